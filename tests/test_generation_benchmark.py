"""`python -m benchmarks.generation` runs on the CPU; every contestant is compared with eager mode there."""

from __future__ import annotations

import pytest

from benchmarks import generation


@pytest.mark.all_cases
@pytest.mark.timeout(300)
def test_it_prints_a_rate_for_every_contestant(capfd: pytest.CaptureFixture[str]) -> None:
    tiny = ["--device", "cpu", "--layers", "1", "--batches", "1", "--tokens", "2", "--rounds", "1", "--limit", "280"]
    assert generation.main(tiny) == 0
    *_, heads, _, line = capfd.readouterr().out.strip().splitlines()
    assert [name in heads for name in generation.CONTESTANTS] == [True] * len(generation.CONTESTANTS)
    rates = [float(one) for one in line.strip("| ").split("|")[3:]]
    assert len(rates) == len(generation.CONTESTANTS) and min(rates) > 0
