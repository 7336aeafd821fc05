"""The benchmark program: what it measures, how it decides that a result is right, and a run on the CPU device."""

from __future__ import annotations

import contextlib
import io
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks.comparison import OURS as SHOWN
from benchmarks.comparison import TITLES
from benchmarks.figures import COLOURS
from benchmarks.ops.__main__ import listing, parser, request_of
from benchmarks.ops.check import Check
from benchmarks.ops.contest import (
    CONTESTANTS,
    OURS,
    PLANNED,
    SAMPLED_ROWS,
    Contest,
    of_every_shard,
    sampled_rows,
    wanted,
)
from benchmarks.ops.estimate import cells_seconds, graph_calls
from benchmarks.ops.request import Request
from benchmarks.ops.shapes import SETS, Cell, Selection
from benchmarks.progress import Phases, Progress
from benchmarks.records import read_csv
from benchmarks.timing import Times, median_of_runs, standard_error
from benchmarks.trying import UNTABLED
from ditron_inductor.report.matmul_shapes import WHOLE_ROWS, divides
from ditron_inductor.task.nodes import KINDS, NODES, STRATEGIES
from tests.rank_process import RankContext
from tests.ranks import RankPools

ROOT = Path(__file__).parents[1]


def shapes(name: str, op: str, world_size: int) -> list[str]:
    return [f"{cell.shape} {'graph' if cell.graph else 'eager'}" for cell in SETS[name](op, world_size)]


def test_anchor_shapes_follow_the_world_size() -> None:
    four = shapes("anchors", "all_gather_matmul", 4)
    assert four[0] == "M=8192;N=14336;K=8192 eager"
    assert four[-2:] == ["M=2048;N=7168;K=4096 eager", "M=2048;N=7168;K=4096 graph"]
    assert len(four) == 7
    assert shapes("anchors", "all_gather_matmul", 2)[0] == "M=8192;N=28672;K=8192 eager"
    assert shapes("anchors", "matmul_reduce_scatter", 4)[0] == "M=8192;N=8192;K=7168 eager"
    decode = shapes("anchors", "matmul_all_reduce", 4)
    assert "M=1;N=8192;K=7168 graph" in decode and len(decode) == 6 + 10
    logits = shapes("anchors", "matmul_all_gather", 2)
    assert logits[0] == "M=1;N=64128;K=8192 graph" and "M=2048;N=64128;K=4096 eager" in logits and len(logits) == 10


def test_zoo_has_what_the_anchors_have_not() -> None:
    for op in KINDS:
        for world_size in (2, 4):
            zoo, anchors = SETS["zoo"](op, world_size), SETS["anchors"](op, world_size)
            assert not set(zoo) & set(anchors)
            assert len(set(zoo)) == len(zoo)
    assert "M=8192;N=26624;K=16384 eager" in shapes("zoo", "all_gather_matmul", 4)
    assert "M=8192;N=5120;K=2048 eager" in shapes("zoo", "matmul_reduce_scatter", 4)
    assert "M=2048;N=2560;K=5120 eager" in shapes("zoo", "all_gather_matmul", 4)


def test_sweep_has_every_power_of_two_that_can_be_sharded() -> None:
    for op in KINDS:
        rows = {cell.M for cell in SETS["sweep"](op, 4)}
        assert rows == {1 << step for step in range(15)} - (set() if op in WHOLE_ROWS else {1, 2})


def test_cells_can_be_sharded() -> None:
    for name, cells in SETS.items():
        for op in KINDS:
            for cell in cells(op, 4):
                assert cell.op == op and min(cell.M, cell.N, cell.K) >= 1
                assert divides(op, cell.M, 4), (name, cell)


def test_selection_filters_and_orders() -> None:
    assert {cell.M for cell in Selection(rows=(2048, 16)).cells(4, "cuda")} == {2048, 16}
    order = [cell.priority for cell in Selection(sets=("anchors", "zoo")).cells(4, "cuda")]
    assert order == sorted(order)
    models = Selection(sets=("zoo",), sources=("qwen3-32b attention",)).cells(4, "cuda")
    assert models and all(cell.source == "qwen3-32b attention" for cell in models)
    both = Selection(ops=("all_gather_matmul",), graph="both").cells(4, "cuda")
    assert [cell.graph for cell in both] == [False, True] * 6
    # The row that is listed both ways is one cell where there are no graphs.
    assert len(Selection(ops=("all_gather_matmul",)).cells(4, "cpu")) == 6


