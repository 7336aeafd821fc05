"""The benchmark of whole models: its cells, its table, and a run on the CPU device."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.models.__main__ import parser, request_of
from benchmarks.models.request import CONTESTANTS
from benchmarks.models.tables import times_table
from benchmarks.models.zoo import DECODES, FORMS, PREFILLS, Cell, cells
from benchmarks.records import Row, read_csv

ROOT = Path(__file__).parents[1]


def test_cells_decode_without_sequence_parallelism() -> None:
    found = cells(["llama3-8b"], ["prefill", "decode"], FORMS, 0)
    assert len(found) == 2 * len(PREFILLS) + len(DECODES)
    assert {cell.form for cell in found if cell.graph} == {"ar"}
    assert [cell.batch for cell in cells(["llama3-70b"], ["decode"], FORMS, 3, [32])] == [32]
    assert Cell("llama3-8b", 4, "sp", "prefill", 2, 4096) in found


def test_only_complete_runs_on_gpus_go_into_the_results() -> None:
    assert request_of(parser().parse_args([])).out.endswith("models.csv")
    assert request_of(parser().parse_args(["--contestants", "eager", "ditron"])).out == ""
    on_cpu = request_of(parser().parse_args(["--device", "cpu"]))
    assert on_cpu.out == "" and "async_tp" not in on_cpu.contestants
    assert {cell.model for cell in on_cpu.cells} == {"tiny"}


def row(contestant: str, p50_us: float | None) -> Row:
    shape = Cell("llama3-8b", 4, "sp", "prefill", 1, 2048).shape
    times = (p50_us, p50_us, p50_us, None, None)
    return Row("models", "prefill", contestant, shape, "bfloat16", 2, 0, *times, "gpu", "t", "t", "c", "d")


def test_the_table_compares_with_the_best_of_the_others() -> None:
    rows = [row("eager", 9000.0), row("inductor", 3000.0), row("async_tp", None), row("ditron", 2000.0)]
    line = times_table(rows).splitlines()[-1].split()
    assert line[-5:] == ["9.000", "3.000", "-", "2.000", "1.50"]


def test_runs_on_the_cpu_device(tmp_path: Path) -> None:
    out = tmp_path / "models.csv"
    command = [sys.executable, "-m", "benchmarks.models", "--device", "cpu", "--phases", "decode", "--rounds", "2"]
    command += ["--contestants", "eager", "ditron", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert "2 matmul_all_reduce" in done.stdout
    rows = read_csv(out)
    assert [one.contestant for one in rows] == ["eager", "ditron"]
    assert all(one.p50_us for one in rows)
    assert set(CONTESTANTS) >= {one.contestant for one in rows}
