"""The kernels that all `chunked` strategies share: signals around library products and copies, and the final reduction.

Problem. Library products and the copy engines know nothing of flags. So small kernels on the same streams wait and
publish, one launch each.
Algorithm. *Pull*: a rank writes into its own slot only, and its peers copy from there. Nobody writes into a peer's
data, so a failure here cannot destroy what a peer is going to read, with one exception (see revoking below).
Signal protocol. It is that of docs/protocol.md, in these parts:
* `stage` and `open_slot` begin a use of the slot. They wait for the credits of all peers for the slot's previous use,
  and give the credits of the use that ended last.
* `publish_pieces` tells peers that pieces in this rank's slot are complete, with one word in the piece's flag row.
* `await_pieces` and `await_all` wait for such flags on the side stream. The copies behind them read these pieces.
* `reduce_partials` and `close_slot` end the use. All copies have ended by then.
A product writes into the slot in any case, because the host has queued it before the credits are known. So if
`open_slot` fails to get a credit, it *revokes* the slot first: it gives every peer a word of this epoch, in a flag row
of its own. A peer that still copies looks at that word after its copies, and takes the copied data as lost.
Limits. A waiting kernel is one program of one warp, so the products beside it keep their SMs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ditron_inductor.core.layout import MAX_WORLD, OPENED, REVOKED_ROW, TIMEOUT
from ditron_inductor.core.signals import (
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
    words_of,
)
from ditron_inductor.core.timed import timed_credits, timed_wait_all
from ditron_inductor.core.trace import END, SEND, SUM, WAIT, event, now
from ditron_inductor.lowering.epilogues import store_flat_sum

PIECE_ROWS = tl.constexpr(0)
RESULT_ROWS = tl.constexpr(16)
"""The first flag rows of the pieces of a slot and of the results of an all-reduce."""


class Partials(NamedTuple):
    """Sizes of the partial tensors, in elements: `numel` of each, N of a row, the `stride` from one partial to the next
    one, and the place `result` of the sum in this rank's slot, if it goes there.
    """

    numel: Any
    N: Any
    stride: Any
    result: Any


class How(NamedTuple):
    """Values of a reduction that are known at compile time: the number of ranks, whether it takes the mean, whether it
    shares its result with the peers, and the elements of a step.
    """

    WORLD: Any
    AVERAGE: Any
    SHARE: Any
    BLOCK: Any


@triton.jit
def sound(use, WORLD: tl.constexpr):
    """Returns 1, or 0 if a wait has failed or a peer has revoked data that this use's copies have read."""
    ok = healthy(use)
    sources = tl.arange(0, MAX_WORLD)
    others = (sources < WORLD) & (sources != use.rank)
    nothing = tl.zeros((MAX_WORLD,), dtype=tl.int64)
    # Acquire. If no word is there, the copies before this launch have read the source's slot before it was overwritten.
    addresses = flag(use, use.rank, REVOKED_ROW, 0) + sources
    seen = tl.atomic_add(addresses, nothing, mask=others, sem="acquire", scope="sys")
    # The word is 0 until the first failure. An old epoch is no failure of this use.
    revoked = others & (seen != 0) & (behind(seen, use.epoch + 1) == 0)
    if tl.sum(revoked.to(tl.int32), axis=0) != 0:
        source = tl.min(tl.where(revoked, sources, MAX_WORLD), axis=0)
        saw = tl.sum(tl.where(sources == source, seen, nothing), axis=0)
        fail(use, TIMEOUT, source, REVOKED_ROW, saw)
        ok = tl.full((), 0, tl.int32)
    return ok


