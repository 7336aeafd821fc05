"""What a rank is told about a run of a program, and what it answers: light to import, for tests that plant faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.fuzz.program import Program
from tests.rank_process import RankContext


@dataclass(frozen=True)
class Verdict:
    """What a rank says of a program: what is wrong, or why the forced strategy was refused.

    sites: how many were fused, by kind, and left alone, by the code of the reason.
    """

    wrong: str = ""
    refused: str = ""
    sites: tuple[tuple[str, int], ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True)
class Settings:
    """How programs are run. generated: Inductor generates code for them, else their graphs are interpreted."""

    backend: str = "ditron"
    generated: bool = True
    timeout_s: float = 60.0


Execute = Callable[[RankContext, Program, Settings], Verdict]


def imported(ctx: RankContext, execute: Execute) -> None:
    """A rank that got `execute` has imported it."""
