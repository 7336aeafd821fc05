"""Kernels with several programs on a rank that are under way at the same time."""

from __future__ import annotations

import threading

import pytest
import torch
import triton
import triton.language as tl

from benchmarks.tolerances import assert_near
from tests.cases import rare
from tests.lowering import test_reduced_experts as experts
from tests.lowering.calls import Site
from tests.lowering.problems import NORM_KINDS, SMALL, TILE_KINDS, Problem
from tests.lowering.programs_at_once import programs_at_once
from tests.rank_process import RankContext
from tests.ranks import RankPools

PROGRAMS = 3
CALLS = 3


@triton.jit
def _meeting(counter, out, PROGRAMS: tl.constexpr):
    """Every program counts itself, and waits for all others."""
    tl.atomic_add(counter, 1)
    while tl.atomic_add(counter, 0) < PROGRAMS:
        pass
    tl.store(out + tl.program_id(0), tl.program_id(0) + 1)


def _meet(ctx: RankContext) -> tuple[list[int], int]:
    counter, out = torch.zeros(1, dtype=torch.int32), torch.zeros(PROGRAMS, dtype=torch.int32)
    with programs_at_once(PROGRAMS, ctx.rank):
        _meeting[(PROGRAMS,)](counter, out, PROGRAMS)
    return out.tolist(), threading.active_count()


def test_programs_that_wait_for_each_other_end(rank_pools: RankPools) -> None:
    """One after the other, the first of them would wait for ever."""
    for found, _ in rank_pools.get("cpu", 2).run(_meet, timeout=60):
        assert found == [1, 2, 3]


@triton.jit
def _fails(out):
    tl.store(out + tl.program_id(0), tl.arange(0, 3))


def _fail(ctx: RankContext) -> str:
    with programs_at_once(PROGRAMS, ctx.rank):
        try:
            _fails[(2,)](torch.zeros(2, dtype=torch.int32))
        except Exception as error:
            return str(error)
    return ""


def test_an_error_of_a_program_is_the_launchs(rank_pools: RankPools) -> None:
    assert all("power of 2" in text for text in rank_pools.get("cpu", 2).run(_fail, timeout=60))


def _call_back_to_back(ctx: RankContext, kind: str) -> None:
    site = Site(name=f"at_once/{(*TILE_KINDS, *NORM_KINDS).index(kind)}:{kind}", strategy="tile")
    problem = Problem(ctx, kind, SMALL["cpu"], site=site)
    for index in range(CALLS):
        problem.refill()
        with programs_at_once(PROGRAMS, ctx.rank + index):
            outputs = problem()
        problem.check(outputs, f"call {index}")


@pytest.mark.parametrize("kind", [*TILE_KINDS[::2], *rare(*TILE_KINDS[1::2], *NORM_KINDS)])
def test_matmuls(rank_pools: RankPools, kind: str) -> None:
    rank_pools.get("cpu", 2).run(_call_back_to_back, kind, timeout=100)


def _reduce(ctx: RankContext, kind: experts.Kind, case: experts.Layer) -> None:
    site = Site(name=f"at_once/{kind.kind}/{case}", strategy="tile")
    for seed in range(CALLS):
        given = experts.given_to(ctx, case, seed)
        wanted = experts.reduced(ctx, kind, case, given)
        with programs_at_once(PROGRAMS, ctx.rank + seed):
            (out,) = site.call(ctx, kind, experts.fields_of(kind, case), **given)
        assert_near(out, wanted, num_partials=ctx.world_size, what=f"call {seed}")


# Few tiles in each of several chunks: a slow program holds up the others, unless they do not wait for it.
LAYERS = [experts.Layer(8, 2, 2, 200, k=8), experts.Layer(12, 2, 8, 40, routing="one")]
MORE_LAYERS = [experts.Layer(24, 3, 5, 96, scale_dtype=experts.BF16), experts.Layer(24, 3, 4, 96, absent=True)]


@pytest.mark.parametrize("kind", [experts.WHOLE, experts.SCATTERED], ids=lambda kind: kind.kind)
@pytest.mark.parametrize("case", [*LAYERS, *rare(*MORE_LAYERS)], ids=str)
def test_experts(rank_pools: RankPools, kind: experts.Kind, case: experts.Layer) -> None:
    rank_pools.get("cpu", 2).run(_reduce, kind, case, timeout=100)
