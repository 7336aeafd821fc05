"""`python -m benchmarks.generation` runs on the CPU; every contestant is compared with eager mode there."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import generation
from benchmarks.records import read_csv


@pytest.mark.all_cases
@pytest.mark.timeout(300)
def test_it_prints_a_rate_for_every_contestant(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "rows.csv"
    tiny = ["--device", "cpu", "--layers", "1", "--batches", "1", "--tokens", "2", "--rounds", "2", "--limit", "280"]
    assert generation.main([*tiny, "--out", str(out)]) == 0
    *_, heads, _, line = capfd.readouterr().out.strip().splitlines()
    assert [name in heads for name in generation.CONTESTANTS] == [True] * len(generation.CONTESTANTS)
    rates = [float(one) for one in line.strip("| ").split("|")[3:]]
    assert [row.contestant for row in read_csv(out)] == list(generation.CONTESTANTS)
    assert len(rates) == len(generation.CONTESTANTS) and min(rates) > 0
