"""Partial products on their way to the rank that adds them up: what reduce-scatter and all-reduce kernels share.

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
def block_offsets(block, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Element offsets [BLOCK_M, BLOCK_N] of the `block`-th block of a slot."""
    inside = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    return block.to(tl.int64) * (BLOCK_M * BLOCK_N) + inside


@triton.jit
def put_in_outbox(outbox, tile, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Store a tile of values [BLOCK_M, BLOCK_N] into the program's outbox, for all its threads to load afterwards."""
    # What was in it has been read by all threads.
    tl.debug_barrier()
    tl.store(outbox + block_offsets(tl.full((), 0, tl.int32), BLOCK_M, BLOCK_N), tile)
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
def owned_elements(tile, offs_m, TILES: tl.constexpr, WORLD: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The Elements of rows `offs_m`, among those of the owner, of an Owned tile, in the product."""
    offs_n = tile.column + tl.arange(0, TILES.BLOCK_N)
    inner_m = tl.minimum(offs_m, tile.rows - 1)
    rows = interleaved_row(inner_m, tile.owner, tile.rows, tile.block, WORLD, INTERLEAVED).to(tl.int64)
    return elements_at(rows, offs_n, (offs_m < tile.rows)[:, None], (offs_n < tile.N)[None, :], tile.N)


@triton.jit
def put_prepared(
    outbox, acc, x, tile, PRE: tl.constexpr, SLICE: tl.constexpr,
    TILES: tl.constexpr, WORLD: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """`put_in_outbox` of what PRE makes of a tile of the product, rounded as the outbox is; of the tile if it is None.

    tile: which one, an Owned. x: what PRE reads besides. SLICE: rows at a time, where that takes as many registers as
    the tile itself; 0 for all.
    """
    BLOCK_M: tl.constexpr = TILES.BLOCK_M
    DTYPE: tl.constexpr = outbox.dtype.element_ty
    if PRE is None:
        put_in_outbox(outbox, acc.to(DTYPE), TILES.BLOCK_M, TILES.BLOCK_N)
    else:
        if SLICE > 0:
            put_in_outbox(outbox, acc.to(DTYPE), TILES.BLOCK_M, TILES.BLOCK_N)
            for i in tl.static_range(BLOCK_M // SLICE):
                slice_m = i * SLICE + tl.arange(0, SLICE)
                inside = slice_m[:, None] * TILES.BLOCK_N + tl.arange(0, TILES.BLOCK_N)[None, :]
                elements = owned_elements(tile, tile.first + slice_m, TILES, WORLD, INTERLEAVED)
                made = prepared(tl.load(outbox + inside).to(tl.float32), x, elements, DTYPE, PRE)
                tl.store(outbox + inside, made.to(DTYPE))
            tl.debug_barrier()
        else:
            offs_m = tile.first + tl.arange(0, TILES.BLOCK_M)
            elements = owned_elements(tile, offs_m, TILES, WORLD, INTERLEAVED)
            result = prepared(acc, x, elements, DTYPE, PRE)
            put_in_outbox(outbox, result.to(DTYPE), TILES.BLOCK_M, TILES.BLOCK_N)


@triton.jit
def publish_partial(use, counters, owner, tile, owner_tiles, chunk_tiles, COUNTED: tl.constexpr):
    """Tell `owner` that partial tile `tile`, carried there by this program, is in its slot.

    owner_tiles: how many tiles the owner has. A tile that lacked its credit must not come here, so that its chunk is
    never published. COUNTED: chunk_tiles > 1.
    """
    chunk = tile // chunk_tiles
    if COUNTED:
        total = tl.minimum(chunk_tiles, owner_tiles - chunk * chunk_tiles)
        if arrive(counters + chunk * MAX_WORLD + owner, total):
            # All tiles of the chunk lie in the owner's slot: it may add them up.
            publish(use, owner, chunk)
    else:
        publish(use, owner, chunk)


@triton.jit
def publish_to_all(use, counters, row, tile, tiles, chunk_tiles, WORLD: tl.constexpr, COUNTED: tl.constexpr):
    """Tell all peers that tile `tile` of `tiles`, carried there by this program, is in their slots.

    row: the first flag row of such tiles. COUNTED: chunk_tiles > 1.
    """
    chunk = tile // chunk_tiles
    if COUNTED:
        total = tl.minimum(chunk_tiles, tiles - chunk * chunk_tiles)
        if arrive(counters + (row + chunk) * MAX_WORLD, total):
            publish_all(use, row + chunk, WORLD)
    else:
        publish_all(use, row + chunk, WORLD)


@triton.jit
def reduced_slice(
    use, own, tile, tiles_per_owner, slice_, ok,
    WORLD: tl.constexpr, AVERAGE: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Rows slice_ * ROWS, .. of the sum over all ranks of own tile `tile`, [ROWS, BLOCK_N] in fp32; NaN if ok is 0.

    own: pointer to the own partial, as a block. Added in rank order 0..W-1 whatever the order of arrival, so equal
    inputs give equal bits. A slice at a time, so that all loads of it are under way together. The caller has waited for
    every peer's flag of the tile.
    """
    BLOCK_N: tl.constexpr = TILES.BLOCK_N
    base = data(use, use.rank, own.dtype.element_ty)
    inside = (slice_ * ROWS + tl.arange(0, ROWS))[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    total = tl.zeros((ROWS, BLOCK_N), dtype=tl.float32)
    for source in tl.static_range(WORLD):
        block = (source * tiles_per_owner + tile).to(tl.int64) * (TILES.BLOCK_M * BLOCK_N)
        partial = tl.where(source == use.rank, own, base + block)
        total += tl.load(tl.multiple_of(partial, 16) + inside).to(tl.float32)
    if AVERAGE:
        total = total / WORLD
    return tl.where(ok != 0, total, float("nan"))
