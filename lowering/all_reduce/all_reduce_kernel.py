"""matmul_all_reduce, strategy `chunked` for small products: a library product, then its all-reduce by one kernel.

Problem. As in chunked.py, for a product of a few megabytes, where copies, streams and small kernels take longer than
the data.
Algorithm. The product, flat, is cut into pieces. In *one shot* a program puts its piece into the slot of every peer,
and adds up what all have sent. In *two shots* the pieces are dealt to the ranks in equal runs, and a program takes one
piece of every run: it sends each to its owner, adds up the own one, sends the rounded sum to every peer, and copies
what the peers have sent. One shot has one round of signals, two shots send less: see `cut`. Sums are in rank order, in
fp32, and rounded once; either all ranks add the same values, or the owner's sum is what all have. The result takes the
product's place: nobody but the piece's program reads or writes there. An epilogue is computed of it by that program.
Signal protocol. Flag row `ticket`: this rank's pieces for all peers, which a program sends when the credits of all
peers have come. RESULT_ROW + ticket: its sum, which needs no credit, since the peers' pieces, which it waited for, show
that their slots are in their new use. A program takes one ticket and waits only for what peers send under the same one,
each time before they wait themselves. The first ticket that some rank has not finished is taken on every rank before
any later one, so it goes on: one resident program is enough.
A piece without credits is not sent, and never published, nor is a sum whose pieces are not all there.
Limits. One flag for each piece, or sum: see `geometry`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ditron_inductor.core.layout import DATA_OFFSET, RESULT_ROW, REVOKED_ROW, TILE_TICKET
from ditron_inductor.core.signals import (
    Words,
    ask_to_send,
    close,
    granted,
    last_use,
    leave,
    peer,
    publish_all,
    request_ticket,
    settle,
    slot_ctl,
    use_of,
)
from ditron_inductor.core.timed import timed_may_send, timed_wait_all
from ditron_inductor.core.trace import TILE, event, now
from ditron_inductor.lowering.chunked_exchange import Operands
from ditron_inductor.lowering.epilogues import Arrangement, Preparer, arrange, preparer_of, store_flat_sum
from ditron_inductor.lowering.host.launch import Launch, ceil_div, rows_of
from ditron_inductor.lowering.host.launcher import Arguments
from ditron_inductor.task.nodes import ReducedSum

MOST_BYTES = 8 << 20
"""Of a product; the copies of larger ones are worth their launches."""
ROUND_BYTES = 800 << 10
"""What a rank can send in the time of one more round of signals."""
LEAST_PIECE = 512
MOST_PIECE_BYTES = 16 << 10
PROGRAMS_PER_SM = 1
THREAD_BYTES = 16
"""Of a piece, to one thread: one access, as long as MOST_WARPS suffice."""
MOST_WARPS = 8

INTERPRETED_MOST_BYTES = 2 << 10
INTERPRETED_ROUND_BYTES = 512
INTERPRETED_LEAST_PIECE = 32
INTERPRETED_PROGRAMS = 4
"""So that small problems have all there is: larger ones too, two shots, several pieces."""


@triton.jit
def add_up(mine, own, places, stride, inside, whole, rank, WORLD: tl.constexpr, AVERAGE: tl.constexpr):
    """The sum of all ranks' elements, in rank order, in fp32; NaN unless `whole`.

    mine: the own ones. own: pointer to the own slot, where those of source s lie at `places` + s * stride. inside:
    which of them there are; the others are anything.
    """
    theirs = ()
    for source in tl.static_range(WORLD):
        there = inside & ((source != rank) & (whole != 0))
        piece = tl.load(own + (places + source * stride), mask=there, other=0.0)
        theirs = theirs + (piece,)  # type: ignore[assignment]
    total = tl.zeros(mine.shape, dtype=tl.float32)
    for source in tl.static_range(WORLD):
        total += tl.where(source == rank, mine, theirs[source]).to(tl.float32)
    if AVERAGE:
        total = total / WORLD
    return tl.where(whole != 0, total, float("nan"))


class How(NamedTuple):
    """What is known at compile time: ranks, a mean or a sum, elements of a piece, threads of a program."""

    WORLD: Any
    AVERAGE: Any
    ONE_SHOT: Any
    PIECE: Any
    THREADS: Any


class Sizes(NamedTuple):
    """Elements of the product, and of its rows."""

    numel: Any
    N: Any


class Begun(NamedTuple):
    """What a program asks for before it knows its ticket: pointers to the own slot and to those of rank + 1, .., what
    `ask_to_send` looks at, and `last_use`.
    """

    own: Any
    slots: Any
    asked: Any
    due: Any


@triton.jit
def begin(use, dtype: tl.constexpr, WORLD: tl.constexpr, THREADS: tl.constexpr):
    """The Begun of a program, with slots of `dtype`."""
    offset = tl.load(slot_ctl(use) + DATA_OFFSET)
    own = peer(use.table, use.rank, offset, dtype)
    slots = ()
    for i in tl.static_range(1, WORLD):
        slots = slots + (peer(use.table, (use.rank + i) % WORLD, offset, dtype),)  # type: ignore[assignment]
    return Begun(own, slots, ask_to_send(use, WORLD, THREADS), last_use(use))


@triton.jit
def swap(use, ticket, begun, ok, HOW: tl.constexpr, TRACE: tl.constexpr):
    """Behind the stores of piece `ticket`: tell all peers, unless ok is 0, give the credits that are due, `leave`, and
    wait for what they send under the same ticket. Returns (what `leave` asks for, whether all of it is there).
    """
    if ok != 0:
        publish_all(use, ticket, HOW.WORLD)
    if ticket == 0:
        settle(tl.where(ok != 0, begun.due, 0), use, HOW.WORLD)
    left = leave(use, ticket, begun.due, HOW.THREADS, True)
    return left, ok & timed_wait_all(use, ticket, HOW.WORLD, TRACE)


@triton.jit
def one_shot(
    use, x, extras, outs, begun, sizes, pieces, ticket, HOW: tl.constexpr, EPILOGUE: tl.constexpr,
    TRACE: tl.constexpr,
):  # fmt: skip
    """Reduce piece `ticket`, and `leave`. A slot has places [source][piece]."""
    PIECE: tl.constexpr = HOW.PIECE
    WORLD: tl.constexpr = HOW.WORLD
    began = now(TRACE)
    lanes = tl.arange(0, PIECE)
    place = ticket * PIECE + lanes
    mine = tl.load(x + place, mask=place < sizes.numel, other=0.0)
    ok = timed_may_send(begun.asked, begun.due, use, ticket, HOW.WORLD, HOW.THREADS, TRACE)
    if ok != 0:
        for i in tl.static_range(WORLD - 1):
            tl.store(begun.slots[i] + (use.rank * pieces + ticket) * PIECE + lanes, mine)
    # Acquire: the piece of all peers.
    left, whole = swap(use, ticket, begun, ok, HOW, TRACE)
    at, stride = ticket * PIECE + lanes, pieces * PIECE
    total = add_up(mine, begun.own, at, stride, lanes >= 0, whole, use.rank, HOW.WORLD, HOW.AVERAGE)
    store_flat_sum(total, whole, extras, outs, place, place < sizes.numel, sizes.N, x.dtype.element_ty, EPILOGUE)
    event(use, began, ticket, use.rank, TILE, TRACE)
    return left


@triton.jit
def two_shots(
    use, x, extras, outs, begun, sizes, pieces, ticket, HOW: tl.constexpr, EPILOGUE: tl.constexpr,
    TRACE: tl.constexpr,
):  # fmt: skip
    """Reduce piece `ticket` of every run of `pieces`, and `leave`.

    A slot has places [source][piece], then sums [owner][piece].
    """
    PIECE: tl.constexpr = HOW.PIECE
    WORLD: tl.constexpr = HOW.WORLD
    began = now(TRACE)
    lanes = tl.arange(0, PIECE)
    theirs = ()
    for i in tl.static_range(1, WORLD):
        place = ((use.rank + i) % HOW.WORLD * pieces + ticket) * PIECE + lanes
        theirs = theirs + (tl.load(x + place, mask=place < sizes.numel, other=0.0),)  # type: ignore[assignment]
    mine_at = (use.rank * pieces + ticket) * PIECE + lanes
    mine = tl.load(x + mine_at, mask=mine_at < sizes.numel, other=0.0)
    ok = timed_may_send(begun.asked, begun.due, use, ticket, HOW.WORLD, HOW.THREADS, TRACE)
    if ok != 0:
        for i in tl.static_range(WORLD - 1):
            tl.store(begun.slots[i] + mine_at, theirs[i])
    # Acquire: the own piece of all peers.
    left, whole = swap(use, ticket, begun, ok, HOW, TRACE)
    at, stride = ticket * PIECE + lanes, pieces * PIECE
    total = add_up(mine, begun.own, at, stride, lanes >= 0, whole, use.rank, HOW.WORLD, HOW.AVERAGE)
    result = total.to(x.dtype.element_ty)
    sums = HOW.WORLD * pieces * PIECE
    if whole != 0:
        for i in tl.static_range(WORLD - 1):
            tl.store(begun.slots[i] + sums + mine_at, result)
        publish_all(use, RESULT_ROW + ticket, HOW.WORLD)
    tl.store(x + mine_at, result, mask=mine_at < sizes.numel)
    # Acquire: the sums of all peers.
    known = ok & timed_wait_all(use, RESULT_ROW + ticket, HOW.WORLD, TRACE)
    results = ()
    for i in tl.static_range(1, WORLD):
        place = ((use.rank + i) % HOW.WORLD * pieces + ticket) * PIECE + lanes
        found = tl.load(begun.own + sums + place, mask=(lanes >= 0) & (known != 0), other=float("nan"))
        results = results + (found,)  # type: ignore[assignment]
    for i in tl.static_range(1, WORLD):
        place = ((use.rank + i) % HOW.WORLD * pieces + ticket) * PIECE + lanes
        tl.store(x + place, results[i - 1], mask=place < sizes.numel)
    if EPILOGUE is not None:
        # The same instructions for all runs, whoever owns them: ranks compute the same bits.
        tl.debug_barrier()
        known = known & whole
        for owner in range(HOW.WORLD):
            place = (owner * pieces + ticket) * PIECE + lanes
            total = tl.load(x + place, mask=place < sizes.numel, other=0.0).to(tl.float32)
            inside = place < sizes.numel
            store_flat_sum(total, known, extras, outs, place, inside, sizes.N, x.dtype.element_ty, EPILOGUE)
    event(use, began, ticket, use.rank, TILE, TRACE)
    return left


@triton.jit(do_not_specialize=["pieces", "rank", "slot", "site"])
def all_reduce_kernel(
    x, extras, outs, pointers, sizes, pieces, rank, slot, site, HOW: tl.constexpr, EPILOGUE: tl.constexpr,
    TRACE: tl.constexpr = 0,
):  # fmt: skip
    """x [numel / N, N], contiguous: every rank's product, then the sum. One program for each of `pieces`.

    extras, outs: tuples, of what EPILOGUE takes and makes of the sum; without it outs is x.
    """
    # All questions before the first answer: one after the other they would take as long as a signal.
    words = Words(pointers.table, pointers.ctl, rank, slot, site)
    request = request_ticket(words, TILE_TICKET, HOW.THREADS, True)
    use = use_of(words)
    begun = begin(use, x.dtype.element_ty, HOW.WORLD, HOW.THREADS)
    ticket = granted(request, HOW.THREADS)
    if HOW.ONE_SHOT:
        left = one_shot(use, x, extras, outs, begun, sizes, pieces, ticket, HOW, EPILOGUE, TRACE)
    else:
        left = two_shots(use, x, extras, outs, begun, sizes, pieces, ticket, HOW, EPILOGUE, TRACE)
    close(granted(left, HOW.THREADS), use)


@dataclass(frozen=True)
class Cut:
    """How a tensor is cut: `pieces` of `piece` elements, in one shot of all of it, in two of every rank's run."""

    one_shot: bool
    piece: int
    pieces: int


