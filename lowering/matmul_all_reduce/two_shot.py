"""matmul_all_reduce, strategy `tile` for many rows: out = all_reduce(sum_i a_i @ b_i + bias) in one
launch, two-shot.

Problem. Every rank holds a [M, K] and b [K, N] of its own slice of K and wants the whole sum, the same bits everywhere.
Algorithm. Tiles of the output are dealt out to owners in equal runs, and a run is cut into parts. *Push*: the tiles of
a part that others own go into their slots, each carried while the next tile is computed. *Own*: an own tile waits for
the other ranks' parts, adds them all in fp32, and goes to the output and, carried likewise, into every peer's slot.
*Copy*: the peers' results come out of the slot. The parts run as a pipeline, part p pushed, p - 1 summed up, p - 2
copied, so the links work while the tensor cores do. Only the owner adds, so all ranks hold the same bits. An
epilogue is computed by each rank, where a result is written: its other operands need not be the same on all ranks.
What it makes of the product is computed of a tile before that is sent.
Signal protocol. Partials: see lowering/partials.py. Results: flag row RESULT_ROW + chunk, written by the owner to all
peers at once, read by the copies of the chunk. In ticket order a wait depends on earlier sends only. The push of a
result needs no credit: the partials of the peer, which it waited for, show that the slot is in its new use there.
Limits. None on M, N, K: edge tiles are masked where they meet the output.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ditron_inductor.core.layout import RESULT_ROW, TILE_TICKET
from ditron_inductor.core.matmul import (
    Carried,
    carry,
    factors_of,
    plus_bias,
    sum_tile,
    zeros_of,
)
from ditron_inductor.core.order import grouped, scatter_order
from ditron_inductor.core.signals import (
    Words,
    credits_due,
    data,
    finish,
    granted,
    healthy,
    request_ticket,
    settle,
    take_tile,
    use_of,
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
"""Most parts of a pipeline."""
PART_WAVES = 2
"""A part has at least so many tiles for each SM: it has to outlast the transfer of the part before it."""


@triton.jit
def store_tile(acc, out, tile, num_m, num_n, M, N, TILES: tl.constexpr):
    """Write tile `tile` of out [M, N] contiguous, without what lies beyond its edges."""
    block_row, block_column = grouped(tile, num_m, num_n, TILES.GROUP_M)
    offs_m = block_row * TILES.BLOCK_M + tl.arange(0, TILES.BLOCK_M)
    offs_n = block_column * TILES.BLOCK_N + tl.arange(0, TILES.BLOCK_N)
    inside = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    tl.store(out + offs_m.to(tl.int64)[:, None] * N + offs_n[None, :], acc, mask=inside)


@triton.jit
def destinations(use, owner, tile, tiles_per_owner, dtype: tl.constexpr, WORLD: tl.constexpr, BLOCK):
    """(where the tile in the outbox goes: pointers to blocks of WORLD - 1 slots, how many of them count).

    A partial goes to its owner's slot, a result (owner is the rank) to all peers' behind the partials, by owner; if
    owner is -1 there is none.
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
    """Tell of the tile that this program carried last: a partial of `owner`, a result if that is the rank, none: -1.

    chunks: with the tiles of all owners.
    """
    owner_tiles = tl.minimum(tiles_per_owner, chunks.tiles - owner * tiles_per_owner)
    of_owner = Chunks(chunks.counters, owner_tiles, chunks.chunk_tiles)
    if owner == use.rank:
        publish_to_all(use, of_owner, RESULT_ROW, tile, HOW)
    elif owner >= 0:
        publish_partial(use, of_owner, owner, tile, HOW)


@triton.jit
def schedule(ticket, tiles_per_owner, part_tiles, rank, WORLD: tl.constexpr):
    """(step, tile of its owner or -1, whether it is a copy) of a ticket; the owner is scatter_order(step).

    Stage s of the pipeline is: push part s, own part s - 1, copy part s - 2; tickets of parts that do not exist are
    empty. Steps 0..WORLD-2 are the peers, WORLD-1 the own rank.
    """
    stage_tickets = (2 * WORLD - 1) * part_tiles
    stage = ticket // stage_tickets
    position = ticket % stage_tickets
    step = position // part_tiles
    is_copy = step >= WORLD
    part = tl.where(step < WORLD - 1, stage, tl.where(is_copy, stage - 2, stage - 1))
    # One part is one stage.
    part = tl.where(part_tiles < tiles_per_owner, part, 0)
    tile = part * part_tiles + position % part_tiles
    exists = (part >= 0) & (tile < tiles_per_owner)
    return tl.where(is_copy, step - WORLD, step), tl.where(exists, tile, -1), is_copy


