"""What the `chunked` strategies share: the signals around library products and copies, and the reduction at the end.

Problem. Library products and the copy engine know nothing of flags, so small kernels on the same streams do the waiting
and the telling, one launch each.
Algorithm. *Pull*: a rank writes into its own slot only, and its peers copy from there. Nobody writes a peer's data, so
nothing that fails here can destroy what a peer is to read, with one exception, which is told (see below).
Signal protocol. As everywhere (docs/protocol.md), with these parts:
* `stage` and `open_slot` begin a use of the slot: they wait for the credits of all peers for its previous use, and give
  those of the use that ended last.
* `publish_pieces` tells peers that pieces in this rank's slot are complete: flag row = the piece's row, one word each.
* `await_pieces` and `await_all` wait for such flags on the side stream; the copies behind them read what they cover.
* `reduce_partials` and `close_slot` end the use: all copies have ended by then.
A product writes into the slot whatever happens, as the host has queued it before anything is known. Where `open_slot`
fails to get a credit, it therefore *revokes* the slot first: a word for every peer, of this epoch, in a row of its own.
A peer that still copies looks at that word when its copies have ended, and takes what it has for lost.
Limits. Waiting kernels are one program of one warp, so that the products beside them keep their SMs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ditron_inductor.core.layout import MAX_WORLD, OPENED, REVOKED_ROW, TIMEOUT
from ditron_inductor.core.signals import (
    Words,
    arrive,
    behind,
    credits_due,
    data,
    fail,
    finish,
    flag,
    healthy,
    publish,
    publish_all,
    settle,
    slot_ctl,
    use_of,
    wait,
)
from ditron_inductor.core.timed import timed_credits, timed_wait_all
from ditron_inductor.core.trace import END, SEND, SUM, WAIT, event, now
from ditron_inductor.lowering.epilogues import store_flat_sum

PIECE_ROWS = tl.constexpr(0)
RESULT_ROWS = tl.constexpr(16)
"""First flag rows of the pieces of a slot, and of an all-reduce's results."""


class Partials(NamedTuple):
    """Elements of each, and of their rows; from one partial to the next one; and in front of the sum in the own slot,
    where it goes there.
    """

    numel: Any
    N: Any
    stride: Any
    result: Any


class How(NamedTuple):
    """What is known of a reduction at compile time: ranks, a mean or a sum, whether it is shared, elements of a
    step.
    """

    WORLD: Any
    AVERAGE: Any
    SHARE: Any
    BLOCK: Any


@triton.jit
def sound(use, WORLD: tl.constexpr):
    """1 unless a wait has failed, or a peer has revoked what the copies of this use, ended by now, have read."""
    ok = healthy(use)
    sources = tl.arange(0, MAX_WORLD)
    others = (sources < WORLD) & (sources != use.rank)
    nothing = tl.zeros((MAX_WORLD,), dtype=tl.int64)
    # Acquire: the copies before this launch have read what stood in the source's slot before this word did.
    addresses = flag(use, use.rank, REVOKED_ROW, 0) + sources
    seen = tl.atomic_add(addresses, nothing, mask=others, sem="acquire", scope="sys")
    # 0 until a first failure, however many epochs ago the group began.
    revoked = others & (seen != 0) & (behind(seen, use.epoch + 1) == 0)
    if tl.sum(revoked.to(tl.int32), axis=0) != 0:
        source = tl.min(tl.where(revoked, sources, MAX_WORLD), axis=0)
        saw = tl.sum(tl.where(sources == source, seen, nothing), axis=0)
        fail(use, TIMEOUT, source, REVOKED_ROW, saw)
        ok = tl.full((), 0, tl.int32)
    return ok


