"""matmul_all_to_all, strategy `tile`: out = all_to_all(a @ b + bias), columns scattered, rows gathered, in one launch.

Problem. Every rank holds its rows a [M, K] and b [K, N]. Rank r wants, for all rows of all ranks, its own columns of
the product. The columns are `parts` parts of W runs of C columns each, and rank r gets the r-th run of each part.
Nothing is added up, so every tile has one reader. Algorithm. One queue of work has the tiles of the product, those for
rank + 1 first and the rank's own tiles last, and then copies of what the peers have sent. A tile lies in one run of
columns. A finished tile for a peer goes into the program's outbox, and the K loop of the next tile carries it into the
peer's slot. An own tile goes into the output. The last tickets copy the peers' tiles from the slot into the output, in
the order in which they are computed: those of rank - 1 first. By then only the last tiles are still on their way.
Signal protocol. Flag row `tile // chunk_tiles` of a peer has one word for each source. A push waits for the credits of
all peers for the slot's previous use; the next launch gives the credits of this use. Every push precedes every flag
wait in ticket order, and a program carries and publishes what it has before it waits for a flag. All ranks send as much
as they receive, so none runs ahead. Limits. The gathered dimension is not the last one, and the group's size times
`parts` divides N.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ditron_inductor.core.layout import TILE_TICKET
from ditron_inductor.core.matmul import Carried, carry, factors_of, parts_of, plus_bias, sum_tile, zeros_of
from ditron_inductor.core.order import grouped, interleaved_row, scatter_order
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
from ditron_inductor.lowering.matmul_all_gather.parts import place_of
from ditron_inductor.lowering.partials import Chunks, publish_partial, put_in_outbox, received_block
from ditron_inductor.lowering.sums import Geometry, SumCall, carrying
from ditron_inductor.task.nodes import MatmulAllToAll
from ditron_inductor.task.ulysses import gathered_shape


@triton.jit
def place_of_tile(tile, num_m, C, parts, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Returns (first row, part, first column in the part's run of C) of tile `tile` for one rank."""
    blocks = tl.cdiv(C, BLOCK_N)
    block_row, block_column = grouped(tile, num_m, parts * blocks, GROUP_M)
    return block_row * BLOCK_M, block_column // blocks, block_column % blocks * BLOCK_N


@triton.jit
def store_tile(result, out, tile, source, num_m, M, C, parts, block, WORLD: tl.constexpr, TILES: tl.constexpr):
    """Stores `result`, tile `tile` from `source` for this rank, in `out`, without what is beyond its edges."""
    row, part, column = place_of_tile(tile, num_m, C, parts, TILES.BLOCK_M, TILES.BLOCK_N, TILES.GROUP_M)
    offs_m = row + tl.arange(0, TILES.BLOCK_M)
    offs_n = column + tl.arange(0, TILES.BLOCK_N)
    to_rows = interleaved_row(offs_m, source, M, block, WORLD, True).to(tl.int64)
    inside = (offs_m < M)[:, None] & (offs_n < C)[None, :]
    tl.store(out + to_rows[:, None] * (parts * C) + (part * C + offs_n)[None, :], result, mask=inside)


