"""The kernels inside replayed CUDA graphs: operands change between replays, eager calls and streams come in between."""

from __future__ import annotations

import pytest

from tests.lowering.problems import SMALL, TILE_KINDS, Problem
from tests.lowering.stress import mix_graphs_with_eager_calls, replay_with_new_operands
from tests.rank_process import RankContext
from tests.ranks import RankPool


def _replay(ctx: RankContext, kinds: tuple[str, ...], calls_per_graph: int) -> None:
    size = SMALL[ctx.device.type]
    replay_with_new_operands(ctx, [Problem(ctx, kind, size) for _ in range(calls_per_graph) for kind in kinds])


# An odd number of calls leaves the ring of slots elsewhere than where the graph found it.
@pytest.mark.parametrize("calls_per_graph", [1, 2])
@pytest.mark.parametrize("kinds", [*((kind,) for kind in TILE_KINDS), TILE_KINDS], ids="+".join)
def test_operands_change_between_replays(gpu_pool: RankPool, kinds: tuple[str, ...], calls_per_graph: int) -> None:
    gpu_pool.run(_replay, kinds, calls_per_graph)


def _mixed(ctx: RankContext, count: int) -> None:
    size = SMALL[ctx.device.type]
    eager = [Problem(ctx, kind, size) for kind in TILE_KINDS]
    choices = TILE_KINDS, TILE_KINDS[::-1], TILE_KINDS[:1]
    graphs = [[Problem(ctx, kind, size) for kind in kinds] for kinds in choices]
    mix_graphs_with_eager_calls(ctx, eager, graphs, count)


def test_graphs_mixed_with_eager_calls_and_a_second_stream(gpu_pool: RankPool) -> None:
    gpu_pool.run(_mixed, 500, timeout=100)
