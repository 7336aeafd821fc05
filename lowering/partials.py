"""Partial products on their way to the rank that adds them up: what reduce-scatter and all-reduce kernels share.

A partial tile lies in its owner's slot as one contiguous [BLOCK_M, BLOCK_N] block: stores to a peer are coalesced and
need no masks, whatever the shape of the problem. Block (source, tile) is `source * tiles_per_owner + tile`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ditron_inductor.core.layout import MAX_WORLD
from ditron_inductor.core.signals import arrive, data, publish, wait, wait_credit


@triton.jit
def block_offsets(block, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Element offsets [BLOCK_M, BLOCK_N] of the `block`-th block of a slot."""
    inside = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    return block.to(tl.int64) * (BLOCK_M * BLOCK_N) + inside


@triton.jit
def push_partial(
    acc, table, ctl, counters, owner, tile, owner_tiles, tiles_per_owner, chunk_tiles, alive, rank, slot, site, epoch,
    dtype: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Store partial tile `tile` of `owner` into its slot; the last tile of a chunk publishes flag row `chunk`.

    owner_tiles: how many tiles the owner really has (<= tiles_per_owner, the spacing of the blocks). alive: 0 if the
    workspace was poisoned before this program started: nothing may be sent.
    """
    # Credit: the owner has read what the slot's previous use left there. The own slot is free by stream order.
    ok = alive
    if owner != rank:
        ok = alive & wait_credit(table, ctl, rank, slot, owner, site, epoch)
    if ok != 0:
        offsets = block_offsets(rank * tiles_per_owner + tile, BLOCK_M, BLOCK_N)
        tl.store(data(table, ctl, owner, slot, dtype) + offsets, acc.to(dtype))
        chunk = tile // chunk_tiles
        total = tl.minimum(chunk_tiles, owner_tiles - chunk * chunk_tiles)
        # A tile without its credit does not arrive, so its chunk is never published.
        if arrive(counters + chunk * MAX_WORLD + owner, total):
            # All tiles of the chunk lie in the owner's slot: it may add them up.
            publish(table, owner, slot, chunk, rank, site, epoch)


@triton.jit
def reduce_partials(
    table, ctl, tile, tiles_per_owner, chunk_tiles, alive, rank, slot, site, epoch,
    dtype: tl.constexpr, WORLD: tl.constexpr, AVERAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(sum over sources 0..W-1 of own tile `tile`, fp32 [BLOCK_M, BLOCK_N]; 1, or 0 after a failure, with NaN).

    Added in rank order whatever the order of arrival, so equal inputs give equal bits everywhere.
    """
    ok = alive
    for source in range(WORLD):
        # Acquire: the source's chunk, published after its last tile. The own chunk is finished by other programs.
        ok = ok & wait(table, ctl, rank, slot, tile // chunk_tiles, source, site, epoch)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    if ok != 0:
        base = data(table, ctl, rank, slot, dtype)
        for source in range(WORLD):
            acc += tl.load(base + block_offsets(source * tiles_per_owner + tile, BLOCK_M, BLOCK_N)).to(tl.float32)
    if AVERAGE:
        acc = acc / WORLD
    return tl.where(ok != 0, acc, float("nan")), ok
