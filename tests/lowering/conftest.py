"""Fixtures: ranks for tests of failures."""

from __future__ import annotations

import pytest

from tests.conftest import CPU_PLACES, GPU_PLACES, Place
from tests.lowering.failures import reset
from tests.ranks import RankPool, RankPools


@pytest.fixture(scope="module", params=[CPU_PLACES[0], *GPU_PLACES])
def fragile_place(request: pytest.FixtureRequest) -> Place:
    """Two ranks on the CPU device: with more, those that wait take the cores, and limits say little."""
    return request.param


@pytest.fixture
def fragile_pool(request: pytest.FixtureRequest, rank_pools: RankPools, fragile_place: Place) -> RankPool:
    """The test file's own ranks: its tests break their group, and some end their processes."""
    where = fragile_place.device_type, fragile_place.world_size
    label = request.module.__name__
    pool = rank_pools.get(*where, label=label)
    # What a failed test left behind must not fail the next one.
    if any(outcome.error or outcome.lost for outcome in pool.outcomes(reset)):
        pool.close()
    return rank_pools.get(*where, label=label)
