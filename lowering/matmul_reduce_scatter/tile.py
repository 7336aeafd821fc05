"""matmul_reduce_scatter, strategy `tile`: out = reduce_scatter(sum_i a_i @ b_i + bias) in one launch.

Problem. Every rank holds a [M, K] and b [K, N] of its own slice of K; rank r wants the r-th chunk of rows of the sum.
There may be several products a_i @ b_i that are added up, and a row that is added to them.
Algorithm. One queue of work: the tiles of the product, those of rank + 1 first and the own ones last. A tile of another
rank is carried into the slot of its owner while the next tile is computed. An own tile waits for the other ranks'
parts, adds all of them in fp32 in rank order, and writes the output: by then they have nearly always come, as every
rank computes its own tiles last. Partials are rounded to the output's dtype, as they are without fusion. An epilogue is
computed of the sum, rounded likewise, before it is written; what it makes of the product is computed of a tile before
that is sent.
The K loops of several products run one after the other into one accumulator; the first one, the longest, carries.
Signal protocol. See lowering/partials.py. A push waits for the credits of all peers for the slot's previous use;
the next launch gives those of this one. Every push precedes every flag wait in ticket order, and a program carries and
publishes what it has before it waits for a flag.
Limits. The scattered dimension is not the last one, and the group's size divides it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl

from ditron_inductor.core.layout import MAX_CHUNKS, TILE_TICKET
from ditron_inductor.core.matmul import (
    Carried,
    carry,
    factors_of,
    further_products_by_descriptors,
    plus_bias,
    plus_column,
    sum_of_rows,
    sum_steps_by_descriptors,
)
from ditron_inductor.core.order import grouped, interleaved_row, scatter_order
from ditron_inductor.core.signals import (
    Words,
    credits_due,
    data,
    finish,
    granted,
    healthy,
    request_ticket,
    settle,
    take_tile,
    use_of,
)
from ditron_inductor.core.timed import first_credits, timed_wait_all
from ditron_inductor.core.trace import TILE, event, now
from ditron_inductor.lowering.config import Config
from ditron_inductor.lowering.epilogues import Arrangement, arrange, elements_of, store_sum
from ditron_inductor.lowering.host.launch import Launch, ceil_div, longest_first, terms_of
from ditron_inductor.lowering.host.launcher import Arguments
from ditron_inductor.lowering.partials import Owned, publish_partial, put_prepared, reduced_slice
from ditron_inductor.task.nodes import MatmulReduceScatter


@triton.jit(do_not_specialize=["rank", "slot", "site", "chunk_tiles"])
def matmul_reduce_scatter_kernel(
    lefts, rights, bias, extras, outs, pointers, rows, N, block, terms, rank, slot, site, chunk_tiles,
    WORLD: tl.constexpr, AVERAGE: tl.constexpr, COUNTED: tl.constexpr, INTERLEAVED: tl.constexpr, EARLY: tl.constexpr,
    HAS_BIAS: tl.constexpr, EPILOGUE: tl.constexpr, PRE: tl.constexpr, PRE_IN_SLICES: tl.constexpr, TILES: tl.constexpr,
    TRACE: tl.constexpr = 0,
):  # fmt: skip
    """See the module. lefts, rights: tuples of [WORLD * rows, K_i] with contiguous K and of [K_i, N], see Terms; bias
    [N], [WORLD * rows, 1] if not INTERLEAVED, or anything; extras, outs: tuples, of what PRE and
    EPILOGUE take, and EPILOGUE makes of the sum; outs [rows, N] contiguous; block: see interleaved_row.

    DESCRIPTORS needs the rows of a tile to follow each other: `block` a multiple of BLOCK_M, or not INTERLEAVED.
    """
    BLOCK_M: tl.constexpr = TILES.BLOCK_M
    BLOCK_N: tl.constexpr = TILES.BLOCK_N
    use = use_of(Words(pointers.table, pointers.ctl, rank, slot, site))
    alive = healthy(use)
    num_m = tl.cdiv(rows, BLOCK_M)
    num_n = tl.cdiv(N, BLOCK_N)
    tiles = num_m * num_n
    dtype: tl.constexpr = lefts[0].dtype.element_ty
    factors = factors_of(lefts, rights, WORLD * rows, N, terms, TILES)
    BLOCK: tl.constexpr = BLOCK_M * BLOCK_N
    # In 32-bit words, as it is carried.
    BLOCK_WORDS: tl.constexpr = BLOCK * lefts[0].dtype.element_ty.primitive_bitwidth // 32
    # Elements of a thread: what an epilogue reads takes registers too.
    REGISTERS: tl.constexpr = 64 if EPILOGUE is None and PRE is None else 32
    SLICE: tl.constexpr = min(BLOCK_M, REGISTERS * TILES.THREADS // BLOCK_N)
    PRE_SLICE: tl.constexpr = SLICE if PRE_IN_SLICES else 0
    outbox = data(use, rank, dtype) + (WORLD * tiles + tl.program_id(0)).to(tl.int64) * BLOCK
    # Whether it may send, -1 before it has asked; the tile that waits in the outbox, of no owner if it is the rank.
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
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        if TILES.DESCRIPTORS:
            row = interleaved_row(block_row * BLOCK_M, owner, rows, block, WORLD, INTERLEAVED)
            steps = tl.cdiv(terms.depths[0], TILES.BLOCK_K)
            head = steps
            if EARLY:
                # At the end of their own tiles peers wait for what is carried: twice the fewest steps, and publish.
                head = tl.where(owner == rank, tl.minimum(steps, 2 * BLOCK_WORDS // TILES.PIECE), steps)
            acc = sum_steps_by_descriptors(acc, 0, head, factors, row, column, tile_carried, TILES)
            if EARLY:
                if sent_owner != rank:
                    publish_partial(use, pointers.counters, sent_owner, sent_tile, tiles, chunk_tiles, COUNTED)
                    sent_owner = rank + 0
                acc = sum_steps_by_descriptors(
                    acc, head, steps, factors, row, column, Carried(outbox, (), 0, 0), TILES
                )
            acc = further_products_by_descriptors(acc, factors, row, column, TILES)
        else:
            inner_m = tl.minimum(block_row * BLOCK_M + tl.arange(0, BLOCK_M), rows - 1)
            rows_m = interleaved_row(inner_m, owner, rows, block, WORLD, INTERLEAVED).to(tl.int64)
            acc = sum_of_rows(acc, factors, rows_m, column, tile_carried, TILES)
        acc = plus_bias(acc, bias, column, N, BLOCK_N, HAS_BIAS)
        acc = plus_column(acc, bias, owner * rows + block_row * BLOCK_M, (owner + 1) * rows - 1, BLOCK_M, HAS_BIAS)
        if sent_owner != rank:
            publish_partial(use, pointers.counters, sent_owner, sent_tile, tiles, chunk_tiles, COUNTED)
            sent_owner = rank + 0
        place = Owned(block_row * BLOCK_M, column, owner, rows, block, N)
        if owner == rank:
            put_prepared(outbox, acc, extras, place, PRE, PRE_SLICE, TILES, WORLD, INTERLEAVED)
            # Acquire: the tile's partials of all peers, published after they were stored.
            whole = alive & timed_wait_all(use, tile // chunk_tiles, WORLD, TRACE)
            offs_n = column + tl.arange(0, BLOCK_N)
            for i in tl.static_range(BLOCK_M // SLICE):
                total = reduced_slice(use, outbox, tile, tiles, i, whole, WORLD, AVERAGE, SLICE, TILES)
                slice_m = block_row * BLOCK_M + i * SLICE + tl.arange(0, SLICE)
                store_sum(total, whole, extras, outs, elements_of(slice_m, offs_n, rows, N), dtype, EPILOGUE)
        else:
            ok = first_credits(ok, alive, use, ticket, WORLD, TRACE)
            if ok != 0:
                put_prepared(outbox, acc, extras, place, PRE, PRE_SLICE, TILES, WORLD, INTERLEAVED)
                sent_owner = owner
                sent_tile = tile
        event(use, began, tile, owner, TILE, TRACE)
        ticket = granted(request, TILES.THREADS)
    if sent_owner != rank:
        target = data(use, sent_owner, dtype) + (rank * tiles + sent_tile).to(tl.int64) * BLOCK
        carry(Carried(outbox, (target,), BLOCK_WORDS, 1), 0, TILES.PIECE)
        publish_partial(use, pointers.counters, sent_owner, sent_tile, tiles, chunk_tiles, COUNTED)
    finish(use)


@dataclass(frozen=True)
class Geometry:
    """Sizes that all ranks share: the output [rows, N], tile shape, tiles of one output, programs, the slot's bytes;
    and the epilogue.
    """

    rows: int
    N: int
    config: Config
    tiles: int
    programs: int
    nbytes: int
    arrangement: Arrangement = field(repr=False)


def geometry(node: MatmulReduceScatter, launch: Launch, a: torch.Tensor, columns: int) -> Geometry:
    """a [.., W*S, .., K] with W*S at `scatter_dim`; columns: N. See Geometry."""
    rows = math.prod(a.shape[:-1]) // node.world_size
    config = launch.config(rows=rows, columns=columns, repeats=node.world_size, dtype=a.dtype)
    tiles = ceil_div(rows, config.block_m) * ceil_div(columns, config.block_n)
    programs = launch.programs(node.world_size * tiles, config)
    # A block for each partial tile, and one for each outbox.
    nbytes = (node.world_size * tiles + programs) * config.block_m * config.block_n * a.element_size()
    return Geometry(
        rows=rows,
        N=columns,
        config=config,
        tiles=tiles,
        programs=programs,
        nbytes=nbytes,
        arrangement=arrange(node.parsed, 1),
    )


def matmul_reduce_scatter(
    node: MatmulReduceScatter,
    launch: Launch,
    sizes: Geometry,
    a: Sequence[torch.Tensor],
    b: Sequence[torch.Tensor],
    bias: torch.Tensor | None = None,
    extras: Sequence[torch.Tensor] = (),
) -> list[torch.Tensor]:
    """a_i [.., W*S, .., K_i] with W*S at `scatter_dim`, b_i [K_i, N], bias [N] or [M, 1], extras as the node's epilogue
    reads them; returns the outputs [.., S, .., N]. See the module.
    """
    shape = [*a[0].shape[:-1], sizes.N]
    shape[node.scatter_dim] //= node.world_size
    arrangement = sizes.arrangement
    outs = arrangement.new_outputs_of_sum(a[0], shape)
    lefts, rights = longest_first(a, b)

    def arguments() -> Arguments:
        block = launch.shard_block(shape, node.scatter_dim)
        tile = launch.tile_of_sum(sizes.config, lefts, rights)
        together = block == sizes.rows or block % sizes.config.block_m == 0
        chunk_tiles = launch.chunk_tiles(sizes.tiles, MAX_CHUNKS.value)
        return Arguments(
            programs=sizes.programs,
            values=dict(
                rows=sizes.rows,
                N=sizes.N,
                block=block,
                terms=terms_of(lefts, rights),
                rank=launch.rank,
                chunk_tiles=chunk_tiles,
                WORLD=node.world_size,
                AVERAGE=node.reduce_op == "avg",
                COUNTED=chunk_tiles > 1,
                INTERLEAVED=block != sizes.rows,
                # With few tiles of its own a program has no other one to publish after.
                EARLY=sizes.tiles <= 2 * sizes.programs,
                **arrangement.constants_of_products(),
                HAS_BIAS=0 if bias is None else bias.dim(),
                TILES=tile._replace(DESCRIPTORS=tile.DESCRIPTORS and together),
                **sizes.config.options,
            ),
        )

    tensors = {
        "lefts": lefts,
        "rights": rights,
        "bias": outs[0] if bias is None else bias.contiguous(),
        # Never empty: without any it gets what it does not look at.
        "extras": tuple(extra.contiguous() for extra in extras) or (outs[0],),
        "outs": tuple(outs),
    }
    launch.run(matmul_reduce_scatter_kernel, sizes.nbytes, arguments, tensors)
    return outs
