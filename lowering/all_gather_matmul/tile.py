"""all_gather_matmul, strategy `tile`: out_i = all_gather(shard) @ weight_i in one launch.

Problem. Every rank holds a shard of the activations, rows [S, K] once flattened, and its own weights [K, N_i].
Algorithm. Two queues of work. The *send* queue pushes the own shard, chunk by chunk (a chunk is `group_m` block rows),
into the slot of every peer: rank - 1 first, since that rank's tiles come to this shard first. The *tile* queue computes
output tiles: those of the own shard, which need no wait, then those of rank + 1, rank + 2, ... A few programs start on
the send queue, the others on the tile queue; a program that comes to a remote tile first helps to empty the send queue,
so every send precedes every wait and a launch completes even with one resident program. Where the gathered tensor is
wanted elsewhere too, the last tickets copy it out of the slot.
Signal protocol. Flag row `chunk`, written once per launch by the last program that pushed a piece of the chunk to that
peer, read by every tile of the chunk. A push waits for the peer's credit for the slot's previous use; credits are given
when all programs have finished, that is when nobody reads the slot any more.
Limits. K is the last dimension of the shard and the gathered dimension another one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from ditron_inductor.core.layout import MAX_CHUNKS, MAX_WORLD
from ditron_inductor.core.matmul import matmul_tile
from ditron_inductor.core.order import gather_order, grouped, interleaved_row
from ditron_inductor.core.signals import (
    arrive,
    current_epoch,
    data,
    finish,
    healthy,
    publish,
    take_send,
    take_tile,
    wait,
    wait_credit,
)
from ditron_inductor.lowering.config import Config
from ditron_inductor.lowering.launch import Launch, ceil_div, round_up
from ditron_inductor.task.nodes import AllGatherMatmul

SEND_BLOCK = 8192
"""Elements that a program copies in one step; SEND_STEPS of them are one piece of the send queue."""
SEND_STEPS = 8
SENDERS = 32
"""Programs that start on the send queue: enough to fill the links."""
INTERPRETED_SEND_BLOCK = 512


@triton.jit
def drain_sends(
    shard, table, ctl, counters, numel, chunk_numel, num_chunks, slot_stride, alive, rank, slot, site, epoch,
    WORLD: tl.constexpr, SEND_BLOCK: tl.constexpr, SEND_STEPS: tl.constexpr,
):  # fmt: skip
    """Take pieces of the own shard from the send queue, push each to its peer, until none is left.

    None at all if the workspace was poisoned before this program started (alive is 0).
    """
    pieces = tl.cdiv(chunk_numel, SEND_BLOCK * SEND_STEPS)
    num_sends = (WORLD - 1) * num_chunks * pieces
    ticket = num_sends
    if alive != 0:
        ticket = take_send(ctl, slot)
    while ticket < num_sends:
        target = (rank + WORLD - 1 - ticket // (num_chunks * pieces)) % WORLD
        chunk = ticket // pieces % num_chunks
        if wait_credit(table, ctl, rank, slot, target, site, epoch) != 0:
            first = chunk.to(tl.int64) * chunk_numel
            end = tl.minimum(first + chunk_numel, numel)
            first += (ticket % pieces).to(tl.int64) * (SEND_BLOCK * SEND_STEPS)
            remote = data(table, ctl, target, slot, shard.dtype.element_ty) + rank.to(tl.int64) * slot_stride
            for i in range(SEND_STEPS):
                offsets = first + i * SEND_BLOCK + tl.arange(0, SEND_BLOCK)
                inside = offsets < end
                tl.store(remote + offsets, tl.load(shard + offsets, mask=inside), mask=inside)
            # A piece without its credit does not arrive, so its chunk is never published.
            if arrive(counters + chunk * MAX_WORLD + target, pieces):
                # Every piece of the chunk lies in the target's slot: its tiles of this chunk may start.
                publish(table, target, slot, chunk, rank, site, epoch)
        ticket = take_send(ctl, slot)


@triton.jit
def shard_of(shard, table, ctl, source, rank, slot, slot_stride):
    """Pointer to the rows of `source`: the own shard where it is, a peer's in this rank's slot."""
    received = data(table, ctl, rank, slot, shard.dtype.element_ty) + source.to(tl.int64) * slot_stride
    return tl.where(source == rank, shard, received)


@triton.jit
def copy_gathered(
    ticket, shard, gathered, table, ctl, rows, K, block, slot_stride, group_rows, alive, rank, slot, site, epoch,
    WORLD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Copy tile `ticket` of the gathered tensor to the caller's output, NaN after a failure."""
    num_m = tl.cdiv(rows, BLOCK_M)
    num_k = tl.cdiv(K, BLOCK_N)
    source = gather_order(ticket // (num_m * num_k), rank, WORLD)
    block_row = ticket // num_k % num_m
    ok = alive
    if source != rank:
        ok = alive & wait(table, ctl, rank, slot, block_row * BLOCK_M // group_rows, source, site, epoch)
    offs_m = block_row * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_k = ticket % num_k * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (offs_m < rows)[:, None] & (offs_k < K)[None, :]
    base = shard_of(shard, table, ctl, source, rank, slot, slot_stride)
    offsets = offs_m.to(tl.int64)[:, None] * K + offs_k[None, :]
    tile = tl.load(base + offsets, mask=inside & (ok != 0), other=float("nan"))
    out_rows = interleaved_row(offs_m.to(tl.int64), source, block, WORLD)
    tl.store(gathered + out_rows[:, None] * K + offs_k[None, :], tile, mask=inside)


@triton.jit(do_not_specialize=["rows", "rank", "slot", "site", "senders", "num_chunks"])
def all_gather_matmul_kernel(
    shard, weights, outs, gathered, table, ctl, counters,
    rows, K, block, columns, strides_bk, strides_bn, slot_stride,
    rank, slot, site, senders, num_chunks,
    WORLD: tl.constexpr, NUM_WEIGHTS: tl.constexpr, RETURN_GATHERED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    EVEN_K: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    SEND_BLOCK: tl.constexpr, SEND_STEPS: tl.constexpr,
):  # fmt: skip
    """See the module. shard [rows, K] contiguous; weights, outs, columns, strides_b*: tuples of NUM_WEIGHTS."""
    epoch = current_epoch(ctl, slot)
    alive = healthy(ctl)
    num_m = tl.cdiv(rows, BLOCK_M)
    num_n = tl.cdiv(columns[0], BLOCK_N)
    for i in tl.static_range(1, NUM_WEIGHTS):
        num_n += tl.cdiv(columns[i], BLOCK_N)
    chunk_numel = GROUP_M * BLOCK_M * K
    pushed = tl.full((), 0, tl.int32)
    if tl.program_id(0) < senders:
        drain_sends(
            shard, table, ctl, counters, rows.to(tl.int64) * K, chunk_numel, num_chunks, slot_stride,
            alive, rank, slot, site, epoch, WORLD, SEND_BLOCK, SEND_STEPS,
        )  # fmt: skip
        pushed += 1
    shard_tiles = num_m * num_n
    ticket = take_tile(ctl, slot)
    while ticket < WORLD * shard_tiles:
        source = gather_order(ticket // shard_tiles, rank, WORLD)
        block_row, block_column = grouped(ticket % shard_tiles, num_m, num_n, GROUP_M)
        ok = alive
        if source != rank:
            if pushed == 0:
                drain_sends(
                    shard, table, ctl, counters, rows.to(tl.int64) * K, chunk_numel, num_chunks, slot_stride,
                    alive, rank, slot, site, epoch, WORLD, SEND_BLOCK, SEND_STEPS,
                )  # fmt: skip
                pushed += 1
            # Acquire: the whole chunk, which its source pushed before it published this flag.
            ok = alive & wait(table, ctl, rank, slot, block_row // GROUP_M, source, site, epoch)
        weight, out, N, stride_bk, stride_bn = weights[0], outs[0], columns[0], strides_bk[0], strides_bn[0]
        first = 0
        before = tl.cdiv(columns[0], BLOCK_N)
        for i in tl.static_range(1, NUM_WEIGHTS):
            mine = block_column >= before
            weight = tl.where(mine, weights[i], weight)
            out = tl.where(mine, outs[i], out)
            N = tl.where(mine, columns[i], N)
            stride_bk = tl.where(mine, strides_bk[i], stride_bk)
            stride_bn = tl.where(mine, strides_bn[i], stride_bn)
            first = tl.where(mine, before, first)
            before += tl.cdiv(columns[i], BLOCK_N)
        column = (block_column - first) * BLOCK_N
        offs_m = block_row * BLOCK_M + tl.arange(0, BLOCK_M)
        base = shard_of(shard, table, ctl, source, rank, slot, slot_stride)
        a_rows = base + tl.minimum(offs_m, rows - 1).to(tl.int64) * K
        acc = matmul_tile(
            a_rows, weight, stride_bk, stride_bn, column, N, K, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, PRECISION, UPCAST
        )
        acc = tl.where(ok != 0, acc, float("nan"))
        offs_n = column + tl.arange(0, BLOCK_N)
        out_rows = interleaved_row(offs_m.to(tl.int64), source, block, WORLD)
        inside = (offs_m < rows)[:, None] & (offs_n < N)[None, :]
        tl.store(out + out_rows[:, None] * N + offs_n[None, :], acc.to(out.dtype.element_ty), mask=inside)
        ticket = take_tile(ctl, slot)
    if RETURN_GATHERED:
        ticket -= WORLD * shard_tiles
        while ticket < WORLD * num_m * tl.cdiv(K, BLOCK_N):
            copy_gathered(
                ticket, shard, gathered, table, ctl, rows, K, block, slot_stride, GROUP_M * BLOCK_M, alive, rank, slot,
                site, epoch, WORLD, BLOCK_M, BLOCK_N,
            )  # fmt: skip
            ticket = take_tile(ctl, slot) - WORLD * shard_tiles
    finish(table, ctl, rank, slot, site, epoch, WORLD)


@dataclass(frozen=True)
class Geometry:
    """Sizes that all ranks share: rows of a shard, their chunks in the slot, the tile shape, the slot's bytes."""

    rows: int
    K: int
    config: Config
    num_chunks: int
    slot_stride: int
    nbytes: int


def geometry(node: AllGatherMatmul, launch: Launch, shard: torch.Tensor, columns: int) -> Geometry:
    """columns: of all weights together, the largest on any rank. See Geometry."""
    K = shard.shape[-1]
    rows = math.prod(shard.shape[:-1])
    config = launch.config(rows=rows, columns=columns, repeats=node.world_size, dtype=shard.dtype)
    blocks = ceil_div(rows, config.block_m)
    if blocks > config.group_m * MAX_CHUNKS.value:
        config = replace(config, group_m=1 << (ceil_div(blocks, MAX_CHUNKS.value) - 1).bit_length())
    slot_stride = round_up(rows * K, 128)
    return Geometry(
        rows=rows,
        K=K,
        config=config,
        num_chunks=ceil_div(blocks, config.group_m),
        slot_stride=slot_stride,
        nbytes=node.world_size * slot_stride * shard.element_size(),
    )


def all_gather_matmul(
    node: AllGatherMatmul, launch: Launch, sizes: Geometry, shard: torch.Tensor, weights: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """shard [.., S, .., K] with S at `gather_dim`, weights [K, N_i].

    Returns the products [rows, N_i], then the gathered tensor [.., W*S, .., K] if the node wants it. See the module.
    """
    shard = shard.contiguous()
    shape = list(shard.shape)
    config = sizes.config
    outs = [shard.new_empty(node.world_size * sizes.rows, weight.shape[1]) for weight in weights]
    gathered = shard
    if node.return_gathered:
        gathered_shape = list(shape)
        gathered_shape[node.gather_dim] *= node.world_size
        gathered = shard.new_empty(gathered_shape)
    num_n = sum(ceil_div(weight.shape[1], config.block_n) for weight in weights)
    tiles = node.world_size * ceil_div(sizes.rows, config.block_m) * num_n
    with launch.call(nbytes=sizes.nbytes) as call:
        all_gather_matmul_kernel[(launch.programs(tiles, config),)](
            shard,
            tuple(weights),
            tuple(outs),
            gathered,
            call.table,
            call.ctl,
            call.counters,
            rows=sizes.rows,
            K=sizes.K,
            block=launch.shard_block(shape, node.gather_dim),
            columns=tuple(weight.shape[1] for weight in weights),
            strides_bk=tuple(weight.stride(0) for weight in weights),
            strides_bn=tuple(weight.stride(1) for weight in weights),
            slot_stride=sizes.slot_stride,
            rank=launch.rank,
            slot=call.slot,
            site=call.site,
            senders=SENDERS,
            num_chunks=sizes.num_chunks,
            WORLD=node.world_size,
            NUM_WEIGHTS=len(weights),
            RETURN_GATHERED=node.return_gathered,
            **launch.constants(config, sizes.K, shard.dtype),
            SEND_BLOCK=INTERPRETED_SEND_BLOCK if launch.interpreted else SEND_BLOCK,
            SEND_STEPS=1 if launch.interpreted else SEND_STEPS,
        )
    return [*outs, gathered] if node.return_gathered else outs
