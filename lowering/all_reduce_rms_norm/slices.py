"""The kernel of all_reduce_rms_norm in two shots where there are fewer rows than SMs: each is sent and added up in
slices.

Problem. One SM stores to peers at a fraction of the links' rate: a row of 16 KB, to three of them, takes it 2 us, while
most SMs have no row.
Algorithm. As in kernel.py in two shots, with SLICES programs for each row of a run. All sends come first: a program
takes tickets, each for a slice of a row of every run, until there are none, and puts the slices into the slots of their
owners. Then it takes tickets of sums, each for a slice of an own row, until there are none, and sends the rounded sums
to all; then it normalises whole rows: those with its number, of its share of the owners.
Signal protocol. Flag row `ticket` for slices, sent when the credits of all peers have come; RESULT_ROW + ticket for
sums, for which the other programs of this rank wait too. A send waits for credits only, and a sum for sends only, so
all of them are made by the programs that run, if only one does. What comes last has no queue: the program's number
says which row, and it may wait for any. A ticket that is held ahead waits for no more than that either.
The own x is read by all programs of a row, after others may have stored: no output may lie in it.
A slice without credits is not sent, and never published, nor is a sum whose slices are not all there.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ditron_inductor.core.layout import RESULT_ROW, SEND_TICKET, TILE_TICKET
from ditron_inductor.core.signals import (
    granted,
    leave,
    may_send,
    publish_all,
    request_ticket,
    settle,
    wait_all,
    wait_rows,
)
from ditron_inductor.core.trace import CREDITS, SEND, SUM, TILE, WAIT, event, now
from ditron_inductor.lowering.all_reduce_rms_norm.rows import extras, finish
from ditron_inductor.lowering.matmul_all_reduce.all_reduce_kernel import add_up


@triton.jit
def slice_of(ticket, width, N, SLICES: tl.constexpr, SLICE: tl.constexpr):
    """The row of a ticket, the columns [SLICE] of its slice, and which of them there are."""
    lanes = tl.arange(0, SLICE)
    cols = ticket % SLICES * width + lanes
    return (ticket // SLICES).to(tl.int64), cols, (lanes < width) & (cols < N)


@triton.jit
def two_shots_in_slices(
    use, x, given, outputs, own, slots, asked, due, M, N, pitch, run, width, ticket, WORLD: tl.constexpr,
    AVERAGE: tl.constexpr, SLICES: tl.constexpr, SLICE: tl.constexpr, BLOCK: tl.constexpr, FORM: tl.constexpr,
    EPS: tl.constexpr, POST_EPS: tl.constexpr, THREADS: tl.constexpr, TRACE: tl.constexpr,
):  # fmt: skip
    """Slice `ticket` of a row of every run, of `run` rows, and those that nobody has taken; sums; rows; and `leave`.

    slots: pointers, of rank + 1, ..; each has places [source][row], then sums [owner][row].
    """
    dtype: tl.constexpr = x.dtype.element_ty
    area = run.to(tl.int64) * pitch
    sums = WORLD * area
    request = request_ticket(use, TILE_TICKET, THREADS, True)
    # Credits: nobody reads any more what the slot's previous use left there.
    waited = now(TRACE)
    ok = may_send(asked, tl.where(ticket == 0, due, 0), use, WORLD, THREADS)
    event(use, waited, ticket, use.rank, CREDITS, TRACE)
    while ticket < run * SLICES:
        sending = now(TRACE)
        coming = request_ticket(use, SEND_TICKET, THREADS, True)
        row, part, there = slice_of(ticket, width, N, SLICES, SLICE)
        sent = ()
        for i in tl.static_range(1, WORLD):
            theirs = (use.rank + i) % WORLD * run + row
            sent = sent + (tl.load(x + theirs * N + part, mask=there & (theirs < M), other=0.0),)  # type: ignore[assignment]
        if ok != 0:
            for i in tl.static_range(WORLD - 1):
                tl.store(slots[i] + use.rank * area + row * pitch + part, sent[i], mask=there)
            publish_all(use, ticket, WORLD)
        if ticket == 0:
            settle(tl.where(ok != 0, due, 0), use, WORLD)
        event(use, sending, ticket, use.rank, SEND, TRACE)
        ticket = granted(coming, THREADS)
    ticket = granted(request, THREADS)
    while ticket < run * SLICES:
        adding = now(TRACE)
        coming = request_ticket(use, TILE_TICKET, THREADS, True)
        row, part, there = slice_of(ticket, width, N, SLICES, SLICE)
        ours = use.rank * run + row
        mine = tl.load(x + ours * N + part, mask=there & (ours < M), other=0.0)
        # Acquire: the slice of the own row, of all peers.
        awaited = now(TRACE)
        whole = ok & wait_all(use, ticket, WORLD)
        event(use, awaited, ticket, use.rank, WAIT, TRACE)
        total = add_up(mine, own, row * pitch + part, area, there, whole, use.rank, WORLD, AVERAGE)
        if whole != 0:
            for i in tl.static_range(WORLD - 1):
                tl.store(slots[i] + sums + use.rank * area + row * pitch + part, total.to(dtype), mask=there)
            # For this rank's other programs too.
            tl.store(own + sums + use.rank * area + row * pitch + part, total.to(dtype), mask=there)
            publish_all(use, RESULT_ROW + ticket, WORLD, True)
        event(use, adding, ticket, use.rank, SUM, TRACE)
        ticket = granted(coming, THREADS)
    left = leave(use, ticket, due, THREADS, True)
    began = now(TRACE)
    row = tl.program_id(0) // SLICES
    # Acquire: all slices of the sums, of all ranks.
    known = ok & wait_rows(use, RESULT_ROW + row * SLICES, WORLD, SLICES)
    event(use, began, row, use.rank, WAIT, TRACE)
    cols = tl.arange(0, BLOCK)[None, :]
    for owner in range(tl.program_id(0) % SLICES, WORLD, SLICES):
        theirs = (owner * run + row + tl.arange(0, 1)).to(tl.int64)[:, None]
        inside = (theirs < M) & (cols < N)
        at = theirs * N + cols
        # A slot of W runs of rows has the rows of the tensor, in their order.
        result = tl.load(own + sums + theirs * pitch + cols, mask=inside & (known != 0), other=float("nan"))
        loaded = extras(given, at, cols, inside, N, FORM)
        finish(result, loaded, outputs, theirs, at, inside, M, N, FORM, EPS, POST_EPS)
    event(use, began, row, use.rank, TILE, TRACE)
    return left
