"""The results that pages speak of, and the cells and runs that a sentence is about."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.comparison import fastest_ratio
from benchmarks.models.facts import Fact, path_of, read_facts
from benchmarks.models.tables import Contest
from benchmarks.prose.accounted import Account, read_accounts
from benchmarks.records import (
    ATTENTION,
    GEMM_COLLECTIVES,
    GENERATION,
    MODELS,
    MOE,
    RESULTS,
    Row,
    grouped,
    newest,
    read_csv,
    runs,
)

TWO_H200S = ("NVIDIA H200", 2)
COPY = {"H200": 4.15e6, "H100": 2.98e6}
"""Bytes in a microsecond that a copy within the memory of a GPU moves."""


@dataclass(frozen=True)
class Results:
    """The rows of all runs of these files, and the newest facts of whole models."""

    gemm: Sequence[Row]
    attention: Sequence[Row]
    models: Sequence[Row]
    facts: Sequence[Fact]
    generated: Sequence[Row]
    decode: Sequence[Row]
    moe: Sequence[Row]
    routers: Sequence[Row]
    removed: Sequence[Row]
    accounts: Mapping[str, Account]


def read_results() -> Results:
    """Returns all results that are in the repository."""
    facts = newest(read_facts(path_of(MODELS)))
    return Results(
        read_csv(GEMM_COLLECTIVES),
        read_csv(ATTENTION),
        read_csv(MODELS),
        facts,
        read_csv(GENERATION),
        read_csv(RESULTS / "decode.csv"),
        read_csv(MOE),
        read_csv(RESULTS / "own_routers.csv"),
        read_csv(RESULTS / "tables_removed.csv"),
        read_accounts(),
    )


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


def pick(
    rows: Iterable[Row], op: str, shape: str, run: int | str = -1, *, gpu: str = "H200", world: int = 2, graph: int = 1
) -> Contest:
    """Returns one run of the cell of this shape. run: its number among the runs of the cell, or its commit, of which
    the newest run is taken.
    """
    wanted = (op, shape, world, graph)
    cell = [row for row in rows if gpu in row.gpu and (row.op, row.shape, row.world, row.graph) == wanted]
    found = [Contest(tuple(lines)) for lines in runs(cell)]
    return found[run] if isinstance(run, int) else [one for one in found if one.rows[0].commit == run][-1]


def time_of(one: Contest, contestant: str = "ditron") -> float:
    """Returns the microseconds of a contestant. ValueError if it has none."""
    us = one.us(contestant)
    if us is None:
        raise ValueError(f"{contestant} has no time in {one.rows[0].cell}")
    return us


def us_of(row: Row) -> float:
    assert row.p50_us is not None
    return row.p50_us


def gains(rows: Iterable[Row], over: str) -> list[float]:
    """In every cell, how many times as fast as a rival Ditron's own choice is."""
    found = [fastest_ratio(lines, (over,), ("ditron",)) for lines in grouped(rows).values()]
    return [gain for gain in found if gain is not None]
