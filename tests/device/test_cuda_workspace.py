"""Workspaces on GPUs: torch's symmetric memory, streams, CUDA graphs, and the failures of test_workspace.py again.

With fewer GPUs than ranks, the ranks share one (gloo): right but slow, so the calls are few.
"""

from __future__ import annotations

import pytest

from tests.device import cuda_jobs, jobs
from tests.ranks import RankPool, RankPools

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300), pytest.mark.parametrize("world_size", [2, 4])]


def test_values_cross_in_order(rank_pools: RankPools, world_size: int) -> None:
    rank_pools.get("cuda", world_size).run(jobs.values_cross, 40)


def test_slots_grow_and_the_old_ring_goes(rank_pools: RankPools, world_size: int) -> None:
    held = rank_pools.get("cuda", world_size).run(jobs.grows)
    assert all(rank_held == held[0] for rank_held in held)
    assert held[0][0] < held[0][1] < held[0][2] == held[0][3]


def test_the_limit_is_an_error_on_all_ranks(rank_pools: RankPools, world_size: int) -> None:
    errors = rank_pools.get("cuda", world_size).run(jobs.grows_beyond_the_limit)
    assert {name for name, _ in errors} == {"WorkspaceError"}


def test_streams_take_turns(rank_pools: RankPools, world_size: int) -> None:
    rank_pools.get("cuda", world_size).run(cuda_jobs.streams_take_turns, 60)


def test_foreign_streams_come_and_go(rank_pools: RankPools, world_size: int) -> None:
    rank_pools.get("cuda", world_size).run(cuda_jobs.foreign_streams_come_and_go)


def test_graphs_and_eager_calls_mix(rank_pools: RankPools, world_size: int) -> None:
    rank_pools.get("cuda", world_size).run(cuda_jobs.graphs_and_eager_calls_mix, 60)


def test_streams_inside_a_graph(rank_pools: RankPools, world_size: int) -> None:
    rank_pools.get("cuda", world_size).run(cuda_jobs.streams_inside_a_graph)


def test_growth_leaves_graphs_alone(rank_pools: RankPools, world_size: int) -> None:
    for name, text in rank_pools.get("cuda", world_size).run(cuda_jobs.growth_leaves_graphs_alone):
        assert name == "DitronCaptureError"
        assert "has to grow to 3000000 bytes. Run it once before the capture begins" in text


def test_a_silent_rank_is_a_timeout_and_a_reset_helps(rank_pools: RankPools, world_size: int) -> None:
    for timeout, poisoned in rank_pools.get("cuda", world_size).run(jobs.one_rank_stays_silent)[:-1]:
        assert timeout[0] == "DitronTimeout" and f"for rank {world_size - 1}" in timeout[1]
        assert poisoned[0] == "DitronPoisoned"


def test_divergence_names_sites(rank_pools: RankPools, world_size: int) -> None:
    errors = rank_pools.get("cuda", world_size).run(jobs.ranks_diverge)
    assert "DitronDiverged" in [name for name, _ in errors]


def test_each_call_waits_as_long_as_its_own_options_say(rank_pools: RankPools, world_size: int) -> None:
    errors = rank_pools.get("cuda", world_size).run(jobs.several_limits)
    assert {name for name, _ in errors[1:]} == {"DitronTimeout"}


def test_reset_after_half_of_a_growth(rank_pools: RankPools, world_size: int) -> None:
    name, _ = rank_pools.get("cuda", world_size).run(jobs.half_of_a_growth)[0]
    assert name == "DitronHandshakeError"


def test_reset_after_an_exception_half_way(rank_pools: RankPools, world_size: int) -> None:
    rank_pools.get("cuda", world_size).run(jobs.fails_half_way)


def test_reset_names_a_missing_rank(rank_pools: RankPools, world_size: int) -> None:
    for name, text in rank_pools.get("cuda", world_size).run(jobs.reset_without_the_last)[:-1]:
        assert name == "DitronHandshakeError" and f"rank {world_size - 1}" in text


def test_a_killed_rank_is_named(world_size: int) -> None:
    pool = RankPool(world_size, "cuda")
    try:
        outcomes = pool.outcomes(jobs.a_rank_is_killed, stop=world_size - 1, grace=5.0)
    finally:
        pool.close()
    assert outcomes[-1].lost
    for outcome in outcomes[:-1]:
        assert outcome.value[0] == "DitronTimeout"