@triton.jit(do_not_specialize=["rank", "slot", "site"])
def stage(
    shards, copies, pointers, numel, rank, slot, site,
    WORLD: tl.constexpr, COPY: tl.constexpr, BLOCK: tl.constexpr, TRACE: tl.constexpr = 0,
):  # fmt: skip
    """Copy shards, a tuple of [numel], contiguous, one behind the other to the start of the own slot, then publish
    row PIECE_ROWS to all peers.

    COPY: copy them to `copies`, another such tuple, too, whatever happens.
    """
    use = use_of(Words(pointers.table, pointers.ctl, rank, slot, site))
    alive = healthy(use)
    # It waits for nothing before that, so peers always get theirs.
    if tl.program_id(0) == 0:
        settle(credits_due(use, alive), use, WORLD)
    ok = alive & timed_credits(use, tl.program_id(0), WORLD, TRACE)
    sending = now(TRACE)
    mine = data(use, rank, shards[0].dtype.element_ty)
    step = tl.num_programs(0) * BLOCK
    first = tl.program_id(0).to(tl.int64) * BLOCK
    NUM: tl.constexpr = len(shards)
    for _ in range((numel - 1) // step + 1):
        offsets = first + tl.arange(0, BLOCK)
        first += step
        inside = offsets < numel
        values = ()
        # All loads before the first store, which they could not pass.
        for index in tl.static_range(NUM):
            values = values + (tl.load(shards[index] + offsets, mask=inside),)  # type: ignore[assignment]
        place = mine + offsets
        for index in tl.static_range(NUM):
            if COPY:
                tl.store(copies[index] + offsets, values[index], mask=inside)
            tl.store(place, values[index], mask=inside & (ok != 0))
            place += numel
    if ok != 0:
        # A program without its credits does not arrive, so the shards are never published.
        if arrive(pointers.counters, tl.num_programs(0)):
            publish_all(use, PIECE_ROWS, WORLD)
    event(use, sending, tl.program_id(0), rank, SEND, TRACE)


@triton.jit(do_not_specialize=["rank", "slot", "site"])
def open_slot(table, ctl, rank, slot, site, WORLD: tl.constexpr, TRACE: tl.constexpr = 0):
    """Begin a use in which products write straight into the own slot: wait for all credits, or revoke the slot."""
    use = use_of(Words(table, ctl, rank, slot, site))
    alive = healthy(use)
    settle(credits_due(use, alive), use, WORLD)
    ok = timed_credits(use, 0, WORLD, TRACE)
    if ok == 0:
        # The products behind this launch overwrite what a peer may be reading. It sees the word before it uses that.
        publish_all(use, REVOKED_ROW, WORLD)
    elif alive != 0:
        tl.store(slot_ctl(use) + OPENED, use.epoch)


@triton.jit(do_not_specialize=["rank", "slot", "site", "first", "count", "parts", "row"])
def publish_pieces(
    table, ctl, rank, slot, site, first, count, parts, row, WORLD: tl.constexpr, TRACE: tl.constexpr = 0
):
    """Tell their readers that pieces `first`, .., `first + count - 1` in the own slot are complete.

    Piece i is row `row + i % parts` of rank + 1 + i // parts. The products before this launch wrote it, so its end was
    theirs too. Not if the slot was not free for them, or the workspace poisoned, when the use began.
    """
    use = use_of(Words(table, ctl, rank, slot, site))
    began = now(TRACE)
    if tl.load(slot_ctl(use) + OPENED) == use.epoch:
        for i in range(first, first + count):
            publish(use, (rank + 1 + i // parts) % WORLD, row + i % parts)
    event(use, began, first, (rank + 1 + first // parts) % WORLD, SEND, TRACE)


@triton.jit(do_not_specialize=["rank", "slot", "site", "first", "count", "parts", "row"])
def await_pieces(table, ctl, rank, slot, site, first, count, parts, row, WORLD: tl.constexpr, TRACE: tl.constexpr = 0):
    """Wait until pieces `first`, .., `first + count - 1` are complete in their sources' slots.

    Piece i is row `row + i % parts` of rank - 1 - i // parts. A failure poisons the workspace; what the copies behind
    this launch read then is not used.
    """
    use = use_of(Words(table, ctl, rank, slot, site))
    began = now(TRACE)
    for i in range(first, first + count):
        # Acquire: what the source wrote before it published, for everything behind this launch on its stream.
        wait(use, row + i % parts, (rank + WORLD - 1 - i // parts) % WORLD)
    event(use, began, first, (rank + WORLD - 1 - first // parts) % WORLD, WAIT, TRACE)


@triton.jit(do_not_specialize=["rank", "slot", "site", "row"])
def await_all(table, ctl, rank, slot, site, row, WORLD: tl.constexpr, TRACE: tl.constexpr = 0):
    """Wait until every peer has published row `row`. As `await_pieces`."""
    use = use_of(Words(table, ctl, rank, slot, site))
    timed_wait_all(use, row, WORLD, TRACE)


@triton.jit(do_not_specialize=["rank", "slot", "site", "row"])
def reduce_partials(
    partials, extras, outs, pointers, sizes, rank, slot, site, row, HOW: tl.constexpr, EPILOGUE: tl.constexpr,
    TRACE: tl.constexpr = 0,
):  # fmt: skip
    """The sum over sources 0..W-1 of partials[source, i] or what EPILOGUE makes of it; NaN
    after a failure.

    Added in rank order, in fp32, and rounded once. outs: a tuple of [numel / N, N] contiguous; extras: a tuple
    of pointers for the epilogue. SHARE: store the sum in the own slot too, and publish row
    `row` to all peers; else this ends the use of the slot. Every copy of this use has ended, or SHARE, and later ones
    are of results only.
    """
    BLOCK: tl.constexpr = HOW.BLOCK
    WORLD: tl.constexpr = HOW.WORLD
    use = use_of(Words(pointers.table, pointers.ctl, rank, slot, site))
    began = now(TRACE)
    ok = sound(use, HOW.WORLD)
    if HOW.SHARE:
        ok = ok & (tl.load(slot_ctl(use) + OPENED) == use.epoch).to(tl.int32)
    dtype: tl.constexpr = partials.dtype.element_ty
    mine = data(use, rank, dtype) + sizes.result
    step = tl.num_programs(0) * BLOCK
    first = tl.program_id(0).to(tl.int64) * BLOCK
    for _ in range((sizes.numel - 1) // step + 1):
        offsets = first + tl.arange(0, BLOCK)
        first += step
        inside = offsets < sizes.numel
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        partial = partials + offsets
        for _ in tl.static_range(WORLD):
            total += tl.load(partial, mask=inside, other=0.0).to(tl.float32)
            partial += sizes.stride
        if HOW.AVERAGE:
            total = total / HOW.WORLD
        store_flat_sum(total, ok, extras, outs, offsets, inside, sizes.N, dtype, EPILOGUE)
        if HOW.SHARE:
            tl.store(mine + offsets, total.to(dtype), mask=inside & (ok != 0))
    if HOW.SHARE:
        if ok != 0:
            # A program that has found a failure does not arrive, so rows that were not added up are never published.
            if arrive(pointers.counters, tl.num_programs(0)):
                publish_all(use, row, HOW.WORLD)
    else:
        finish(use)
    event(use, began, tl.program_id(0), rank, SUM, TRACE)


@triton.jit(do_not_specialize=["rank", "slot", "site"])
def close_slot(
    outs, numels, table, ctl, rank, slot, site,
    WORLD: tl.constexpr, BLOCK: tl.constexpr, TRACE: tl.constexpr = 0,
):  # fmt: skip
    """End the use of the slot: fill outs, a tuple of [numels[i]], with NaN after a failure."""
    use = use_of(Words(table, ctl, rank, slot, site))
    began = now(TRACE)
    if sound(use, WORLD) == 0:
        step = tl.num_programs(0) * BLOCK
        NUM_OUTS: tl.constexpr = len(outs)
        for index in tl.static_range(NUM_OUTS):
            first = tl.program_id(0).to(tl.int64) * BLOCK
            for _ in range((numels[index] - 1) // step + 1):
                offsets = first + tl.arange(0, BLOCK)
                first += step
                nothing = tl.full((BLOCK,), float("nan"), tl.float32).to(outs[index].dtype.element_ty)
                tl.store(outs[index] + offsets, nothing, mask=offsets < numels[index])
    finish(use)
    event(use, began, tl.program_id(0), rank, END, TRACE)


assert PIECE_ROWS.value < RESULT_ROWS.value < REVOKED_ROW.value
