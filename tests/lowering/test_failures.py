"""A dead, stopped or diverged rank is an error with names on the others, in time; after `reset` the group works."""

from __future__ import annotations

import functools
import signal

import pytest
import torch.distributed as dist

from tests.cases import rare
from tests.conftest import Place
from tests.lowering import test_all_gather_attention as attention
from tests.lowering.calls import WORKSPACE_LIMIT, Site
from tests.lowering.failures import (
    TIMEOUT_S,
    Failure,
    diverge,
    fails,
    hasty,
    lose_a_rank,
    names,
    reset_and_work,
    stop_a_rank,
)
from tests.lowering.problems import KINDS, TILE_KINDS, Problem, Size
from tests.rank_process import RankContext
from tests.ranks import RankPool


# Of many rows a gather ends as a reduction does.
@pytest.mark.parametrize("stopped_kind", [kind for kind in TILE_KINDS if kind != "matmul_all_gather"])
def test_a_stopped_rank(fragile_pool: RankPool, stopped_kind: str) -> None:
    stop_a_rank(fragile_pool, stopped_kind, "tile")


def _all_reduce_without(ctx: RankContext, victim: int) -> Failure | None:
    """A sum of three tiles, of which the first three ranks own one each."""
    site = Site(name="fourth/0", timeout_s=3.0)
    problem = Problem(ctx, "matmul_all_reduce", Size(20, 40, 32), site=site)
    problem.check(problem())
    dist.barrier()
    return None if ctx.rank == victim else fails(ctx, problem)


@pytest.mark.parametrize("fragile_place", [Place("cpu", 4)], indirect=True, ids=str)
def test_a_rank_that_others_wait_for_is_named_by_those_that_wait_for_them(fragile_pool: RankPool) -> None:
    victim = 2
    *owners, victims, last = fragile_pool.run(_all_reduce_without, victim)
    assert victims is None
    assert all(f"for rank {victim} " in failure.message for failure in owners), owners
    # It owns no tile, and its time is over when an owner's is.
    assert f"for rank {victim} " not in last.message and names(last, victim), last


# The ranks meet on the host at a site's first call; later calls meet in the kernel.
@pytest.mark.parametrize("first_call", [True, False], ids=["first-call", "later-call"])
def test_a_rank_at_another_site(fragile_pool: RankPool, first_call: bool) -> None:
    diverge(fragile_pool, "all_gather_matmul", "tile", first_call)


def _run_another_kind(ctx: RankContext, odd_rank: int) -> Failure:
    kinds = ("matmul_reduce_scatter", "matmul_all_reduce")
    problems = [hasty(ctx, "kinds/0", kind) for kind in kinds]
    for problem in problems:
        problem.check(problem())
    return fails(ctx, problems[ctx.rank == odd_rank])


def test_a_rank_in_another_kernel(fragile_pool: RankPool) -> None:
    failures = fragile_pool.run(_run_another_kind, 0)
    assert {failure.type_name for failure in failures} <= {"DitronDiverged", "DitronTimeout"}, failures
    assert any(failure.type_name == "DitronDiverged" for failure in failures), failures
    fragile_pool.run(reset_and_work)


def _stop_half_way(ctx: RankContext, victim: int) -> Failure | None:
    steps = [hasty(ctx, f"half/{i}", kind) for i, kind in enumerate(KINDS)]
    for problem in steps:
        problem.check(problem())
    try:
        steps[0]()
        if ctx.rank == victim:
            raise KeyError("a user's mistake")
        return fails(ctx, steps[1])
    except KeyError:
        return None


def test_an_exception_half_way(fragile_pool: RankPool) -> None:
    victim = 0
    failures = fragile_pool.run(_stop_half_way, victim)
    for rank, failure in enumerate(failures):
        if rank != victim:
            assert failure.type_name == "DitronTimeout", failures
            assert "half/1:" in failure.message and f"for rank {victim}" in failure.message, failures
    fragile_pool.run(reset_and_work)


def _fail_twice(ctx: RankContext, victim: int) -> tuple[Failure, Failure] | None:
    problem = hasty(ctx, "twice/0", "all_gather_matmul")
    problem.check(problem())
    if ctx.rank == victim:
        return None
    return fails(ctx, problem), fails(ctx, problem)


def test_a_failed_group_refuses_calls_until_reset(fragile_pool: RankPool) -> None:
    victim = 0
    pairs = fragile_pool.run(_fail_twice, victim)
    for pair in pairs[1:]:
        first, second = pair
        assert first.type_name == "DitronTimeout", pairs
        assert second.type_name in ("DitronPoisoned", "DitronTimeout") and second.seconds < 1.0, pairs
    fragile_pool.run(reset_and_work)


def _other_options(ctx: RankContext, limits: tuple[int, ...]) -> Failure:
    return fails(ctx, hasty(ctx, "options/0", "all_gather_matmul", workspace_limit=limits[ctx.rank]))


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
    fragile_pool.run(reset_and_work)


def _absent(ctx: RankContext, victim: int) -> Failure | None:
    group = dist.new_group(list(range(ctx.world_size)))
    if ctx.rank == victim:
        return None
    whole = {"group_name": group.group_name, "world_size": ctx.world_size}
    return fails(ctx, hasty(ctx, "absent/0", "all_gather_matmul", **whole))


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
    outcomes = fragile_pool.outcomes(lose_a_rank, kind, "tile", victim, signal.SIGKILL, timeout=60, stop=victim)
    assert outcomes[victim].lost
    for outcome in outcomes[1:]:
        assert outcome.value is not None, outcome
        assert outcome.value.type_name == "DitronTimeout", outcome
        assert f"for rank {victim}" in outcome.value.message and f"lost/0:{kind}" in outcome.value.message, outcome


def _miss_a_rank(ctx: RankContext, strategy: str) -> Failure | None:
    case = attention.Case("full", 8, 8)
    site = Site(name=f"missed/0:{strategy}", strategy=strategy, timeout_s=TIMEOUT_S)
    call = functools.partial(attention.forward, ctx, site, case, case.operands(ctx))
    call()
    dist.barrier()
    return None if ctx.rank == 0 else fails(ctx, call)


@pytest.mark.parametrize("strategy", ["tile", *rare("chunked")])
def test_attention_without_the_keys_of_a_rank(fragile_pool: RankPool, strategy: str) -> None:
    for failure in fragile_pool.run(_miss_a_rank, strategy)[1:]:
        assert failure.type_name == "DitronTimeout" and "missed/0" in failure.message, failure
        assert "for rank 0" in failure.message, failure


def _prove_alone(ctx: RankContext) -> Failure:
    """Rank 0 proves nothing of its mask, and the others do: their graphs' sites have other names."""
    case = attention.Case("causal" if ctx.rank else "given", 8, 8, bias="" if ctx.rank else "alibi")
    site = Site(name=f"{case.kind}/0", strategy="chunked", timeout_s=TIMEOUT_S)
    operands, bias = case.operands(ctx), case.drawn_bias(ctx)
    return fails(ctx, functools.partial(attention.forward, ctx, site, case, operands, False, bias))


def test_a_mask_that_is_proved_on_some_ranks(fragile_pool: RankPool) -> None:
    failures = fragile_pool.run(_prove_alone)
    assert {failure.type_name for failure in failures} <= {"DitronDiverged", "DitronTimeout"}, failures
    told = [failure.message for failure in failures if failure.type_name == "DitronDiverged"]
    assert told and all("given/0" in message and "causal/0" in message for message in told), failures
    fragile_pool.run(reset_and_work)
