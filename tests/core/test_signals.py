"""Who may send and who gives credits, on one process that holds the heaps of all ranks: nobody comes late by chance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from ditron_inductor.core.layout import (
    CREDIT_ROW,
    CTL_WORDS,
    DUE,
    EPOCH,
    EPOCH_BITS,
    MAX_WORLD,
    NUM_SLOTS,
    POISON,
    POLL_LIMIT,
    RECORD,
    RECORD_PEER,
    RECORD_WORDS,
    SLOT_WORDS,
    TIMEOUT,
)
from ditron_inductor.core.signals import (
    Words,
    ask_to_send,
    credits_due,
    healthy,
    last_use,
    may_send,
    settle,
    use_of,
    wait_credits,
)
from ditron_inductor.device import slot_layout
from tests.rank_process import RankContext
from tests.ranks import RankPools

WORLD = 3
RANK = 1
SITE = 77
OTHER_SITE = 78
EPOCH_NOW = 9
DUE_SLOT, DUE_EPOCH = 0, 4


@triton.jit(do_not_specialize=["rank", "slot", "site"])
def may_send_kernel(table, ctl, out, rank, slot, site, WORLD: tl.constexpr, THREADS: tl.constexpr):
    """out = whether the first program may send."""
    words = Words(table, ctl, rank, slot, site)
    asked = ask_to_send(words, WORLD, THREADS)
    use = use_of(words)
    tl.store(out, may_send(asked, last_use(use), use, WORLD, THREADS))


@triton.jit(do_not_specialize=["rank", "slot", "site"])
def wait_credits_kernel(table, ctl, out, rank, slot, site, WORLD: tl.constexpr, THREADS: tl.constexpr):
    """out = whether the credits of all peers have come."""
    tl.store(out, wait_credits(use_of(Words(table, ctl, rank, slot, site)), WORLD))


@triton.jit(do_not_specialize=["rank", "slot", "site"])
def settle_kernel(table, ctl, out, rank, slot, site, WORLD: tl.constexpr, THREADS: tl.constexpr):
    """Gives the credits that are due, as the first program does that sends nothing."""
    use = Words(table, ctl, rank, slot, site)
    settle(credits_due(use, healthy(use)), use, WORLD)


@dataclass(frozen=True)
class Found:
    """What a launch left: its answer, the poison word, the peer that its record names, and the credits that rank 0
    and 2 were given for the use that was due.
    """

    answer: int
    poison: int
    peer: int
    given: list[int]


def launch(kernel: Any, credits: list[int], *, poison: int = 0) -> Found:
    """One launch of RANK in slot 1 at EPOCH_NOW; credits: the epochs of the words of all ranks there, by rank."""
    slot = 1
    heaps = [torch.zeros(NUM_SLOTS.value * SLOT_WORDS.value, dtype=torch.int64) for _ in range(WORLD)]
    table = torch.tensor([heap.data_ptr() for heap in heaps], dtype=torch.int64)
    row = slot * SLOT_WORDS.value + CREDIT_ROW.value * MAX_WORLD.value
    for source, epoch in enumerate(credits):
        # Whichever site the credit is of.
        heaps[RANK][row + source] = OTHER_SITE << EPOCH_BITS.value | epoch
    record = torch.zeros(RECORD_WORDS.value, dtype=torch.int64)
    ctl = torch.zeros(CTL_WORDS.value, dtype=torch.int64)
    ctl[RECORD.value] = record.data_ptr()
    ctl[POLL_LIMIT.value] = 5
    ctl[POISON.value] = poison
    ctl[DUE.value] = (DUE_SLOT + 1) << EPOCH_BITS.value | DUE_EPOCH
    ctl[slot_layout.slot_word(slot, EPOCH.value)] = EPOCH_NOW - 1
    out = torch.full((1,), -1, dtype=torch.int32)
    kernel[(1,)](table, ctl, out, RANK, slot, SITE, WORLD, 128, num_warps=4)
    due = DUE_SLOT * SLOT_WORDS.value + CREDIT_ROW.value * MAX_WORLD.value + RANK
    given = [slot_layout.unpack(int(heaps[peer][due]))[1] for peer in (0, 2)]
    return Found(int(out), int(ctl[POISON.value]), int(record[RECORD_PEER.value]), given)


def check_credits(ctx: RankContext) -> None:
    """A slot is free when each peer has finished with its previous use, or with a later one, and not before."""
    before = EPOCH_NOW - 1
    for kernel in (may_send_kernel, wait_credits_kernel):
        for credits in ([before, 0, before], [before + 3, 0, before]):
            found = launch(kernel, credits)
            assert (found.answer, found.poison) == (1, 0), (kernel, credits, found)
        for late, epoch in ((0, before - 1), (2, before - 1), (2, 0)):
            credits = [before, 0, before]
            credits[late] = epoch
            found = launch(kernel, credits)
            assert (found.answer, found.poison, found.peer) == (0, TIMEOUT.value, late), (kernel, credits, found)


def check_what_is_given(ctx: RankContext) -> None:
    """Credits are given before a wait, as a peer may wait for these, and not by a workspace in which one has failed."""
    before = EPOCH_NOW - 1
    free, taken = [before, 0, before], [before, 0, before - 1]
    assert launch(settle_kernel, free).given == [DUE_EPOCH, DUE_EPOCH]
    assert launch(may_send_kernel, taken).given == [DUE_EPOCH, DUE_EPOCH]
    for kernel in (settle_kernel, may_send_kernel):
        for credits in (free, taken):
            found = launch(kernel, credits, poison=TIMEOUT.value)
            assert found.given == [0, 0] and found.answer <= 0, (kernel, credits, found)


def test_a_slot_is_overwritten_with_the_credits_of_all_peers_only(rank_pools: RankPools) -> None:
    rank_pools.get("cpu", 2).run(check_credits)


def test_credits_are_given_before_a_wait_and_not_by_a_poisoned_workspace(rank_pools: RankPools) -> None:
    rank_pools.get("cpu", 2).run(check_what_is_given)
