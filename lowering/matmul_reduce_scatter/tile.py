"""matmul_reduce_scatter, strategy `tile`: out = reduce_scatter(sum_i a_i @ b_i + bias) in one launch.

Problem. Every rank holds a [M, K] and b [K, N] of its own slice of K. Rank r wants the r-th chunk of rows of the sum.
Several products a_i @ b_i may be added up, and a row to them. Algorithm. One queue of work has the tiles of the
product, those of rank + 1 first and the rank's own tiles last. A tile of another rank is carried into the slot of its
owner while the next tile is computed. An own tile waits for the other ranks' partial tiles, adds all of them in fp32 in
rank order, and stores the output. By then they have nearly always come, since every rank computes its own tiles last.
Partial tiles are rounded to the output's dtype, as they are without fusion. An epilogue is computed on the sum, rounded
too, before it is stored, and its part before the reduction on a tile before the tile is sent. The K loops of several
products run one after the other into one accumulator; the first and longest of them carries. Signal protocol. See
lowering/partials.py. A push waits for the credits of all peers for the slot's previous use; the next launch gives the
credits of this use. Every push precedes every flag wait in ticket order, and a program carries and publishes what it
has before it waits for a flag. Limits. The scattered dimension is not the last one, and the group's size divides it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ditron_inductor.core.layout import TILE_TICKET
from ditron_inductor.core.matmul import (
    Carried,
    carry,
    factors_of,
    further_products_by_descriptors,
    parts_of,
    plus_bias,
    plus_column,
    sum_of_rows,
    sum_steps_by_descriptors,
    zeros_of,
)
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
from ditron_inductor.core.timed import first_credits, timed_wait_all
from ditron_inductor.core.trace import TILE, event, now
from ditron_inductor.lowering.epilogues import arrange, elements_of, store_sum
from ditron_inductor.lowering.host.launch import Launch, ceil_div
from ditron_inductor.lowering.host.launcher import Arguments
from ditron_inductor.lowering.partials import Chunks, Owned, publish_partial, put_prepared, reduced_slice
from ditron_inductor.lowering.sums import Geometry, SumCall, carrying
from ditron_inductor.task.nodes import MatmulReduceScatter


@triton.jit(do_not_specialize=["chunk_tiles", "rank"])
def matmul_reduce_scatter_kernel(
    operands, extras, outs, pointers, rank, sizes, functions, chunk_tiles, HOW: tl.constexpr,
    TRACE: tl.constexpr = 0,
):  # fmt: skip
    """See the module. operands: pointers to the a_i [WORLD * M, K_i] with contiguous K, to the b_i [K_i, N], see Terms,
    and to the bias: [N], [WORLD * M, 1] if not INTERLEAVED, or anything if there is none. extras: the tensors that the
    epilogue's Functions read. outs: the outputs of the epilogue, or the sum, [M, N] contiguous. With TILES.DESCRIPTORS
    the rows of a tile have to follow each other: sizes.block is a multiple of BLOCK_M, or INTERLEAVED is false.
    """
    PRE: tl.constexpr = functions.PRE
    EPILOGUE: tl.constexpr = functions.EPILOGUE
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
    dtype: tl.constexpr = lefts[0].dtype.element_ty
    factors = factors_of(lefts, rights, WORLD * sizes.M, sizes.N, sizes.terms, TILES)
    chunks = Chunks(pointers.counters, tiles, chunk_tiles)
    BLOCK: tl.constexpr = BLOCK_M * BLOCK_N
    # The size of a block in 32-bit words, in which it is carried.
    BLOCK_WORDS: tl.constexpr = BLOCK * lefts[0].dtype.element_ty.primitive_bitwidth // 32
    # The elements of a thread. The tensors that an epilogue reads take registers too.
    REGISTERS: tl.constexpr = 64 if EPILOGUE is None and PRE is None else 32
    SLICE: tl.constexpr = min(BLOCK_M, REGISTERS * TILES.THREADS // BLOCK_N)
    outbox = data(use, rank, dtype) + (WORLD * tiles + tl.program_id(0)).to(tl.int64) * BLOCK
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
        block_row, block_column = grouped(tile, num_m, num_n, TILES.GROUP_M)
        target = data(use, sent_owner, dtype) + (rank * tiles + sent_tile).to(tl.int64) * BLOCK
        carried = tl.where(sent_owner != rank, BLOCK_WORDS, 0)
        column = block_column * BLOCK_N
        tile_carried = Carried(outbox, (target,), carried, 1)
        acc = zeros_of(TILES)
        if TILES.DESCRIPTORS:
            row = interleaved_row(block_row * BLOCK_M, owner, sizes.M, sizes.block, WORLD, HOW.INTERLEAVED)
            steps = tl.cdiv(sizes.terms.depths[0], TILES.BLOCK_K)
            head = steps
            if HOW.EARLY:
                # The peers are at the end of their own tiles too and wait for what is carried. So it is published
                # after twice the steps that carrying needs.
                head = tl.where(owner == rank, tl.minimum(steps, 2 * BLOCK_WORDS // TILES.PIECE), steps)
            acc = sum_steps_by_descriptors(acc, 0, head, factors, row, column, tile_carried, TILES)
            if HOW.EARLY:
                if sent_owner != rank:
                    publish_partial(use, chunks, sent_owner, sent_tile, HOW)
                    sent_owner = rank + 0
                acc = sum_steps_by_descriptors(acc, head, steps, factors, row, column, Carried(outbox, (), 0, 0), TILES)
            acc = further_products_by_descriptors(acc, factors, row, column, TILES)
        else:
            inner_m = tl.minimum(block_row * BLOCK_M + tl.arange(0, BLOCK_M), sizes.M - 1)
            rows_m = interleaved_row(inner_m, owner, sizes.M, sizes.block, WORLD, HOW.INTERLEAVED).to(tl.int64)
            acc = sum_of_rows(acc, factors, rows_m, column, tile_carried, TILES)
        acc = plus_bias(acc, bias, column, sizes.N, BLOCK_N, HOW.HAS_BIAS)
        first_row = owner * sizes.M
        acc = plus_column(acc, bias, first_row + block_row * BLOCK_M, first_row + sizes.M - 1, BLOCK_M, HOW.HAS_BIAS)
        if sent_owner != rank:
            publish_partial(use, chunks, sent_owner, sent_tile, HOW)
            sent_owner = rank + 0
        place = Owned(block_row * BLOCK_M, column, owner, sizes.M, sizes.block, sizes.N)
        if owner == rank:
            put_prepared(outbox, acc, extras, place, PRE, SLICE, HOW)
            # Acquire: the peers' partial tiles are visible.
            whole = alive & timed_wait_all(use, tile // chunk_tiles, WORLD, TRACE)
            offs_n = column + tl.arange(0, BLOCK_N)
            for i in tl.static_range(BLOCK_M // SLICE):
                total = reduced_slice(use, outbox, tile, tiles, i, whole, SLICE, HOW)
                slice_m = block_row * BLOCK_M + i * SLICE + tl.arange(0, SLICE)
                store_sum(total, whole, extras, outs, elements_of(slice_m, offs_n, sizes.M, sizes.N), dtype, EPILOGUE)
        else:
            ok = first_credits(ok, alive, use, ticket, WORLD, TRACE)
            if ok != 0:
                put_prepared(outbox, acc, extras, place, PRE, SLICE, HOW)
                sent_owner = owner
                sent_tile = tile
        event(use, began, tile, owner, TILE, TRACE)
        ticket = granted(request, TILES.THREADS)
    if sent_owner != rank:
        target = data(use, sent_owner, dtype) + (rank * tiles + sent_tile).to(tl.int64) * BLOCK
        carry(Carried(outbox, (target,), BLOCK_WORDS, 1), 0, TILES.PIECE)
        publish_partial(use, chunks, sent_owner, sent_tile, HOW)
    finish(use)


def geometry(node: MatmulReduceScatter, launch: Launch, a: torch.Tensor, columns: int) -> Geometry:
    """Returns the Geometry for a [.., W*S, .., K], W*S at `scatter_dim`, and columns N of an output."""
    M, world = math.prod(a.shape[:-1]) // node.world_size, node.world_size
    config = launch.config(rows=M, columns=columns, repeats=world, dtype=a.dtype)
    tiles = ceil_div(M, config.block_m) * ceil_div(columns, config.block_n)
    return carrying(
        launch, a.dtype, config, (M, columns), tiles=tiles, computed=world * tiles, places=world * tiles,
        arrangement=arrange(node.parsed, 1),
    )  # fmt: skip


def matmul_reduce_scatter(
    node: MatmulReduceScatter,
    launch: Launch,
    sizes: Geometry,
    a: Sequence[torch.Tensor],
    b: Sequence[torch.Tensor],
    bias: torch.Tensor | None = None,
    extras: Sequence[torch.Tensor] = (),
) -> list[torch.Tensor]:
    """Returns the outputs [.., S, .., N] for a_i [.., W*S, .., K_i] with W*S at `scatter_dim`, b_i [K_i, N] and bias
    [N] or [M, 1]; see the module. extras: the extra tensors of the epilogue.
    """
    shape = [*a[0].shape[:-1], sizes.N]
    shape[node.scatter_dim] //= node.world_size
    outs = sizes.arrangement.new_outputs_of_sum(a[0], shape)
    call = SumCall(node, launch, sizes, a, b, bias)

    def arguments() -> Arguments:
        how, block = call.how(), launch.shard_block(shape, node.scatter_dim)
        together = block == sizes.M or block % sizes.config.block_m == 0
        how = how._replace(
            TILES=how.TILES._replace(DESCRIPTORS=how.TILES.DESCRIPTORS and together),
            INTERLEAVED=block != sizes.M,
            # A program with few tiles of its own would publish the last carried tile late.
            EARLY=sizes.tiles <= 2 * sizes.programs,
        )
        return call.arguments(sizes=call.sizes_with(block), chunk_tiles=sizes.chunk_tiles, HOW=how)

    call.reduce(matmul_reduce_scatter_kernel, arguments, extras, outs)
    return outs
