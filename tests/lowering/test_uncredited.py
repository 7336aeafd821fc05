"""Without a peer's credit for the slot's previous use nothing is sent: not a byte of data and no flag."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from ditron_inductor.core.layout import CREDIT_ROW, MAX_WORLD, POLL_LIMIT, REVOKED_ROW, SLOT_WORDS
from ditron_inductor.device import slot_layout, workspaces
from ditron_inductor.errors import DitronTimeout
from tests.lowering.calls import Site
from tests.lowering.failures import fails, names, reset
from tests.lowering.problems import ODD, SMALL, TILE_KINDS, Problem
from tests.rank_process import RankContext
from tests.ranks import RankPool

POLLS = 100
UNTOUCHED = 0x5A
READER = 1
"""The rank that has not finished with the slot, as far as rank 0 knows."""


def check(ctx: RankContext, kind: str, strategy: str, odd: bool) -> None:
    site = Site(name=f"uncredited/{odd:d}:{kind}", strategy=strategy)
    problem = Problem(ctx, kind, (ODD if odd else SMALL)[ctx.device.type], site=site)
    for _ in range(slot_layout.NUM_SLOTS + 1):
        problem.check(problem())
    (shared,) = workspaces.of_group(dist.distributed_c10d._resolve_process_group(ctx.group_name))
    ring, slot = shared.generations[-1], shared.calls % slot_layout.NUM_SLOTS
    header = ring.heap.local[: slot_layout.HEADER_BYTES].view(torch.int64)
    flags = header[slot * SLOT_WORDS.value :][: SLOT_WORDS.value].view(-1, MAX_WORLD.value)
    data = ring.data(slot, ctx.rank, torch.uint8)
    dist.barrier()
    if ctx.rank == READER:
        data.fill_(UNTOUCHED)
    else:
        flags[CREDIT_ROW.value, READER] = 0
        ring.ctl[POLL_LIMIT.value] = POLLS
    before = flags.clone()
    dist.barrier()
    if ctx.rank != READER:
        failure = fails(ctx, problem)
        # With more than two ranks it may wait for another one that gave up, before it asks for its credits.
        assert failure.type_name == DitronTimeout.__name__ and names(failure, READER), failure
        assert not names(failure, ctx.rank), failure
    dist.barrier()
    if ctx.rank == READER:
        assert (data == UNTOUCHED).all(), "data"
        # Credits are another use's, and what may not be relied on any more is told.
        told = [row for row in range(CREDIT_ROW.value) if row != REVOKED_ROW.value]
        assert torch.equal(flags[told], before[told]), "flags"
    dist.barrier()
    reset(ctx)


SENDING = {
    **{kind: (kind, "tile", False) for kind in TILE_KINDS},
    "a gather whose tiles carry nothing": ("all_gather_matmul", "tile", True),
    "a gather by chunks": ("all_gather_matmul", "chunked", False),
}


@pytest.mark.parametrize("sending", SENDING)
def test_nothing_is_sent_without_credits(fragile_pool: RankPool, sending: str) -> None:
    fragile_pool.run(check, *SENDING[sending])
