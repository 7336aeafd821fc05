"""Static tile orders: which rank's chunk comes first, and how tiles follow each other inside a chunk."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gather_order(step, rank, WORLD: tl.constexpr):
    """Returns the source of the `step`-th chunk when gathering: rank, rank + 1, ..; the own chunk needs no wait."""
    return (rank + step) % WORLD


@triton.jit
def scatter_order(step, rank, WORLD: tl.constexpr):
    """Returns the destination of the `step`-th chunk when scattering: rank + 1, ..., the rank's own chunk last."""
    return (rank + 1 + step) % WORLD


@triton.jit
def grouped(tile, num_m, num_n, GROUP_M: tl.constexpr):
    """Returns (block row, block column) of the `tile`-th tile, column by column within groups of GROUP_M block rows.
    Tiles that run together then share operands in L2, and a group's rows finish together.
    """
    group_tiles = GROUP_M * num_n
    first_m = (tile // group_tiles) * GROUP_M
    group_rows = tl.minimum(num_m - first_m, GROUP_M)
    inside = tile % group_tiles
    return first_m + inside % group_rows, inside // group_rows


@triton.jit
def interleaved_row(row, chunk, rows, block, WORLD: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Returns the row of the whole tensor that corresponds to row `row` of the shard of rank `chunk`, which has `rows`
    rows. A gather or scatter along an inner dimension interleaves the shards (INTERLEAVED). Each shard then holds runs
    of `block` consecutive rows, where `block` is the product of the shard's sizes from that dimension to the last but
    one.
    """
    if INTERLEAVED:
        return (row // block) * (block * WORLD) + chunk * block + row % block
    else:
        return chunk * rows + row