def test_every_strategy_is_a_contestant_and_has_a_name_and_a_colour() -> None:
    assert OURS == {"ditron": "auto"} | {f"ditron:{name}": name for name in STRATEGIES if name != "auto"}
    assert set(SHOWN) == {*OURS, UNTABLED, PLANNED}
    assert set(TITLES) == set(CONTESTANTS)
    assert set(COLOURS) == set(CONTESTANTS) - {"gemm", "gloo"}


def test_contestants_can_be_left_out() -> None:
    def request(**names: tuple[str, ...]) -> Request:
        return Request(Selection(), "cuda", **names)

    assert wanted(request()) == CONTESTANTS
    assert wanted(request(only=("nccl", "ditron:tile"))) == ("nccl", "ditron:tile")
    assert "async_tp" not in wanted(request(skip=("async_tp",)))
    with pytest.raises(ValueError, match="no contestants: mccl"):
        wanted(request(only=("mccl",)))


def test_some_contestants_alone_do_not_replace_committed_results() -> None:
    assert request_of(parser().parse_args([])).out.endswith("gemm_collectives.csv")
    assert request_of(parser().parse_args(["--only", "nccl"])).out == ""
    assert request_of(parser().parse_args(["--device", "cpu"])).out == ""
    assert request_of(parser().parse_args(["--skip", "nccl", "--out", "x.csv"])).out == "x.csv"


def test_estimates() -> None:
    small, large = Cell("all_gather_matmul", 256, 256, 256), Cell("all_gather_matmul", 8192, 14336, 8192)
    request = Request(Selection(), "cuda")
    once = cells_seconds(request, [small, large], 4)
    assert 0 < once[0] < once[1]
    thrice = cells_seconds(Request(Selection(), "cuda", repeats=3), [small, large], 4)
    assert all(one < three < 3 * one for one, three in zip(once, thrice, strict=True))
    assert graph_calls(large, 4) == 2
    assert all(graph_calls(cell, 4) % 2 == 0 for op in KINDS for cell in SETS["sweep"](op, 4))
    assert "40 cells, about" in listing(request, 4)


def times(p50_us: float, **other: float) -> Times:
    return Times(
        **{"p20_us": p50_us - 1, "p80_us": p50_us + 1, "skew_pct": 1.0, "host_us": 5.0, **other}, p50_us=p50_us
    )


def test_median_of_runs() -> None:
    runs = [{"a": times(10.0, skew_pct=3.0)}, {"a": times(30.0, p20_us=2.0)}, {"a": times(12.0, p80_us=99.0)}]
    assert median_of_runs(runs) == {"a": Times(2.0, 12.0, 99.0, 1.0, 5.0)}
    assert median_of_runs(runs[:1]) == runs[0]


def test_standard_error_is_that_of_a_median() -> None:
    generator = torch.Generator().manual_seed(0)
    draws = 100 + torch.randn(400, 25, generator=generator, dtype=torch.float64)
    medians = [statistics.median(draw) for draw in draws.tolist()]
    estimate = statistics.mean(standard_error(draw) for draw in draws.tolist())
    assert estimate == pytest.approx(statistics.stdev(medians) / 100, rel=0.15)
    assert standard_error([5.0] * 7) == 0.0


def test_progress_learns_from_what_has_passed() -> None:
    seconds = 0.0
    progress = Progress([2.0, 2.0, 4.0, 2.0], now=lambda: seconds)
    assert progress.expected(2) == 4.0
    seconds = 6.0
    progress.finish(0, 6.0)
    assert progress.expected(2) == 12.0
    progress.finish(1, None)
    assert progress.expected(2) == 12.0
    assert progress.text() == "[00:06] |#########               | 2/4, 00:18 left"
    progress.finish(2, 12.0)
    progress.finish(3, 6.0)
    assert progress.text() == "[00:06] |" + "#" * 24 + "| 4/4, 00:00 left"


