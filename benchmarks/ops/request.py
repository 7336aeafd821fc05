"""What the command line asked for, as the ranks get it. Imports no torch: the starting process needs none."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.ops.shapes import Selection


@dataclass(frozen=True)
class Request:
    """One run.

    only: names of contestants, all of them when empty; skip: without these. budget_s: seconds that the run may take.
    rounds: most samples of a contestant in one run of a cell; repeats: runs of a cell, whose median is recorded.
    out: the CSV that rows are merged into, empty for none. commit: for the column of that name.
    """

    selection: Selection
    device: str
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    budget_s: float = 600.0
    rounds: int = 20
    repeats: int = 1
    out: str = ""
    commit: str = ""
