"""The strategy `chunked` inside replayed CUDA graphs, and on several streams: its side stream forks and joins there."""

from __future__ import annotations

import pytest
import torch

from tests.lowering.calls import Site
from tests.lowering.problems import CHUNKED_KINDS, CUT_KINDS, KINDS, SMALL, Problem, Size, chunked_problems
from tests.lowering.stress import (
    Mismatches,
    call_on_two_streams,
    check_all,
    mix_graphs_with_eager_calls,
    replay_with_new_operands,
)
from tests.rank_process import RankContext
from tests.ranks import RankPool

LARGE = Size(1024, 2048, 3072)
"""Large enough for several products and copies at a time."""


def _replay(ctx: RankContext, kinds: tuple[str, ...], size: Size | None) -> None:
    # The library may otherwise add up parts of K in bf16, which is less exact than what we compare with allows.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    replay_with_new_operands(ctx, chunked_problems(ctx, kinds, f"graph {size is None}", size))


# An odd number of calls leaves the ring of slots elsewhere than where the graph found it.
@pytest.mark.parametrize("size", [None, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("kinds", [*((kind,) for kind in CHUNKED_KINDS), CHUNKED_KINDS, CUT_KINDS * 2], ids="+".join)
def test_operands_change_between_replays(gpu_pool: RankPool, kinds: tuple[str, ...], size: Size | None) -> None:
    gpu_pool.run(_replay, kinds, size)


def _mixed(ctx: RankContext, count: int) -> None:
    """`chunked` and `tile`."""
    size = SMALL[ctx.device.type]
    tile = [Problem(ctx, kind, size, site=Site(name=f"graph/tile:{kind}")) for kind in KINDS]
    eager = [*chunked_problems(ctx, CUT_KINDS, "graph eager"), *tile]
    graphs = [
        chunked_problems(ctx, CUT_KINDS, "graph a"),
        [*chunked_problems(ctx, CUT_KINDS[::-1], "graph b"), *tile],
        chunked_problems(ctx, CUT_KINDS[:1], "graph c"),
    ]
    mix_graphs_with_eager_calls(ctx, eager, graphs, count, second_priority=-1)


def test_graphs_mixed_with_eager_calls_and_a_second_stream(gpu_pool: RankPool) -> None:
    gpu_pool.run(_mixed, 500, timeout=100)


def _two_streams(ctx: RankContext, count: int) -> None:
    call_on_two_streams(ctx, chunked_problems(ctx, CUT_KINDS, "streams"), count)


def test_two_streams(gpu_pool: RankPool) -> None:
    gpu_pool.run(_two_streams, 300, timeout=100)


def _reused_memory(ctx: RankContext, count: int) -> None:
    """Operands and results die as soon as the host lets go of them, while the side stream may still copy."""
    problems = chunked_problems(ctx, CUT_KINDS, "memory", LARGE)
    first = [problem() for problem in problems]
    mismatches = Mismatches(ctx)
    for i in range(count):
        problem, wanted = problems[i % len(problems)], first[i % len(problems)]
        kept = problem.left
        problem.left = kept.clone()
        outputs = problem()
        # What the allocator hands out next is overwritten at once.
        problem.left = kept
        for _ in range(4):
            torch.full_like(kept, float("nan"))
        mismatches.add(outputs, wanted)
    check_all(problems, first)
    mismatches.assert_none(count)


def test_memory_is_not_reused_too_early(gpu_pool: RankPool) -> None:
    gpu_pool.run(_reused_memory, 100, timeout=100)
