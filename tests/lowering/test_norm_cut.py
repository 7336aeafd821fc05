"""How rows are cut for the kernel of all_reduce_rms_norm, and what its benchmark says of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.ops.all_reduce_rms_norm import SETS, Cell, table, verdict
from benchmarks.records import Row, merge_csv
from ditron_inductor.core.layout import MAX_CHUNKS, MAX_WORLD, REVOKED_ROW
from ditron_inductor.lowering.all_reduce_rms_norm import norm_kernel
from ditron_inductor.lowering.all_reduce_rms_norm.norm_kernel import RowCut, cut
from ditron_inductor.lowering.norms.rows import block_of
from ditron_inductor.task.results import read_results

H200 = {
    "programs": 132,
    "tile": norm_kernel.TILE,
    "most_pieces": REVOKED_ROW.value,
    "round_bytes": norm_kernel.ROUND_BYTES,
    "least_slice": norm_kernel.LEAST_SLICE,
}


@pytest.mark.parametrize(
    ("m", "n", "world", "expected"),
    [
        (1, 5120, 4, RowCut(True, 1, 1, 1)),
        (64, 8192, 2, RowCut(True, 1, 1, 64)),
        # In two shots slices of at least 1024 columns, no more than there are SMs, and not two.
        (64, 8192, 4, RowCut(False, 1, 1, 16, 8)),
        (102, 5120, 4, RowCut(False, 1, 1, 26, 4)),
        (256, 8192, 4, RowCut(False, 1, 1, 64)),
        (128, 4096, 2, RowCut(True, 1, 1, 128)),
        # Two ranks send no less in two shots.
        (2048, 4096, 2, RowCut(True, 1, 3, 683)),
        (2048, 4096, 4, RowCut(False, 1, 2, 256)),
        # Long rows, dealt out to as many pieces as run at once.
        (1638, 5120, 4, RowCut(False, 1, 2, 264)),
        (409, 5120, 2, RowCut(True, 1, 2, 264)),
        (1638, 5120, 2, RowCut(True, 1, 7, 264)),
        (4096, 512, 2, RowCut(True, 8, 1, 512)),
        # Rather more programs than more rows in each.
        (100, 512, 2, RowCut(True, 1, 1, 100)),
    ],
)
def test_cut(m: int, n: int, world: int, expected: RowCut) -> None:
    assert cut(m, n, 2, world, **H200) == expected


def test_only_single_rows_are_sliced() -> None:
    """Where flags are fewer than rows, a piece has several, and the kernel for slices takes one."""
    found = cut(13, 64, 2, 3, programs=12, tile=64, most_pieces=4, round_bytes=512, least_slice=16)
    assert found.rows * found.tiles > 1 and found.slices == 1


@pytest.mark.parametrize("num_sms", [1, 132, 304])
def test_every_row_has_its_place_and_its_flag(num_sms: int) -> None:
    for world in range(2, MAX_WORLD.value + 1):
        for m, n in ((1, 1), (7, 16384), (1000, 33), (8192, 4096), (100_001, 128)):
            found = cut(m, n, 2, world, **{**H200, "programs": num_sms})
            rows = found.rows * found.tiles * found.pieces * (1 if found.one_shot else world)
            most = REVOKED_ROW.value if found.one_shot else MAX_CHUNKS.value // 2 - 1
            assert m <= rows and 0 < found.pieces * found.slices <= most, (m, n, world, found)
            alone = not found.one_shot and found.rows == found.tiles == 1 and found.pieces * found.slices <= num_sms
            assert found.slices == 1 or alone
            assert found.rows & (found.rows - 1) == 0 and found.rows * block_of(n) <= max(norm_kernel.TILE, block_of(n))


def test_benchmark_shapes() -> None:
    sizes = [cell.M * cell.N * 2 for cell in SETS["sweep"]()]
    assert min(sizes) <= 10 << 10 and max(sizes) == 16 << 20
    assert all(cell.op == "matmul_all_reduce_rms_norm" for cell in SETS["decode"]())


def test_benchmark_targets() -> None:
    row = Row("norm", "all_reduce_rms_norm", "nccl", Cell(4, 4096).shape, "bfloat16", 2, 1, *[17.0] * 3, 0.0, None,
              "GPU", "2.11", "3.6", "abc", "2026-01-31")  # fmt: skip
    ours = replace(row, contestant="ditron", p50_us=10.0)
    assert verdict([row, ours]) == "1.70 PASS"
    assert verdict([row, replace(ours, p50_us=11.0)]) == "1.55 FAIL"
    assert verdict([replace(row, graph=0), replace(ours, p50_us=11.0, graph=0)]) == "1.55 PASS"
    assert verdict([row, ours, replace(row, contestant="symm_mem", p50_us=9.0)]) == "1.70 FAIL"
    assert "1.70 PASS" in table([row, ours])


def test_benchmark_rows_become_a_table(tmp_path: Path) -> None:
    row = Row("norm", "all_reduce_rms_norm", "ditron:library", Cell(4, 4096).shape, "bfloat16", 2, 1, *[17.0] * 3, 0.0,
              None, "GPU", "2.11", "3.6", "abc", "2026-01-31")  # fmt: skip
    merge_csv(tmp_path / "norm.csv", [row, replace(row, contestant="ditron:tile", p50_us=9.0)])
    (entry,) = read_results((tmp_path / "norm.csv").read_text())
    assert (entry.op, entry.m, entry.n, entry.k, entry.us) == (row.op, 4, 4096, 1, {"library": 17.0, "tile": 9.0})