@triton.jit(do_not_specialize=["parts", "chunk_tiles", "rank"])
def matmul_all_to_all_kernel(
    operands, out, pointers, rank, sizes, parts, chunk_tiles, HOW: tl.constexpr,
    TRACE: tl.constexpr = 0,
):  # fmt: skip
    """See the module. operands: pointers to the a_i [M, K_i] with contiguous K, to the b_i [K_i, parts * WORLD * N],
    see Terms, and to the bias or anything. `out` is [WORLD * M, parts * N], contiguous, with rows as in
    interleaved_row. A slot has places [peer][tile], and an outbox for each program.
    """
    lefts, rights, bias = parts_of(operands)
    WORLD: tl.constexpr = HOW.WORLD
    TILES: tl.constexpr = HOW.TILES
    BLOCK_M: tl.constexpr = TILES.BLOCK_M
    BLOCK_N: tl.constexpr = TILES.BLOCK_N
    use = use_of(words_of(pointers, rank))
    alive = healthy(use)
    num_m = tl.cdiv(sizes.M, BLOCK_M)
    tiles = num_m * parts * tl.cdiv(sizes.N, BLOCK_N)
    columns = parts * WORLD * sizes.N
    dtype: tl.constexpr = out.dtype.element_ty
    factors = factors_of(lefts, rights, sizes.M, columns, sizes.terms, TILES)
    chunks = Chunks(pointers.counters, tiles, chunk_tiles)
    BLOCK: tl.constexpr = BLOCK_M * BLOCK_N
    # The size of a block in 32-bit words, in which it is carried.
    BLOCK_WORDS: tl.constexpr = BLOCK * out.dtype.element_ty.primitive_bitwidth // 32
    outbox = data(use, rank, dtype) + ((WORLD - 1) * tiles + tl.program_id(0)).to(tl.int64) * BLOCK
    # `ok` says whether this program may send; it is -1 until it has asked. sent_owner and sent_tile are the tile that
    # waits in the outbox; sent_owner is this rank if there is none.
    ok = tl.full((), -1, tl.int32)
    sent_owner = rank + 0
    sent_tile = tl.full((), 0, tl.int32)
    ticket = take_tile(use)
    if ticket == 0:
        settle(credits_due(use, alive), use, WORLD)
    while ticket < WORLD * tiles:
        began = now(TRACE)
        request = request_ticket(use, TILE_TICKET, TILES.THREADS, True)
        owner = scatter_order(ticket // tiles, rank, WORLD)
        tile = ticket % tiles
        row, part, column = place_of_tile(tile, num_m, sizes.N, parts, BLOCK_M, BLOCK_N, TILES.GROUP_M)
        column += (part * WORLD + owner) * sizes.N
        place = (place_of(rank, sent_owner, WORLD) * tiles + sent_tile).to(tl.int64) * BLOCK
        target = data(use, sent_owner, dtype) + tl.where(sent_owner != rank, place, 0)
        carried = tl.where(sent_owner != rank, BLOCK_WORDS, 0)
        # Add the bias first, because behind the product there are no registers left for it.
        acc = plus_bias(zeros_of(TILES), bias, column, columns, BLOCK_N, HOW.HAS_BIAS)
        acc = sum_tile(acc, factors, row, column, Carried(outbox, (target,), carried, 1), TILES)
        if sent_owner != rank:
            publish_partial(use, chunks, sent_owner, sent_tile, HOW)
            sent_owner = rank + 0
        ok = first_credits(ok, alive, use, ticket, WORLD, TRACE)
        result = tl.where(ok != 0, acc, float("nan")).to(dtype)
        if owner == rank:
            store_tile(result, out, tile, rank, num_m, sizes.M, sizes.N, parts, sizes.block, WORLD, TILES)
        elif ok != 0:
            put_in_outbox(outbox, result, TILES)
            sent_owner = owner
            sent_tile = tile
        event(use, began, tile, owner, TILE, TRACE)
        ticket = granted(request, TILES.THREADS)
    # Sends come before waits: what is left in the outbox is sent now.
    if sent_owner != rank:
        sending = now(TRACE)
        place = (place_of(rank, sent_owner, WORLD) * tiles + sent_tile).to(tl.int64) * BLOCK
        carry(Carried(outbox, (data(use, sent_owner, dtype) + place,), BLOCK_WORDS, 1), 0, TILES.PIECE)
        publish_partial(use, chunks, sent_owner, sent_tile, HOW)
        event(use, sending, sent_tile // chunk_tiles, sent_owner, SEND, TRACE)
    # Look this up again, so that no register holds it while tiles are computed.
    own = data(use, rank, dtype)
    while ticket < (2 * WORLD - 1) * tiles:
        copying = now(TRACE)
        request = request_ticket(use, TILE_TICKET, TILES.THREADS, True)
        tile = ticket % tiles
        # Rank - 1 sends to this rank first.
        source = (rank + 2 * WORLD - 1 - ticket // tiles) % WORLD
        block = place_of(source, rank, WORLD) * tiles + tile
        # Acquire: the source has pushed all tiles of the chunk before it published this flag.
        whole = alive & timed_wait(use, tile // chunk_tiles, source, TRACE)
        result = received_block(own, block, whole, TILES)
        store_tile(result, out, tile, source, num_m, sizes.M, sizes.N, parts, sizes.block, WORLD, TILES)
        event(use, copying, tile, source, COPY, TRACE)
        ticket = granted(request, TILES.THREADS)
    finish(use)


def geometry(node: MatmulAllToAll, launch: Launch, a: torch.Tensor, columns: int) -> Geometry:
    """Returns the Geometry for a [.., K]: M rows of a rank, N columns of a run, tiles for one rank."""
    M, world = math.prod(a.shape[:-1]), node.world_size
    N = columns // (node.parts * world)
    config = launch.config(rows=M, columns=N, repeats=world * node.parts, dtype=a.dtype)
    tiles = ceil_div(M, config.block_m) * node.parts * ceil_div(N, config.block_n)
    return carrying(launch, a.dtype, config, (M, N), tiles=tiles, computed=world * tiles, places=(world - 1) * tiles)


def matmul_all_to_all(
    node: MatmulAllToAll,
    launch: Launch,
    sizes: Geometry,
    a: Sequence[torch.Tensor],
    b: Sequence[torch.Tensor],
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns [.., W*S, .., N / W] for a_i [.., S, .., K_i] with S at `gather_dim`, b_i [K_i, N], bias [N]."""
    out = a[0].new_empty(gathered_shape(a[0].shape, b[0].shape[1], node.gather_dim, node.world_size))
    call = SumCall(node, launch, sizes, a, b, bias)

    def arguments() -> Arguments:
        how = call.how()
        # Blocks of columns begin at multiples of N. The copy unit fails if these are not multiples of 16 bytes.
        aligned = sizes.N * a[0].element_size() % 16 == 0
        how = how._replace(TILES=how.TILES._replace(DESCRIPTORS=how.TILES.DESCRIPTORS and aligned))
        block = launch.shard_block(list(a[0].shape), node.gather_dim)
        return call.arguments(sizes=call.sizes_with(block), parts=node.parts, chunk_tiles=sizes.chunk_tiles, HOW=how)

    return call.run(matmul_all_to_all_kernel, arguments, out)
