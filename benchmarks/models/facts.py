"""What belongs to a contestant of a cell besides its times: compile time, memory, fused sites, and why it has no times.

Kept beside the rows, `models_facts.csv` beside `models.csv`, in a long form of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.records import Row, merged, read_lines, write_lines

ALL = "all"
"""Stands for all contestants of a cell that was skipped."""


@dataclass(frozen=True)
class Fact:
    """What is known of one contestant. compile_s: its first call, of the slowest rank. peak_mib: most memory of torch's
    allocator in a step, with weights and inputs, of the rank that needs most; in older rows also with what was compared
    with. workspace_mib: Ditron's own memory that peers write into. Each None where there is none. fused: sites by kind,
    as `2 flash_decode, ..`.
    """

    op: str
    shape: str
    dtype: str
    world: int
    graph: int
    gpu: str
    contestant: str
    compile_s: float | None
    peak_mib: float | None
    workspace_mib: float | None
    fused: str
    why: str
    commit: str
    date: str

    @property
    def cell(self) -> tuple[str, ...]:
        """That of the rows: what the contestants have in common."""
        parts = ("models", self.op, self.shape, self.dtype, self.world, self.graph, self.gpu)
        return tuple(str(part) for part in parts)

    @property
    def sizes(self) -> dict[str, str]:
        return dict(part.split("=", 1) for part in self.shape.split(";"))


def path_of(results: Path) -> Path:
    """The facts beside a file of rows."""
    return results.with_name(f"{results.stem}_facts.csv")


def read_facts(path: Path) -> list[Fact]:
    """None if there is no file. ValueError where its columns are not those of `Fact`."""
    return read_lines(path, Fact)


def merge_facts(path: Path, facts: Iterable[Fact]) -> None:
    """Write facts into the file, behind the older ones of their cells. Why a cell was skipped is said only of one that
    was never measured.
    """
    cells = merged(read_facts(path), facts)
    told = {cell: [fact for fact in found if fact.contestant != ALL] or found[-1:] for cell, found in cells.items()}
    write_lines(path, Fact, told)


def reasons(facts: Iterable[Fact], rows: Iterable[Row]) -> list[Fact]:
    """Returns the facts that say why a contestant has no time in a cell, where the rows have none either."""
    timed = {(row.cell, row.contestant) for row in rows if row.p50_us is not None}
    return [fact for fact in facts if fact.why and (fact.cell, fact.contestant) not in timed]
