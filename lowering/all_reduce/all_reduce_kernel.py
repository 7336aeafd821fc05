"""matmul_all_reduce, strategy `chunked` for small products: a library product, then its all-reduce by one kernel.

Problem. It is that of chunked.py for a product of a few megabytes, for which copies, streams and small kernels take
longer than the data. Algorithm. The product, flattened, is cut into pieces. In *one shot* a program puts its piece into
the slot of every peer, and adds up what all ranks have sent. In *two shots* the pieces are divided among the ranks in
equal runs, and a program takes one piece of every run: it sends each piece to its owner, adds up its own piece, sends
the rounded sum to every peer, and copies the sums that the peers have sent. One shot has one round of signals less, and
two shots send less data (see `cut`). Sums are added in rank order, in fp32, and rounded once, so all ranks get equal
bits. The result overwrites the product, since only the piece's program reads or writes there. This program computes an
epilogue too. Signal protocol. Flag row `ticket` publishes this rank's pieces for all peers, which a program sends after
the credits of all peers have come. Flag row RESULT_ROW + ticket publishes its sum. The sum needs no credit: the peers'
pieces, for which the program has waited, show that the peers are in the same use of the slot. A program takes one
ticket, and waits only for what peers send under the same ticket, which they do before they wait. The first ticket that
some rank has not finished is taken on every rank before any later ticket, so it completes: one resident program is
enough. A piece without credits is neither sent nor published, nor is a sum of which pieces are missing. Limits. There
is one flag for each piece and each sum; see `geometry`.
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
    words_of,
)
from ditron_inductor.core.timed import timed_may_send, timed_wait_all
from ditron_inductor.core.trace import TILE, event, now
from ditron_inductor.lowering.chunked_exchange import Operands
from ditron_inductor.lowering.epilogues import Arrangement, Preparer, arrange, extras_or, preparer_of, store_flat_sum
from ditron_inductor.lowering.host.launch import Launch, ceil_div, rows_of
from ditron_inductor.lowering.host.launcher import Arguments
from ditron_inductor.lowering.projections.projections_kernel import projections
from ditron_inductor.task.nodes import FEWEST_ALONE, Projections, ReducedSum

MOST_BYTES = 16 << 20
"""The most bytes of a product for this kernel. For larger products, copies are worth their launches."""
ROUND_BYTES = 800 << 10
"""The bytes that a rank can send in the time of one more round of signals."""
LEAST_PIECE = 512
MOST_PIECE_BYTES = 16 << 10
PROGRAMS_PER_SM = 1
THREAD_BYTES = 16
"""The bytes of a piece for each thread: a single access, unless a piece needs more than MOST_WARPS."""
MOST_WARPS = 8

ROW_PRODUCT = Projections(1, strategy="tile")
ROW_DTYPES = (torch.bfloat16, torch.float16)
"""The product of one row with a large weight is a call of `projections`: cuBLAS takes 20.0 us for K = 7168 and N = 4096
on an H200, and that kernel 15.8.
"""

INTERPRETED_MOST_BYTES = 2 << 10
INTERPRETED_ROUND_BYTES = 512
INTERPRETED_LEAST_PIECE = 32
INTERPRETED_PROGRAMS = 4
INTERPRETED_FEWEST_ALONE = 1 << 10
"""The limits of the interpreter are low, so that small test problems reach every case."""


@triton.jit
def add_up(mine, own, places, stride, inside, whole, rank, WORLD: tl.constexpr, AVERAGE: tl.constexpr):
    """Returns the sum of all ranks' elements, added in rank order in fp32; NaN if `whole` is 0. mine: this rank's
    elements. own: pointer to this rank's slot, where the elements of source s lie at `places` + s * stride. inside:
    which of them exist; the results of the others have no meaning.
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
    """Values that are known at compile time: the number of ranks, whether to take the mean, whether to use one shot,
    the elements of a piece, and the threads of a program.
    """

    WORLD: Any
    AVERAGE: Any
    ONE_SHOT: Any
    PIECE: Any
    THREADS: Any


class Sizes(NamedTuple):
    """The number of elements of the product and of each of its rows."""

    numel: Any
    N: Any


class Begun(NamedTuple):
    """What a program loads before it has its ticket: pointers to all slots, `ask_to_send`, and `last_use`."""

    own: Any
    slots: Any
    asked: Any
    due: Any


@triton.jit
def begin(use, dtype: tl.constexpr, WORLD: tl.constexpr, THREADS: tl.constexpr):
    """Returns the Begun of a program, with pointers of `dtype`."""
    offset = tl.load(slot_ctl(use) + DATA_OFFSET)
    own = peer(use.table, use.rank, offset, dtype)
    slots = ()
    for i in tl.static_range(1, WORLD):
        slots = slots + (peer(use.table, (use.rank + i) % WORLD, offset, dtype),)  # type: ignore[assignment]
    return Begun(own, slots, ask_to_send(use, WORLD, THREADS), last_use(use))


