"""matmul_all_reduce, strategy `tile`: out = all_reduce(a @ b) in one launch, two-shot, bit-identical on all ranks.

Problem. Every rank holds a [M, K] and b [K, N] of its own slice of K, and every rank wants the whole sum.
Algorithm. Each tile of the output has an owner: the tiles, in grouped order, are dealt out in W equal runs. One queue
of work in three phases. (1) Tiles of the product, those of rank + 1 first, each stored from the accumulator into its
owner's slot. (2) The own tiles: add the W partials in rank order, in fp32, round once, write the own output and push
the result to every peer. (3) The peers' tiles: copy each result from the slot into the output.
Signal protocol. Flag rows below MAX_CHUNKS / 2: a chunk of partials, published by the last tile pushed, read by phase
2. Rows from there on: a chunk of results, published to each peer by the last tile of the chunk, read by phase 3. Phase
1 waits for credits only, phase 2 for phase 1 of all ranks, phase 3 for phase 2: ticket order makes that free of cycles.
The push of phase 2 needs no credit: the partials of the peer, which it waited for, show that the slot is in its new use
there.
Limits. None on M, N, K: edge tiles are masked where they meet the output.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ditron_inductor.core.layout import MAX_CHUNKS, MAX_WORLD
from ditron_inductor.core.matmul import matmul_tile
from ditron_inductor.core.order import gather_order, grouped, scatter_order
from ditron_inductor.core.signals import arrive, current_epoch, data, finish, healthy, publish, take_tile, wait
from ditron_inductor.lowering.config import Config
from ditron_inductor.lowering.launch import Launch, ceil_div, rows_of
from ditron_inductor.lowering.partials import block_offsets, push_partial, reduce_partials
from ditron_inductor.task.nodes import MatmulAllReduce

RESULT_ROW = tl.constexpr(MAX_CHUNKS.value // 2)


@triton.jit
def store_tile(acc, out, tile, num_m, num_n, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Write tile `tile` of out [M, N] contiguous, without what lies beyond its edges."""
    block_row, block_column = grouped(tile, num_m, num_n, GROUP_M)
    offs_m = block_row * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = block_column * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    tl.store(out + offs_m.to(tl.int64)[:, None] * N + offs_n[None, :], acc, mask=inside)


