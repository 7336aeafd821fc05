"""all_to_all_matmul, strategy `tile`: out = received @ weight, received = all_to_all(x), in one launch.

Problem. Every rank holds x, which has the rows of all ranks and columns of its own. Rank r wants its rows of every
rank's x, side by side in rank order, times its weight [K, N]. So each output tile contracts pieces from all ranks.
Algorithm. There are two queues of work. The *send* queue pushes the rows for every peer into its slot, chunk by chunk.
A chunk is a run of block rows, and it goes to every peer before the next chunk. The first tickets of the *tile* queue
are for senders: a program that takes one pushes until the send queue is empty. All other tickets are output tiles. A
tile multiplies the rank's own piece first, which needs no wait, while the peers' pieces arrive. Then it takes those of
rank + 1, rank + 2, ..., with one wait for each source before its K loop, and adds them to the same fp32 accumulator. If
the node returns the received tensor, the last tickets copy it out of the slot. Signal protocol. Flag row `chunk` of a
peer is written once per launch, by the last program that pushed a piece of the chunk to this peer. Every tile of the
chunk reads it, once for each source. A push waits for the credits of all peers for the slot's previous use; the next
launch gives the credits of this use. Tickets that wait for a flag come after the senders' tickets, and senders wait for
credits only. So a launch completes even with one resident program. All ranks send as much as they receive, so none runs
ahead. Limits. The scattered dimension is not the last one. If it lies inside others, the launcher copies x first, so
that each rank's rows lie together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ditron_inductor.core.layout import TILE_TICKET
from ditron_inductor.core.matmul import (
    Carried,
    Weight,
    matmul_run_by_descriptors,
    matmul_steps,
    rows_descriptor,
    weight_descriptor,
)
from ditron_inductor.core.order import grouped
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
from ditron_inductor.core.timed import timed_wait
from ditron_inductor.core.trace import COPY, TILE, event, now
from ditron_inductor.lowering.config import Config
from ditron_inductor.lowering.gathers import SENDERS, QueuedPiece, push_piece, send_queue
from ditron_inductor.lowering.host.launch import Launch, ceil_div
from ditron_inductor.lowering.host.launcher import Arguments
from ditron_inductor.task.nodes import AllToAllMatmul
from ditron_inductor.task.ulysses import received_shape

MOST_CHUNKS = 16
"""The most chunks of the rows for a peer. More would start the first tiles earlier, but need more waits."""
INTERPRETED_SENDERS = 2


class How(NamedTuple):
    """Compile-time values: ranks, whether the received tensor is returned, steps of the send queue, Tiles."""

    WORLD: Any
    RETURN_RECEIVED: Any
    SEND_BLOCK: Any
    SEND_STEPS: Any
    TILES: Any


@triton.jit
def drain_sends(use, ticket, x, counters, numel, chunk_numel, num_sends, HOW: tl.constexpr, TRACE: tl.constexpr):
    """Pushes piece `ticket` of x to its peer, then takes the next ticket of the send queue, until none is left. numel:
    the number of elements for each rank. They lie together in x and in the slot of that rank.
    """
    PIECE_NUMEL: tl.constexpr = HOW.SEND_BLOCK * HOW.SEND_STEPS
    pieces = tl.cdiv(chunk_numel, PIECE_NUMEL)
    while ticket < num_sends:
        # Rank - 1 is first, because it needs the pieces of this rank before those of other ranks.
        target = (use.rank + HOW.WORLD - 1 - ticket // pieces % (HOW.WORLD - 1)) % HOW.WORLD
        chunk = ticket // (pieces * (HOW.WORLD - 1))
        inside = ticket % pieces * PIECE_NUMEL
        first = chunk.to(tl.int64) * chunk_numel + inside
        # The last chunk is shorter.
        count = tl.minimum(tl.minimum(chunk_numel - inside, PIECE_NUMEL), numel - first).to(tl.int32)
        place = data(use, target, x.dtype.element_ty) + use.rank * numel + first
        piece = QueuedPiece(target, chunk, x + target * numel + first, place, count)
        ticket = push_piece(use, counters, piece, pieces, HOW, TRACE)


class Pieces(NamedTuple):
    """What each rank sends: `rows` rows of `parts` runs of C columns (`numel` elements), in chunks of rows."""

    rows: Any
    C: Any
    parts: Any
    numel: Any
    chunk_rows: Any


@triton.jit
def copy_received(
    use, ticket, x, received, pieces, alive, WORLD: tl.constexpr, TILES: tl.constexpr, TRACE: tl.constexpr,
):  # fmt: skip
    """Copies tile `ticket` of the received tensor to the output; NaN after a failure."""
    began = now(TRACE)
    num_m = tl.cdiv(pieces.rows, TILES.BLOCK_M)
    blocks = tl.cdiv(pieces.C, TILES.BLOCK_N)
    source = (use.rank + ticket // (num_m * pieces.parts * blocks)) % WORLD
    block_row = ticket // (pieces.parts * blocks) % num_m
    part = ticket // blocks % pieces.parts
    ok = alive
    if source != use.rank:
        ok = alive & timed_wait(use, block_row * TILES.BLOCK_M // pieces.chunk_rows, source, TRACE)
    offs_m = block_row * TILES.BLOCK_M + tl.arange(0, TILES.BLOCK_M)
    offs_c = ticket % blocks * TILES.BLOCK_N + tl.arange(0, TILES.BLOCK_N)
    inside = (offs_m < pieces.rows)[:, None] & (offs_c < pieces.C)[None, :]
    slot_data = data(use, use.rank, x.dtype.element_ty)
    base = tl.where(source == use.rank, x, slot_data) + source * pieces.numel
    offsets = offs_m.to(tl.int64)[:, None] * (pieces.parts * pieces.C) + (part * pieces.C + offs_c)[None, :]
    tile = tl.load(base + offsets, mask=inside & (ok != 0), other=float("nan"))
    columns = (part * WORLD + source) * pieces.C + offs_c
    out_rows = received + offs_m.to(tl.int64)[:, None] * (WORLD * pieces.parts * pieces.C)
    tl.store(out_rows + columns[None, :], tile, mask=inside)
    event(use, began, ticket, source, COPY, TRACE)


class Tensors(NamedTuple):
    """The pointers of the kernel; see there."""

    x: Any
    weight: Any
    out: Any
    received: Any


class Sizes(NamedTuple):
    """The columns of a run (C) and of the output (N), the strides of the weight, and the rows of a chunk."""

    C: Any
    N: Any
    stride_bk: Any
    stride_bn: Any
    chunk_rows: Any


@triton.jit(do_not_specialize=["rows", "parts", "senders", "num_chunks", "rank"])
def all_to_all_matmul_kernel(
    tensors, pointers, rank, rows, sizes, parts, senders, num_chunks, HOW: tl.constexpr,
    TRACE: tl.constexpr = 0,
):  # fmt: skip
    """See the module. x is [WORLD * rows, parts * C], contiguous, by the rank that gets the rows. weight is [parts *
    WORLD * C, N]. out [rows, N] and received [rows, parts * WORLD * C] are contiguous. A slot has rows [WORLD * rows,
    parts * C], by the rank from which they come. With TILES.DESCRIPTORS, C is a multiple of BLOCK_K and rows of x are
    multiples of 16 bytes. With TILES.EVEN_K, C is a multiple of BLOCK_K.
    """
    TILES: tl.constexpr = HOW.TILES
    BLOCK_M: tl.constexpr = TILES.BLOCK_M
    BLOCK_N: tl.constexpr = TILES.BLOCK_N
    use = use_of(words_of(pointers, rank))
    alive = healthy(use)
    width = parts * sizes.C
    numel = rows.to(tl.int64) * width
    num_m = tl.cdiv(rows, BLOCK_M)
    num_n = tl.cdiv(sizes.N, BLOCK_N)
    ticket = take_tile(use)
    while ticket < senders:
        chunk_numel = sizes.chunk_rows * width
        pieces = tl.cdiv(chunk_numel, HOW.SEND_BLOCK * HOW.SEND_STEPS)
        send_ticket = take_send(use)
        if send_ticket == 0:
            settle(credits_due(use, alive), use, HOW.WORLD)
        drain_sends(
            use, send_ticket, tensors.x, pointers.counters, numel, chunk_numel,
            tl.where(alive != 0, (HOW.WORLD - 1) * num_chunks * pieces, 0), HOW, TRACE,
        )  # fmt: skip
        ticket = take_tile(use)
    slot_data = data(use, rank, tensors.x.dtype.element_ty)
    own_rows = tensors.x + rank * numel
    if TILES.DESCRIPTORS:
        own_descriptor = rows_descriptor(own_rows, rows, width, width, BLOCK_M, TILES.BLOCK_K)
        slot_descriptor = rows_descriptor(slot_data, HOW.WORLD * rows, width, width, BLOCK_M, TILES.BLOCK_K)
        b_descriptor = weight_descriptor(
            tensors.weight, sizes.N, HOW.WORLD * width, sizes.stride_bk, sizes.stride_bn,
            BLOCK_N, TILES.BLOCK_K, TILES.K_MAJOR,
        )  # fmt: skip
    ok = alive
    # `ready` is the chunk for which the program has waited last, from all sources.
    ready = tl.full((), -1, tl.int32)
    while ticket < senders + num_m * num_n:
        began = now(TRACE)
        request = request_ticket(use, TILE_TICKET, TILES.THREADS, True)
        block_row, block_column = grouped(ticket - senders, num_m, num_n, TILES.GROUP_M)
        row, column = block_row * BLOCK_M, block_column * BLOCK_N
        chunk = row // sizes.chunk_rows
        offs_m = row + tl.arange(0, BLOCK_M)
        rows_m = tl.minimum(offs_m, rows - 1).to(tl.int64) * width
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for part in range(parts):
            first = (part * HOW.WORLD + rank) * sizes.C
            if TILES.DESCRIPTORS:
                acc = matmul_run_by_descriptors(
                    acc, own_descriptor, b_descriptor, row, part * sizes.C, column, first, sizes.C, TILES,
                )  # fmt: skip
            else:
                acc = matmul_steps(
                    acc, own_rows + rows_m + part * sizes.C,
                    Weight(tensors.weight + first.to(tl.int64) * sizes.stride_bk, sizes.stride_bk, sizes.stride_bn),
                    column, sizes.N, sizes.C, Carried(own_rows, (), 0, 0), TILES,
                )  # fmt: skip
        for step in range(1, HOW.WORLD):
            source = (rank + step) % HOW.WORLD
            if chunk != ready:
                # Acquire: the source has pushed the whole chunk before it published this flag.
                ok = ok & timed_wait(use, chunk, source, TRACE)
                if TILES.DESCRIPTORS and not TILES.UPCAST:
                    ok = proxy_fence(ok)
            for part in range(parts):
                first = (part * HOW.WORLD + source) * sizes.C
                if TILES.DESCRIPTORS:
                    acc = matmul_run_by_descriptors(
                        acc, slot_descriptor, b_descriptor, source * rows + row, part * sizes.C, column, first,
                        sizes.C, TILES,
                    )  # fmt: skip
                else:
                    acc = matmul_steps(
                        acc, slot_data + source * numel + rows_m + part * sizes.C,
                        Weight(tensors.weight + first.to(tl.int64) * sizes.stride_bk, sizes.stride_bk, sizes.stride_bn),
                        column, sizes.N, sizes.C, Carried(own_rows, (), 0, 0), TILES,
                    )  # fmt: skip
        ready = chunk
        offs_n = column + tl.arange(0, BLOCK_N)
        inside = (offs_m < rows)[:, None] & (offs_n < sizes.N)[None, :]
        result = tl.where(ok != 0, acc, float("nan")).to(tensors.out.dtype.element_ty)
        tl.store(tensors.out + offs_m.to(tl.int64)[:, None] * sizes.N + offs_n[None, :], result, mask=inside)
        event(use, began, ticket - senders, rank, TILE, TRACE)
        ticket = granted(request, TILES.THREADS)
    if HOW.RETURN_RECEIVED:
        ticket -= senders + num_m * num_n
        pieces = Pieces(rows, sizes.C, parts, numel, sizes.chunk_rows)
        while ticket < HOW.WORLD * num_m * parts * tl.cdiv(sizes.C, BLOCK_N):
            copy_received(use, ticket, tensors.x, tensors.received, pieces, alive, HOW.WORLD, TILES, TRACE)
            ticket = take_tile(use) - (senders + num_m * num_n)
    finish(use)


@dataclass(frozen=True)
class Geometry:
    """The layout of a call, from sizes that all ranks share: a rank has `rows` rows, in `num_chunks` chunks of
    `chunk_rows`, and C columns in each of its runs.
    """

    rows: int
    C: int
    config: Config
    chunk_rows: int
    num_chunks: int
    nbytes: int


def geometry(node: AllToAllMatmul, launch: Launch, x: torch.Tensor, columns: int) -> Geometry:
    """Returns the Geometry for x [.., W*S, .., parts * C]; W*S is at `scatter_dim`. columns: the largest N."""
    rows = math.prod(x.shape[:-1]) // node.world_size
    config = launch.config(rows=rows, columns=columns, repeats=1, dtype=x.dtype)
    blocks = ceil_div(rows, config.block_m)
    chunk_blocks = max(1, ceil_div(blocks, MOST_CHUNKS))
    return Geometry(
        rows=rows,
        C=x.shape[-1] // node.parts,
        config=config,
        chunk_rows=chunk_blocks * config.block_m,
        num_chunks=ceil_div(blocks, chunk_blocks),
        nbytes=node.world_size * rows * x.shape[-1] * x.element_size(),
    )


def by_rank(node: AllToAllMatmul, x: torch.Tensor) -> torch.Tensor:
    """Returns x [.., W*S, .., C'] as [W * rows, C'], contiguous, each rank's rows together; perhaps a copy."""
    outer, rows = math.prod(x.shape[: node.scatter_dim]), math.prod(x.shape[node.scatter_dim : -1]) // node.world_size
    if outer == 1:
        return x.contiguous().view(node.world_size * rows, x.shape[-1])
    runs = x.reshape(outer, node.world_size, rows, x.shape[-1]).transpose(0, 1)
    return runs.reshape(node.world_size * outer * rows, x.shape[-1])


