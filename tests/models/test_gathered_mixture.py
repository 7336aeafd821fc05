"""A layer of experts behind a gather and in front of a reduce-scatter trains through Ditron, and is equal to eager."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.cases import rare
from tests.models.gathered_mixture import train
from tests.ranks import RankPool, RankPools

# The gather with the router, and both reduce-scatters: of the tokens, and in the backward of their gradients.
FUSED = Counter({"all_gather_matmul": 1, "grouped_matmul_reduce_scatter": 2})


@pytest.mark.parametrize("world_size", [2, *rare(4)])
def test_training(rank_pools: RankPools, world_size: int) -> None:
    ranks = rank_pools.get("cpu", world_size)
    assert ranks.run(train, 32 * world_size, False) == [(FUSED, {"tile"})] * world_size


@pytest.mark.gpu
def test_training_on_gpus(gpu_pool: RankPool) -> None:
    assert gpu_pool.run(train, 1024, True) == [(FUSED, {"tile"})] * gpu_pool.world_size
