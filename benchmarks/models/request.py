"""What the command line asked for, as the ranks get it."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.models.zoo import Cell

CONTESTANTS: tuple[str, ...] = ("eager", "inductor", "async_tp", "ditron")
"""In the order of the tables."""


@dataclass(frozen=True)
class Request:
    """One run. budget_s: seconds that it may take. rounds: most samples of a contestant in one run of a cell; repeats:
    runs of a cell, whose median is recorded. out: the CSV that rows are merged into, empty for none.
    """

    cells: tuple[Cell, ...]
    device: str
    contestants: tuple[str, ...] = CONTESTANTS
    budget_s: float = 600.0
    rounds: int = 10
    repeats: int = 1
    out: str = ""
    commit: str = ""