@triton.jit(do_not_specialize=["rank", "slot", "site", "chunk_tiles", "part_tiles", "num_parts"])
def matmul_all_reduce_kernel(
    lefts, rights, bias, extras, outs, pointers, sizes, rank, slot, site, chunk_tiles, part_tiles, num_parts,
    HOW: tl.constexpr, EPILOGUE: tl.constexpr, PRE: tl.constexpr, TRACE: tl.constexpr = 0,
):  # fmt: skip
    """See the module. lefts, rights: tuples of [M, K_i] with contiguous K and of [K_i, N], see Terms; bias [N], or
    anything; extras, outs: tuples, of what PRE and EPILOGUE take, and EPILOGUE makes of the sum; outs [M, N]
    contiguous.
    """
    WORLD: tl.constexpr = HOW.WORLD
    TILES: tl.constexpr = HOW.TILES
    BLOCK_M: tl.constexpr = TILES.BLOCK_M
    BLOCK_N: tl.constexpr = TILES.BLOCK_N
    use = use_of(Words(pointers.table, pointers.ctl, rank, slot, site))
    alive = healthy(use)
    num_m = tl.cdiv(sizes.M, BLOCK_M)
    num_n = tl.cdiv(sizes.N, BLOCK_N)
    tiles = num_m * num_n
    tiles_per_owner = tl.cdiv(tiles, WORLD)
    dtype: tl.constexpr = lefts[0].dtype.element_ty
    factors = factors_of(lefts, rights, sizes.M, sizes.N, sizes.terms, TILES)
    chunks = Chunks(pointers.counters, tiles, chunk_tiles)
    BLOCK: tl.constexpr = BLOCK_M * BLOCK_N
    # In 32-bit words, as it is carried.
    BLOCK_WORDS: tl.constexpr = BLOCK * lefts[0].dtype.element_ty.primitive_bitwidth // 32
    SLICE: tl.constexpr = min(BLOCK_M, 64 * TILES.THREADS // BLOCK_N)
    outbox = data(use, rank, dtype)
    outbox += (2 * WORLD * tiles_per_owner + 2 * tl.program_id(0)).to(tl.int64) * BLOCK
    # A second block: a partial is read while the result takes shape.
    results = outbox + BLOCK
    # Whether this program may send, -1 before it has asked, and the tile that waits in the outbox, see `destinations`.
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
                # Before a wait, deliver what is there.
                carry(Carried(box, targets, carried, num_targets), 0, TILES.PIECE)
                publish_carried(use, chunks, sent_owner, sent_tile, tiles_per_owner, HOW)
                sent_owner = tl.full((), -1, tl.int32)
                # Acquire: the owner's results of the chunk, which it pushed before it published this flag.
                whole = alive & timed_wait(use, RESULT_ROW + tile // chunk_tiles, owner, TRACE)
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
                    # Acquire: the tile's partials of all peers, published after they were stored.
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
                # The same instructions for own tiles and copies: ranks compute the same bits of both.
                if is_copy | (owner == rank):
                    block = data(use, rank, dtype)
                    block += ((WORLD + owner) * tiles_per_owner + tile).to(tl.int64) * BLOCK
                    source = tl.multiple_of(tl.where(is_copy, block, results), 16)
                    tile_row, tile_column = grouped(first + tile, num_m, num_n, TILES.GROUP_M)
                    tile_n = tile_column * BLOCK_N + tl.arange(0, BLOCK_N)
                    for i in tl.static_range(BLOCK_M // SLICE):
                        tile_m = tile_row * BLOCK_M + i * SLICE + tl.arange(0, SLICE)
                        # What was not sent is not read: whatever the slot holds, NaN is stored.
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
    """a [.., K]; columns: N. M and N are those of the output, the tiles those of an owner. See Geometry."""
    M, world = math.prod(a.shape[:-1]), node.world_size
    config = launch.config(rows=M, columns=columns, repeats=1, dtype=a.dtype)
    owned = ceil_div(ceil_div(M, config.block_m) * ceil_div(columns, config.block_n), world)
    # Two areas, partials by source and results by owner; and as many outboxes.
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
    """a_i [.., K_i], b_i [K_i, N], bias [N], extras as the node's epilogue reads them; returns the outputs [.., N]. See
    the module.
    """
    outs = sizes.arrangement.new_outputs_of_sum(a[0], [*a[0].shape[:-1], sizes.N])
    call = SumCall(node, launch, sizes, a, b, bias)

    def arguments() -> Arguments:
        parts = max(1, min(PARTS, node.world_size * sizes.tiles // (PART_WAVES * launch.num_sms)))
        part_tiles = ceil_div(sizes.tiles, parts)
        return call.arguments(
            sizes=call.sizes_with(sizes.M),
            chunk_tiles=sizes.chunk_tiles,
            part_tiles=part_tiles,
            num_parts=ceil_div(sizes.tiles, part_tiles),
            HOW=call.how(),
        )

    call.reduce(matmul_all_reduce_kernel, arguments, extras, outs)
    return outs
