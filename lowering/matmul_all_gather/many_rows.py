"""matmul_all_gather, strategy `tile` for many rows: out = all_gather(a @ b + bias) in one launch.

Problem. Every rank holds a [M, K] and b [K, N] with columns of its own (or a with rows of its own), and wants the
products of all ranks. Algorithm. One queue of work has the tiles of the rank's own product, and then copies of the
peers' tiles in the order in which they are computed. A finished tile goes into the output, and into the program's
outbox. The K loop of the program's next tile carries it into the slots of all peers, and then it is published. When the
copies begin, the links have worked as long as the tensor cores, so only the last tiles are still on their way. Signal
protocol. Flag row `tile // chunk_tiles` has one word for each source. A push waits for the credits of all peers for the
slot's previous use; the next launch gives the credits of this use. Every push precedes every flag wait in ticket order,
and a program carries and publishes what it has before it waits for a flag. Limits. None on M, N and K. Tiles at the
edges are masked where they are stored in the output.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ditron_inductor.core.layout import TILE_TICKET
from ditron_inductor.core.matmul import Carried, carry, factors_of, parts_of, plus_bias, sum_tile, zeros_of
from ditron_inductor.core.order import grouped, interleaved_row
from ditron_inductor.core.signals import (
    credits_due,
    data,
    finish,
    granted,
    healthy,
    request_ticket,
    settle,
    take_tile,
    use_of,
    words_of,
)
from ditron_inductor.core.timed import first_credits, timed_wait
from ditron_inductor.core.trace import COPY, SEND, TILE, event, now
from ditron_inductor.lowering.host.launch import Launch, ceil_div
from ditron_inductor.lowering.host.launcher import Arguments
from ditron_inductor.lowering.matmul_all_gather.parts import gathered_like, place_of
from ditron_inductor.lowering.partials import Chunks, publish_to_all, put_in_outbox, received_block
from ditron_inductor.lowering.sums import Geometry, SumCall, carrying
from ditron_inductor.task.nodes import MatmulAllGather


@triton.jit
def destinations(use, tile, tiles, dtype: tl.constexpr, WORLD: tl.constexpr, BLOCK: tl.constexpr):
    """Returns pointers to the blocks, in the slots of all peers, of this rank's tile `tile`."""
    targets = ()
    for i in tl.static_range(1, WORLD):
        target = (use.rank + i) % WORLD
        place = (place_of(use.rank, target, WORLD) * tiles + tile).to(tl.int64) * BLOCK
        targets = targets + (data(use, target, dtype) + place,)  # type: ignore[assignment]
    return targets


@triton.jit
def store_part(result, out, tile, source, num_m, num_n, M, N, block, WORLD: tl.constexpr, TILES: tl.constexpr):
    """Stores `result`, tile `tile` of the product of `source`, in `out`, without what is beyond its edges."""
    block_row, block_column = grouped(tile, num_m, num_n, TILES.GROUP_M)
    offs_m = block_row * TILES.BLOCK_M + tl.arange(0, TILES.BLOCK_M)
    offs_n = block_column * TILES.BLOCK_N + tl.arange(0, TILES.BLOCK_N)
    to_rows = interleaved_row(offs_m, source, M, block, WORLD, True).to(tl.int64)
    inside = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    tl.store(out + to_rows[:, None] * N + offs_n[None, :], result, mask=inside)


