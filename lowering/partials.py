"""How tiles of products get to peers, for the kernels that multiply before they send.

A partial tile lies in its owner's slot as one contiguous [BLOCK_M, BLOCK_N] block, so stores to a peer are coalesced
and need no masks, whatever the shape of the problem. The block of (source, tile) has the number `source *
tiles_per_owner + tile`. The owner's own partial tile stays in the outbox of the program that computed it, and this
program adds the tiles up.

A program puts a finished tile into its *outbox*, a block of its own at the end of the slot. The K loop of its next tile
carries it to the owner (see core/matmul.py). Then the program publishes the tile.

Signals: an owner has the flag rows `tile // chunk_tiles`, with one word for each source. If there are enough rows, a
chunk is one tile, and a program publishes its tile itself. Otherwise tiles are counted, and the last tile of a chunk
publishes the chunk.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ditron_inductor.core.layout import MAX_WORLD
from ditron_inductor.core.order import interleaved_row
from ditron_inductor.core.signals import arrive, data, publish, publish_all
from ditron_inductor.lowering.epilogues import elements_at, prepared


@triton.jit
def slice_offsets(slice_, ROWS: tl.constexpr, TILES: tl.constexpr):
    """Returns the element offsets [ROWS, BLOCK_N], within a block, of the ROWS rows from slice_ * ROWS on."""
    return (slice_ * ROWS + tl.arange(0, ROWS))[:, None] * TILES.BLOCK_N + tl.arange(0, TILES.BLOCK_N)[None, :]


@triton.jit
def block_offsets(block, TILES: tl.constexpr):
    """Returns the element offsets [BLOCK_M, BLOCK_N] of the `block`-th block of a slot."""
    return block.to(tl.int64) * (TILES.BLOCK_M * TILES.BLOCK_N) + slice_offsets(0, TILES.BLOCK_M, TILES)


@triton.jit
def put_in_outbox(outbox, tile, TILES: tl.constexpr):
    """Stores a tile of values [BLOCK_M, BLOCK_N] in the program's outbox. All its threads may load them afterwards."""
    # All threads have to have read the previous content.
    tl.debug_barrier()
    tl.store(outbox + block_offsets(tl.full((), 0, tl.int32), TILES), tile)
    tl.debug_barrier()


class Owned(NamedTuple):
    """The place of a tile in a product [.., N]: its `first` row among the `rows` rows of its owner, and its first
    column. `block` is the argument of `interleaved_row`.
    """

    first: Any
    column: Any
    owner: Any
    rows: Any
    block: Any
    N: Any


@triton.jit
def owned_elements(tile, offs_m, HOW: tl.constexpr):
    """Returns the Elements, in the product, of the rows `offs_m`, counted among the owner's, of an Owned tile."""
    TILES: tl.constexpr = HOW.TILES
    offs_n = tile.column + tl.arange(0, TILES.BLOCK_N)
    inner_m = tl.minimum(offs_m, tile.rows - 1)
    rows = interleaved_row(inner_m, tile.owner, tile.rows, tile.block, HOW.WORLD, HOW.INTERLEAVED).to(tl.int64)
    return elements_at(rows, offs_n, (offs_m < tile.rows)[:, None], (offs_n < tile.N)[None, :], tile.N)


