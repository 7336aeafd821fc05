"""Tiles of products on their way to peers: what kernels share that multiply before they send.

A partial tile lies in its owner's slot as one contiguous [BLOCK_M, BLOCK_N] block: stores to a peer are coalesced and
need no masks, whatever the shape of the problem. Block (source, tile) is `source * tiles_per_owner + tile`. The owner's
own partial stays in the outbox of the program that computed it, which adds it up.

A program puts a finished tile into its *outbox*, a block of its own at the end of the slot, and the K loop of its next
tile carries it to the owner, see core/matmul.py. Then it publishes the tile.

Signals: flag row `tile // chunk_tiles` of an owner, one word for each source. With one tile in a chunk, as long as the
rows suffice, a program publishes its tile itself; else tiles are counted and the last one of a chunk publishes it.
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
    """Element offsets [ROWS, BLOCK_N] of rows slice_ * ROWS, .. in a block."""
    return (slice_ * ROWS + tl.arange(0, ROWS))[:, None] * TILES.BLOCK_N + tl.arange(0, TILES.BLOCK_N)[None, :]


@triton.jit
def block_offsets(block, TILES: tl.constexpr):
    """Element offsets [BLOCK_M, BLOCK_N] of the `block`-th block of a slot."""
    return block.to(tl.int64) * (TILES.BLOCK_M * TILES.BLOCK_N) + slice_offsets(0, TILES.BLOCK_M, TILES)


@triton.jit
def put_in_outbox(outbox, tile, TILES: tl.constexpr):
    """Store a tile of values [BLOCK_M, BLOCK_N] into the program's outbox, for all its threads to load afterwards."""
    # What was in it has been read by all threads.
    tl.debug_barrier()
    tl.store(outbox + block_offsets(tl.full((), 0, tl.int32), TILES), tile)
    tl.debug_barrier()


class Owned(NamedTuple):
    """Where a tile of a product [.., N] lies: its first row among the `rows` of its owner, and its first column; with
    `block` of `interleaved_row`.
    """

    first: Any
    column: Any
    owner: Any
    rows: Any
    block: Any
    N: Any


@triton.jit
def owned_elements(tile, offs_m, HOW: tl.constexpr):
    """The Elements of rows `offs_m`, among those of the owner, of an Owned tile, in the product."""
    TILES: tl.constexpr = HOW.TILES
    offs_n = tile.column + tl.arange(0, TILES.BLOCK_N)
    inner_m = tl.minimum(offs_m, tile.rows - 1)
    rows = interleaved_row(inner_m, tile.owner, tile.rows, tile.block, HOW.WORLD, HOW.INTERLEAVED).to(tl.int64)
    return elements_at(rows, offs_n, (offs_m < tile.rows)[:, None], (offs_n < tile.N)[None, :], tile.N)


@triton.jit
def put_prepared(outbox, acc, x, tile, PRE: tl.constexpr, SLICE: tl.constexpr, HOW: tl.constexpr):
    """`put_in_outbox` of what PRE makes of a tile of the product, rounded as the outbox is; of the tile if it is None.

    tile: which one, an Owned. x: what PRE reads besides. SLICE: rows at a time, where that takes as many registers as
    the tile itself (PRE_IN_SLICES).
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
    """How the tiles that a rank sends to another one share flags: counters, tiles, and how many have one flag."""

    counters: Any
    tiles: Any
    chunk_tiles: Any


@triton.jit
def completes(chunks, place, tile, HOW: tl.constexpr):
    """Whether all tiles of the chunk of `tile` have been carried, with this one; they are counted at `place`.

    A tile that lacked its credit must not come here, so that its chunk is never published.
    """
    if HOW.COUNTED:
        first = tile // chunks.chunk_tiles * chunks.chunk_tiles
        return arrive(chunks.counters + place, tl.minimum(chunks.chunk_tiles, chunks.tiles - first))
    else:
        return True


@triton.jit
def publish_partial(use, chunks, owner, tile, HOW: tl.constexpr):
    """Tell `owner` that partial tile `tile`, carried there by this program, is in its slot."""
    chunk = tile // chunks.chunk_tiles
    if completes(chunks, chunk * MAX_WORLD + owner, tile, HOW):
        # All tiles of the chunk lie in the owner's slot: it may add them up.
        publish(use, owner, chunk)


@triton.jit
def publish_to_all(use, chunks, row, tile, HOW: tl.constexpr):
    """Tell all peers that tile `tile`, carried there by this program, is in their slots. row: of the first chunk."""
    chunk = row + tile // chunks.chunk_tiles
    if completes(chunks, chunk * MAX_WORLD, tile, HOW):
        publish_all(use, chunk, HOW.WORLD)


@triton.jit
def received_block(own, block, ok, TILES: tl.constexpr):
    """The block of a tile in the own slot, at `own`; NaN if ok is 0. The caller has waited for the tile's flag."""
    offsets = block_offsets(block, TILES)
    return tl.load(own + offsets, mask=(offsets >= 0) & (ok != 0), other=float("nan"))


@triton.jit
def reduced_slice(use, own, tile, tiles_per_owner, slice_, ok, ROWS: tl.constexpr, HOW: tl.constexpr):
    """Rows slice_ * ROWS, .. of the sum over all ranks of own tile `tile`, [ROWS, BLOCK_N] in fp32; NaN if ok is 0.

    own: pointer to the own partial, as a block. Added in rank order 0..W-1 whatever the order of arrival, so equal
    inputs give equal bits. A slice at a time, so that all loads of it are under way together. The caller has waited for
    every peer's flag of the tile.
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
