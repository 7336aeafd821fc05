"""Calls that must not succeed: problems whose waits give up soon, how calls end, and failures of every strategy."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import ditron_inductor
from ditron_inductor.core.layout import POISON
from ditron_inductor.device import workspaces
from ditron_inductor.errors import DitronError
from tests.lowering.calls import Site
from tests.lowering.problems import CUT_KINDS, SMALL, TILE_KINDS, Problem
from tests.rank_process import RankContext
from tests.ranks import RankPool

TIMEOUT_S = 3.0
# Waits are bounded by a number of polls, and two cores may be shared by four ranks that poll.
LIMIT_S = {"cpu": 20.0, "cuda": 8.0}


@dataclass(frozen=True)
class Failure:
    """How a call ended that must not succeed."""

    type_name: str
    message: str
    seconds: float


def hasty(ctx: RankContext, name: str, kind: str, *, timeout_s: float = TIMEOUT_S, **of_site: Any) -> Problem:
    """A small problem whose waits give up soon."""
    site = Site(name=f"{name}:{kind}", timeout_s=timeout_s, **of_site)
    return Problem(ctx, kind, SMALL[ctx.device.type], site=site)


def fails(ctx: RankContext, problem: Problem) -> Failure:
    """Call until it raises: an expired wait is reported by the next call when the kernel ran asynchronously."""
    limit = LIMIT_S[ctx.device.type]
    start, calls = time.monotonic(), 0
    while time.monotonic() - start < limit:
        calls += 1
        try:
            problem()
            if ctx.device.type == "cuda":
                torch.cuda.synchronize()
        except DitronError as error:
            return Failure(type(error).__name__, str(error), time.monotonic() - start)
    raise AssertionError(f"no error within {limit} s, in {calls} calls: if it is one, its launch took so long")


def names(failure: Failure, rank: int) -> bool:
    """Whether it says that it waited for this rank, or that this rank has not begun the call."""
    told = re.findall(r"for rank (\d+) |Ranks? (\d+(?:, \d+)*) ha(?:s|ve) not begun this call", failure.message)
    return any(str(rank) in ", ".join(found).split(", ") for found in told)


def reset(ctx: RankContext) -> None:
    """The group works again."""
    ditron_inductor.reset(dist.group.WORLD)


def reset_and_work(ctx: RankContext, strategy: str = "tile") -> None:
    """After a reset kinds of all ways to signal give right results in every slot."""
    reset(ctx)
    for index, kind in enumerate(TILE_KINDS[::3] if strategy == "tile" else CUT_KINDS[::2]):
        problem = hasty(ctx, f"works/{index}", kind, strategy=strategy)
        for outputs in [problem() for _ in range(2)]:
            problem.check(outputs)


def nan_once_poisoned(ctx: RankContext, problems: Sequence[Problem]) -> bool:
    """Whether all that a launch returns is NaN once a wait of its rank has failed."""
    for problem in problems:
        problem.check(problem())
    (shared,) = workspaces.of_group(dist.distributed_c10d._resolve_process_group(ctx.group_name))
    ctl = shared.generations[-1].ctl
    dist.barrier()
    ctl[POISON.value] = 1
    missing = all(bool(out.isnan().all()) for problem in problems for out in problem())
    dist.barrier()
    return missing


def call_without_the_last(ctx: RankContext, problem: Problem) -> Failure | None:
    """The last rank does not come before the others have given up: it is called again when they have answered."""
    problem.check(problem())
    dist.barrier()
    return fails(ctx, problem) if ctx.rank != ctx.world_size - 1 else None


def check_left_waiting(outcomes: Sequence[Failure | None], site: str) -> None:
    """Of `call_without_the_last`: each other one times out, and names the site and the rank that did not come."""
    *waiting, _ = outcomes
    failures = [one for one in waiting if one is not None]
    assert len(failures) == len(waiting) and {one.type_name for one in failures} == {"DitronTimeout"}, waiting
    assert all(names(one, len(waiting)) and site in one.message for one in failures), waiting


def lose_a_rank_of(ctx: RankContext, problem: Problem, victim: int, signal_number: int) -> Failure | None:
    """The victim sends itself a signal after one call of all ranks."""
    problem.check(problem())
    dist.barrier()
    if ctx.rank == victim:
        os.kill(os.getpid(), signal_number)
        return None
    return fails(ctx, problem)


def lose_a_rank(ctx: RankContext, kind: str, strategy: str, victim: int, signal_number: int) -> Failure | None:
    """`lose_a_rank_of` a small problem of a kind."""
    return lose_a_rank_of(ctx, hasty(ctx, "lost/0", kind, strategy=strategy), victim, signal_number)


def stop(pool: RankPool, lose: Callable[..., Failure | None], *arguments: object, site: str) -> None:
    """Each peer raises an error that names the last rank, which stops in the middle of `lose`, and the site."""
    victim = pool.world_size - 1
    outcomes = pool.outcomes(lose, *arguments, victim, signal.SIGSTOP, timeout=60, stop=victim)
    failures = [outcome.value for outcome in outcomes if outcome.rank != victim]
    assert all(failure is not None for failure in failures), outcomes
    assert {failure.type_name for failure in failures} == {"DitronTimeout"}, failures
    assert all(site in failure.message for failure in failures), failures
    assert all(names(failure, victim) for failure in failures), failures


def stop_a_rank(pool: RankPool, kind: str, strategy: str) -> None:
    """The group works again when the rank goes on."""
    stop(pool, lose_a_rank, kind, strategy, site=f"lost/0:{kind}")
    pool.run(reset_and_work, strategy)


def run_another_site(ctx: RankContext, kind: str, strategy: str, odd_rank: int, first_call: bool) -> Failure:
    """One rank calls another site than its peers, at the first call of both sites or later."""
    problems = [hasty(ctx, f"diverged/{first_call}/{index}", kind, strategy=strategy) for index in range(2)]
    if not first_call:
        for problem in problems:
            problem.check(problem())
    return fails(ctx, problems[ctx.rank == odd_rank])


def diverge(pool: RankPool, kind: str, strategy: str, first_call: bool = False) -> None:
    """Every rank raises an error that names both sites, and the odd rank where it is not that rank itself."""
    odd_rank = 1
    failures = pool.run(run_another_site, kind, strategy, odd_rank, first_call)
    for rank, failure in enumerate(failures):
        assert failure.type_name == "DitronDiverged", failures
        assert f"diverged/{first_call}/0" in failure.message, failures
        assert f"diverged/{first_call}/1" in failure.message, failures
        assert rank == odd_rank or f"rank {odd_rank}" in failure.message, failures
    pool.run(reset_and_work, strategy)
