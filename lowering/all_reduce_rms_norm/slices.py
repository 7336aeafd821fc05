"""The kernel of all_reduce_rms_norm in two shots for fewer rows than SMs: rows are sent and added up in slices.

Problem. One SM stores to peers at a fraction of the links' rate: it takes 2 us for a row of 16 KB to three peers, while
most SMs have no row.
Algorithm. It is that of norm_kernel.py in two shots, with SLICES programs for each row of a run. All sends come first:
a program takes tickets, each for a slice of a row of every run, until none is left, and puts the slices into the slots
of their owners. Then it takes tickets of sums, each for a slice of a row of this rank, until none is left, and sends
the rounded sums to all peers. Then it normalises whole rows: those with its number, for its share of the owners.
Signal protocol. Flag row `ticket` publishes slices, which are sent after the credits of all peers have come. RESULT_ROW
+ ticket publishes sums, for which the other programs of this rank wait too. A send waits for credits only, and a sum
for sends only, so the resident programs do all of them, even if there is only one. A ticket that is held ahead waits
for no more than that. The last step has no queue: the program's number says which row, and it may wait for everything.
All programs of a row read this rank's x, perhaps after others have stored outputs, so no output may share memory with
x. A slice without credits is neither sent nor published, nor is a sum of which slices are missing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ditron_inductor.core.layout import RESULT_ROW, SEND_TICKET, TILE_TICKET
from ditron_inductor.core.signals import granted, leave, publish_all, request_ticket, settle, wait_rows
from ditron_inductor.core.timed import timed_may_send, timed_wait_all
from ditron_inductor.core.trace import SEND, SUM, TILE, WAIT, event, now
from ditron_inductor.lowering.all_reduce.all_reduce_kernel import add_up
from ditron_inductor.lowering.norms.rows import extras, finish


class How(NamedTuple):
    """Values that are known at compile time, here and in norm_kernel.py: the number of ranks, whether to take the mean,
    whether to use one shot, the rows of a tile, the tiles of a piece, the places of a row, the slices of a row, the
    places of a slice, and the threads of a program.
    """

    WORLD: Any
    AVERAGE: Any
    ONE_SHOT: Any
    ROWS: Any
    TILES: Any
    BLOCK: Any
    SLICES: Any
    SLICE: Any
    THREADS: Any


class SliceColumns(NamedTuple):
    """The columns N of a row, the pitch of rows in a slot, and the columns of a slice."""

    N: Any
    pitch: Any
    width: Any


class SliceRuns(NamedTuple):
    """The sizes M and N, the pitch of rows in a slot, the pieces and rows of a run, and the columns of a slice."""

    M: Any
    N: Any
    pitch: Any
    pieces: Any
    run: Any
    width: Any


@triton.jit
def slice_of(ticket, width, N, SLICES: tl.constexpr, SLICE: tl.constexpr):
    """Returns (the row of a ticket, the columns [SLICE] of its slice, which of them exist)."""
    lanes = tl.arange(0, SLICE)
    cols = ticket % SLICES * width + lanes
    return (ticket // SLICES).to(tl.int64), cols, (lanes < width) & (cols < N)


@triton.jit
def two_shots_in_slices(
    use, x, given, outputs, begun, sizes, ticket, HOW: tl.constexpr, NORMS: tl.constexpr, TRACE: tl.constexpr,
):  # fmt: skip
    """Sends slice `ticket` of a row of every run, and further slices that nobody has taken; then computes sums and
    whole rows. Returns the result of `leave`. A slot has places [source][row], then sums [owner][row].
    """
    WORLD: tl.constexpr = HOW.WORLD
    dtype: tl.constexpr = x.dtype.element_ty
    area = sizes.run.to(tl.int64) * sizes.pitch
    sums = HOW.WORLD * area
    request = request_ticket(use, TILE_TICKET, HOW.THREADS, True)
    ok = timed_may_send(begun.asked, begun.due, use, ticket, HOW.WORLD, HOW.THREADS, TRACE)
    while ticket < sizes.run * HOW.SLICES:
        sending = now(TRACE)
        coming = request_ticket(use, SEND_TICKET, HOW.THREADS, True)
        row, part, there = slice_of(ticket, sizes.width, sizes.N, HOW.SLICES, HOW.SLICE)
        sent = ()
        for i in tl.static_range(1, WORLD):
            theirs = (use.rank + i) % HOW.WORLD * sizes.run + row
            one = tl.load(x + theirs * sizes.N + part, mask=there & (theirs < sizes.M), other=0.0)
            sent = sent + (one,)  # type: ignore[assignment]
        if ok != 0:
            for i in tl.static_range(WORLD - 1):
                tl.store(begun.slots[i] + use.rank * area + row * sizes.pitch + part, sent[i], mask=there)
            publish_all(use, ticket, HOW.WORLD)
        if ticket == 0:
            settle(tl.where(ok != 0, begun.due, 0), use, HOW.WORLD)
        event(use, sending, ticket, use.rank, SEND, TRACE)
        ticket = granted(coming, HOW.THREADS)
    ticket = granted(request, HOW.THREADS)
    while ticket < sizes.run * HOW.SLICES:
        adding = now(TRACE)
        coming = request_ticket(use, TILE_TICKET, HOW.THREADS, True)
        row, part, there = slice_of(ticket, sizes.width, sizes.N, HOW.SLICES, HOW.SLICE)
        ours = use.rank * sizes.run + row
        mine = tl.load(x + ours * sizes.N + part, mask=there & (ours < sizes.M), other=0.0)
        # Acquire: the peers' parts of this slice are visible.
        whole = ok & timed_wait_all(use, ticket, HOW.WORLD, TRACE)
        total = add_up(mine, begun.own, row * sizes.pitch + part, area, there, whole, use.rank, HOW.WORLD, HOW.AVERAGE)
        if whole != 0:
            for i in tl.static_range(WORLD - 1):
                slot_sums = begun.slots[i] + sums + use.rank * area
                tl.store(slot_sums + row * sizes.pitch + part, total.to(dtype), mask=there)
            # This rank's other programs need the sums too.
            tl.store(begun.own + sums + use.rank * area + row * sizes.pitch + part, total.to(dtype), mask=there)
            publish_all(use, RESULT_ROW + ticket, HOW.WORLD, True)
        event(use, adding, ticket, use.rank, SUM, TRACE)
        ticket = granted(coming, HOW.THREADS)
    left = leave(use, ticket, begun.due, HOW.THREADS, True)
    began = now(TRACE)
    row = tl.program_id(0) // HOW.SLICES
    # Acquire: all slices of the sums of all ranks are visible.
    known = ok & wait_rows(use, RESULT_ROW + row * HOW.SLICES, HOW.WORLD, HOW.SLICES)
    event(use, began, row, use.rank, WAIT, TRACE)
    cols = tl.arange(0, HOW.BLOCK)[None, :]
    for owner in range(tl.program_id(0) % HOW.SLICES, HOW.WORLD, HOW.SLICES):
        theirs = (owner * sizes.run + row + tl.arange(0, 1)).to(tl.int64)[:, None]
        inside = (theirs < sizes.M) & (cols < sizes.N)
        at = theirs * sizes.N + cols
        # The W runs of rows in a slot are the rows of the tensor in their order.
        result = tl.load(begun.own + sums + theirs * sizes.pitch + cols, mask=inside & (known != 0), other=float("nan"))
        loaded = extras(given, at, cols, inside, sizes.N, NORMS.FORM)
        finish(result, loaded, outputs, theirs, at, inside, sizes.M, sizes.N, NORMS)
    event(use, began, row, use.rank, TILE, TRACE)
    return left
