"""all_gather_contract, strategy `tile`: out_i = G.T @ factor_i, or factor_i @ G, in one launch.

Problem. Every rank holds a shard of G [W*S, C] (the transpose of one where the last dimension is gathered), and its own
factors [W*S, N_i]; the products contract the gathered dimension, so that each output tile needs every rank's shard.
Algorithm. A chunk is a run of `group_m` blocks of C, with all of its S. The first tickets of the tile queue stand for
senders: whoever takes one pushes pieces of the own shard, chunk by chunk, each to every peer, until the send queue is
empty. All others compute output tiles, those of the first chunk first: one K loop for each rank's part of the tile, the
fp32 accumulator kept from one to the next. Where the gathered tensor is wanted elsewhere too, the last tickets copy it
out of the slot.
Order of the sums. Ranks 0..W-1, whatever the own rank: a tile needs all parts of its chunk before it is done, so
nothing is gained by the own one first; and where the factors are the same on all ranks, so are the bits of the outputs.
Signal protocol. Flag row `chunk`, written once per launch by the last program that pushed a piece of the chunk to that
peer, read by every tile of the chunk, once for each source and before its K loop. A push waits for the credits of all
peers for the slot's previous use; the next launch gives those of this one. Every wait for a flag belongs to a ticket
behind the senders', and these wait for credits only: a launch completes even with one resident program.
Limits. Operands are loaded by pointers, not by descriptors: see core/matmul_strided.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ditron_inductor.core.matmul_strided import matmul_steps_strided
from ditron_inductor.core.order import grouped
from ditron_inductor.core.signals import (
    Words,
    credits_due,
    data,
    finish,
    healthy,
    settle,
    take_send,
    take_tile,
    use_of,
    wait,
    wait_credits,
)
from ditron_inductor.core.trace import COPY, SEND, TILE, WAIT, event, now
from ditron_inductor.lowering.config import Config
from ditron_inductor.lowering.gathers import (
    INTERPRETED_SEND_BLOCK,
    SEND_BLOCK,
    SEND_STEPS,
    SENDERS,
    sent_piece,
    shard_of,
)
from ditron_inductor.lowering.host.launch import Launch, ceil_div, dot_precision, round_up
from ditron_inductor.lowering.host.launcher import Arguments
from ditron_inductor.task.nodes import AllGatherContract, Contraction

MOST_CHUNKS = 8
"""Of a shard: the first tiles start when one of them has come, and each has a flag that every tile looks at."""
INTERPRETED_SENDERS = 2


@triton.jit
def drain_sends(
    use, ticket, shard, counters, num_sends, pieces, chunk_numel, width, pitch, limit, slot_stride, WORLD: tl.constexpr,
    SEND_BLOCK: tl.constexpr, SEND_STEPS: tl.constexpr, TRACE: tl.constexpr,
):  # fmt: skip
    """Push piece `ticket` of the own shard to its peer, take the next one from the send queue, until none is left.

    A chunk is `width` of the `limit` columns of the shard [.., pitch], `chunk_numel` elements; one row where chunks lie
    together. It goes to every peer before the next one does.
    """
    while ticket < num_sends:
        began = now(TRACE)
        target = (use.rank + WORLD - 1 - ticket // pieces % (WORLD - 1)) % WORLD
        chunk = ticket // (pieces * (WORLD - 1))
        place = data(use, target, shard.dtype.element_ty) + use.rank.to(tl.int64) * slot_stride
        if wait_credits(use, WORLD) != 0:
            for i in range(SEND_STEPS):
                index = ticket % pieces * (SEND_BLOCK * SEND_STEPS) + i * SEND_BLOCK + tl.arange(0, SEND_BLOCK)
                column = chunk.to(tl.int64) * width + index % width
                offsets = (index // width).to(tl.int64) * pitch + column
                inside = (index < chunk_numel) & (column < limit)
                tl.store(place + offsets, tl.load(shard + offsets, mask=inside), mask=inside)
            sent_piece(use, counters, target, chunk, pieces)
        event(use, began, chunk, target, SEND, TRACE)
        ticket = take_send(use)


@triton.jit
def copy_whole(
    use, ticket, shard, gathered, numel, run, slot_stride, num_chunks, alive, WORLD: tl.constexpr,
    SEND_BLOCK: tl.constexpr, SEND_STEPS: tl.constexpr, TRACE: tl.constexpr,
):  # fmt: skip
    """Copy piece `ticket` of all shards [numel] to the gathered tensor, which keeps runs of each apart; NaN after a
    failure.
    """
    began = now(TRACE)
    pieces = tl.cdiv(numel, SEND_BLOCK * SEND_STEPS)
    source = ticket // pieces
    ok = alive
    if source != use.rank:
        for chunk in range(num_chunks):
            ok = ok & wait(use, chunk, source)
        event(use, began, num_chunks - 1, source, WAIT, TRACE)
    base = shard_of(use, shard, source, slot_stride)
    for i in range(SEND_STEPS):
        index = (ticket % pieces).to(tl.int64) * (SEND_BLOCK * SEND_STEPS) + i * SEND_BLOCK + tl.arange(0, SEND_BLOCK)
        values = tl.load(base + index, mask=(index < numel) & (ok != 0), other=float("nan"))
        place = (index // run * WORLD + source) * run + index % run
        tl.store(gathered + place, values, mask=index < numel)
    event(use, began, ticket, source, COPY, TRACE)


@triton.jit(do_not_specialize=["rank", "slot", "site", "senders", "num_chunks", "runs"])
def all_gather_contract_kernel(
    shard, factors, outs, gathered, pointers, C, block, runs, columns, stride_gk, stride_gc, strides_fk, strides_fn,
    slot_stride, chunk_numel, width, pitch, limit, run, rank, slot, site, senders, num_chunks,
    WORLD: tl.constexpr, NUM_FACTORS: tl.constexpr, GATHERED_FIRST: tl.constexpr, RETURN_GATHERED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr, SEND_BLOCK: tl.constexpr, SEND_STEPS: tl.constexpr,
    TRACE: tl.constexpr = 0,
):  # fmt: skip
    """See the module. shard: contiguous, its element (k, c) at k * stride_gk + c * stride_gc, k in `runs` runs of
    `block`; factors, columns (the N_i), strides_f*: tuples of NUM_FACTORS, all as [W*S, N_i]; outs [C, N_i], or their
    transposes, contiguous.
    """
    use = use_of(Words(pointers.table, pointers.ctl, rank, slot, site))
    alive = healthy(use)
    BLOCK_C: tl.constexpr = BLOCK_M if GATHERED_FIRST else BLOCK_N
    BLOCK_O: tl.constexpr = BLOCK_N if GATHERED_FIRST else BLOCK_M
    num_c = tl.cdiv(C, BLOCK_C)
    ticket = take_tile(use)
    while ticket < senders:
        pieces = tl.cdiv(chunk_numel, SEND_BLOCK * SEND_STEPS)
        send_ticket = take_send(use)
        if send_ticket == 0:
            settle(credits_due(use, alive), use, WORLD)
        drain_sends(
            use, send_ticket, shard, pointers.counters,
            tl.where(alive != 0, (WORLD - 1) * num_chunks * pieces, 0), pieces,
            chunk_numel, width, pitch, limit, slot_stride, WORLD, SEND_BLOCK, SEND_STEPS, TRACE,
        )  # fmt: skip
        ticket = take_tile(use)
    ok = alive
    # The chunk of all sources that was waited for last.
    ready = tl.full((), -1, tl.int32)
    first = senders
    for i in tl.static_range(NUM_FACTORS):
        N = columns[i]
        num_o = tl.cdiv(N, BLOCK_O)
        while ticket < first + num_c * num_o:
            began = now(TRACE)
            block_c, block_o = grouped(ticket - first, num_c, num_o, GROUP_M)
            chunk = block_c // GROUP_M
            offs_c = block_c * BLOCK_C + tl.arange(0, BLOCK_C)
            offs_o = block_o * BLOCK_O + tl.arange(0, BLOCK_O)
            acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            for step in range(WORLD):
                # A tensor, also where the interpreter counts with Python's numbers.
                source = tl.full((), 0, tl.int32) + step
                if (source != rank) & (chunk != ready):
                    # Acquire: the whole chunk, which its source pushed before it published this flag.
                    waited = now(TRACE)
                    ok = ok & wait(use, chunk, source)
                    event(use, waited, chunk, source, WAIT, TRACE)
                base = shard_of(use, shard, source, slot_stride)
                for j in range(runs):
                    g = base + (j * block).to(tl.int64) * stride_gk
                    f = factors[i] + ((j * WORLD + source) * block).to(tl.int64) * strides_fk[i]
                    if GATHERED_FIRST:
                        acc = matmul_steps_strided(
                            acc, g, stride_gc, stride_gk, offs_c, C, f, strides_fk[i], strides_fn[i], offs_o, N, block,
                            BLOCK_K, EVEN_K, PRECISION, UPCAST,
                        )  # fmt: skip
                    else:
                        acc = matmul_steps_strided(
                            acc, f, strides_fn[i], strides_fk[i], offs_o, N, g, stride_gk, stride_gc, offs_c, C, block,
                            BLOCK_K, EVEN_K, PRECISION, UPCAST,
                        )  # fmt: skip
            ready = chunk
            result = tl.where(ok != 0, acc, float("nan")).to(shard.dtype.element_ty)
            if GATHERED_FIRST:
                places = offs_c.to(tl.int64)[:, None] * N + offs_o[None, :]
                inside = (offs_c < C)[:, None] & (offs_o < N)[None, :]
            else:
                places = offs_o.to(tl.int64)[:, None] * C + offs_c[None, :]
                inside = (offs_o < N)[:, None] & (offs_c < C)[None, :]
            tl.store(outs[i] + places, result, mask=inside)
            event(use, began, ticket - senders, rank, TILE, TRACE)
            ticket = take_tile(use)
        first += num_c * num_o
    if RETURN_GATHERED:
        numel = C * block * runs
        copies = WORLD * tl.cdiv(numel, SEND_BLOCK * SEND_STEPS)
        while ticket < first + copies:
            copy_whole(
                use, ticket - first, shard, gathered, numel, run, slot_stride, num_chunks, alive, WORLD, SEND_BLOCK,
                SEND_STEPS, TRACE,
            )  # fmt: skip
            ticket = take_tile(use)
    finish(use)


@dataclass(frozen=True)
class Geometry:
    """Sizes that all ranks share: of the contraction, the tile shape, chunks of the shard, the slot's bytes.

    chunk_columns: of C in a chunk.
    """

    sizes: Contraction
    config: Config
    num_chunks: int
    chunk_columns: int
    slot_stride: int
    nbytes: int


def geometry(node: AllGatherContract, launch: Launch, shard: torch.Tensor, columns: int) -> Geometry:
    """columns: of all factors together, the largest on any rank. See Geometry."""
    sizes = Contraction.of(shard.shape, node.gather_dim)
    rows, wide = (sizes.kept, columns) if node.gathered_first else (columns, sizes.kept)
    config = launch.config(rows=rows, columns=wide, repeats=1, dtype=shard.dtype)
    block_c = config.block_m if node.gathered_first else config.block_n
    blocks = ceil_div(sizes.kept, block_c)
    group = 1 << (ceil_div(blocks, MOST_CHUNKS) - 1).bit_length()
    slot_stride = round_up(sizes.kept * sizes.depth, 128)
    return Geometry(
        sizes=sizes,
        config=config,
        num_chunks=ceil_div(blocks, group),
        chunk_columns=group * block_c,
        slot_stride=slot_stride,
        nbytes=node.world_size * slot_stride * shard.element_size(),
    )


def all_gather_contract(
    node: AllGatherContract, launch: Launch, sizes: Geometry, shard: torch.Tensor, factors: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """shard [.., S, ..] with S at `gather_dim`, factors [W*S, N_i], or [N_i, W*S].

    Returns the outputs [C, N_i], or [N_i, C], then the gathered tensor [.., W*S, ..] if the node wants it. See the
    module.
    """
    shard = shard.contiguous()
    shape = list(shard.shape)
    C, depth = sizes.sizes.kept, sizes.sizes.depth
    # As [W*S, N_i], whatever the order of the product.
    factors = tuple(one if node.gathered_first else one.t() for one in factors)
    shapes = [(C, one.shape[1]) if node.gathered_first else (one.shape[1], C) for one in factors]
    outs = [shard.new_empty(one) for one in shapes]
    gathered = shard
    if node.return_gathered:
        whole = list(shape)
        whole[node.gather_dim] *= node.world_size
        gathered = shard.new_empty(whole)

    def arguments() -> Arguments:
        config, block = sizes.config, sizes.sizes.block
        block_c, block_o = config.block_m, config.block_n
        if not node.gathered_first:
            block_c, block_o = block_o, block_c
        tiles = ceil_div(C, block_c) * sum(ceil_div(one.shape[1], block_o) for one in factors)
        senders = INTERPRETED_SENDERS if launch.interpreted else SENDERS
        # Chunks of a shard [C, S] are runs of its rows, and lie together.
        along = depth if sizes.sizes.last else 1
        return Arguments(
            programs=launch.programs(tiles + senders, config),
            values=dict(
                C=C,
                block=block,
                runs=depth // block,
                columns=tuple(one.shape[1] for one in factors),
                stride_gk=1 if sizes.sizes.last else C,
                stride_gc=depth if sizes.sizes.last else 1,
                strides_fk=tuple(one.stride(0) for one in factors),
                strides_fn=tuple(one.stride(1) for one in factors),
                slot_stride=sizes.slot_stride,
                chunk_numel=sizes.chunk_columns * depth,
                width=sizes.chunk_columns * along,
                pitch=C * along,
                limit=C * along,
                run=block * (1 if sizes.sizes.last else C),
                rank=launch.rank,
                senders=senders,
                num_chunks=sizes.num_chunks,
                WORLD=node.world_size,
                NUM_FACTORS=len(factors),
                GATHERED_FIRST=node.gathered_first,
                RETURN_GATHERED=node.return_gathered,
                BLOCK_M=config.block_m,
                BLOCK_N=config.block_n,
                BLOCK_K=config.block_k,
                GROUP_M=sizes.chunk_columns // block_c,
                EVEN_K=block % config.block_k == 0,
                PRECISION=dot_precision(shard.dtype),
                UPCAST=launch.interpreted,
                SEND_BLOCK=INTERPRETED_SEND_BLOCK if launch.interpreted else SEND_BLOCK,
                SEND_STEPS=1 if launch.interpreted else SEND_STEPS,
                num_warps=config.num_warps,
                num_stages=config.num_stages,
            ),
        )

    tensors = {"shard": shard, "factors": factors, "outs": tuple(outs), "gathered": gathered}
    launch.run(all_gather_contract_kernel, sizes.nbytes, arguments, tensors)
    return [*outs, gathered] if node.return_gathered else outs
