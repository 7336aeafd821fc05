"""The protocol under stress: back-to-back calls, late ranks, several sites and sizes, two streams, subgroups."""

from __future__ import annotations

import random

import pytest
import torch.distributed as dist

from tests.cases import rare
from tests.lowering.calls import Site
from tests.lowering.problems import SMALL, TILE_KINDS, Problem, Size
from tests.lowering.stress import BACK_TO_BACK, call_in_random_order, call_on_two_streams, delay, start_late
from tests.rank_process import RankContext
from tests.ranks import RankPool


def sizes(ctx: RankContext, kind: str) -> tuple[Size, ...]:
    """In the order of the calls. A slot begins with 512 KiB: the larger ones make the workspace grow."""
    if ctx.device.type == "cuda":
        return Size(64, 128, 256), Size(700, 520, 1030), Size(5, 72, 10), Size(4096, 1024, 2048)
    if kind == "all_gather_matmul":
        return Size(8, 16, 24), Size(32, 4200 if ctx.world_size == 2 else 70, 8), Size(5, 40, 10)
    return Size(5, 40, 10), Size(33, 30, 40)


def some_kinds(ctx: RankContext) -> tuple[str, ...]:
    """All of them, but for ranks that have to share few cores."""
    return TILE_KINDS[::3] if (ctx.device.type, ctx.world_size) == ("cpu", 4) else TILE_KINDS


def _back_to_back(ctx: RankContext, kind: str, late_rank: int) -> None:
    count = BACK_TO_BACK[ctx.device.type, ctx.world_size]
    problems = [Problem(ctx, kind, SMALL[ctx.device.type]) for _ in range(3)]
    call_in_random_order(ctx, problems, count, late_rank)


@pytest.mark.parametrize("late_rank", [-1, 0])
@pytest.mark.parametrize("kind", TILE_KINDS)
def test_back_to_back_with_random_delays(pool: RankPool, kind: str, late_rank: int) -> None:
    pool.run(_back_to_back, kind, late_rank, timeout=100)


def _late_start(ctx: RankContext, late_rank: int) -> None:
    start_late(ctx, [Problem(ctx, kind, SMALL[ctx.device.type]) for kind in some_kinds(ctx)], late_rank)


@pytest.mark.parametrize("late_rank", [-1, 0])
def test_a_rank_starts_late(pool: RankPool, late_rank: int) -> None:
    pool.run(_late_start, late_rank)


def _sites_and_sizes(ctx: RankContext) -> None:
    problems = [
        Problem(ctx, kind, size, site=Site(name=f"grow/{index}:{kind}"))
        for kind in some_kinds(ctx)
        for index, size in enumerate(sizes(ctx, kind))
    ]
    # First growing, then with all memory there, in another order.
    order = [*problems, *random.Random(ctx.seed).sample(problems, len(problems) // 2)]
    results = []
    for position, problem in enumerate(order):
        if ctx.rank == position % ctx.world_size:
            delay(ctx, 1)
        results.append(problem())
    for problem, outputs in zip(order, results, strict=True):
        problem.check(outputs)


def test_alternating_sites_and_growing_sizes(pool: RankPool) -> None:
    if pool.device_type == "cpu" and pool.world_size == 2:
        pytest.skip("four ranks show it")
    pool.run(_sites_and_sizes)


def _subgroups(ctx: RankContext, members: tuple[int, ...]) -> None:
    group = dist.new_group(list(members))
    if ctx.rank not in members:
        return
    for kind in TILE_KINDS:
        site = Site(name=f"subgroup/0:{kind}", group_name=group.group_name, world_size=len(members))
        problem = Problem(ctx, kind, SMALL[ctx.device.type], site=site)
        for outputs in [problem() for _ in range(3)]:
            problem.check(outputs, what=f"ranks {members}:")


@pytest.mark.parametrize("members", [*rare(((0, 1, 2),)), (1, 3)], ids=str)
def test_groups_of_some_ranks(pool: RankPool, members: tuple[int, ...]) -> None:
    if pool.world_size <= max(members):
        pytest.skip("needs 4 ranks")
    pool.run(_subgroups, members)


def _two_streams(ctx: RankContext, count: int) -> None:
    call_on_two_streams(ctx, [Problem(ctx, kind, SMALL[ctx.device.type]) for kind in TILE_KINDS], count)


def test_two_streams(gpu_pool: RankPool) -> None:
    gpu_pool.run(_two_streams, 300, timeout=100)
