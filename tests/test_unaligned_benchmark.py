"""The benchmark of unaligned matmuls: its cells, a run without a GPU, and tables that follow from times."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from benchmarks.ops import unaligned
from benchmarks.ops.unaligned import SETS, Cell, Measured
from benchmarks.records import Row, read_csv
from ditron_inductor.passes.finish.pad_products import find_unaligned, form
from ditron_inductor.task.alignment import RULE, ProductWork
from tests.ranks import RankContext, RankPools

US = {"eager": 400.0, "aligned": 100.0, "pitched": 110.0, "unpadded": 420.0, "inductor": 150.0, "padded": 140.0}


@pytest.mark.parametrize("cell", [cell for cells in SETS.values() for cell in cells], ids=lambda cell: cell.shape)
def test_every_cell_can_be_padded(cell: Cell) -> None:
    with FakeTensorMode():
        *given, _ = cell.operands(torch.device("cuda"))
        module = make_fx(torch.matmul)(*given)
        *aligned, _ = cell.aligned().operands(torch.device("cuda"))
        *pitched, out = cell.operands(torch.device("cuda"), step=8)
        whole = make_fx(torch.matmul)(*aligned)
    assert [node for node in module.graph.nodes if find_unaligned(node)]
    assert not [node for node in whole.graph.nodes if find_unaligned(node)]
    for one in (*pitched, out):
        found = form(one)
        assert found is not None and found.aligned == 16
    assert [one.shape for one in pitched] == [one.shape for one in given]
    assert given[0].shape[-2:] == (cell.m, cell.k) and given[1].shape[-2:] == (cell.k, cell.n)


def run(ctx: RankContext, out: str) -> list[Row]:
    from benchmarks.session import Session

    options = unaligned.parser().parse_args(
        ["--device", "cpu", "--shapes", "tiny", "--rounds", "2", "--out", out, "--commit", "c"]
    )
    return unaligned.measure(Session(ctx.device, time.monotonic()), options)


def test_runs_without_a_gpu(rank_pools: RankPools, tmp_path: Path) -> None:
    out = tmp_path / "rows.csv"
    rows = rank_pools.get("cpu", 2).run(run, str(out), timeout=150)[0]
    assert {row.contestant for row in rows} == set(US) and all(row.p50_us for row in rows)
    assert [row.contestant for row in read_csv(out)] == [row.contestant for row in rows]


def measured(**us: float) -> Measured:
    cell = Cell(8192, 4096, 4097)
    work = ProductWork(torch.bfloat16, 2.0 * 8192 * 4096 * 4097, 1e8, 2, 16, 67e6, 1)
    return Measured(cell, work, US | us)


def test_table_says_what_the_rule_chooses_and_what_that_costs() -> None:
    chosen = measured()
    assert chosen.pads and chosen.chosen_us == 140.0
    assert unaligned.table([chosen]).splitlines()[-1].split()[-3:] == ["pad", "1.00", "1.07"]
    assert unaligned.table([measured(unpadded=70.0)]).splitlines()[-1].split()[-3:] == ["pad", "2.00", "1.07"]
    few = dataclasses.replace(chosen, work=dataclasses.replace(chosen.work, flops=1e9))
    assert few.chosen_us == 420.0
    assert unaligned.table([few]).splitlines()[-1].split()[-3:] == ["-", "3.00", "0.36"]


def test_constants_that_these_times_ask_for() -> None:
    """A quarter of the speed is reached without padding, and the copies took (140 - 420 + 400 - 100) us."""
    lines = {" ".join(words[:-3]): words[-3:] for words in map(str.split, unaligned.fitted([measured()]).splitlines())}
    assert lines["operand[2]"] == [f"{RULE.operand[2]:.2f}", "0.25", "1"]
    seconds = 67e6 / RULE.bytes_per_s + RULE.launch_s
    assert lines["copies: measured over predicted"] == ["1.00", f"{20e-6 / seconds:.2f}", "1"]
    assert lines["flops_per_s[torch.bfloat16] (largest)"][1] == f"{measured().work.flops / 100e-6:.2e}"
