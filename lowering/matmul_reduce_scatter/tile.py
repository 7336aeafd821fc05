"""matmul_reduce_scatter, strategy `tile`: out = reduce_scatter(a @ b) in one launch.

Problem. Every rank holds a [M, K] and b [K, N] of its own slice of K; rank r wants the r-th chunk of rows of the sum.
Algorithm. One queue of work. First the tiles of the product, those of rank + 1 first and the own ones last, each stored
straight from the accumulator into the slot of the rank that owns its rows. Then the own tiles: add the W partial tiles
in rank order, in fp32, and write the output. Partials are rounded to the output's dtype, as they are without fusion.
Signal protocol. Flag row `chunk` (a run of tiles of one owner) is published once by the last tile of the chunk and read
by the reductions of the chunk. A push waits for the owner's credit for the slot's previous use; credits are given when
all programs have finished. Every push precedes every flag wait in ticket order.
Limits. The scattered dimension is not the last one, and the group's size divides it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ditron_inductor.core.layout import MAX_CHUNKS
from ditron_inductor.core.matmul import matmul_tile
from ditron_inductor.core.order import grouped, interleaved_row, scatter_order
from ditron_inductor.core.signals import current_epoch, finish, healthy, take_tile
from ditron_inductor.lowering.config import Config
from ditron_inductor.lowering.launch import Launch, ceil_div, rows_of
from ditron_inductor.lowering.partials import push_partial, reduce_partials
from ditron_inductor.task.nodes import MatmulReduceScatter


@triton.jit(do_not_specialize=["rank", "slot", "site", "chunk_tiles"])
def matmul_reduce_scatter_kernel(
    a, b, out, table, ctl, counters,
    rows, N, K, block, stride_am, stride_bk, stride_bn,
    rank, slot, site, chunk_tiles,
    WORLD: tl.constexpr, AVERAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    EVEN_K: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """See the module. a [WORLD * rows, K] with contiguous K; out [rows, N] contiguous; block: see interleaved_row."""
    epoch = current_epoch(ctl, slot)
    alive = healthy(ctl)
    num_m = tl.cdiv(rows, BLOCK_M)
    num_n = tl.cdiv(N, BLOCK_N)
    tiles = num_m * num_n
    dtype: tl.constexpr = out.dtype.element_ty
    ticket = take_tile(ctl, slot)
    while ticket < WORLD * tiles:
        owner = scatter_order(ticket // tiles, rank, WORLD)
        tile = ticket % tiles
        block_row, block_column = grouped(tile, num_m, num_n, GROUP_M)
        offs_m = tl.minimum(block_row * BLOCK_M + tl.arange(0, BLOCK_M), rows - 1).to(tl.int64)
        a_rows = a + interleaved_row(offs_m, owner, block, WORLD) * stride_am
        acc = matmul_tile(
            a_rows, b, stride_bk, stride_bn, block_column * BLOCK_N, N, K,
            BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, PRECISION, UPCAST,
        )  # fmt: skip
        push_partial(
            acc, table, ctl, counters, owner, tile, tiles, tiles, chunk_tiles, alive, rank, slot, site, epoch,
            dtype, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        ticket = take_tile(ctl, slot)
    while ticket < (WORLD + 1) * tiles:
        tile = ticket - WORLD * tiles
        acc, _ok = reduce_partials(
            table, ctl, tile, tiles, chunk_tiles, alive, rank, slot, site, epoch,
            dtype, WORLD, AVERAGE, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        block_row, block_column = grouped(tile, num_m, num_n, GROUP_M)
        offs_m = block_row * BLOCK_M + tl.arange(0, BLOCK_M)
        offs_n = block_column * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = (offs_m < rows)[:, None] & (offs_n < N)[None, :]
        tl.store(out + offs_m.to(tl.int64)[:, None] * N + offs_n[None, :], acc.to(dtype), mask=inside)
        ticket = take_tile(ctl, slot)
    finish(table, ctl, rank, slot, site, epoch, WORLD)


@dataclass(frozen=True)
class Geometry:
    """Sizes that all ranks share: the output [rows, N], the tile shape, tiles of one output, the slot's bytes."""

    rows: int
    N: int
    config: Config
    tiles: int
    nbytes: int


def geometry(node: MatmulReduceScatter, launch: Launch, a: torch.Tensor, columns: int) -> Geometry:
    """a [.., W*S, .., K] with W*S at `scatter_dim`; columns: N. See Geometry."""
    rows = math.prod(a.shape[:-1]) // node.world_size
    config = launch.config(rows=rows, columns=columns, repeats=node.world_size, dtype=a.dtype)
    tiles = ceil_div(rows, config.block_m) * ceil_div(columns, config.block_n)
    nbytes = node.world_size * tiles * config.block_m * config.block_n * a.element_size()
    return Geometry(rows=rows, N=columns, config=config, tiles=tiles, nbytes=nbytes)


def matmul_reduce_scatter(
    node: MatmulReduceScatter, launch: Launch, sizes: Geometry, a: torch.Tensor, b: torch.Tensor
) -> torch.Tensor:
    """a [.., W*S, .., K] with W*S at `scatter_dim`, b [K, N]; returns [.., S, .., N]. See the module."""
    shape = [*a.shape[:-1], sizes.N]
    shape[node.scatter_dim] //= node.world_size
    out = a.new_empty(shape)
    a_rows = rows_of(a)
    K = b.shape[0]
    with launch.call(nbytes=sizes.nbytes) as call:
        matmul_reduce_scatter_kernel[(launch.programs((node.world_size + 1) * sizes.tiles, sizes.config),)](
            a_rows,
            b,
            out,
            call.table,
            call.ctl,
            call.counters,
            rows=sizes.rows,
            N=sizes.N,
            K=K,
            block=launch.shard_block(list(out.shape), node.scatter_dim),
            stride_am=a_rows.stride(0),
            stride_bk=b.stride(0),
            stride_bn=b.stride(1),
            rank=launch.rank,
            slot=call.slot,
            site=call.site,
            chunk_tiles=launch.chunk_tiles(sizes.tiles, MAX_CHUNKS.value),
            WORLD=node.world_size,
            AVERAGE=node.reduce_op == "avg",
            **launch.constants(sizes.config, K, a.dtype),
        )
    return out