@triton.jit(do_not_specialize=["rank"])
def stage(
    shards, copies, pointers, rank, numel,
    WORLD: tl.constexpr, COPY: tl.constexpr, BLOCK: tl.constexpr, TRACE: tl.constexpr = 0,
):  # fmt: skip
    """Copies `shards`, a tuple of contiguous [numel] tensors, one behind the other to the start of this rank's slot,
    and then publishes flag row PIECE_ROWS to all peers. COPY: it copies them to the tuple `copies` of such tensors too,
    even after a failure.
    """
    use = use_of(words_of(pointers, rank))
    alive = healthy(use)
    # This program has not waited for anything yet, so the peers get their credits in any case.
    if tl.program_id(0) == 0:
        settle(credits_due(use, alive), use, WORLD)
    ok = alive & timed_credits(use, tl.program_id(0), WORLD, TRACE)
    sending = now(TRACE)
    mine = data(use, use.rank, shards[0].dtype.element_ty)
    step = tl.num_programs(0) * BLOCK
    first = tl.program_id(0).to(tl.int64) * BLOCK
    NUM: tl.constexpr = len(shards)
    for _ in range((numel - 1) // step + 1):
        offsets = first + tl.arange(0, BLOCK)
        first += step
        inside = offsets < numel
        values = ()
        # All loads come before the first store, because a load cannot be moved before a store.
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
    event(use, sending, tl.program_id(0), use.rank, SEND, TRACE)


@triton.jit(do_not_specialize=["rank"])
def open_slot(pointers, rank, WORLD: tl.constexpr, TRACE: tl.constexpr = 0):
    """Begins a use in which products write into this rank's slot: it waits for all credits, or revokes the slot."""
    use = use_of(words_of(pointers, rank))
    alive = healthy(use)
    settle(credits_due(use, alive), use, WORLD)
    ok = timed_credits(use, 0, WORLD, TRACE)
    if ok == 0:
        # The products behind this launch overwrite data that a peer may be reading. The peer sees the word before it
        # uses the data.
        publish_all(use, REVOKED_ROW, WORLD)
    elif alive != 0:
        tl.store(slot_ctl(use) + OPENED, use.epoch)


@triton.jit(do_not_specialize=["first", "count", "parts", "row", "rank"])
def publish_pieces(
    pointers, rank, first, count, parts, row, WORLD: tl.constexpr, TRACE: tl.constexpr = 0
):
    """Tells their readers that the pieces `first`, .., `first + count - 1` in this rank's slot are complete. Piece i is
    for rank + 1 + i // parts, in its flag row `row + i % parts`. Products before this launch wrote it. If the use began
    without its credits, or in a poisoned workspace, nothing is published.
    """
    use = use_of(words_of(pointers, rank))
    began = now(TRACE)
    if tl.load(slot_ctl(use) + OPENED) == use.epoch:
        for i in range(first, first + count):
            publish(use, (use.rank + 1 + i // parts) % WORLD, row + i % parts)
    event(use, began, first, (use.rank + 1 + first // parts) % WORLD, SEND, TRACE)


@triton.jit(do_not_specialize=["first", "count", "parts", "row", "rank"])
def await_pieces(pointers, rank, first, count, parts, row, WORLD: tl.constexpr, TRACE: tl.constexpr = 0):
    """Waits until the pieces `first`, .., `first + count - 1` are complete in the slots of their sources. Piece i comes
    from rank - 1 - i // parts, with flag row `row + i % parts`. A failure poisons the workspace, and the data that the
    copies behind this launch read is not used.
    """
    use = use_of(words_of(pointers, rank))
    began = now(TRACE)
    for i in range(first, first + count):
        # Acquire: everything behind this launch on its stream sees what the source wrote before it published.
        wait(use, row + i % parts, (use.rank + WORLD - 1 - i // parts) % WORLD)
    event(use, began, first, (use.rank + WORLD - 1 - first // parts) % WORLD, WAIT, TRACE)


@triton.jit(do_not_specialize=["row", "rank"])
def await_all(pointers, rank, row, WORLD: tl.constexpr, TRACE: tl.constexpr = 0):
    """Waits, like `await_pieces`, until every peer has published flag row `row`."""
    use = use_of(words_of(pointers, rank))
    timed_wait_all(use, row, WORLD, TRACE)


@triton.jit(do_not_specialize=["row", "rank"])
def reduce_partials(
    partials, extras, outs, pointers, rank, sizes, row, HOW: tl.constexpr, EPILOGUE: tl.constexpr,
    TRACE: tl.constexpr = 0,
):  # fmt: skip
    """Stores EPILOGUE of sum_{source = 0..W-1} partials[source, i] in `outs`, or the sum itself if there is no
    epilogue; NaN after a failure. Partial results are added in rank order, in fp32, and the sum is rounded once. outs:
    a tuple of contiguous [numel / N, N] tensors. extras: a tuple of pointers for the epilogue. SHARE: the sum is stored
    in this rank's slot too, and flag row `row` is published to all peers; without SHARE this ends the use of the slot.
    Every copy of partial results has ended before.
    """
    BLOCK: tl.constexpr = HOW.BLOCK
    WORLD: tl.constexpr = HOW.WORLD
    use = use_of(words_of(pointers, rank))
    began = now(TRACE)
    ok = sound(use, HOW.WORLD)
    if HOW.SHARE:
        ok = ok & (tl.load(slot_ctl(use) + OPENED) == use.epoch).to(tl.int32)
    dtype: tl.constexpr = partials.dtype.element_ty
    mine = data(use, use.rank, dtype) + sizes.result
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
            # A program that has found a failure does not arrive, so the row is not published if a sum is missing.
            if arrive(pointers.counters, tl.num_programs(0)):
                publish_all(use, row, HOW.WORLD)
    else:
        finish(use)
    event(use, began, tl.program_id(0), use.rank, SUM, TRACE)


@triton.jit(do_not_specialize=["rank"])
def close_slot(
    outs, numels, pointers, rank,
    WORLD: tl.constexpr, BLOCK: tl.constexpr, TRACE: tl.constexpr = 0,
):  # fmt: skip
    """Ends the use of the slot. After a failure it fills `outs`, a tuple of [numels[i]] tensors, with NaN."""
    use = use_of(words_of(pointers, rank))
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
    event(use, began, tl.program_id(0), use.rank, END, TRACE)


assert PIECE_ROWS.value < RESULT_ROWS.value < REVOKED_ROW.value
