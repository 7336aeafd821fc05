"""Routers that multiply shards: the same on all ranks, others on each, read by one rank, and others than before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed._functional_collectives import all_gather_tensor

import ditron_inductor
from ditron_inductor.device.meetings import meetings
from ditron_inductor.errors import DitronNotReplicated
from tests.ranks import RankContext, RankPools

EXPERTS, WIDTH, TAKEN, ROWS = 8, 64, 2, 2048


def route(ctx: RankContext, seeds: Sequence[int], reads: bool, captured: bool) -> tuple[list[str], str]:
    """Returns (the error of each call, "" for none, why the graph runs as Inductor alone would run it).

    Each call has a router that is drawn by its seed, and is compared with eager mode. reads: the rank reads the rows
    before they are routed. captured: the calls but the first are captured, behind a meeting of another graph.
    """

    def layer(x: torch.Tensor, router: torch.Tensor) -> Any:
        rows = all_gather_tensor(x, 1, ctx.group_name).flatten(0, 1)
        weights, chosen = torch.softmax(rows @ router.t(), -1).topk(TAKEN)
        order = chosen.flatten().sort()[1]
        slots = rows[order // TAKEN] * weights.flatten()[order].unsqueeze(-1)
        return (slots, rows.sin()) if reads else slots

    torch._dynamo.reset()
    meetings._plain.clear()
    call: Any = torch.compile(layer, backend="ditron")
    errors = []
    with torch.no_grad():
        for number, seed in enumerate(seeds):
            torch.manual_seed(seed)
            router = torch.randn(EXPERTS, WIDTH)
            torch.manual_seed(100 + 10 * number + ctx.rank)
            x = torch.randn(2, ROWS // 2 // ctx.world_size, WIDTH)
            capturing = captured and number > 0
            meetings.version += capturing
            try:
                with (
                    mock.patch.object(torch.cuda, "is_available", return_value=capturing),
                    mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=capturing),
                ):
                    found = call(x, router)
            except DitronNotReplicated as error:
                errors.append(str(error))
            else:
                torch.testing.assert_close(found, layer(x, router), msg=f"router {number}")
                errors.append("")
    return errors, next(iter(meetings._plain.values()), "")


def check(
    ctx: RankContext, begin: int, seeds: Sequence[int], reads: bool, captured: bool = False
) -> tuple[list[str], str]:
    """See `route`. begin: from this call on the routers of rank 1 are others. reads: rank 1 reads the rows."""
    own = tuple(seed + 100 if ctx.rank == 1 and number >= begin else seed for number, seed in enumerate(seeds))
    ditron_inductor.reset()
    return route(ctx, own, reads and ctx.rank == 1, captured)


@pytest.mark.parametrize(
    ("begin", "reads", "plain"),
    [
        pytest.param(9, False, "", id="the_same"),
        pytest.param(0, False, "float32[8, 64] of a router differs between ranks", id="others_on_each_rank"),
        pytest.param(0, True, "2 on rank 0, 1 on rank 1 launches", id="rows_read_by_one_rank"),
    ],
)
def test_each_rank_has_what_its_program_computes(rank_pools: RankPools, begin: int, reads: bool, plain: str) -> None:
    for errors, why in rank_pools.get("cpu", 2).run(check, begin, (1, 2, 3, 4), reads, timeout=180.0):
        assert errors == [""] * 4
        assert plain in why and bool(plain) == bool(why)


def test_what_the_ranks_found_holds_in_captures(rank_pools: RankPools) -> None:
    for errors, why in rank_pools.get("cpu", 2).run(check, 0, (1, 2, 3, 4), False, True, timeout=180.0):
        assert errors == [""] * 4 and "differs" in why


def test_a_router_that_differs_later_is_an_error(rank_pools: RankPools) -> None:
    for errors, why in rank_pools.get("cpu", 2).run(check, 3, (1, 2, 3, 4), False, timeout=180.0):
        assert errors[:3] == [""] * 3 and not why
        assert "rank 1" in errors[3] and "float32[8, 64], read at test_routers.py:" in errors[3]