def cut(numel: int, itemsize: int, world_size: int, *, programs: int, least_piece: int, round_bytes: int) -> Cut:
    """The smallest pieces, of 2^n elements, that are no more than `programs`.

    round_bytes: two shots are chosen where they save a rank more than that. In one shot it sends numel elements to
    each of its W - 1 peers, in two shots 2 / W of them.
    """
    saved = (world_size - 1) * (world_size - 2) * numel * itemsize // max(world_size, 1)
    one = saved <= round_bytes
    length = numel if one else ceil_div(numel, world_size)
    piece = least_piece
    while ceil_div(length, piece) > programs and 2 * piece * itemsize <= MOST_PIECE_BYTES:
        piece *= 2
    return Cut(one, piece, ceil_div(length, piece))


@dataclass(frozen=True)
class Geometry:
    """Sizes that all ranks share: the output [M, N], how it is cut, warps of a program, the slot's bytes; and the
    epilogue, `preparer` before the reduction.
    """

    M: int
    N: int
    cut: Cut
    num_warps: int
    nbytes: int
    arrangement: Arrangement = field(repr=False)
    preparer: Preparer | None = field(repr=False)


def fits(launch: Launch, numel: int, itemsize: int) -> bool:
    """Whether a product of `numel` elements is small."""
    return numel * itemsize <= (INTERPRETED_MOST_BYTES if launch.interpreted else MOST_BYTES)