def test_phases_count_what_the_device_still_does() -> None:
    clock = iter([0.0, 3.0, 3.0, 4.0])
    synchronized = []
    phases = Phases(lambda: synchronized.append(True), now=lambda: next(clock))
    for _ in range(2):
        with phases.phase("timing"):
            pass
    lines = phases.table().splitlines()
    assert lines[2].split() == ["timing", "2", "4.0", "2.00", "100"]
    assert len(synchronized) == 2


def test_sampled_rows() -> None:
    assert sampled_rows(3, torch.device("cpu")).tolist() == [0, 1, 2]
    rows = sampled_rows(5000, torch.device("cpu")).tolist()
    assert len(set(rows)) == SAMPLED_ROWS and rows == sorted(rows) and (rows[0], rows[-1]) == (0, 4999)
    assert of_every_shard(torch.tensor([0, 2]), 10, 3).tolist() == [0, 2, 10, 12, 20, 22]


def contest(rows: int = 1000) -> tuple[Contest, torch.Tensor]:
    """A contest whose library multiplies by one."""
    result = torch.randn(rows, 24, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    sampled = sampled_rows(rows, torch.device("cpu"))
    return Contest({}, lambda i: result, lambda: (sampled, result[sampled].float()), link_bytes=0), result


def test_check_looks_at_every_value() -> None:
    described, result = contest()
    check = Check(described)
    assert check.problem(result.clone()) == ""
    assert check.problem(result + 0.001 * torch.randn(1000, 24).to(torch.bfloat16)) == ""
    outside = next(row for row in range(1000) if row not in sampled_rows(1000, torch.device("cpu")).tolist())
    for value in (float("nan"), 1e3):
        wrong = result.clone()
        wrong[outside, 5] = value
        assert check.problem(wrong) == "1 of 24000 values are far from the library's"
    wrong = result.clone()
    wrong[999] += 1
    assert "sampled rows" in check.problem(wrong)
    assert check.problem(result[:-1]).startswith("returned (999, 24)")
    assert check.problem(result.float()).startswith("returned (1000, 24) torch.float32")
    assert check.problem(None) == "returned NoneType, not a tensor"


def test_check_catches_a_library_that_is_wrong_itself() -> None:
    described, result = contest()
    sampled, expected = described.sample()
    described.sample = lambda: (sampled, expected + 1)
    assert "sampled rows" in Check(described).problem(result)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "benchmarks.ops",
        "--device",
        "cpu",
        "--shapes",
        "tiny",
        "--world",
        "2",
        *arguments,
    ]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)


def _run_in_rank(ctx: RankContext, request: Request) -> tuple[str, str]:
    """What a run prints to stdout and to stderr."""
    from benchmarks.ops.run import main

    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        assert main(request, ctx.device, time.monotonic())
    return out.getvalue(), err.getvalue()


def test_a_run_on_the_cpu_device(rank_pools: RankPools, tmp_path: Path) -> None:
    out = tmp_path / "results.csv"
    arguments = ["--device", "cpu", "--shapes", "tiny", "--rounds", "2", "--repeats", "1", "--out", str(out)]
    request = request_of(parser().parse_args(arguments))
    printed, said = rank_pools.get("cpu", 2).run(_run_in_rank, request)[0]
    rows = {(row.op, row.contestant): row for row in read_csv(out)}
    ours = {op: {name for name, one in OURS.items() if one in ("auto", *NODES[op].strategies)} for op in KINDS}
    assert set(rows) == {(op, name) for op in KINDS for name in ("gemm", "gloo", *ours[op])}, said
    assert all(row.p50_us for row in rows.values()) and "no number" not in printed, printed
    assert "ditron ran library" in said
    for phase in ("operands", "expected result", "first calls: ditron:tile", "checks", "timing"):
        assert re.search(rf"^{phase} +\d", printed, re.MULTILINE), printed


def test_a_run_without_time_says_what_it_skipped() -> None:
    done = run("--budget", "0")
    assert done.returncode == 0, done.stderr
    skipped = re.findall(r"^no number: .*: all: skipped: \d+ s of 0 s are spent", done.stdout, re.MULTILINE)
    assert len(skipped) == sum(len(SETS["tiny"](op, 2)) for op in KINDS)


def test_bad_arguments_are_refused() -> None:
    done = run("--rounds", "1")
    assert done.returncode == 2 and "1 is less than 2" in done.stderr
    done = run("--world", "1")
    assert done.returncode == 2 and "at least two ranks" in done.stderr
