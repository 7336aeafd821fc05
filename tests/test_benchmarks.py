"""The benchmark program: rows survive their file, newer replace older, and a run on the CPU device fills a table."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.ops.shapes import SETS
from benchmarks.records import COLUMNS, Row, merge_csv, read_csv, table

ROW = Row(
    bench="gemm_collectives",
    op="all_gather_matmul",
    contestant="nccl",
    shape="M=8;N=8;K=8",
    dtype="bfloat16",
    world=4,
    graph=0,
    p20_us=9.0,
    p50_us=10.0,
    p80_us=11.0,
    skew_pct=1.5,
    limit_us=8.0,
    gpu="some GPU",
    torch="2",
    triton="3",
    commit="abc",
    date="2026-01-01",
)
ROOT = Path(__file__).parents[1]


def test_columns_are_fixed() -> None:
    wanted = "bench,op,contestant,shape,dtype,world,graph,p20_us,p50_us,p80_us,skew_pct,limit_us,gpu,torch,triton"
    assert ",".join(COLUMNS) == f"{wanted},commit,date"


def test_rows_survive_and_are_replaced(tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    failed = dataclasses.replace(ROW, contestant="ditron", p20_us=None, p50_us=None, p80_us=None, skew_pct=None)
    merge_csv(path, [ROW, failed])
    assert read_csv(path) == [ROW, failed]
    newer = dataclasses.replace(ROW, p50_us=7.0, commit="def", date="2026-02-01")
    merge_csv(path, [newer])
    assert read_csv(path) == [newer, failed]


def test_other_columns_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="columns"):
        read_csv(path)


def test_table_compares() -> None:
    ours = dataclasses.replace(ROW, contestant="ditron", p50_us=9.0)
    lines = table([ROW, ours], ("nccl", "ditron")).splitlines()
    assert lines[0].split() == "op shape dtype graph limit us nccl ditron vs nccl of limit".split()
    assert lines[2].split()[-5:] == ["8.0", "10.0", "9.0", "1.11", "0.89"]


def test_anchor_shapes_at_four_ranks() -> None:
    shapes = {op: [cell.shape for cell in SETS["anchors"](op, 4)] for op in ("all_gather_matmul", "matmul_all_reduce")}
    assert shapes["all_gather_matmul"][0] == "M=8192;N=14336;K=8192"
    assert "M=1;N=8192;K=7168" in shapes["matmul_all_reduce"]


def test_a_run_on_the_cpu_device(tmp_path: Path) -> None:
    out = tmp_path / "results.csv"
    arguments = ["--device", "cpu", "--shapes", "tiny", "--world", "2", "--rounds", "2", "--out", str(out)]
    command = [sys.executable, "-m", "benchmarks.ops", "--ops", "matmul_all_reduce", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    assert "ditron:tile" in done.stdout.splitlines()[0]
    rows = read_csv(out)
    assert {row.contestant for row in rows} == {"gemm", "gloo", "ditron", "ditron:tile", "ditron:library"}, done.stderr
    assert all(row.p50_us for row in rows), done.stdout
