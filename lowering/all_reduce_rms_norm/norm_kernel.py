"""all_reduce_rms_norm by one kernel: whole rows are exchanged, added up and normalised in registers.

Problem. Every rank holds x [M, N] and wants total = all_reduce(x) + bias + residual and normed = norm(total). With few
rows the time is that of launches and rounds of signals; with more rows it depends on how often they are read and
written.
Algorithm. It is that of all_reduce/all_reduce_kernel.py, but pieces are whole rows, in tiles of a few rows that stay in
registers. In *one shot* a program puts its rows into the slot of every peer, and adds up what all ranks have sent. In
*two shots* the rows are divided among the ranks in equal runs, and a program takes one piece of every run: it sends
each piece to its owner, adds up its own piece, and sends the rounded sum to every peer. Every rank does what follows
the sum for all rows, because sending both results would take twice as many bytes. Sums are in rank order, in fp32, and
rounded once, so all ranks normalise equal bits. In two shots of fewer rows than SMs, each row is cut into slices for
several programs (see slices.py). A few KB in one shot are sent in band (see norm_in_band.py).
Signal protocol. It is that of all_reduce_kernel.py: flag row `ticket` publishes rows, which are sent after the credits
of all peers have come; RESULT_ROW + ticket publishes sums. A program takes one ticket, and waits only for what peers
send under the same ticket. A piece without credits is neither sent nor published, nor is a sum of which rows are
missing.
Limits. There are at most nodes.MOST_NORM_COLUMNS columns. There is one flag for each piece, so with many rows a piece
has many tiles.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ditron_inductor.core.layout import RESULT_ROW, REVOKED_ROW, SEND_TICKET, TILE_TICKET
from ditron_inductor.core.signals import close, granted, publish_all, request_ticket, use_of, words_of
from ditron_inductor.core.timed import timed_may_send, timed_wait_all
from ditron_inductor.core.trace import TILE as TILE_EVENT
from ditron_inductor.core.trace import event, now
from ditron_inductor.lowering.all_reduce.all_reduce_kernel import add_up, begin, swap
from ditron_inductor.lowering.all_reduce_rms_norm import norm_in_band
from ditron_inductor.lowering.all_reduce_rms_norm.slices import How, SliceColumns, SliceRuns, two_shots_in_slices
from ditron_inductor.lowering.host.launch import Launch, ceil_div, round_up
from ditron_inductor.lowering.host.launcher import Arguments
from ditron_inductor.lowering.norms.add_norm import Outputs
from ditron_inductor.lowering.norms.rows import (
    all_outputs,
    allocate,
    block_of,
    constants_of,
    extras,
    finish,
    pointers,
    residual_of,
    warps_of,
    with_rows,
)
from ditron_inductor.task.nodes import ReductionWithNorm

ROUND_BYTES = 800 << 10
"""The bytes that a rank can send in the time of one more round of signals."""
TILE = 4096
"""The elements of a tile, unless a row is longer."""
LEAST_SLICE = 1024
"""The fewest elements of a slice. One SM sends them in less time than a signal takes."""
LEAST_SLICES = 4
"""The fewest slices of a row that is cut. Fewer were not measured."""
WIDE_PIECES_PER_SM = 2
"""The pieces for each SM if a row is longer than a tile. An SM then has no more programs at once, and every further
wave of programs would take one or two rounds of signals.
"""

INTERPRETED_ROUND_BYTES = 512
INTERPRETED_TILE = 64
INTERPRETED_PIECES = 4
INTERPRETED_LEAST_SLICE = 16
"""The limits of the interpreter are low, so that small test problems reach every case."""


@triton.jit
def rows_of(ticket, tile, pieces, run, M, ROWS: tl.constexpr):
    """Returns the rows [ROWS, 1] of a run that belong to tile `tile` of a piece. Tiles are dealt to the pieces in
    turns, so the numbers of their tiles differ by at most one. Rows behind the end of the run are M, which no tensor
    has.
    """
    rows = (tile * pieces + ticket) * ROWS + tl.arange(0, ROWS)
    return tl.where(rows < run, rows, M).to(tl.int64)[:, None]


@triton.jit
def one_shot(use, x, given, outputs, begun, sizes, ticket, HOW: tl.constexpr, NORMS: tl.constexpr, TRACE: tl.constexpr):
    """Reduces and normalises the rows of piece `ticket`; returns the result of `leave`. A slot is [source][row]."""
    WORLD: tl.constexpr = HOW.WORLD
    began = now(TRACE)
    cols = tl.arange(0, HOW.BLOCK)[None, :]
    first = rows_of(ticket, 0, sizes.pieces, sizes.run, sizes.M, HOW.ROWS)
    area = sizes.run.to(tl.int64) * sizes.pitch
    at = first * sizes.N + cols
    inside = (first < sizes.M) & (cols < sizes.N)
    mine = tl.load(x + at, mask=inside, other=0.0)
    loaded = extras(given, at, cols, inside, sizes.N, NORMS.FORM)
    ok = timed_may_send(begun.asked, begun.due, use, ticket, HOW.WORLD, HOW.THREADS, TRACE)
    if ok != 0:
        for i in tl.static_range(WORLD - 1):
            tl.store(begun.slots[i] + use.rank * area + first * sizes.pitch + cols, mine, mask=inside)
        for tile in range(1, HOW.TILES):
            rows = rows_of(ticket, tile, sizes.pieces, sizes.run, sizes.M, HOW.ROWS)
            there = (rows < sizes.M) & (cols < sizes.N)
            more = tl.load(x + rows * sizes.N + cols, mask=there, other=0.0)
            for i in tl.static_range(WORLD - 1):
                tl.store(begun.slots[i] + use.rank * area + rows * sizes.pitch + cols, more, mask=there)
    # Acquire: the peers' rows are visible.
    left, whole = swap(use, ticket, begun, ok, HOW, TRACE)
    dtype: tl.constexpr = x.dtype.element_ty
    places = first * sizes.pitch + cols
    total = add_up(mine, begun.own, places, area, inside, whole, use.rank, HOW.WORLD, HOW.AVERAGE)
    finish(total.to(dtype), loaded, outputs, first, at, inside, sizes.M, sizes.N, NORMS)
    for tile in range(1, HOW.TILES):
        rows = rows_of(ticket, tile, sizes.pieces, sizes.run, sizes.M, HOW.ROWS)
        there = (rows < sizes.M) & (cols < sizes.N)
        at = rows * sizes.N + cols
        more = tl.load(x + at, mask=there, other=0.0)
        places = rows * sizes.pitch + cols
        total = add_up(more, begun.own, places, area, there, whole, use.rank, HOW.WORLD, HOW.AVERAGE)
        loaded = extras(given, at, cols, there, sizes.N, NORMS.FORM)
        finish(total.to(dtype), loaded, outputs, rows, at, there, sizes.M, sizes.N, NORMS)
    event(use, began, ticket, use.rank, TILE_EVENT, TRACE)
    return left


@triton.jit
def sums_of(rows, cols, sums, sizes, given, known, FORM: tl.constexpr):
    """Loads (rows that have been added up, NaN if `known` is 0; their residual). sums: pointer to [M, pitch]."""
    there = (rows < sizes.M) & (cols < sizes.N)
    result = tl.load(sums + rows * sizes.pitch + cols, mask=there & (known != 0), other=float("nan"))
    return result, residual_of(given, rows * sizes.N + cols, cols, there, FORM)


@triton.jit
def two_shots(
    use, x, given, outputs, begun, sizes, ticket, HOW: tl.constexpr, NORMS: tl.constexpr, TRACE: tl.constexpr,
):  # fmt: skip
    """Does one piece's rows of every run; returns what `leave` does. Slots: [source][row], then sums [owner][row]."""
    FORM: tl.constexpr = NORMS.FORM
    WORLD: tl.constexpr = HOW.WORLD
    began = now(TRACE)
    cols = tl.arange(0, HOW.BLOCK)[None, :]
    area = sizes.run.to(tl.int64) * sizes.pitch
    sums = HOW.WORLD * area
    dtype: tl.constexpr = x.dtype.element_ty
    ok = timed_may_send(begun.asked, begun.due, use, ticket, HOW.WORLD, HOW.THREADS, TRACE)
    if ok != 0:
        for tile in range(HOW.TILES):
            rows = rows_of(ticket, tile, sizes.pieces, sizes.run, sizes.M, HOW.ROWS)
            # Load all of them first, because a load cannot be moved before a store.
            sent = ()
            for i in tl.static_range(1, WORLD):
                theirs = (use.rank + i) % HOW.WORLD * sizes.run + rows
                there = (theirs < sizes.M) & (cols < sizes.N)
                sent = sent + (tl.load(x + theirs * sizes.N + cols, mask=there, other=0.0),)  # type: ignore[assignment]
            for i in tl.static_range(WORLD - 1):
                theirs = (use.rank + 1 + i) % HOW.WORLD * sizes.run + rows
                there = (theirs < sizes.M) & (cols < sizes.N)
                tl.store(begun.slots[i] + use.rank * area + rows * sizes.pitch + cols, sent[i], mask=there)
    # Acquire: the peers' parts of this rank's rows are visible.
    left, whole = swap(use, ticket, begun, ok, HOW, TRACE)
    for tile in range(HOW.TILES):
        rows = rows_of(ticket, tile, sizes.pieces, sizes.run, sizes.M, HOW.ROWS)
        ours = use.rank * sizes.run + rows
        there = (ours < sizes.M) & (cols < sizes.N)
        mine = tl.load(x + ours * sizes.N + cols, mask=there, other=0.0)
        places = rows * sizes.pitch + cols
        result = add_up(mine, begun.own, places, area, there, whole, use.rank, HOW.WORLD, HOW.AVERAGE)
        if whole != 0:
            for i in tl.static_range(WORLD - 1):
                slot_sums = begun.slots[i] + sums + use.rank * area
                tl.store(slot_sums + rows * sizes.pitch + cols, result.to(dtype), mask=there)
        # This rank needs the sums too, and nobody else writes them there.
        tl.store(begun.own + sums + use.rank * area + rows * sizes.pitch + cols, result.to(dtype), mask=there)
    # The threads that read these sums may not be those that wrote them.
    tl.debug_barrier()
    if whole != 0:
        publish_all(use, RESULT_ROW + ticket, HOW.WORLD)
    # Acquire: the peers' sums are visible.
    known = ok & timed_wait_all(use, RESULT_ROW + ticket, HOW.WORLD, TRACE)
    for tile in range(HOW.TILES):
        rows = rows_of(ticket, tile, sizes.pieces, sizes.run, sizes.M, HOW.ROWS)
        coming, residual = sums_of(use.rank * sizes.run + rows, cols, begun.own + sums, sizes, given, 1, FORM)
        for i in tl.static_range(WORLD):
            theirs = (use.rank + i) % HOW.WORLD * sizes.run + rows
            there = (theirs < sizes.M) & (cols < sizes.N)
            result, loaded = coming, with_rows(residual, given, cols, sizes.N, FORM)
            if i + 1 < HOW.WORLD:
                # Load the next rows before these are stored, because a load cannot be moved before a store.
                following = (use.rank + i + 1) % HOW.WORLD * sizes.run + rows
                coming, residual = sums_of(following, cols, begun.own + sums, sizes, given, known, FORM)
            finish(result, loaded, outputs, theirs, theirs * sizes.N + cols, there, sizes.M, sizes.N, NORMS)
    event(use, began, ticket, use.rank, TILE_EVENT, TRACE)
    return left


