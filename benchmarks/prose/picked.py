"""The results that pages speak of, and the cells and runs that a sentence is about."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.comparison import fastest_ratio
from benchmarks.models.facts import Fact, path_of, read_facts
from benchmarks.models.tables import Contest
from benchmarks.records import ATTENTION, GEMM_COLLECTIVES, GENERATION, MODELS, Row, grouped, newest, read_csv, runs

TWO_H200S = ("NVIDIA H200", 2)


@dataclass(frozen=True)
class Results:
    """The rows of all runs of these files, and the newest facts of whole models."""

    gemm: Sequence[Row]
    attention: Sequence[Row]
    models: Sequence[Row]
    facts: Sequence[Fact]
    generated: Sequence[Row]


def read_results() -> Results:
    """Returns all results that are in the repository."""
    gemm, attention, models, generated = map(read_csv, (GEMM_COLLECTIVES, ATTENTION, MODELS, GENERATION))
    return Results(gemm, attention, models, newest(read_facts(path_of(MODELS))), generated)


def is_cell(one: Contest, *, world: int | None = None, phase: str = "prefill", **sizes: object) -> bool:
    """Whether a cell was measured on H200s, of which the prose speaks, and has all of these sizes, by the names that
    they have in `shape`.
    """
    same = all(one.sizes.get(name) == str(value) for name, value in sizes.items())
    return same and "H200" in one.where[0] and one.phase == phase and world in (None, one.where[1])


def older(rows: Iterable[Row], **cell: object) -> list[Contest]:
    """Every run of the cells that have these sizes, the oldest first."""
    return [one for one in every_run(rows) if is_cell(one, **cell)]  # type: ignore[arg-type]


def every_run(rows: Iterable[Row]) -> list[Contest]:
    """Every run of every cell, the oldest of a cell first."""
    return [Contest(tuple(run)) for lines in grouped(rows).values() for run in runs(lines)]


def at(cells: Sequence[Contest], commit: str) -> Contest:
    """Returns the run at a commit."""
    (found,) = (one for one in cells if one.rows[0].commit == commit)
    return found


def us_of(row: Row) -> float:
    assert row.p50_us is not None
    return row.p50_us


def gains(rows: Iterable[Row], over: str) -> list[float]:
    """In every cell, how many times as fast as a rival Ditron's own choice is."""
    found = [fastest_ratio(lines, (over,), ("ditron",)) for lines in grouped(rows).values()]
    return [gain for gain in found if gain is not None]
