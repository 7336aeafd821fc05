"""The harness itself: values in rank order, every rank's traceback, a hang that costs its limit and one pool."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.ranks import RankContext, RankPools, RanksFailed


def _describe(ctx: RankContext) -> tuple[int, int, float, str | None]:
    import torch
    import torch.distributed as dist

    total = torch.tensor([float(ctx.rank)])
    dist.all_reduce(total)
    return ctx.rank, int(total.item()), torch.rand(()).item(), os.environ.get("TRITON_INTERPRET")


def _fail_on(ctx: RankContext, rank: int) -> None:
    if ctx.rank == rank:
        raise ValueError(f"told to fail on {rank}")


def _hang_on(ctx: RankContext, rank: int) -> None:
    if ctx.rank == rank:
        time.sleep(600)


def _stop_on(ctx: RankContext, rank: int) -> str:
    if ctx.rank == rank:
        os.kill(os.getpid(), signal.SIGSTOP)
    return "went on"


def _kill_on(ctx: RankContext, rank: int) -> None:
    if ctx.rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)


def test_values_seeds_and_environment(rank_pools: RankPools) -> None:
    first = rank_pools.get("cpu", 2).run(_describe, seed=3)
    assert [value[:2] for value in first] == [(0, 1), (1, 1)]
    assert first[0][2] != first[1][2], "ranks draw different numbers"
    assert [value[3] for value in first] == ["1", "1"]
    assert rank_pools.get("cpu", 2).run(_describe, seed=3) == first, "a seed gives the same numbers again"
    assert os.environ.get("TRITON_INTERPRET") is None, "the test process itself is not interpreted"


def test_an_exception_keeps_its_traceback_and_the_pool(rank_pools: RankPools) -> None:
    pool = rank_pools.get("cpu", 2)
    with pytest.raises(RanksFailed, match=r"(?s)failed on ranks \[1\].*told to fail on 1"):
        pool.run(_fail_on, 1)
    assert rank_pools.get("cpu", 2) is pool and not pool.broken


def _fall_out_of_step(ctx: RankContext) -> None:
    from ditron_inductor.errors import DitronPoisoned

    if ctx.rank == 0:
        raise DitronPoisoned(group_name=ctx.group_name, cause="told to")


def test_ranks_out_of_step_cost_the_pool_unless_that_was_to_be_seen(rank_pools: RankPools) -> None:
    pool = rank_pools.get("cpu", 2, label="out of step")
    assert pool.outcomes(_fall_out_of_step)[0].error is not None and not pool.broken
    with pytest.raises(RanksFailed, match="told to"):
        pool.run(_fall_out_of_step)
    assert rank_pools.get("cpu", 2, label="out of step") is not pool


def test_a_stopped_rank_goes_on_later(rank_pools: RankPools) -> None:
    outcomes = rank_pools.get("cpu", 2).outcomes(_stop_on, 1, timeout=20, stop=1)
    assert [outcome.value for outcome in outcomes] == ["went on", "went on"]


def test_a_hang_and_a_kill_cost_the_pool_only() -> None:
    pools = RankPools()
    try:
        pool = pools.get("cpu", 2, label="hang")
        killed = pool.outcomes(_kill_on, 0, timeout=20, stop=0)
        assert killed[0].lost == f"process ended with code {-signal.SIGKILL}" and killed[1].error is None
        start = time.monotonic()
        with pytest.raises(RanksFailed, match=r"(?s)rank 1: no answer to _hang_on in time.*_hang_on"):
            pools.get("cpu", 2, label="hang").run(_hang_on, 1, timeout=1)
        assert time.monotonic() - start < START_AND_HANG_S
        assert pools.get("cpu", 2, label="hang") is not pool
    finally:
        pools.close()


START_AND_HANG_S = 60
