"""Runs programs on pools of live ranks, several pools beside each other, and reports what fails.

A rank that raises, gives a wrong value or does not answer in time is a failure of its program: its report has the
program's source, what each rank said, the stacks of those that said nothing, and the command that repeats it. Its pool
is ended, for nothing is known of its state, and the next program gets a fresh one.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from tests.fuzz.program import Program
from tests.fuzz.verdict import Execute, Settings, Verdict, imported
from tests.rank_process import Outcome
from tests.ranks import START_LIMIT_S, RankPool

TEXT_LIMIT = 12_000
# A rank whose peer has raised waits for it; after this it is asked for its stacks.
GRACE_S = 10.0
SAY_EVERY = 50
SLOWEST = 5
RIGHT = "right"


@dataclass(frozen=True)
class Failure:
    """A program that failed: how (`wrong value`, `error`, `hang`), its report, and the programs before it in its pool.

    by_inductor: what became of the same program through Inductor alone, empty where nobody asked.
    """

    program: Program
    how: str
    report: str
    before: tuple[int, ...]
    by_inductor: str = ""


@dataclass
class Summary:
    """What came of all programs.

    unfit: programs that fail through Inductor alone too. broken: why pools were lost. sites: what became of
    collectives on rank 0, counted. drawn: what programs have in them, counted. taken: the seconds of each program that
    ended, by its number.
    """

    programs: int = 0
    refused: int = 0
    seconds: float = 0.0
    failures: list[Failure] = field(default_factory=list)
    unfit: list[Failure] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    sites: Counter[str] = field(default_factory=Counter)
    drawn: Counter[str] = field(default_factory=Counter)
    taken: dict[int, float] = field(default_factory=dict)


@dataclass
class Fuzzer:
    """Takes programs and runs them on `jobs` pools.

    limit_s: for one program. make_pool: a fresh pool of ranks. execute: what ranks do with a program. compare: repeat
    failures by Inductor alone, while there is time. say: where reports go, one at a time, and what was done so far.
    """

    make_pool: Callable[[], RankPool]
    execute: Execute
    settings: Settings
    limit_s: float
    jobs: int = 1
    compare: bool = True
    say: Callable[[str], None] = print
    command: Callable[[Program, tuple[int, ...]], str] = lambda program, before: ""
    end: float = float("inf")

    def run(self, programs: Iterable[Program], seconds: float = float("inf")) -> Summary:
        """Runs the programs, until they end or the time is over."""
        start = time.monotonic()
        self.end = start + seconds
        summary, lock = Summary(), threading.Lock()
        given = _until(iter(programs), self.end)

        def work() -> None:
            worker = _Worker(self)
            try:
                while True:
                    with lock:
                        program = next(given, None)
                    if program is None:
                        return
                    verdict, failure = worker.check(program)
                    with lock:
                        self._add(summary, program, verdict, failure)
                        if summary.programs % SAY_EVERY == 0:
                            self.say(f"{_counts(summary)}, {time.monotonic() - start:.0f} seconds so far")
            except Exception:
                # A pool that does not start, most likely. The other pools go on.
                with lock:
                    summary.broken.append(traceback.format_exc())
                    self.say(f"a pool of ranks is lost\n{summary.broken[-1]}")
            finally:
                worker.close()

        threads = [threading.Thread(target=work, name=f"pool{number}", daemon=True) for number in range(self.jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        summary.seconds = time.monotonic() - start
        return summary

    def _add(self, summary: Summary, program: Program, verdict: Verdict | None, failure: Failure | None) -> None:
        summary.programs += 1
        summary.drawn.update(_traits(program))
        if verdict is not None:
            summary.refused += bool(verdict.refused)
            summary.sites.update(dict(verdict.sites))
            summary.taken[program.index] = verdict.seconds
        if failure is not None:
            (summary.unfit if failure.by_inductor not in ("", RIGHT) else summary.failures).append(failure)
            self.say(failure.report)

    def text(self, summary: Summary) -> str:
        """The last lines: what failed, each with the command that repeats it, and the count of everything."""
        lines = []
        for one in (*summary.unfit, *summary.failures):
            alone = f"; by Inductor alone: {one.by_inductor}" if one.by_inductor else ""
            lines.append(f"{one.how} in program {one.program.index}{alone}\n    {self.command(one.program, ())}")
            if one.before:
                lines.append(f"    with what its ranks ran before: {self.command(one.program, one.before)}")
        for name, found in (("drawn", summary.drawn), ("sites", summary.sites)):
            parts = [f"{key} {count}" for key, count in found.most_common()]
            lines.append(f"{name}: {', '.join(parts) or 'nothing'}")
        slowest = sorted(summary.taken.items(), key=lambda item: -item[1])[:SLOWEST]
        lines.append(
            f"slowest: {', '.join(f'program {index} {seconds:.1f} s' for index, seconds in slowest) or 'none'}"
        )
        lines += [f"{len(summary.broken)} pools of ranks were lost"] * bool(summary.broken)
        counts = f"{_counts(summary)}, {summary.seconds:.0f} seconds"
        others = f"{len(summary.unfit)} failed by Inductor too, {summary.refused} refused by their strategy"
        return "\n".join([*lines, others, counts])


class _Worker:
    """One pool after the other, and what the present one has run."""

    def __init__(self, fuzzer: Fuzzer) -> None:
        self.fuzzer = fuzzer
        self.pool: RankPool | None = None
        self.before: list[int] = []

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()
        self.pool, self.before = None, []

    def check(self, program: Program) -> tuple[Verdict | None, Failure | None]:
        """Runs the program; what rank 0 said, and the failure if there is one."""
        before = tuple(self.before)
        outcomes, text = self._outcomes(program, self.fuzzer.settings)
        how = _how(outcomes)
        if not how:
            self.before.append(program.index)
            return outcomes[0].value, None
        self.close()
        by_inductor = ""
        in_time = time.monotonic() < self.fuzzer.end
        if self.fuzzer.compare and in_time and self.fuzzer.settings.backend == "ditron":
            alone, _ = self._outcomes(program, replace(self.fuzzer.settings, backend="inductor"))
            by_inductor = _how(alone) or RIGHT
            self.close()
        heading = f"{'=' * 20} {how} in program {program.index}"
        heading += f"; by Inductor alone: {by_inductor}" if by_inductor else ""
        command = f"repeat: {self.fuzzer.command(program, ())}"
        return None, Failure(program, how, "\n".join([heading, str(program), text, command]), before, by_inductor)

    def _outcomes(self, program: Program, settings: Settings) -> tuple[list[Outcome], str]:
        """What the ranks answered, and the same as text."""
        if self.pool is None:
            self.pool = self.fuzzer.make_pool()
            # What a rank imports for its first program is not charged to that.
            self.pool.run(imported, self.fuzzer.execute, timeout=START_LIMIT_S)
        limit = self.fuzzer.limit_s
        try:
            outcomes = self.pool.outcomes(self.fuzzer.execute, program, settings, timeout=limit, grace=GRACE_S)
        except OSError as error:
            why = f"ended after the program before: {error}"
            outcomes = [Outcome(rank, lost=why) for rank in range(self.pool.world_size)]
        return outcomes, "\n".join(self._said(self.pool, outcome) for outcome in outcomes)

    def _said(self, pool: RankPool, outcome: Outcome) -> str:
        head = f"--- rank {outcome.rank}"
        if outcome.lost:
            return f"{head}: {outcome.lost}; the end of its log:\n{pool.log_tail(outcome.rank, TEXT_LIMIT)}"
        if outcome.error is not None:
            return f"{head}\n{outcome.error.traceback[-TEXT_LIMIT:]}"
        verdict: Verdict = outcome.value
        return f"{head}: {verdict.wrong[:TEXT_LIMIT] or verdict.refused or 'right'}"


def _counts(summary: Summary) -> str:
    return f"{summary.programs} programs, {len(summary.failures)} failed"


def _until(programs: Iterator[Program], end: float) -> Iterator[Program]:
    for program in programs:
        if time.monotonic() >= end:
            return
        yield program


def _how(outcomes: list[Outcome]) -> str:
    """The kind of failure, empty where all ranks are right, or all refuse."""
    if any(outcome.error is not None for outcome in outcomes):
        names = sorted({outcome.error.type_name for outcome in outcomes if outcome.error is not None})
        hang = ", a hang of others" if any(outcome.lost for outcome in outcomes) else ""
        return f"error ({', '.join(names)}{hang})"
    if any(outcome.lost for outcome in outcomes):
        lost = next(outcome.lost for outcome in outcomes if outcome.lost)
        return "hang" if "in time" in lost else f"error ({lost})"
    if any(outcome.value.wrong for outcome in outcomes):
        return "wrong value"
    if 0 < sum(bool(outcome.value.refused) for outcome in outcomes) < len(outcomes):
        return "a strategy that some ranks refuse"
    return ""


def _traits(program: Program) -> Iterator[str]:
    yield program.dtype
    yield from (f"{key.removeprefix('ditron.')}={value}" for key, value in program.options)
    facts = {"backward": program.trained, "dynamic": program.dynamic, "captured": program.capture}
    facts |= {"delays": any(any(call.sleeps) or any(call.spins) for call in program.calls)}
    yield from (name for name, holds in {**facts, "ranks differ": program.differs}.items() if holds)