@triton.jit
def push_result(
    result, table, ctl, counters, tile, owner_tiles, tiles_per_owner, chunk_tiles, ok, rank, slot, site, epoch,
    dtype: tl.constexpr, WORLD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Store own result tile `tile` into the slot of every peer; the last one of a chunk publishes it to all."""
    if ok != 0:
        # Behind the W * tiles_per_owner blocks of partials, by owner.
        offsets = block_offsets((WORLD + rank) * tiles_per_owner + tile, BLOCK_M, BLOCK_N)
        for i in range(1, WORLD):
            tl.store(data(table, ctl, (rank + i) % WORLD, slot, dtype) + offsets, result)
        chunk = tile // chunk_tiles
        total = tl.minimum(chunk_tiles, owner_tiles - chunk * chunk_tiles)
        # A tile that could not be added up does not arrive, so its chunk is never published.
        if arrive(counters + (RESULT_ROW + chunk) * MAX_WORLD, total):
            # The chunk's results lie in every peer's slot: they may copy them out.
            for i in range(1, WORLD):
                publish(table, (rank + i) % WORLD, slot, RESULT_ROW + chunk, rank, site, epoch)


@triton.jit(do_not_specialize=["rank", "slot", "site", "chunk_tiles"])
def matmul_all_reduce_kernel(
    a, b, out, table, ctl, counters,
    M, N, K, stride_am, stride_bk, stride_bn,
    rank, slot, site, chunk_tiles,
    WORLD: tl.constexpr, AVERAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    EVEN_K: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """See the module. a [M, K] with contiguous K; out [M, N] contiguous."""
    epoch = current_epoch(ctl, slot)
    alive = healthy(ctl)
    num_m = tl.cdiv(M, BLOCK_M)
    num_n = tl.cdiv(N, BLOCK_N)
    tiles = num_m * num_n
    tiles_per_owner = tl.cdiv(tiles, WORLD)
    own_tiles = tl.minimum(tiles_per_owner, tiles - rank * tiles_per_owner)
    dtype: tl.constexpr = out.dtype.element_ty
    ticket = take_tile(ctl, slot)
    while ticket < WORLD * tiles_per_owner:
        owner = scatter_order(ticket // tiles_per_owner, rank, WORLD)
        tile = ticket % tiles_per_owner
        owner_tiles = tl.minimum(tiles_per_owner, tiles - owner * tiles_per_owner)
        if tile < owner_tiles:
            block_row, block_column = grouped(owner * tiles_per_owner + tile, num_m, num_n, GROUP_M)
            offs_m = tl.minimum(block_row * BLOCK_M + tl.arange(0, BLOCK_M), M - 1).to(tl.int64)
            acc = matmul_tile(
                a + offs_m * stride_am, b, stride_bk, stride_bn, block_column * BLOCK_N, N, K,
                BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, PRECISION, UPCAST,
            )  # fmt: skip
            push_partial(
                acc, table, ctl, counters, owner, tile, owner_tiles, tiles_per_owner, chunk_tiles, alive, rank, slot,
                site, epoch, dtype, BLOCK_M, BLOCK_N,
            )  # fmt: skip
        ticket = take_tile(ctl, slot)
    while ticket < (WORLD + 1) * tiles_per_owner:
        tile = ticket - WORLD * tiles_per_owner
        if tile < own_tiles:
            acc, ok = reduce_partials(
                table, ctl, tile, tiles_per_owner, chunk_tiles, alive, rank, slot, site, epoch,
                dtype, WORLD, AVERAGE, BLOCK_M, BLOCK_N,
            )  # fmt: skip
            result = acc.to(dtype)
            store_tile(result, out, rank * tiles_per_owner + tile, num_m, num_n, M, N, BLOCK_M, BLOCK_N, GROUP_M)
            push_result(
                result, table, ctl, counters, tile, own_tiles, tiles_per_owner, chunk_tiles, ok, rank, slot, site,
                epoch, dtype, WORLD, BLOCK_M, BLOCK_N,
            )  # fmt: skip
        ticket = take_tile(ctl, slot)
    while ticket < 2 * WORLD * tiles_per_owner:
        position = ticket - WORLD * tiles_per_owner
        owner = gather_order(position // tiles_per_owner, rank, WORLD)
        tile = position % tiles_per_owner
        if tile < tl.minimum(tiles_per_owner, tiles - owner * tiles_per_owner):
            # Acquire: the owner's results of the chunk, which it pushed before it published this flag.
            ok = alive & wait(table, ctl, rank, slot, RESULT_ROW + tile // chunk_tiles, owner, site, epoch)
            offsets = block_offsets((WORLD + owner) * tiles_per_owner + tile, BLOCK_M, BLOCK_N)
            source = data(table, ctl, rank, slot, dtype) + offsets
            result = tl.load(source, mask=(offsets >= 0) & (ok != 0), other=float("nan"))
            store_tile(result, out, owner * tiles_per_owner + tile, num_m, num_n, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        ticket = take_tile(ctl, slot)
    finish(table, ctl, rank, slot, site, epoch, WORLD)


@dataclass(frozen=True)
class Geometry:
    """Sizes that all ranks share: the output [M, N], the tile shape, tiles of one owner, the slot's bytes."""

    M: int
    N: int
    config: Config
    owned: int
    nbytes: int


def geometry(node: MatmulAllReduce, launch: Launch, a: torch.Tensor, columns: int) -> Geometry:
    """a [.., K]; columns: N. See Geometry."""
    M = math.prod(a.shape[:-1])
    config = launch.config(rows=M, columns=columns, repeats=1, dtype=a.dtype)
    owned = ceil_div(ceil_div(M, config.block_m) * ceil_div(columns, config.block_n), node.world_size)
    # Two areas of W * owned tiles each: partials by source, and results by owner.
    nbytes = 2 * node.world_size * owned * config.block_m * config.block_n * a.element_size()
    return Geometry(M=M, N=columns, config=config, owned=owned, nbytes=nbytes)


def matmul_all_reduce(
    node: MatmulAllReduce, launch: Launch, sizes: Geometry, a: torch.Tensor, b: torch.Tensor
) -> torch.Tensor:
    """a [.., K], b [K, N]; returns [.., N]. See the module."""
    out = a.new_empty([*a.shape[:-1], sizes.N])
    a_rows = rows_of(a)
    K = b.shape[0]
    with launch.call(nbytes=sizes.nbytes) as call:
        matmul_all_reduce_kernel[(launch.programs(2 * node.world_size * sizes.owned, sizes.config),)](
            a_rows,
            b,
            out,
            call.table,
            call.ctl,
            call.counters,
            M=sizes.M,
            N=sizes.N,
            K=K,
            stride_am=a_rows.stride(0),
            stride_bk=b.stride(0),
            stride_bn=b.stride(1),
            rank=launch.rank,
            slot=call.slot,
            site=call.site,
            chunk_tiles=launch.chunk_tiles(sizes.owned, RESULT_ROW.value),
            WORLD=node.world_size,
            AVERAGE=node.reduce_op == "avg",
            **launch.constants(sizes.config, K, a.dtype),
        )
    return out
