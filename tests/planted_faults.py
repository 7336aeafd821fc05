"""In the place of what ranks do with a random program: faults that the fuzzer has to report."""

from __future__ import annotations

import time

from tests.fuzz.program import Program
from tests.fuzz.verdict import Settings, Verdict
from tests.rank_process import RankContext


def planted(ctx: RankContext, program: Program, settings: Settings) -> Verdict:
    """Rank 1 is wrong in program 1 and hangs in program 2."""
    if ctx.rank == 1 and program.index == 1:
        return Verdict(wrong="3 for 4")
    if ctx.rank == 1 and program.index == 2:
        time.sleep(600)
    return Verdict(sites=(("all_gather_matmul", 1),))
