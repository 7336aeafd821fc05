"""all_gather_matmul, strategy `tile`: out_i = all_gather(shard) @ weight_i, with its epilogue, in one launch.

Problem. Every rank holds a shard of the activations, flattened to rows [S, K], and its own weights [K, N_i]. Algorithm.
There are two queues of work. The *send* queue pushes the rank's own shard, chunk by chunk, into the slot of every peer.
(A chunk is `group_m` block rows.) Rank - 1 is first, because its tiles come to this shard first. The *tile* queue
computes output tiles: first those of the own shard, which wait for nothing, then those of rank + 1, rank + 2, ... Each
tile of the own shard carries one piece of the send queue in its K loop (see core/matmul.py). If that is not enough, a
few programs begin with the send queue. A program that comes to a remote tile first helps to empty the send queue. So
every send precedes every wait, and a launch completes even with one resident program. If the node returns the gathered
tensor, the last tickets copy it out of the slot. Signal protocol. Flag row `chunk` of a peer is written once per
launch, by the last program that pushed a piece of the chunk to this peer. Every tile of the chunk reads it. A push
waits for the credits of all peers for the slot's previous use; the next launch gives the credits of this use. Prologue.
A norm that computes the shard is a launch in front, into the buffer that is sent. Epilogue. Products that an epilogue
combines are computed in one tile, and the outputs are computed in registers. Limits. K is the last dimension of the
shard and the gathered dimension another one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ditron_inductor.core.layout import SEND_TICKET, TILE_TICKET
from ditron_inductor.core.matmul import (
    Carried,
    matmul_tile,
    matmul_tile_by_descriptors,
    rows_descriptor,
    weight_descriptor,
    weight_of,
)
from ditron_inductor.core.matmul_pair import matmul_pair, matmul_pair_by_descriptors
from ditron_inductor.core.order import gather_order, grouped, interleaved_row
from ditron_inductor.core.signals import (
    credits_due,
    data,
    finish,
    granted,
    healthy,
    proxy_fence,
    request_ticket,
    settle,
    take_send,
    take_tile,
    use_of,
    words_of,
)
from ditron_inductor.core.timed import timed_credits, timed_wait
from ditron_inductor.core.trace import COPY, TILE, event, now
from ditron_inductor.lowering.all_gather_matmul.shard_norm import MakeShard, make_shard
from ditron_inductor.lowering.config import Config
from ditron_inductor.lowering.epilogues import Arrangement, arrange, elements_at, extras_or, store_outputs, unpacked
from ditron_inductor.lowering.gathers import (
    SEND_BLOCK,
    SEND_STEPS,
    SENDERS,
    QueuedPiece,
    push_piece,
    send_queue,
    sent_piece,
    shard_of,
)
from ditron_inductor.lowering.host.launch import Launch, ceil_div, round_up, widths_of
from ditron_inductor.lowering.host.launcher import Arguments
from ditron_inductor.task.nodes import AllGatherMatmul

GATHER_CHUNKS = 64
"""The most chunks of a shard. A flag for each block row would cost more time than the earlier start saves."""


class Tensors(NamedTuple):
    """Pointers to the shard, and to the gathered tensor if it is returned, or else to anything."""

    shard: Any
    gathered: Any


class Sizes(NamedTuple):
    """The columns K of the shard, the argument `block` of `interleaved_row`, the Widths of the weights, and the number
    of elements from one rank's place in a slot to the next rank's place.
    """

    K: Any
    block: Any
    widths: Any
    slot_stride: Any


class How(NamedTuple):
    """Values that are known at compile time: the number of ranks, the Tiles, whether the gathered tensor is returned,
    whether the ranks' rows are interleaved in it, the Groups of weights that are multiplied in one tile, and the steps
    of the send queue.
    """

    WORLD: Any
    TILES: Any
    RETURN_GATHERED: Any
    INTERLEAVED: Any
    GROUPS: Any
    SEND_BLOCK: Any
    SEND_STEPS: Any


class Sends(NamedTuple):
    """The send queue: the shard is [rows, K] and has `num_chunks` chunks of `chunk_numel` elements. `slot_stride`: see
    Sizes. `num_sends` is the number of tickets, 0 if the workspace was poisoned before this program began.
    """

    rows: Any
    K: Any
    chunk_numel: Any
    num_chunks: Any
    slot_stride: Any
    num_sends: Any


@triton.jit
def piece_of(use, ticket, shard, numel, sends, HOW: tl.constexpr):
    """Returns (the QueuedPiece of ticket `ticket`; the number of pieces of a chunk)."""
    WORLD: tl.constexpr = HOW.WORLD
    PIECE_NUMEL: tl.constexpr = HOW.SEND_BLOCK * HOW.SEND_STEPS
    pieces = tl.cdiv(sends.chunk_numel, PIECE_NUMEL)
    # The piece of a ticket beyond the last one has no elements, but its pointers have to be valid. So no remainder may
    # be taken of a negative number: on a GPU it would be negative.
    step = ticket // (sends.num_chunks * pieces) % WORLD
    target = (use.rank + 2 * WORLD - 1 - step) % WORLD
    chunk = ticket // pieces % sends.num_chunks
    inside = (ticket % pieces) * PIECE_NUMEL
    first = chunk.to(tl.int64) * sends.chunk_numel + inside
    count = tl.minimum(tl.minimum(sends.chunk_numel - inside, PIECE_NUMEL), numel - first).to(tl.int32)
    place = data(use, target, shard.dtype.element_ty) + use.rank.to(tl.int64) * sends.slot_stride + first
    return QueuedPiece(target, chunk, shard + first, place, tl.maximum(count, 0)), pieces


@triton.jit
def drain_sends(use, ticket, shard, counters, sends, HOW: tl.constexpr, TRACE: tl.constexpr):
    """Pushes piece `ticket` of this rank's shard, then takes the next ticket of the send queue, until none is left."""
    numel = sends.rows.to(tl.int64) * sends.K
    while ticket < sends.num_sends:
        piece, pieces = piece_of(use, ticket, shard, numel, sends, HOW)
        ticket = push_piece(use, counters, piece, pieces, HOW, TRACE)