@triton.jit
def put_prepared(outbox, acc, x, tile, PRE: tl.constexpr, SLICE: tl.constexpr, HOW: tl.constexpr):
    """Applies PRE, if there is one, to a tile of the product, rounds it to the dtype of the outbox, and does
    `put_in_outbox`. acc: the tile, fp32. tile: its place, an Owned. x: the extra tensors that PRE reads. SLICE: the
    rows that are computed at once if PRE needs as many registers as the tile itself (PRE_IN_SLICES).
    """
    TILES: tl.constexpr = HOW.TILES
    BLOCK_M: tl.constexpr = TILES.BLOCK_M
    DTYPE: tl.constexpr = outbox.dtype.element_ty
    if PRE is None:
        put_in_outbox(outbox, acc.to(DTYPE), TILES)
    elif HOW.PRE_IN_SLICES:
        put_in_outbox(outbox, acc.to(DTYPE), TILES)
        for i in tl.static_range(BLOCK_M // SLICE):
            inside = slice_offsets(i, SLICE, TILES)
            elements = owned_elements(tile, tile.first + (i * SLICE + tl.arange(0, SLICE)), HOW)
            made = prepared(tl.load(outbox + inside).to(tl.float32), x, elements, DTYPE, PRE)
            tl.store(outbox + inside, made.to(DTYPE))
        tl.debug_barrier()
    else:
        elements = owned_elements(tile, tile.first + tl.arange(0, BLOCK_M), HOW)
        put_in_outbox(outbox, prepared(acc, x, elements, DTYPE, PRE).to(DTYPE), TILES)


class Chunks(NamedTuple):
    """How tiles from one rank to another share flags: counters, tiles, and tiles that have one flag."""

    counters: Any
    tiles: Any
    chunk_tiles: Any


@triton.jit
def completes(chunks, place, tile, HOW: tl.constexpr):
    """Counts `tile`, which has been carried, at `place` of the counters. Returns whether it was the last tile of its
    chunk. It must not be called for a tile without its credits, so that the chunk of such a tile is never published.
    """
    if HOW.COUNTED:
        first = tile // chunks.chunk_tiles * chunks.chunk_tiles
        return arrive(chunks.counters + place, tl.minimum(chunks.chunk_tiles, chunks.tiles - first))
    else:
        return True


@triton.jit
def publish_partial(use, chunks, owner, tile, HOW: tl.constexpr):
    """Tells `owner` that the partial tile `tile`, which this program carried there, is in its slot."""
    chunk = tile // chunks.chunk_tiles
    if completes(chunks, chunk * MAX_WORLD + owner, tile, HOW):
        # All tiles of the chunk lie in the owner's slot, so the owner may add them up.
        publish(use, owner, chunk)


@triton.jit
def publish_to_all(use, chunks, row, tile, HOW: tl.constexpr):
    """Tells all peers that tile `tile`, which was carried, is in their slots. row: that of the first chunk."""
    chunk = row + tile // chunks.chunk_tiles
    if completes(chunks, chunk * MAX_WORLD, tile, HOW):
        publish_all(use, chunk, HOW.WORLD)


@triton.jit
def received_block(own, block, ok, TILES: tl.constexpr):
    """Loads block `block` of the slot data at `own`, whose flag the caller has seen; NaN if ok is 0."""
    offsets = block_offsets(block, TILES)
    return tl.load(own + offsets, mask=(offsets >= 0) & (ok != 0), other=float("nan"))


@triton.jit
def reduced_slice(use, own, tile, tiles_per_owner, slice_, ok, ROWS: tl.constexpr, HOW: tl.constexpr):
    """Returns the sum over all ranks of the rows from slice_ * ROWS on of this rank's tile `tile`, fp32 [ROWS,
    BLOCK_N]; NaN if ok is 0. own: pointer to this rank's own partial tile, a block. Partial tiles are added in rank
    order 0..W-1, whatever the order of arrival, so equal inputs give equal bits. A slice is small enough that all its
    loads are under way at once. The caller has waited for every peer's flag of the tile.
    """
    WORLD: tl.constexpr = HOW.WORLD
    TILES: tl.constexpr = HOW.TILES
    BLOCK_N: tl.constexpr = TILES.BLOCK_N
    base = data(use, use.rank, own.dtype.element_ty)
    inside = slice_offsets(slice_, ROWS, TILES)
    total = tl.zeros((ROWS, BLOCK_N), dtype=tl.float32)
    for source in tl.static_range(WORLD):
        block = (source * tiles_per_owner + tile).to(tl.int64) * (TILES.BLOCK_M * BLOCK_N)
        partial = tl.where(source == use.rank, own, base + block)
        total += tl.load(tl.multiple_of(partial, 16) + inside).to(tl.float32)
    if HOW.AVERAGE:
        total = total / WORLD
    return tl.where(ok != 0, total, float("nan"))
