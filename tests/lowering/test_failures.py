"""A dead, stopped or diverged rank is an error with names on the others, in time; after `reset` the group works."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

import ditron_inductor
from ditron_inductor.errors import DitronError
from tests.conftest import CPU_PLACES, GPU_PLACES, Place
from tests.lowering.calls import WORKSPACE_LIMIT, Site
from tests.lowering.problems import KINDS, SMALL, TILE_KINDS, Problem
from tests.rank_process import RankContext
from tests.ranks import RankPool, RankPools

TIMEOUT_S = 3.0
# Waits are bounded by a number of polls, and two cores may be shared by four ranks that poll.
LIMIT_S = {"cpu": 20.0, "cuda": 8.0}


@dataclass(frozen=True)
class Failure:
    """How a call ended that must not succeed."""

    type_name: str
    message: str
    seconds: float


@pytest.fixture(scope="module", params=[CPU_PLACES[0], *GPU_PLACES])
def fragile_place(request: pytest.FixtureRequest) -> Place:
    """Two ranks on the CPU device: with more, those that wait take the cores, and limits say little."""
    return request.param


@pytest.fixture
def fragile_pool(rank_pools: RankPools, fragile_place: Place) -> RankPool:
    """Ranks apart from those of other tests: these break their group, and some end their processes."""
    where = fragile_place.device_type, fragile_place.world_size
    pool = rank_pools.get(*where, label="failures")
    # What a failed test left behind must not fail the next one.
    if any(outcome.error or outcome.lost for outcome in pool.outcomes(_reset)):
        pool.close()
    return rank_pools.get(*where, label="failures")


def _reset(ctx: RankContext) -> None:
    ditron_inductor.reset(dist.group.WORLD)


def _site(name: str, **changes: object) -> Site:
    return Site(name=name, **({"timeout_s": TIMEOUT_S} | changes))  # type: ignore[arg-type]


def _fails(ctx: RankContext, problem: Problem) -> Failure:
    """Call until it raises: an expired wait is reported by the next call when the kernel ran asynchronously."""
    limit = LIMIT_S[ctx.device.type]
    start = time.monotonic()
    while time.monotonic() - start < limit:
        try:
            problem()
            if ctx.device.type == "cuda":
                torch.cuda.synchronize()
        except DitronError as error:
            return Failure(type(error).__name__, str(error), time.monotonic() - start)
    raise AssertionError(f"no error within {limit} s")


def _works(ctx: RankContext) -> None:
    """Every kind gives right results in every slot."""
    for kind in TILE_KINDS:
        problem = Problem(ctx, kind, SMALL[ctx.device.type], site=_site(f"works/{TILE_KINDS.index(kind)}:{kind}"))
        for outputs in [problem() for _ in range(2)]:
            problem.check(outputs)


def _reset_and_work(ctx: RankContext) -> None:
    ditron_inductor.reset(dist.group.WORLD)
    _works(ctx)


def _lose_a_rank(ctx: RankContext, kind: str, victim: int, signal_number: int) -> Failure | None:
    problem = Problem(ctx, kind, SMALL[ctx.device.type], site=_site(f"lost/0:{kind}"))
    problem.check(problem())
    dist.barrier()
    if ctx.rank == victim:
        os.kill(os.getpid(), signal_number)
        return None
    return _fails(ctx, problem)


@pytest.mark.parametrize("kind", TILE_KINDS)
def test_a_stopped_rank(fragile_pool: RankPool, kind: str) -> None:
    victim = fragile_pool.world_size - 1
    outcomes = fragile_pool.outcomes(_lose_a_rank, kind, victim, signal.SIGSTOP, timeout=60, stop=victim)
    failures = [outcome.value for outcome in outcomes if outcome.rank != victim]
    assert all(failure is not None for failure in failures), outcomes
    assert {failure.type_name for failure in failures} == {"DitronTimeout"}, failures
    assert all(f"lost/0:{kind}" in failure.message for failure in failures), failures
    named = [f"for rank {victim}" in failure.message for failure in failures]
    # A rank that owns no part of a replicated result waits for its owner, who waits for the victim.
    assert all(named) or (kind == "matmul_all_reduce" and any(named)), failures
    fragile_pool.run(_reset_and_work)


def _run_another_site(ctx: RankContext, odd_rank: int, first_call: bool) -> Failure:
    kind = "all_gather_matmul"
    names = [f"diverged/{first_call}/{index}:{kind}" for index in range(2)]
    problems = [Problem(ctx, kind, SMALL[ctx.device.type], site=_site(name)) for name in names]
    if not first_call:
        for problem in problems:
            problem.check(problem())
    return _fails(ctx, problems[ctx.rank == odd_rank])


# The ranks meet on the host at a site's first call; later calls meet in the kernel.
@pytest.mark.parametrize("first_call", [True, False], ids=["first-call", "later-call"])
def test_a_rank_at_another_site(fragile_pool: RankPool, first_call: bool) -> None:
    odd_rank = 1
    failures = fragile_pool.run(_run_another_site, odd_rank, first_call)
    for rank, failure in enumerate(failures):
        assert failure.type_name == "DitronDiverged", failures
        assert f"diverged/{first_call}/0" in failure.message, failures
        assert f"diverged/{first_call}/1" in failure.message, failures
        assert rank == odd_rank or f"rank {odd_rank}" in failure.message, failures
    fragile_pool.run(_reset_and_work)


def _run_another_kind(ctx: RankContext, odd_rank: int) -> Failure:
    kinds = ("matmul_reduce_scatter", "matmul_all_reduce")
    problems = [Problem(ctx, kind, SMALL[ctx.device.type], site=_site(f"kinds/0:{kind}")) for kind in kinds]
    for problem in problems:
        problem.check(problem())
    return _fails(ctx, problems[ctx.rank == odd_rank])


def test_a_rank_in_another_kernel(fragile_pool: RankPool) -> None:
    failures = fragile_pool.run(_run_another_kind, 0)
    assert {failure.type_name for failure in failures} <= {"DitronDiverged", "DitronTimeout"}, failures
    assert any(failure.type_name == "DitronDiverged" for failure in failures), failures
    fragile_pool.run(_reset_and_work)


def _stop_half_way(ctx: RankContext, victim: int) -> Failure | None:
    steps = [Problem(ctx, kind, SMALL[ctx.device.type], site=_site(f"half/{i}:{kind}")) for i, kind in enumerate(KINDS)]
    for problem in steps:
        problem.check(problem())
    try:
        steps[0]()
        if ctx.rank == victim:
            raise KeyError("a user's mistake")
        return _fails(ctx, steps[1])
    except KeyError:
        return None


def test_an_exception_half_way(fragile_pool: RankPool) -> None:
    victim = 0
    failures = fragile_pool.run(_stop_half_way, victim)
    for rank, failure in enumerate(failures):
        if rank != victim:
            assert failure.type_name == "DitronTimeout", failures
            assert "half/1:" in failure.message and f"for rank {victim}" in failure.message, failures
    fragile_pool.run(_reset_and_work)


def _fail_twice(ctx: RankContext, victim: int) -> tuple[Failure, Failure] | None:
    problem = Problem(ctx, KINDS[0], SMALL[ctx.device.type], site=_site("twice/0:all_gather_matmul"))
    problem.check(problem())
    if ctx.rank == victim:
        return None
    return _fails(ctx, problem), _fails(ctx, problem)


def test_a_failed_group_refuses_calls_until_reset(fragile_pool: RankPool) -> None:
    victim = 0
    pairs = fragile_pool.run(_fail_twice, victim)
    for pair in pairs[1:]:
        first, second = pair
        assert first.type_name == "DitronTimeout", pairs
        assert second.type_name in ("DitronPoisoned", "DitronTimeout") and second.seconds < 1.0, pairs
    fragile_pool.run(_reset_and_work)


def _other_options(ctx: RankContext, limits: tuple[int, ...]) -> Failure:
    site = _site("options/0:all_gather_matmul", workspace_limit=limits[ctx.rank])
    return _fails(ctx, Problem(ctx, "all_gather_matmul", SMALL[ctx.device.type], site=site))


def test_a_rank_with_other_options(fragile_pool: RankPool) -> None:
    odd_rank = 1
    # Options that no rank has used yet, so that all of them come to compare.
    limits = [WORKSPACE_LIMIT - 8192] * fragile_pool.world_size
    limits[odd_rank] += 4096
    failures = fragile_pool.run(_other_options, tuple(limits))
    for failure in failures:
        assert failure.type_name == "DitronOptionsMismatch", failures
        assert "workspace_limit" in failure.message and f"rank {odd_rank}" in failure.message, failures
        assert str(limits[odd_rank]) in failure.message, failures
    fragile_pool.run(_reset_and_work)


def _absent(ctx: RankContext, victim: int) -> Failure | None:
    group = dist.new_group(list(range(ctx.world_size)))
    if ctx.rank == victim:
        return None
    site = _site("absent/0:all_gather_matmul", group_name=group.group_name, world_size=ctx.world_size)
    return _fails(ctx, Problem(ctx, "all_gather_matmul", SMALL[ctx.device.type], site=site))


def test_a_rank_that_never_comes_to_the_first_call(fragile_pool: RankPool) -> None:
    victim = 1
    failures = fragile_pool.run(_absent, victim)
    for rank, failure in enumerate(failures):
        if rank != victim:
            assert failure.type_name == "DitronHandshakeError", failures
            assert f"{victim}" in failure.message.partition("did not hear from")[2], failures


def test_a_killed_rank(fragile_pool: RankPool) -> None:
    victim = 0
    kind = "all_gather_matmul"
    outcomes = fragile_pool.outcomes(_lose_a_rank, kind, victim, signal.SIGKILL, timeout=60, stop=victim)
    assert outcomes[victim].lost
    for outcome in outcomes[1:]:
        assert outcome.value is not None, outcome
        assert outcome.value.type_name == "DitronTimeout", outcome
        assert f"for rank {victim}" in outcome.value.message and f"lost/0:{kind}" in outcome.value.message, outcome
