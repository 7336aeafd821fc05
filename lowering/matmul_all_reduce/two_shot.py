"""matmul_all_reduce, strategy `tile` for many rows: out = all_reduce(sum_i a_i @ b_i + bias) in one launch, two-shot.

Problem. Every rank holds a [M, K] and b [K, N] of its own slice of K, and wants the whole sum with the same bits.
Algorithm. The tiles of the output are divided among the ranks, their owners, in equal runs, and a run is cut into
parts. *Push*: the tiles that other ranks own go into the owners' slots; each is carried while the next tile is
computed. *Own*: a tile of this rank waits for the other ranks' partial tiles, adds all of them in fp32, and goes to the
output and, carried too, into every peer's slot. *Copy*: the peers' results are copied out of the slot. The parts form a
pipeline: while part p is pushed, part p - 1 is added up and part p - 2 is copied. So the links and the tensor cores
work at the same time. Only the owner adds, so all ranks get equal bits. Every rank computes the epilogue where it
stores a result, because the extra tensors may differ between ranks. The part of an epilogue before the reduction is
computed on a tile before the tile is sent. Signal protocol. For partial tiles see lowering/partials.py. The owner
publishes results in flag row RESULT_ROW + chunk to all peers at once; the copies of the chunk wait for it. In ticket
order, a wait depends on earlier sends only. The push of a result needs no credit: the peer's partial tiles, for which
it has waited, show that the peer is in the same use of the slot. Limits. None on M, N and K. Tiles at the edges are
masked where they are stored in the output.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ditron_inductor.core.layout import RESULT_ROW, TILE_TICKET
from ditron_inductor.core.matmul import Carried, carry, factors_of, parts_of, plus_bias, sum_tile, zeros_of
from ditron_inductor.core.order import grouped, scatter_order
from ditron_inductor.core.signals import (
    credits_due,
    data,
    finish,
    granted,
    healthy,
    request_ticket,
    settle,
    take_tile,
    use_of,
    words_of,
)
from ditron_inductor.core.timed import first_credits, timed_wait, timed_wait_all
from ditron_inductor.core.trace import COPY, TILE, event, now
from ditron_inductor.lowering.epilogues import arrange, elements_of, store_sum
from ditron_inductor.lowering.host.launch import Launch, ceil_div
from ditron_inductor.lowering.host.launcher import Arguments
from ditron_inductor.lowering.partials import (
    Chunks,
    Owned,
    publish_partial,
    publish_to_all,
    put_prepared,
    received_block,
    reduced_slice,
    slice_offsets,
)
from ditron_inductor.lowering.sums import Geometry, SumCall, carrying
from ditron_inductor.task.nodes import MatmulAllReduce

PARTS = 8
"""The most parts of the pipeline."""
PART_WAVES = 2
"""The fewest tiles of a part for each SM. A part has to take longer than the transfer of the part before it."""


@triton.jit
def store_tile(acc, out, tile, num_m, num_n, M, N, TILES: tl.constexpr):
    """Stores `acc` as tile `tile` of out [M, N], contiguous, without the elements that lie beyond its edges."""
    block_row, block_column = grouped(tile, num_m, num_n, TILES.GROUP_M)
    offs_m = block_row * TILES.BLOCK_M + tl.arange(0, TILES.BLOCK_M)
    offs_n = block_column * TILES.BLOCK_N + tl.arange(0, TILES.BLOCK_N)
    inside = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    tl.store(out + offs_m.to(tl.int64)[:, None] * N + offs_n[None, :], acc, mask=inside)


@triton.jit
def destinations(use, owner, tile, tiles_per_owner, dtype: tl.constexpr, WORLD: tl.constexpr, BLOCK):
    """Returns the destinations of the tile in the outbox: (pointers to blocks of WORLD - 1 slots; how many of them are
    valid). A partial tile goes to the slot of its owner. A result, whose owner is this rank, goes to the slots of all
    peers, behind the partial tiles, by owner. If owner is -1, there is no tile.
    """
    is_result = owner == use.rank
    block = tl.where(is_result, WORLD + use.rank, use.rank) * tiles_per_owner + tile
    targets = ()
    for i in tl.static_range(1, WORLD):
        peer = (use.rank + i) % WORLD
        if i == 1:
            peer = tl.where(is_result | (owner < 0), peer, owner)
        place = data(use, peer, dtype) + block.to(tl.int64) * BLOCK
        targets = targets + (place,)  # type: ignore[assignment]
    return targets, tl.where(is_result, WORLD - 1, tl.where(owner < 0, 0, 1))


@triton.jit
def publish_carried(use, chunks, owner, tile, tiles_per_owner, HOW: tl.constexpr):
    """Publishes the tile that this program carried last: a partial tile for `owner`, a result if `owner` is this rank,
    or nothing if it is -1. chunks.tiles has the tiles of all owners.
    """
    owner_tiles = tl.minimum(tiles_per_owner, chunks.tiles - owner * tiles_per_owner)
    of_owner = Chunks(chunks.counters, owner_tiles, chunks.chunk_tiles)
    if owner == use.rank:
        publish_to_all(use, of_owner, RESULT_ROW, tile, HOW)
    elif owner >= 0:
        publish_partial(use, of_owner, owner, tile, HOW)


@triton.jit
def schedule(ticket, tiles_per_owner, part_tiles, rank, WORLD: tl.constexpr):
    """Returns (step; tile of its owner, or -1; whether it is a copy) of a ticket. The owner is scatter_order(step).
    Stage s of the pipeline pushes part s, adds up part s - 1 and copies part s - 2. The tickets of parts that do not
    exist are empty. Steps 0..WORLD-2 are the peers, and step WORLD-1 is this rank.
    """
    stage_tickets = (2 * WORLD - 1) * part_tiles
    stage = ticket // stage_tickets
    position = ticket % stage_tickets
    step = position // part_tiles
    is_copy = step >= WORLD
    part = tl.where(step < WORLD - 1, stage, tl.where(is_copy, stage - 2, stage - 1))
    # If there is only one part, there is only one stage.
    part = tl.where(part_tiles < tiles_per_owner, part, 0)
    tile = part * part_tiles + position % part_tiles
    exists = (part >= 0) & (tile < tiles_per_owner)
    return tl.where(is_copy, step - WORLD, step), tl.where(exists, tile, -1), is_copy


@triton.jit(do_not_specialize=["chunk_tiles", "part_tiles", "rank"])
def matmul_all_reduce_kernel(
    operands, extras, outs, pointers, rank, sizes, functions, chunk_tiles, part_tiles, HOW: tl.constexpr,
    TRACE: tl.constexpr = 0,
):  # fmt: skip
    """See the module. operands: pointers to the a_i [M, K_i] with contiguous K, to the b_i [K_i, N], see Terms, and to
    the bias [N], or anything if there is none. extras: the tensors that the epilogue's Functions read. outs:
    the outputs of the epilogue, or the sum, [M, N] contiguous. part_tiles: the tiles of an owner in one part.
    """
    PRE: tl.constexpr = functions.PRE
    EPILOGUE: tl.constexpr = functions.EPILOGUE
    lefts, rights, bias = parts_of(operands)
    WORLD: tl.constexpr = HOW.WORLD
    TILES: tl.constexpr = HOW.TILES
    BLOCK_M: tl.constexpr = TILES.BLOCK_M
    BLOCK_N: tl.constexpr = TILES.BLOCK_N
    use = use_of(words_of(pointers, rank))
    alive = healthy(use)
    num_m = tl.cdiv(sizes.M, BLOCK_M)
    num_n = tl.cdiv(sizes.N, BLOCK_N)
    tiles = num_m * num_n
    tiles_per_owner = tl.cdiv(tiles, WORLD)
    num_parts = tl.cdiv(tiles_per_owner, part_tiles)
    dtype: tl.constexpr = lefts[0].dtype.element_ty
    factors = factors_of(lefts, rights, sizes.M, sizes.N, sizes.terms, TILES)
    chunks = Chunks(pointers.counters, tiles, chunk_tiles)
    BLOCK: tl.constexpr = BLOCK_M * BLOCK_N
    # The size of a block in 32-bit words, in which it is carried.
    BLOCK_WORDS: tl.constexpr = BLOCK * lefts[0].dtype.element_ty.primitive_bitwidth // 32
    SLICE: tl.constexpr = min(BLOCK_M, 64 * TILES.THREADS // BLOCK_N)
    outbox = data(use, rank, dtype)
    outbox += (2 * WORLD * tiles_per_owner + 2 * tl.program_id(0)).to(tl.int64) * BLOCK
    # A second block holds the result, because the partial tile is read while the result is computed.
    results = outbox + BLOCK
    # `ok` says whether this program may send; it is -1 until it has asked. sent_owner and sent_tile are the tile that
    # waits in the outbox, see `destinations`.
    ok = tl.full((), -1, tl.int32)
    sent_owner = tl.full((), -1, tl.int32)
    sent_tile = tl.full((), 0, tl.int32)
    ticket = take_tile(use)
    if ticket == 0:
        settle(credits_due(use, alive), use, WORLD)
    while ticket < tl.where(num_parts > 1, num_parts + 2, 1) * (2 * WORLD - 1) * part_tiles:
        request = request_ticket(use, TILE_TICKET, TILES.THREADS, True)
        step, tile, is_copy = schedule(ticket, tiles_per_owner, part_tiles, rank, WORLD)
        owner = scatter_order(step, rank, WORLD)
        first = owner * tiles_per_owner
        owner_tiles = tl.minimum(tiles_per_owner, tiles - first)
        if (tile >= 0) & (tile < owner_tiles):
            began = now(TRACE)
            targets, num_targets = destinations(use, sent_owner, sent_tile, tiles_per_owner, dtype, WORLD, BLOCK)
            carried = tl.where(sent_owner < 0, 0, BLOCK_WORDS)
            whole = alive
            box = tl.where(sent_owner == rank, results, outbox)
            if is_copy:
                # Before a wait, send what is in the outbox.
                carry(Carried(box, targets, carried, num_targets), 0, TILES.PIECE)
                publish_carried(use, chunks, sent_owner, sent_tile, tiles_per_owner, HOW)
                sent_owner = tl.full((), -1, tl.int32)
                # Acquire: the owner has pushed its results of the chunk before it published this flag. (The interpreter
                # makes a tensor of the row only if the tensor comes first.)
                whole = alive & timed_wait(use, tile // chunk_tiles + RESULT_ROW, owner, TRACE)
                if EPILOGUE is None:
                    block = (WORLD + owner) * tiles_per_owner + tile
                    result = received_block(data(use, rank, dtype), block, whole, TILES)
                    store_tile(result, outs[0], first + tile, num_m, num_n, sizes.M, sizes.N, TILES)
            else:
                block_row, block_column = grouped(first + tile, num_m, num_n, TILES.GROUP_M)
                row, column = block_row * BLOCK_M, block_column * BLOCK_N
                taken = Carried(box, targets, carried, num_targets)
                acc = sum_tile(zeros_of(TILES), factors, row, column, taken, TILES)
                acc = plus_bias(acc, bias, column, sizes.N, BLOCK_N, HOW.HAS_BIAS)
                publish_carried(use, chunks, sent_owner, sent_tile, tiles_per_owner, HOW)
                sent_owner = tl.full((), -1, tl.int32)
                place = Owned(row, column, 0, sizes.M, sizes.M, sizes.N)
                if owner != rank:
                    ok = first_credits(ok, alive, use, ticket, WORLD, TRACE)
                    if ok != 0:
                        put_prepared(outbox, acc, extras, place, PRE, SLICE, HOW)
                        sent_owner = owner
                        sent_tile = tile
                else:
                    put_prepared(outbox, acc, extras, place, PRE, SLICE, HOW)
                    # Acquire: the peers' partial tiles are visible.
                    whole = alive & timed_wait_all(use, tile // chunk_tiles, WORLD, TRACE)
                    offs_n = column + tl.arange(0, BLOCK_N)
                    for i in tl.static_range(BLOCK_M // SLICE):
                        total = reduced_slice(use, outbox, tile, tiles_per_owner, i, whole, SLICE, HOW)
                        result = total.to(dtype)
                        if EPILOGUE is None:
                            slice_m = row + i * SLICE + tl.arange(0, SLICE)
                            elements = elements_of(slice_m, offs_n, sizes.M, sizes.N)
                            tl.store(outs[0] + elements.places, result, mask=elements.inside)
                        tl.store(results + slice_offsets(i, SLICE, TILES), result)
                    if whole != 0:
                        sent_owner = rank + 0
                        sent_tile = tile
                    tl.debug_barrier()
            if EPILOGUE is not None:
                # Own tiles and copies are computed by the same instructions, so all ranks get the same bits.
                if is_copy | (owner == rank):
                    block = data(use, rank, dtype)
                    block += ((WORLD + owner) * tiles_per_owner + tile).to(tl.int64) * BLOCK
                    source = tl.multiple_of(tl.where(is_copy, block, results), 16)
                    tile_row, tile_column = grouped(first + tile, num_m, num_n, TILES.GROUP_M)
                    tile_n = tile_column * BLOCK_N + tl.arange(0, BLOCK_N)
                    for i in tl.static_range(BLOCK_M // SLICE):
                        tile_m = tile_row * BLOCK_M + i * SLICE + tl.arange(0, SLICE)
                        # After a failure the loaded values do not matter, because NaN is stored.
                        reduced = tl.load(source + slice_offsets(i, SLICE, TILES)).to(tl.float32)
                        elements = elements_of(tile_m, tile_n, sizes.M, sizes.N)
                        store_sum(reduced, whole, extras, outs, elements, dtype, EPILOGUE)
            if is_copy:
                event(use, began, tile, owner, COPY, TRACE)
            else:
                event(use, began, tile, owner, TILE, TRACE)
        ticket = granted(request, TILES.THREADS)
    targets, num_targets = destinations(use, sent_owner, sent_tile, tiles_per_owner, dtype, WORLD, BLOCK)
    box = tl.where(sent_owner == rank, results, outbox)
    carry(Carried(box, targets, tl.where(sent_owner < 0, 0, BLOCK_WORDS), num_targets), 0, TILES.PIECE)
    publish_carried(use, chunks, sent_owner, sent_tile, tiles_per_owner, HOW)
    finish(use)


def geometry(node: MatmulAllReduce, launch: Launch, a: torch.Tensor, columns: int) -> Geometry:
    """Returns the Geometry for a [.., K] and columns N: sizes of the output, and tiles of an owner."""
    M, world = math.prod(a.shape[:-1]), node.world_size
    config = launch.config(rows=M, columns=columns, repeats=1, dtype=a.dtype)
    owned = ceil_div(ceil_div(M, config.block_m) * ceil_div(columns, config.block_n), world)
    # There are two areas, for partial tiles by source and results by owner, and each program has two outboxes.
    return carrying(
        launch, a.dtype, config, (M, columns), tiles=owned, computed=world * owned, places=2 * world * owned, boxes=2,
        flags=RESULT_ROW.value, arrangement=arrange(node.parsed, 1),
    )  # fmt: skip


def matmul_all_reduce(
    node: MatmulAllReduce,
    launch: Launch,
    sizes: Geometry,
    a: Sequence[torch.Tensor],
    b: Sequence[torch.Tensor],
    bias: torch.Tensor | None = None,
    extras: Sequence[torch.Tensor] = (),
) -> list[torch.Tensor]:
    """Returns the outputs [.., N] for a_i [.., K_i], b_i [K_i, N], bias [N] and the epilogue's extra tensors."""
    outs = sizes.arrangement.new_outputs_of_sum(a[0], [*a[0].shape[:-1], sizes.N])
    call = SumCall(node, launch, sizes, a, b, bias)

    def arguments() -> Arguments:
        parts = max(1, min(PARTS, node.world_size * sizes.tiles // (PART_WAVES * launch.num_sms)))
        return call.arguments(
            sizes=call.sizes_with(sizes.M),
            chunk_tiles=sizes.chunk_tiles,
            part_tiles=ceil_div(sizes.tiles, parts),
            HOW=call.how(),
        )

    call.reduce(matmul_all_reduce_kernel, arguments, extras, outs)
    return outs
