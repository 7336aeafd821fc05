"""The strategy `chunked` inside replayed CUDA graphs, and on several streams: its side stream forks and joins there."""

from __future__ import annotations

import random

import pytest
import torch

from tests.lowering.calls import Site
from tests.lowering.problems import KINDS, SMALL, Mismatches, Problem, Size
from tests.lowering.test_cuda_graphs import Captured
from tests.lowering.test_repeated_calls import delay
from tests.rank_process import RankContext
from tests.ranks import RankPool

LARGE = Size(1024, 2048, 3072)
"""Large enough for several products and copies at a time."""


def _problems(ctx: RankContext, kinds: tuple[str, ...], label: str, size: Size | None = None) -> list[Problem]:
    size = size or SMALL[ctx.device.type]
    return [
        Problem(ctx, kind, size, site=Site(name=f"graph/{label}{i}:{kind}", strategy="chunked"))
        for i, kind in enumerate(kinds)
    ]


def _replay(ctx: RankContext, kinds: tuple[str, ...], size: Size | None) -> None:
    # The library may otherwise add up parts of K in bf16, which is less exact than what we compare with allows.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    captured = Captured(_problems(ctx, kinds, f"{size is None}", size))
    for replay in range(5):
        for problem in captured.problems:
            problem.refill()
        if ctx.rank == replay % ctx.world_size:
            delay(ctx, 20)
        captured.graph.replay()
        captured.check(f"replay {replay}:")


# An odd number of calls leaves the ring of slots elsewhere than where the graph found it.
@pytest.mark.parametrize("size", [None, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("kinds", [*((kind,) for kind in KINDS), KINDS, KINDS * 2], ids="+".join)
def test_operands_change_between_replays(gpu_pool: RankPool, kinds: tuple[str, ...], size: Size | None) -> None:
    gpu_pool.run(_replay, kinds, size)


def _mixed(ctx: RankContext, count: int) -> None:
    """Graphs and eager calls, `chunked` and `tile`, on two streams that the user orders, with ranks that come late."""
    size = SMALL[ctx.device.type]
    tile = [Problem(ctx, kind, size, site=Site(name=f"graph/tile:{kind}")) for kind in KINDS]
    eager = [*_problems(ctx, KINDS, "eager"), *tile]
    first = [problem() for problem in eager]
    for problem, outputs in zip(eager, first, strict=True):
        problem.check(outputs)
    graphs = [
        Captured(_problems(ctx, KINDS, "a")),
        Captured([*_problems(ctx, KINDS[::-1], "b"), *tile]),
        Captured(_problems(ctx, KINDS[:1], "c")),
    ]
    expected = []
    for index, captured in enumerate(graphs):
        captured.graph.replay()
        captured.check(f"graph {index}:")
        expected.append([[x.clone() for x in outputs] for outputs in captured.outputs])
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(), torch.cuda.Stream(priority=-1)]
    mismatches = Mismatches(ctx)
    torch.cuda.synchronize()
    order, delays = random.Random(ctx.seed), random.Random(ctx.rank)
    for _ in range(count):
        choice = order.randrange(len(graphs) + len(eager))
        stream = streams[order.randrange(len(streams))]
        # Whoever uses two streams for one group orders replays himself: the host does not see them.
        for other in streams:
            stream.wait_stream(other)
        with torch.cuda.stream(stream):
            if ctx.rank == order.randrange(ctx.world_size):
                delay(ctx, delays.choice((0.0, 0.02, 0.2)))
            if choice < len(graphs):
                graphs[choice].graph.replay()
                for outputs, wanted in zip(graphs[choice].outputs, expected[choice], strict=True):
                    mismatches.add(outputs, wanted)
            else:
                index = choice - len(graphs)
                mismatches.add(eager[index](), first[index])
    torch.cuda.synchronize()
    mismatches.assert_none(count)


def test_graphs_mixed_with_eager_calls_and_a_second_stream(gpu_pool: RankPool) -> None:
    gpu_pool.run(_mixed, 500, timeout=100)


def _two_streams(ctx: RankContext, count: int) -> None:
    problems = _problems(ctx, KINDS, "streams")
    first = [problem() for problem in problems]
    for problem, outputs in zip(problems, first, strict=True):
        problem.check(outputs)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    mismatches = [Mismatches(ctx) for _ in streams]
    torch.cuda.synchronize()
    order, delays = random.Random(ctx.seed), random.Random(ctx.rank)
    for _ in range(count):
        which = order.randrange(len(streams))
        # Nothing orders the two streams but the workspace itself.
        with torch.cuda.stream(streams[which]):
            delay(ctx, delays.choice((0.0, 0.02, 0.2)))
            index = order.randrange(len(problems))
            mismatches[which].add(problems[index](), first[index])
    for each in mismatches:
        torch.cuda.synchronize()
        each.assert_none(count)


def test_two_streams(gpu_pool: RankPool) -> None:
    gpu_pool.run(_two_streams, 300, timeout=100)


def _reused_memory(ctx: RankContext, count: int) -> None:
    """Operands and results die as soon as the host lets go of them, while the side stream may still copy."""
    problems = _problems(ctx, KINDS, "memory", LARGE)
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
    for problem, outputs in zip(problems, first, strict=True):
        problem.check(outputs)
    mismatches.assert_none(count)


def test_memory_is_not_reused_too_early(gpu_pool: RankPool) -> None:
    gpu_pool.run(_reused_memory, 100, timeout=100)