@triton.jit(do_not_specialize=["M", "pieces", "run", "rank"])
def all_reduce_rms_norm_kernel(
    x, given, outputs, pointers, rank, M, columns, pieces, run,
    HOW: tl.constexpr, NORMS: tl.constexpr, TRACE: tl.constexpr = 0,
):  # fmt: skip
    """See the module. x is [M, N], contiguous, and may be the total, except with SLICES. given, outputs: see
    `rows.extras` and `rows.finish`. There is a program for each of the `pieces` of a run of `run` rows, or for each of
    its SLICES, which have columns.width columns in SLICE places.
    """
    # Ask for all before the first answer is needed: one by one, the loads would take as long as a signal.
    words = words_of(pointers, rank)
    request = request_ticket(words, TILE_TICKET if HOW.SLICES == 1 else SEND_TICKET, HOW.THREADS, True)
    use = use_of(words)
    begun = begin(use, x.dtype.element_ty, HOW.WORLD, HOW.THREADS)
    ticket = granted(request, HOW.THREADS)
    sizes = SliceRuns(M, columns.N, columns.pitch, pieces, run, columns.width)
    if HOW.SLICES > 1:
        left = two_shots_in_slices(use, x, given, outputs, begun, sizes, ticket, HOW, NORMS, TRACE)
    elif HOW.ONE_SHOT:
        left = one_shot(use, x, given, outputs, begun, sizes, ticket, HOW, NORMS, TRACE)
    else:
        left = two_shots(use, x, given, outputs, begun, sizes, ticket, HOW, NORMS, TRACE)
    close(granted(left, HOW.THREADS), use)


