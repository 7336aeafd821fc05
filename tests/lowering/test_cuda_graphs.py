"""The kernels inside replayed CUDA graphs: operands change between replays, eager calls and streams come in between."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from tests.lowering.problems import SMALL, TILE_KINDS, Mismatches, Problem
from tests.lowering.test_repeated_calls import delay
from tests.rank_process import RankContext
from tests.ranks import RankPool


class Captured:
    """The calls of `problems` in one CUDA graph, after one eager call of each."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = problems
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for problem in problems:
                problem()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.outputs = [problem() for problem in problems]

    def check(self, what: str) -> None:
        """The outputs of the last replay."""
        for problem, outputs in zip(self.problems, self.outputs, strict=True):
            problem.check(outputs, what=what)


def _replay(ctx: RankContext, kinds: tuple[str, ...], calls_per_graph: int) -> None:
    size = SMALL[ctx.device.type]
    captured = Captured([Problem(ctx, kind, size) for _ in range(calls_per_graph) for kind in kinds])
    for replay in range(5):
        for problem in captured.problems:
            problem.refill()
        if ctx.rank == replay % ctx.world_size:
            delay(ctx, 20)
        captured.graph.replay()
        captured.check(f"replay {replay}:")


# An odd number of calls leaves the ring of slots elsewhere than where the graph found it.
@pytest.mark.parametrize("calls_per_graph", [1, 2])
@pytest.mark.parametrize("kinds", [*((kind,) for kind in TILE_KINDS), TILE_KINDS], ids="+".join)
def test_operands_change_between_replays(gpu_pool: RankPool, kinds: tuple[str, ...], calls_per_graph: int) -> None:
    gpu_pool.run(_replay, kinds, calls_per_graph)


def _mixed(ctx: RankContext, count: int) -> None:
    size = SMALL[ctx.device.type]
    eager = [Problem(ctx, kind, size) for kind in TILE_KINDS]
    first = [problem() for problem in eager]
    for problem, outputs in zip(eager, first, strict=True):
        problem.check(outputs)
    choices = TILE_KINDS, TILE_KINDS[::-1], TILE_KINDS[:1]
    graphs = [Captured([Problem(ctx, kind, size) for kind in kinds]) for kinds in choices]
    expected = []
    for index, captured in enumerate(graphs):
        captured.graph.replay()
        captured.check(f"graph {index}:")
        expected.append([[x.clone() for x in outputs] for outputs in captured.outputs])
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
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