def geometry(node: ReducedSum, launch: Launch, a: torch.Tensor, columns: int) -> Geometry:
    """a [.., K]; columns: N. See Geometry."""
    world, itemsize = node.world_size, a.element_size()
    M = math.prod(a.shape[:-1])
    chosen = cut(
        M * columns,
        itemsize,
        world,
        programs=INTERPRETED_PROGRAMS if launch.interpreted else PROGRAMS_PER_SM * launch.num_sms,
        least_piece=INTERPRETED_LEAST_PIECE if launch.interpreted else LEAST_PIECE,
        round_bytes=INTERPRETED_ROUND_BYTES if launch.interpreted else ROUND_BYTES,
    )
    assert chosen.pieces <= REVOKED_ROW.value - (0 if chosen.one_shot else RESULT_ROW.value), chosen
    areas = world if chosen.one_shot else 2 * world
    return Geometry(
        M=M,
        N=columns,
        cut=chosen,
        num_warps=max(1, min(chosen.piece * itemsize // (32 * THREAD_BYTES), MOST_WARPS)),
        nbytes=areas * chosen.pieces * chosen.piece * itemsize,
        arrangement=arrange(node.parsed, 1),
        preparer=preparer_of(node, a.device),
    )


def reduced_sum(
    node: ReducedSum,
    launch: Launch,
    sizes: Geometry,
    a: Sequence[torch.Tensor],
    b: Sequence[torch.Tensor],
    bias: torch.Tensor | None = None,
    extras: Sequence[torch.Tensor] = (),
) -> list[torch.Tensor]:
    """a_i [.., K_i], b_i [K_i, N], bias [N], extras as the node's epilogue reads them; returns the outputs [.., N]. See
    the module.
    """
    arrangement = sizes.arrangement
    out = a[0].new_empty([*a[0].shape[:-1], sizes.N])
    Operands([[rows_of(one)] for one in a], b, bias).multiply(0, out.view(sizes.M, sizes.N))
    if sizes.preparer is not None:
        sizes.preparer.prepare(out, extras)

    def arguments() -> Arguments:
        return Arguments(
            programs=sizes.cut.pieces,
            values=dict(
                sizes=Sizes(numel=sizes.M * sizes.N, N=sizes.N),
                pieces=sizes.cut.pieces,
                rank=launch.rank,
                HOW=How(
                    WORLD=node.world_size,
                    AVERAGE=node.reduce_op == "avg",
                    ONE_SHOT=sizes.cut.one_shot,
                    PIECE=sizes.cut.piece,
                    THREADS=launch.threads(sizes.num_warps),
                ),
                num_warps=sizes.num_warps,
                EPILOGUE=arrangement.function,
            ),
        )

    outs = [out] if arrangement.function is None else arrangement.new_outputs_of_sum(out, out.shape)
    # Never empty: without any it gets what it does not look at.
    tensors = {"x": out, "extras": tuple(extra.contiguous() for extra in extras) or (out,), "outs": tuple(outs)}
    launch.run(all_reduce_kernel, sizes.nbytes, arguments, tensors)
    return outs