@dataclass(frozen=True)
class RowCut:
    """How rows are cut: all rows in one shot, or each run in two shots, have `pieces` pieces of at most `tiles` tiles
    of `rows` rows. If a piece has several `slices`, it is one row of a run.
    """

    one_shot: bool
    rows: int
    tiles: int
    pieces: int
    slices: int = 1


def cut(
    M: int,
    N: int,
    itemsize: int,
    world_size: int,
    *,
    programs: int,
    tile: int,
    most_pieces: int,
    round_bytes: int,
    least_slice: int,
) -> RowCut:
    """Returns the RowCut. A tile has at most `tile` elements, or one row, and there is a piece for each of `programs`
    if there are enough rows. Otherwise, in two shots, a row is cut into 2^n slices of at least `least_slice` elements,
    as far as there are programs for them. round_bytes: two shots are chosen if a rank then sends fewer bytes by more
    than this number. In one shot it sends all rows to each of its W - 1 peers, and in two shots 2 / W of them.
    """
    saved = (world_size - 1) * (world_size - 2) * M * N * itemsize // world_size
    in_one_shot = saved <= round_bytes
    length = M if in_one_shot else ceil_div(M, world_size)
    rows = max(1, tile // block_of(N))
    while rows > 1 and ceil_div(length, rows) < programs:
        rows //= 2
    flags = REVOKED_ROW.value - (0 if in_one_shot else RESULT_ROW.value)
    most = min(most_pieces, flags)
    wide = block_of(N) > tile
    if wide:
        most = min(most, WIDE_PIECES_PER_SM * programs)
    tiles = ceil_div(ceil_div(length, rows), most)
    # Either every SM gets equally many pieces, or there are as few pieces as this number of tiles allows.
    pieces = most if wide and tiles > 1 else ceil_div(length, rows * tiles)
    slices = 1
    # Only pieces of one row are cut into slices.
    most_slices = min(programs, flags) // pieces if not in_one_shot and rows * tiles == 1 else 1
    while 2 * slices <= most_slices and 2 * slices * least_slice <= N:
        slices *= 2
    return RowCut(in_one_shot, rows, tiles, pieces, slices if slices >= LEAST_SLICES else 1)


@dataclass(frozen=True)
class Geometry:
    """The layout of a call, from sizes that all ranks share: the output [M, N], how it is cut, the rows of a run, the
    elements `pitch` of a row in the slot, and the bytes of the slot. in_band: how the work is divided if everything is
    sent in band, where no data is in the slot; otherwise None.
    """

    M: int
    N: int
    cut: RowCut
    run: int
    pitch: int
    nbytes: int
    in_band: norm_in_band.Shares | None = None


def slice_width(columns: int, slices: int) -> int:
    """Returns the columns of each slice but the last. A slice begins, like a row, at a multiple of 16 elements."""
    return round_up(ceil_div(columns, slices), 16)


def slice_warps(block: int, itemsize: int) -> int:
    """Returns the warps for slices of `block` places: as `warps_of` up to 8, and more above 64 bytes a thread."""
    return max(1, min(block // (32 * 16), 8), min(block * itemsize // (32 * 64), 16))


def geometry(node: ReductionWithNorm, launch: Launch, a: torch.Tensor, columns: int) -> Geometry:
    """Returns the Geometry for x [rows of a, columns]. a: x itself, or the left operand of the product x."""
    rows, itemsize = math.prod(a.shape[:-1]), a.element_size()
    chosen = cut(
        rows,
        columns,
        itemsize,
        node.world_size,
        programs=INTERPRETED_PIECES if launch.interpreted else launch.num_sms,
        tile=INTERPRETED_TILE if launch.interpreted else TILE,
        most_pieces=INTERPRETED_PIECES if launch.interpreted else REVOKED_ROW.value,
        round_bytes=INTERPRETED_ROUND_BYTES if launch.interpreted else ROUND_BYTES,
        least_slice=INTERPRETED_LEAST_SLICE if launch.interpreted else LEAST_SLICE,
    )
    # A row begins at a multiple of 16 elements, so that 16 bytes can be moved at a time.
    pitch = round_up(columns, 16)
    areas = node.world_size * (1 if chosen.one_shot else 2)
    run = rows if chosen.one_shot else ceil_div(rows, node.world_size)
    dealt = norm_in_band.shares_of(launch, rows, columns, itemsize) if chosen.one_shot else None
    nbytes = 0 if dealt is not None else areas * run * pitch * itemsize
    return Geometry(M=rows, N=columns, cut=chosen, run=run, pitch=pitch, nbytes=nbytes, in_band=dealt)


def all_reduce_rms_norm(
    node: ReductionWithNorm,
    launch: Launch,
    sizes: Geometry,
    x: torch.Tensor,
    given: tuple[torch.Tensor | None, ...],
    in_place: bool = False,
) -> Outputs:
    """Returns the Outputs for x [.., N]; see the module. in_place: x may be overwritten by the total."""
    x = x.contiguous()
    if sizes.in_band is not None:
        return norm_in_band.all_reduce_rms_norm(node, launch, sizes.M, sizes.N, sizes.in_band, x, given)
    cut = sizes.cut
    # With slices, a program may read a row of x after another program has stored a part of the total.
    outputs = allocate(node, x, {"total": x} if in_place and cut.slices == 1 else {})

    def arguments() -> Arguments:
        block = block_of(sizes.N)
        width = slice_width(sizes.N, cut.slices)
        num_warps = warps_of(cut.rows * block) if cut.slices == 1 else slice_warps(block, x.element_size())
        return Arguments(
            programs=cut.pieces * cut.slices,
            values=dict(
                M=sizes.M,
                columns=SliceColumns(sizes.N, sizes.pitch, width),
                pieces=cut.pieces,
                run=sizes.run,
                rank=launch.rank,
                HOW=How(
                    WORLD=node.world_size,
                    AVERAGE=node.reduce_op == "avg",
                    ONE_SHOT=cut.one_shot,
                    ROWS=cut.rows,
                    TILES=cut.tiles,
                    BLOCK=block,
                    SLICES=cut.slices,
                    SLICE=block_of(width),
                    THREADS=launch.threads(num_warps),
                ),
                **constants_of(node, stores_reduced=True),
                num_warps=num_warps,
            ),
        )

    tensors = {"x": x, "given": pointers(given, x), "outputs": all_outputs(node, outputs)}
    launch.run(all_reduce_rms_norm_kernel, sizes.nbytes, arguments, tensors)
    return outputs