@triton.jit
def copy_gathered(use, ticket, shard, gathered, rows, sizes, alive, HOW: tl.constexpr, TRACE: tl.constexpr):
    """Copies tile `ticket` of the gathered tensor to the output `gathered`; NaN after a failure."""
    TILES: tl.constexpr = HOW.TILES
    num_m = tl.cdiv(rows, TILES.BLOCK_M)
    num_k = tl.cdiv(sizes.K, TILES.BLOCK_N)
    began = now(TRACE)
    source = gather_order(ticket // (num_m * num_k), use.rank, HOW.WORLD)
    block_row = ticket // num_k % num_m
    ok = alive
    if source != use.rank:
        chunk = block_row * TILES.BLOCK_M // (TILES.GROUP_M * TILES.BLOCK_M)
        ok = alive & timed_wait(use, chunk, source, TRACE)
    offs_m = block_row * TILES.BLOCK_M + tl.arange(0, TILES.BLOCK_M)
    offs_k = ticket % num_k * TILES.BLOCK_N + tl.arange(0, TILES.BLOCK_N)
    inside = (offs_m < rows)[:, None] & (offs_k < sizes.K)[None, :]
    base = shard_of(use, shard, source, sizes.slot_stride)
    offsets = offs_m.to(tl.int64)[:, None] * sizes.K + offs_k[None, :]
    tile = tl.load(base + offsets, mask=inside & (ok != 0), other=float("nan"))
    out_rows = interleaved_row(offs_m, source, rows, sizes.block, HOW.WORLD, HOW.INTERLEAVED).to(tl.int64)
    tl.store(gathered + out_rows[:, None] * sizes.K + offs_k[None, :], tile, mask=inside)
    event(use, began, ticket, source, COPY, TRACE)


@triton.jit(do_not_specialize=["rows", "senders", "rank"])
def all_gather_matmul_kernel(
    tensors, weights, extras, outs, pointers, rank, rows, sizes, senders,
    HOW: tl.constexpr, EPILOGUE: tl.constexpr, TRACE: tl.constexpr = 0,
):  # fmt: skip
    """See the module. tensors.shard is [rows, K], contiguous; weights, extras and outs are tuples of pointers, see
    Widths. HOW.GROUPS: the weights that are multiplied in one tile. EPILOGUE: computes the outputs from them (see
    lowering/epilogues.py), or None. With HOW.TILES.DESCRIPTORS, K is a multiple of 16 bytes.
    """
    shard = tensors.shard
    WORLD: tl.constexpr = HOW.WORLD
    TILES: tl.constexpr = HOW.TILES
    GROUPS: tl.constexpr = HOW.GROUPS
    FIRST_WEIGHTS: tl.constexpr = GROUPS.FIRST_WEIGHTS
    K_MAJOR: tl.constexpr = TILES.K_MAJOR
    NUM_GROUPS: tl.constexpr = GROUPS.NUM_GROUPS
    BLOCK_M: tl.constexpr = TILES.BLOCK_M
    BLOCK_N: tl.constexpr = TILES.BLOCK_N
    use = use_of(words_of(pointers, rank))
    alive = healthy(use)
    K = sizes.K
    BITS: tl.constexpr = shard.dtype.element_ty.primitive_bitwidth
    num_m = tl.cdiv(rows, BLOCK_M)
    shard_tiles = 0
    b_descriptors = ()
    for g in tl.static_range(NUM_GROUPS):
        shard_tiles += num_m * tl.cdiv(sizes.widths.columns[unpacked(FIRST_WEIGHTS, g)], BLOCK_N)
    NUM_WEIGHTS: tl.constexpr = len(weights)
    for i in tl.static_range(NUM_WEIGHTS):
        if TILES.DESCRIPTORS:
            descriptor = weight_descriptor(
                weights[i], sizes.widths.columns[i], K, sizes.widths.strides_bk[i], sizes.widths.strides_bn[i],
                BLOCK_N, TILES.BLOCK_K, (K_MAJOR >> i) & 1,
            )  # fmt: skip
            b_descriptors = b_descriptors + (descriptor,)  # type: ignore[assignment]
    chunk_numel = TILES.GROUP_M * BLOCK_M * K
    num_chunks = tl.cdiv(num_m, TILES.GROUP_M)
    pieces = tl.cdiv(chunk_numel, HOW.SEND_BLOCK * HOW.SEND_STEPS)
    num_sends = tl.where(alive != 0, (WORLD - 1) * num_chunks * pieces, 0)
    sends = Sends(rows, K, chunk_numel, num_chunks, sizes.slot_stride, num_sends)
    # send_ticket is the piece that this program sends next. `credited` says whether the credits have come; it is -1
    # until the program has asked.
    send_ticket = take_send(use)
    if send_ticket == 0:
        settle(credits_due(use, alive), use, WORLD)
    credited = tl.full((), -1, tl.int32)
    if tl.program_id(0) < senders:
        drain_sends(use, send_ticket, shard, pointers.counters, sends, HOW, TRACE)
        send_ticket = num_sends
    ticket = take_tile(use)
    for step in range(WORLD):
        source = gather_order(step, use.rank, WORLD)
        base = shard_of(use, shard, source, sizes.slot_stride)
        if step == 1:
            # Sends come before waits: what the tiles of the own shard have not carried is sent now.
            drain_sends(use, send_ticket, shard, pointers.counters, sends, HOW, TRACE)
            send_ticket = num_sends
        if TILES.DESCRIPTORS:
            a_descriptor = rows_descriptor(base, rows, K, K, BLOCK_M, TILES.BLOCK_K)
        ok = alive
        # `ready` is the chunk of this source for which the program has waited last.
        ready = tl.full((), -1, tl.int32)
        first = step * shard_tiles
        for g in tl.static_range(NUM_GROUPS):
            N = sizes.widths.columns[unpacked(FIRST_WEIGHTS, g)]
            weight_tiles = num_m * tl.cdiv(N, BLOCK_N)
            while ticket < first + weight_tiles:
                began = now(TRACE)
                request = request_ticket(use, TILE_TICKET, TILES.THREADS, True)
                if TILES.DESCRIPTORS:
                    piece, _ = piece_of(use, send_ticket, shard, rows.to(tl.int64) * K, sends, HOW)
                    carries = (step == 0) & (send_ticket < num_sends)
                    send_request = request_ticket(use, SEND_TICKET, TILES.THREADS, carries)
                    if carries & (credited < 0):
                        credited = timed_credits(use, ticket, WORLD, TRACE)
                    carries = carries & (credited > 0)
                    # This counts 32-bit words. K is a multiple of 16 bytes, and so is every piece.
                    carried = tl.multiple_of(tl.where(carries, piece.count, 0) * BITS // 32, 4)
                block_row, block_column = grouped(ticket - first, num_m, tl.cdiv(N, BLOCK_N), TILES.GROUP_M)
                chunk = block_row // TILES.GROUP_M
                if (source != use.rank) & (chunk != ready):
                    # Acquire: the source has pushed the whole chunk before it published this flag.
                    ok = alive & timed_wait(use, chunk, source, TRACE)
                    if TILES.DESCRIPTORS and not TILES.UPCAST:
                        ok = proxy_fence(ok)
                    ready = chunk
                column = block_column * BLOCK_N
                offs_m = block_row * BLOCK_M + tl.arange(0, BLOCK_M)
                a_rows = base + tl.minimum(offs_m, rows - 1).to(tl.int64) * K
                if unpacked(GROUPS.NUM_TOGETHER, g) == 2:
                    if TILES.DESCRIPTORS:
                        accs = matmul_pair_by_descriptors(
                            a_descriptor, b_descriptors[unpacked(FIRST_WEIGHTS, g)],
                            b_descriptors[unpacked(FIRST_WEIGHTS, g) + 1], block_row * BLOCK_M, column, K,
                            Carried(piece.source, (piece.place,), carried, 1), TILES,
                            (K_MAJOR >> unpacked(FIRST_WEIGHTS, g)) & 1,
                            (K_MAJOR >> unpacked(FIRST_WEIGHTS, g) + 1) & 1,
                        )  # fmt: skip
                    else:
                        weight = weight_of(weights, sizes.widths, unpacked(FIRST_WEIGHTS, g))
                        other = weight_of(weights, sizes.widths, unpacked(FIRST_WEIGHTS, g) + 1)
                        accs = matmul_pair(a_rows, weight, other, column, N, K, TILES)
                elif TILES.DESCRIPTORS:
                    accs = (matmul_tile_by_descriptors(
                        a_descriptor, b_descriptors[unpacked(FIRST_WEIGHTS, g)], block_row * BLOCK_M, column, K,
                        Carried(piece.source, (piece.place,), carried, 1), TILES,
                        (K_MAJOR >> unpacked(FIRST_WEIGHTS, g)) & 1,
                    ),)  # fmt: skip
                else:
                    weight = weight_of(weights, sizes.widths, unpacked(FIRST_WEIGHTS, g))
                    accs = (matmul_tile(a_rows, weight, column, N, K, Carried(base, (), 0, 0), TILES),)
                if TILES.DESCRIPTORS:
                    if carries:
                        sent_piece(use, pointers.counters, piece.target, piece.chunk, pieces)
                    if (step == 0) & (send_ticket < num_sends):
                        send_ticket = granted(send_request, TILES.THREADS)
                offs_n = column + tl.arange(0, BLOCK_N)
                to_rows = interleaved_row(offs_m, source, rows, sizes.block, WORLD, HOW.INTERLEAVED).to(tl.int64)
                elements = elements_at(to_rows, offs_n, (offs_m < rows)[:, None], (offs_n < N)[None, :], N)
                store_outputs(
                    accs, ok, extras, outs, elements, g, unpacked(GROUPS.NUM_TOGETHER, g),
                    unpacked(GROUPS.FIRST_OUTS, g),
                    unpacked(GROUPS.NUM_OUTS, g), shard.dtype.element_ty, EPILOGUE,
                )  # fmt: skip
                event(use, began, ticket, source, TILE, TRACE)
                ticket = granted(request, TILES.THREADS)
            first += weight_tiles
    if HOW.RETURN_GATHERED:
        ticket -= WORLD * shard_tiles
        while ticket < WORLD * num_m * tl.cdiv(K, BLOCK_N):
            copy_gathered(use, ticket, shard, tensors.gathered, rows, sizes, alive, HOW, TRACE)
            ticket = take_tile(use) - WORLD * shard_tiles
    finish(use)


@dataclass(frozen=True)
class Geometry:
    """The layout of a call, from sizes that all ranks share: a shard is [rows, K] and has `num_chunks` chunks. The slot
    has `nbytes` bytes; a rank's place in it has `slot_stride` elements. `make_shard` computes the shard if there is a
    norm.
    """

    rows: int
    K: int
    config: Config
    num_chunks: int
    slot_stride: int
    nbytes: int
    arrangement: Arrangement = field(repr=False)
    make_shard: MakeShard | None = field(default=None, repr=False)


def geometry(node: AllGatherMatmul, launch: Launch, shard: torch.Tensor, columns: int) -> Geometry:
    """Returns the Geometry. columns: the columns of all weights together, the largest number on any rank."""
    K = shard.shape[-1]
    rows = math.prod(shard.shape[:-1])
    arrangement = arrange(node.parsed, node.num_weights)
    config = launch.config(rows=rows, columns=columns, repeats=node.world_size, dtype=shard.dtype)
    if arrangement.together > 1:
        # A tile of two weights has half the columns of each, so it has as many products.
        config = replace(config, block_n=max(config.block_n // arrangement.together, 16)).validate()
    blocks = ceil_div(rows, config.block_m)
    if blocks > config.group_m * GATHER_CHUNKS:
        config = replace(config, group_m=1 << (ceil_div(blocks, GATHER_CHUNKS) - 1).bit_length())
    slot_stride = round_up(rows * K, 128)
    return Geometry(
        rows=rows,
        K=K,
        config=config,
        num_chunks=ceil_div(blocks, config.group_m),
        slot_stride=slot_stride,
        nbytes=node.world_size * slot_stride * shard.element_size(),
        arrangement=arrangement,
        make_shard=make_shard(node, shard.shape, shard.device),
    )


def all_gather_matmul(
    node: AllGatherMatmul,
    launch: Launch,
    sizes: Geometry,
    shard: torch.Tensor,
    weights: Sequence[torch.Tensor],
    extras: Sequence[torch.Tensor] = (),
    given: tuple[torch.Tensor | None, ...] = (),
) -> list[torch.Tensor]:
    """Runs a call (see the module). shard [.., S, .., K] with S at `gather_dim`, weights [K, N_i]. extras, given: the
    extra tensors of the epilogue and of the prologue. Returns the outputs [rows, N_i], then the gathered tensor [..,
    W*S, .., K] if the node returns it, then what the prologue returns.
    """
    shard = shard.contiguous()
    returned: tuple[torch.Tensor, ...] = ()
    if sizes.make_shard is not None:
        shard, returned = sizes.make_shard(shard, given)
    shape = list(shard.shape)
    config = sizes.config
    arrangement = sizes.arrangement
    outs = arrangement.new_outputs(shard, node.world_size * sizes.rows, weights)
    weights = tuple(weights[index] for index in arrangement.weights)
    gathered = shard
    if node.return_gathered:
        gathered_shape = list(shape)
        gathered_shape[node.gather_dim] *= node.world_size
        gathered = shard.new_empty(gathered_shape)

    def arguments() -> Arguments:
        firsts = [weights[first] for first in arrangement.first_weights]
        num_n = sum(ceil_div(weight.shape[1], config.block_n) for weight in firsts)
        own_tiles = ceil_div(sizes.rows, config.block_m) * num_n
        block = launch.shard_block(shape, node.gather_dim)
        tile = launch.tile(config, shard, weights)
        # The tiles of the own shard carry it if there are nearly as many of them as pieces.
        pieces = ceil_div(config.group_m * config.block_m * sizes.K, SEND_BLOCK * SEND_STEPS)
        carried = tile.DESCRIPTORS and (node.world_size - 1) * sizes.num_chunks * pieces <= 1.25 * own_tiles
        return Arguments(
            programs=launch.programs(node.world_size * own_tiles, config),
            values=dict(
                rows=sizes.rows,
                sizes=Sizes(sizes.K, block, widths_of(weights), sizes.slot_stride),
                rank=launch.rank,
                senders=0 if carried else SENDERS,
                HOW=How(
                    WORLD=node.world_size,
                    TILES=tile,
                    RETURN_GATHERED=node.return_gathered,
                    INTERLEAVED=block != sizes.rows,
                    GROUPS=arrangement.packed_groups,
                    **send_queue(launch),
                ),
                EPILOGUE=arrangement.function,
                **config.options,
            ),
        )

    tensors = {
        "tensors": Tensors(shard, gathered),
        "weights": weights,
        "extras": extras_or(shard, extras),
        "outs": tuple(outs[index] for index in arrangement.outputs),
    }
    launch.run(all_gather_matmul_kernel, sizes.nbytes, arguments, tensors)
    return [*outs, *([gathered] if node.return_gathered else []), *returned]