@triton.jit
def swap(use, ticket, begun, ok, HOW: tl.constexpr, TRACE: tl.constexpr):
    """Publishes piece `ticket` after its stores (unless ok is 0), gives the credits that are due, calls `leave`, and
    waits for what the peers send under the same ticket. Returns (the result of `leave`; 1 if everything has come).
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
    """Reduces piece `ticket`, and returns the result of `leave`. A slot has places [source][piece]."""
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
    # Acquire: the peers' pieces are visible.
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
    """Reduces piece `ticket` of every run of `pieces` pieces, and returns the result of `leave`. A slot has places
    [source][piece], then sums [owner][piece].
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
    # Acquire: the peers' parts of this rank's piece are visible.
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
    # Acquire: the peers' sums are visible.
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
        # All runs are computed by the same instructions, whoever owns them, so all ranks get the same bits.
        tl.debug_barrier()
        known = known & whole
        for owner in range(HOW.WORLD):
            place = (owner * pieces + ticket) * PIECE + lanes
            total = tl.load(x + place, mask=place < sizes.numel, other=0.0).to(tl.float32)
            inside = place < sizes.numel
            store_flat_sum(total, known, extras, outs, place, inside, sizes.N, x.dtype.element_ty, EPILOGUE)
    event(use, began, ticket, use.rank, TILE, TRACE)
    return left


@triton.jit(do_not_specialize=["pieces", "rank"])
def all_reduce_kernel(
    x, extras, outs, pointers, rank, sizes, pieces, HOW: tl.constexpr, EPILOGUE: tl.constexpr,
    TRACE: tl.constexpr = 0,
):  # fmt: skip
    """Overwrites x [numel / N, N], contiguous, this rank's product, by the sum over ranks. It has one program for each
    of `pieces` pieces. extras, outs: tuples of pointers to the extra tensors and the outputs of EPILOGUE; without an
    epilogue outs is (x,).
    """
    # Ask for all before the first answer is needed: one by one, the loads would take as long as a signal.
    words = words_of(pointers, rank)
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
    """How a tensor, or in two shots each rank's run of it, is cut: `pieces` pieces of `piece` elements."""

    one_shot: bool
    piece: int
    pieces: int


def cut(numel: int, itemsize: int, world_size: int, *, programs: int, least_piece: int, round_bytes: int) -> Cut:
    """Returns the Cut with the smallest pieces, of 2^n elements, of which there are at most `programs`, or as many as
    there are flags for where pieces would be larger than MOST_PIECE_BYTES. round_bytes: two shots are chosen if a rank
    then sends fewer bytes by more than this number. In one shot it sends numel elements to each of its W - 1 peers, and
    in two shots 2 / W of them.
    """
    saved = (world_size - 1) * (world_size - 2) * numel * itemsize // max(world_size, 1)
    in_one_shot = saved <= round_bytes
    length = numel if in_one_shot else ceil_div(numel, world_size)
    flags = REVOKED_ROW.value - (0 if in_one_shot else RESULT_ROW.value)
    piece = least_piece
    while (ceil_div(length, piece) > programs and 2 * piece * itemsize <= MOST_PIECE_BYTES) or (
        ceil_div(length, piece) > flags
    ):
        piece *= 2
    return Cut(in_one_shot, piece, ceil_div(length, piece))


@dataclass(frozen=True)
class Geometry:
    """The layout of a call, from sizes that all ranks share: the output [M, N], how it is cut, the warps of a program,
    and the bytes of the slot. `arrangement` is the epilogue, and `preparer` its part before the reduction.
    """

    M: int
    N: int
    cut: Cut
    num_warps: int
    nbytes: int
    arrangement: Arrangement = field(repr=False)
    preparer: Preparer | None = field(repr=False)


def fits(launch: Launch, numel: int, itemsize: int) -> bool:
    """Returns whether a product of `numel` elements is small enough for this kernel."""
    return numel * itemsize <= (INTERPRETED_MOST_BYTES if launch.interpreted else MOST_BYTES)


def geometry(node: ReducedSum, launch: Launch, a: torch.Tensor, columns: int) -> Geometry:
    """Returns the Geometry for a [.., K]. columns: N."""
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


def product_of(
    launch: Launch,
    sizes: Geometry,
    rows: Sequence[torch.Tensor],
    b: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Returns the sum [M, N] of the products rows_i [M, K_i] @ b_i [K_i, N] and the bias [N], by the library or by the
    kernel of one row. Ranks need not agree on it.
    """
    alone = len(b) == 1 and bias is None and sizes.M == 1
    fewest = INTERPRETED_FEWEST_ALONE if launch.interpreted else FEWEST_ALONE
    if alone and rows[0].dtype in ROW_DTYPES and b[0].stride(0) == 1 and b[0].numel() >= fewest:
        return projections(ROW_PRODUCT, [rows[0], b[0]])[0]
    out = rows[0].new_empty(sizes.M, sizes.N)
    Operands([[left] for left in rows], b, bias).multiply(0, out)
    return out


def reduced_sum(
    node: ReducedSum,
    launch: Launch,
    sizes: Geometry,
    a: Sequence[torch.Tensor],
    b: Sequence[torch.Tensor],
    bias: torch.Tensor | None = None,
    extras: Sequence[torch.Tensor] = (),
) -> list[torch.Tensor]:
    """Returns the outputs [.., N] for a_i [.., K_i], b_i [K_i, N], bias [N] and the epilogue's extra tensors."""
    arrangement = sizes.arrangement
    out = product_of(launch, sizes, [rows_of(left) for left in a], b, bias).view(*a[0].shape[:-1], sizes.N)
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
    tensors = {"x": out, "extras": extras_or(out, extras), "outs": tuple(outs)}
    launch.run(all_reduce_kernel, sizes.nbytes, arguments, tensors)
    return outs