def all_to_all_matmul(
    node: AllToAllMatmul, launch: Launch, sizes: Geometry, x: torch.Tensor, weight: torch.Tensor
) -> list[torch.Tensor]:
    """Returns the output [rows, N] for x [.., W*S, .., parts * C] with W*S at `scatter_dim` and weight [K, N]; then the
    received tensor [.., S, .., K] if the node returns it. See the module.
    """
    pieces = by_rank(node, x)
    out = x.new_empty(sizes.rows, weight.shape[1])
    received = out
    if node.return_received:
        received = x.new_empty(received_shape(x.shape, node.scatter_dim, node.world_size))

    def arguments() -> Arguments:
        config = sizes.config
        tile = launch.tile(config, pieces, [weight])
        even_k = sizes.C % config.block_k == 0
        senders = INTERPRETED_SENDERS if launch.interpreted else SENDERS
        tiles = ceil_div(sizes.rows, config.block_m) * ceil_div(weight.shape[1], config.block_n)
        return Arguments(
            programs=launch.programs(senders + tiles, config),
            values=dict(
                rows=sizes.rows,
                sizes=Sizes(sizes.C, weight.shape[1], weight.stride(0), weight.stride(1), sizes.chunk_rows),
                parts=node.parts,
                rank=launch.rank,
                senders=senders,
                num_chunks=sizes.num_chunks,
                HOW=How(
                    WORLD=node.world_size,
                    RETURN_RECEIVED=node.return_received,
                    **send_queue(launch),
                    TILES=tile._replace(EVEN_K=even_k, DESCRIPTORS=tile.DESCRIPTORS and even_k),
                ),
                **config.options,
            ),
        )

    tensors = {"tensors": Tensors(pieces, weight, out, received)}
    launch.run(all_to_all_matmul_kernel, sizes.nbytes, arguments, tensors)
    return [out, received] if node.return_received else [out]
