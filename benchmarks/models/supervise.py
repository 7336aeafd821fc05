"""Rank processes for the benchmark of whole models, started again where one contestant ends them.

A contestant that hangs, or that breaks the device for its process, would cost all cells behind it. The ranks say in a
journal what they are at; when they end early, that contestant is left out with the reason, and new ranks go on.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from benchmarks.launch import start_ranks
from benchmarks.models.request import CONTESTANTS, LIMIT, Barred, Request

MODULE = "benchmarks.models.run"
MOST_STARTS = 6
LEAST_S = 30.0
"""With less of the budget left no new ranks are started."""


def supervise(
    request: Request, world_size: int, start: Callable[[str, Request, int], int] = start_ranks, least_s: float = LEAST_S
) -> int:
    """Run all cells; the exit code: 1 where ranks ended early and none were started for what was left."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ditron-models-") as folder:
        journal = Path(folder) / "journal"
        request = replace(request, journal=str(journal))
        for _ in range(MOST_STARTS):
            journal.write_text("")
            code = start(MODULE, request, world_size)
            following = after_failure(request, journal.read_text())
            if code == 0 or following is None:
                return code
            left = request.budget_s - (time.monotonic() - begun)
            if left < least_s or following.first >= len(request.cells):
                return code
            request = replace(following, budget_s=left)
            begun = time.monotonic()
    return 1


def after_failure(request: Request, journal: str) -> Request | None:
    """What is left to do when the ranks ended early; None if they did not come to the first cell.

    A contestant at which they ended is barred, and the cell done again without it; at the second time it is barred from
    all cells that follow. Where it was all of them together, or eager, the cell is.
    """
    lines = journal.splitlines()
    if not lines:
        return None
    number, what = json.loads(lines[-1])
    if number >= len(request.cells):
        return None
    alone = what in (*CONTESTANTS, LIMIT) and what != "eager"
    why = f"the ranks ended in it, by themselves or after {request.cell_limit_s:.0f} s"
    if alone and any(one.contestant == what for one in request.barred):
        barred = Barred(None, what, f"{why}, in two cells")
    else:
        barred = Barred(number, what if alone else "", why if alone else f"{why}: {what or 'eager'}")
    return replace(request, first=number, barred=(*request.barred, barred))
