"""No rank goes on before all have come: in growth and reset, where one rank is slower than the others at each step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from ditron_inductor.core.layout import DONE, SEND_TICKET, TILE_TICKET
from ditron_inductor.device import reset, slot_layout
from ditron_inductor.device.ring import Generation
from tests.device.jobs import LIMIT_S, expected, opened, ping
from tests.rank_process import RankContext
from tests.ranks import RankPools

DELAY_S = 0.5
SLOW_RANK = 1

Times = dict[str, tuple[float, float]]
"""When the first call of each step began and ended on a rank; one clock for all processes of a machine."""


def timed(ctx: RankContext, times: Times, name: str, step: Callable[..., Any]) -> Callable[..., Any]:
    """The step, which the slow rank begins late, noting its times."""

    def run(*args: Any, **kwargs: Any) -> Any:
        began = time.monotonic()
        if ctx.rank == SLOW_RANK:
            time.sleep(DELAY_S)
        result = step(*args, **kwargs)
        times.setdefault(name, (began, time.monotonic()))
        return result

    return run


def reset_in_steps(ctx: RankContext) -> Times:
    times: Times = {}
    registry, workspace = opened(ctx)
    ping(workspace)
    shared = workspace.shared
    with (
        mock.patch.object(shared, "synchronize", timed(ctx, times, "end kernels", shared.synchronize)),
        mock.patch.object(shared, "restart", timed(ctx, times, "zero", shared.restart)),
    ):
        reset(registry=registry, timeout_s=LIMIT_S)
    times["go on"] = (time.monotonic(),) * 2
    assert ping(workspace).tolist() == expected(workspace, 1)
    return times


def grow_in_steps(ctx: RankContext) -> Times:
    times: Times = {}
    _, workspace = opened(ctx)
    ping(workspace)
    with mock.patch.object(Generation, "zero", timed(ctx, times, "zero", Generation.zero)):
        with workspace.call("test/0:larger", 1_000_000):
            times["go on"] = (time.monotonic(),) * 2
    return times


def assert_in_order(ranks: list[Times], first: str, then: str) -> None:
    """All ranks have ended the first step before any begins the next."""
    last_end = max(times[first][1] for times in ranks)
    first_begin = min(times[then][0] for times in ranks)
    assert last_end <= first_begin, (first, then, ranks)


def leftovers(ctx: RankContext) -> None:
    """A launch that failed half way has left tickets and counted tiles behind."""
    registry, workspace = opened(ctx)
    ping(workspace)
    (ring,) = workspace.shared.generations
    ring.counters.fill_(3)
    words = [
        slot_layout.slot_word(slot, word.value)
        for slot in range(slot_layout.NUM_SLOTS)
        for word in (SEND_TICKET, TILE_TICKET, DONE)
    ]
    ring.ctl[torch.tensor(words)] = 7
    reset(registry=registry, timeout_s=LIMIT_S)
    assert workspace.shared.generations == [ring]
    assert not ring.counters.any() and not ring.ctl[torch.tensor(words)].any()
    assert ping(workspace).tolist() == expected(workspace, 1)


def largest_of_uneven(ctx: RankContext) -> list[int]:
    """Of two shards, the first one larger on the first rank and the second one on the last."""
    _, workspace = opened(ctx)
    return [workspace.largest("first", 9 - ctx.rank), workspace.largest("second", 3 + ctx.rank)]


def test_reset_zeroes_when_all_kernels_have_ended_and_goes_on_when_all_is_zero(rank_pools: RankPools) -> None:
    ranks = rank_pools.get("cpu", 2).run(reset_in_steps)
    assert_in_order(ranks, "end kernels", "zero")
    assert_in_order(ranks, "zero", "go on")


def test_growth_goes_on_when_all_is_zero(rank_pools: RankPools) -> None:
    assert_in_order(rank_pools.get("cpu", 2).run(grow_in_steps), "zero", "go on")


def test_reset_forgets_what_a_launch_left_behind(rank_pools: RankPools) -> None:
    rank_pools.get("cpu", 2).run(leftovers)


def test_the_largest_of_uneven_shards_is_known_to_all(rank_pools: RankPools) -> None:
    assert rank_pools.get("cpu", 2).run(largest_of_uneven) == [[9, 4], [9, 4]]
