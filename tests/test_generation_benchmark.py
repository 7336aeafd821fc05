"""The benchmarks of generation run on the CPU; every contestant is compared with eager mode there."""

from __future__ import annotations

import importlib.util
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import generation, transformers_generation
from benchmarks.records import read_csv

TINY = ["--device", "cpu", "--layers", "1", "--batches", "1", "--rounds", "2", "--limit", "280"]
needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs transformers: the extra 'models'"
)


@pytest.mark.all_cases
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("module", "more", "names"),
    [
        pytest.param(generation, ["--tokens", "2"], list(generation.CONTESTANTS), id="generation"),
        pytest.param(generation, ["--tokens", "5", "--page", "2"], list(generation.CONTESTANTS), id="paged"),
        pytest.param(
            transformers_generation,
            ["--tokens", "4", "--cache", "32"],
            ["inductor", "ditron"],
            id="transformers",
            marks=needs_transformers,
        ),
    ],
)
def test_it_prints_every_contestant(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, module: Any, more: list[str], names: list[str]
) -> None:
    out = tmp_path / "rows.csv"
    assert module.main([*TINY, *more, "--out", str(out)]) == 0
    *_, heads, _, line = capfd.readouterr().out.strip().splitlines()
    assert [name in heads for name in names] == [True] * len(names)
    assert [row.contestant for row in read_csv(out)] == names
    rates = [float(one) for one in line.strip("| ").split("|")[-len(names) :]]
    assert len(rates) == len(names) and min(rates) > 0


@pytest.mark.parametrize(("limit", "rounds"), [(1000.0, 9), (20.0 + 5 * 10, 5), (5.0, 2)])
def test_rounds_end_before_the_limit(monkeypatch: pytest.MonkeyPatch, limit: float, rounds: int) -> None:
    """A round takes 10 s here. Two are made in any case: a row needs them."""
    seen: list[str] = []

    def token_us(session: Any, model: Any, tokens: Any, count: int, how: dict[str, Any]) -> float:
        seen.append(how["name"])
        return float(len(seen))

    monkeypatch.setattr(transformers_generation, "token_us", token_us)
    session: Any = SimpleNamespace(seconds=lambda: 5.0 * len(seen), say=lambda text: None)
    turns: Any = {name: ({"name": name}, {}) for name in ("inductor", "ditron")}
    options = Namespace(rounds=9, tokens=8, limit=limit)
    times = transformers_generation.token_times(session, SimpleNamespace(), None, options, turns)  # type: ignore[arg-type]
    assert (seen.count("inductor"), seen.count("ditron")) == (rounds, rounds) and set(times) == set(turns)