@triton.jit(do_not_specialize=["chunk_tiles", "rank"])
def matmul_all_gather_kernel(
    operands, out, pointers, rank, sizes, chunk_tiles, HOW: tl.constexpr, TRACE: tl.constexpr = 0,
):  # fmt: skip
    """See the module. operands: pointers to the a_i [M, K_i] with contiguous K, to the b_i [K_i, N], see Terms, and
    to the bias or anything. `out` is [WORLD * M, N], contiguous, with rows as in interleaved_row. A slot has places
    [peer][tile], and an outbox for each program.
    """
    lefts, rights, bias = parts_of(operands)
    WORLD: tl.constexpr = HOW.WORLD
    TILES: tl.constexpr = HOW.TILES
    BLOCK_M: tl.constexpr = TILES.BLOCK_M
    BLOCK_N: tl.constexpr = TILES.BLOCK_N
    use = use_of(words_of(pointers, rank))
    alive = healthy(use)
    num_m = tl.cdiv(sizes.M, BLOCK_M)
    num_n = tl.cdiv(sizes.N, BLOCK_N)
    tiles = num_m * num_n
    dtype: tl.constexpr = out.dtype.element_ty
    factors = factors_of(lefts, rights, sizes.M, sizes.N, sizes.terms, TILES)
    chunks = Chunks(pointers.counters, tiles, chunk_tiles)
    BLOCK: tl.constexpr = BLOCK_M * BLOCK_N
    # The size of a block in 32-bit words, in which it is carried.
    BLOCK_WORDS: tl.constexpr = BLOCK * out.dtype.element_ty.primitive_bitwidth // 32
    outbox = data(use, rank, dtype) + ((WORLD - 1) * tiles + tl.program_id(0)).to(tl.int64) * BLOCK
    # `ok` says whether this program may send; it is -1 until it has asked. `sent` is the tile that waits in the outbox,
    # -1 if there is none.
    ok = tl.full((), -1, tl.int32)
    sent = tl.full((), -1, tl.int32)
    ticket = take_tile(use)
    if ticket == 0:
        settle(credits_due(use, alive), use, WORLD)
    while ticket < tiles:
        began = now(TRACE)
        request = request_ticket(use, TILE_TICKET, TILES.THREADS, True)
        block_row, block_column = grouped(ticket, num_m, num_n, TILES.GROUP_M)
        targets = destinations(use, tl.maximum(sent, 0), tiles, dtype, WORLD, BLOCK)
        carried = tl.where(sent < 0, 0, BLOCK_WORDS)
        row, column = block_row * BLOCK_M, block_column * BLOCK_N
        # Add the bias first, because behind the product there are no registers left for it.
        acc = plus_bias(zeros_of(TILES), bias, column, sizes.N, BLOCK_N, HOW.HAS_BIAS)
        acc = sum_tile(acc, factors, row, column, Carried(outbox, targets, carried, WORLD - 1), TILES)
        if sent >= 0:
            publish_to_all(use, chunks, 0, sent, HOW)
        sent = tl.full((), -1, tl.int32)
        ok = first_credits(ok, alive, use, ticket, WORLD, TRACE)
        result = tl.where(ok != 0, acc, float("nan")).to(dtype)
        if ok != 0:
            put_in_outbox(outbox, result, TILES)
            sent = ticket
        store_part(result, out, ticket, rank, num_m, num_n, sizes.M, sizes.N, sizes.block, WORLD, TILES)
        event(use, began, ticket, rank, TILE, TRACE)
        ticket = granted(request, TILES.THREADS)
    # Sends come before waits: what is left in the outbox is sent now.
    sending = now(TRACE)
    targets = destinations(use, tl.maximum(sent, 0), tiles, dtype, WORLD, BLOCK)
    carry(Carried(outbox, targets, tl.where(sent < 0, 0, BLOCK_WORDS), WORLD - 1), 0, TILES.PIECE)
    if sent >= 0:
        publish_to_all(use, chunks, 0, sent, HOW)
        event(use, sending, sent // chunk_tiles, rank, SEND, TRACE)
    # Look this up again, so that no register holds it while tiles are computed.
    own = data(use, rank, dtype)
    while ticket < WORLD * tiles:
        copying = now(TRACE)
        request = request_ticket(use, TILE_TICKET, TILES.THREADS, True)
        tile = (ticket - tiles) // (WORLD - 1)
        source = (rank + 1 + (ticket - tiles) % (WORLD - 1)) % WORLD
        block = place_of(source, rank, WORLD) * tiles + tile
        # Acquire: the source has pushed all tiles of the chunk before it published this flag.
        whole = alive & timed_wait(use, tile // chunk_tiles, source, TRACE)
        result = received_block(own, block, whole, TILES)
        store_part(result, out, tile, source, num_m, num_n, sizes.M, sizes.N, sizes.block, WORLD, TILES)
        event(use, copying, tile, source, COPY, TRACE)
        ticket = granted(request, TILES.THREADS)
    finish(use)


def geometry(node: MatmulAllGather, launch: Launch, a: torch.Tensor, columns: int) -> Geometry:
    """Returns the Geometry for a [.., K], with the rows and columns of a rank's product. columns: N."""
    M = math.prod(a.shape[:-1])
    config = launch.config(rows=M, columns=columns, repeats=1, dtype=a.dtype)
    tiles = ceil_div(M, config.block_m) * ceil_div(columns, config.block_n)
    places = (node.world_size - 1) * tiles
    return carrying(launch, a.dtype, config, (M, columns), tiles=tiles, computed=tiles, places=places)


def matmul_all_gather(
    node: MatmulAllGather,
    launch: Launch,
    sizes: Geometry,
    a: Sequence[torch.Tensor],
    b: Sequence[torch.Tensor],
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the gathered products for a_i [.., K_i], b_i [K_i, N] and bias [N]; see the module."""
    out = gathered_like(node, a[0], sizes.N)
    call = SumCall(node, launch, sizes, a, b, bias)

    def arguments() -> Arguments:
        block = launch.shard_block([*a[0].shape[:-1], sizes.N], node.gather_dim)
        return call.arguments(sizes=call.sizes_with(block), chunk_tiles=sizes.chunk_tiles, HOW=call.how())

    return call.run(matmul_all_gather_kernel, arguments, out)
