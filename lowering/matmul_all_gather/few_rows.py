"""matmul_all_gather, strategy `tile` for a few rows: out = all_gather(a @ b + bias) in one launch.

Problem. Every rank holds a [M, K] and b [K, N] with columns of its own, and wants the products of all ranks, such as
the logits in decoding. The product takes as long as reading the weight does, and the gathered tensor is small.
Algorithm. Every program takes one run of neighbouring tiles. It computes them one after the other, and stores each in
the output and in the slot of every peer, without waiting for these stores. After its last tile it tells all peers. Then
it waits for the same run of all peers, and copies it from the slot into the output. There is one signal and one copy
for each program; one for each tile would take a tenth of the product's time. Signal protocol. Flag row `run` has one
word for each source. Before its first push a program waits for the credits of all peers. A program takes one ticket,
and waits only for what peers send under the same ticket, which they do before they wait. So the first ticket that some
rank has not finished completes: one resident program is enough. A run without credits is neither sent nor published,
and its tiles in the output are NaN. Limits. There is one flag for each run; see `geometry`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ditron_inductor.core.layout import MAX_CHUNKS, TILE_TICKET
from ditron_inductor.core.matmul import matmul_tile_of_few_rows, parts_of, plus_bias
from ditron_inductor.core.order import interleaved_row
from ditron_inductor.core.signals import (
    ask_to_send,
    close,
    data,
    granted,
    last_use,
    leave,
    publish_all,
    request_ticket,
    settle,
    use_of,
    words_of,
)
from ditron_inductor.core.timed import timed_may_send, timed_wait_all
from ditron_inductor.core.trace import COPY, TILE, event, now
from ditron_inductor.lowering.config import Config, select_few_rows_config
from ditron_inductor.lowering.host.launch import Launch, ceil_div
from ditron_inductor.lowering.host.launcher import Arguments
from ditron_inductor.lowering.matmul_all_gather.parts import gathered_like, place_of
from ditron_inductor.lowering.sums import Geometry, SumCall
from ditron_inductor.task.nodes import MatmulAllGather

MOST_ROWS = 64
"""With more rows the tensor cores need larger tiles than all rows of a few columns."""
INTERPRETED_MOST_ROWS = 16

STAGES = {16: 5, 32: 4, 64: 3}
"""The stages of the K loop, by the rows of a tile; they leave memory for a second program on an SM."""
COPY_ROWS = tl.constexpr(16)
COPY_BYTES = 256
"""The bytes of a run that one thread copies at a time, from all peers together. All of them are under way at once."""


def fits(launch: Launch, rows: int, columns: int) -> bool:
    """Returns whether there are few enough rows for this kernel."""
    return 0 < rows <= (INTERPRETED_MOST_ROWS if launch.interpreted else MOST_ROWS)


def select_tiles(*, rows: int, dtype: torch.dtype, interpreted: bool) -> Config:
    """Returns the tile shape for a few rows. It is equal on all ranks."""
    config = select_few_rows_config(rows=rows, dtype=dtype, interpreted=interpreted)
    return replace(config, num_stages=STAGES[config.block_m], programs_per_sm=2)


class Sizes(NamedTuple):
    """The columns of a product, `block` of `interleaved_row`, the columns of a product in a slot, and Terms."""

    N: Any
    block: Any
    pitch: Any
    terms: Any


@triton.jit(do_not_specialize=["M", "run_tiles", "rank"])
def matmul_all_gather_kernel(
    operands, out, pointers, rank, M, sizes, run_tiles, HOW: tl.constexpr, TRACE: tl.constexpr = 0,
):  # fmt: skip
    """See the module. operands: pointers to the a_i [M, K_i], M <= BLOCK_M, with contiguous K, to the b_i [K_i, N], see
    Terms, and to the bias or anything. `out` is [WORLD * M, N] with rows as in interleaved_row. A slot has places
    [peer][M][pitch]; pitch is a multiple of BLOCK_N. There is a program for each run of run_tiles tiles.
    """
    lefts, rights, bias = parts_of(operands)
    WORLD: tl.constexpr = HOW.WORLD
    TILES: tl.constexpr = HOW.TILES
    BLOCK_M: tl.constexpr = TILES.BLOCK_M
    BLOCK_N: tl.constexpr = TILES.BLOCK_N
    # All this is requested now and used after the first tile, because it takes as long as a tenth of the product.
    words = words_of(pointers, rank)
    request = request_ticket(words, TILE_TICKET, TILES.THREADS, True)
    asked = ask_to_send(words, WORLD, TILES.THREADS)
    use = use_of(words)
    due = last_use(use)
    run = granted(request, TILES.THREADS)
    dtype: tl.constexpr = out.dtype.element_ty
    own = data(use, rank, dtype)
    slots = ()
    for i in tl.static_range(1, WORLD):
        target = (rank + i) % WORLD
        place = place_of(rank, target, WORLD).to(tl.int64) * M * sizes.pitch
        slots = slots + (data(use, target, dtype) + place,)  # type: ignore[assignment]
    offs_m = tl.arange(0, BLOCK_M)
    in_m = (offs_m < M)[:, None]
    own_rows = interleaved_row(offs_m, rank, M, sizes.block, WORLD, True).to(tl.int64)[:, None] * sizes.N
    # `ok` says whether this program may send; it is -1 until the answers have been read.
    ok = tl.full((), -1, tl.int32)
    tile = run * run_tiles
    last_tile = tl.minimum(tile + run_tiles, tl.cdiv(sizes.N, BLOCK_N))
    while tile < last_tile:
        began = now(TRACE)
        acc = matmul_tile_of_few_rows(lefts, M, rights, sizes.terms, tile * BLOCK_N, sizes.N, TILES)
        offs_n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        if ok < 0:
            ok = timed_may_send(asked, due, use, run, WORLD, TILES.THREADS, TRACE)
        acc = plus_bias(acc, bias, tile * BLOCK_N, sizes.N, BLOCK_N, HOW.HAS_BIAS)
        result = tl.where(ok != 0, acc, float("nan")).to(dtype)
        if ok != 0:
            in_slot = offs_m[:, None] * sizes.pitch + offs_n[None, :]
            for i in tl.static_range(WORLD - 1):
                tl.store(slots[i] + in_slot, result, mask=in_m & (in_slot >= 0))
        tl.store(out + own_rows + offs_n[None, :], result, mask=in_m & (offs_n < sizes.N)[None, :])
        event(use, began, tile, rank, TILE, TRACE)
        tile += 1
    if ok != 0:
        # The run lies in every peer's slot. A run without credits is neither sent nor published.
        publish_all(use, run, WORLD)
    if run == 0:
        settle(tl.where(ok != 0, due, 0), use, WORLD)
    left = leave(use, run, due, TILES.THREADS, True)
    # Acquire: the same run of all peers is visible.
    copying = now(TRACE)
    whole = ok & timed_wait_all(use, run, WORLD, TRACE)
    for first in range(run * run_tiles * BLOCK_N, last_tile * BLOCK_N, HOW.COPY_COLUMNS):
        columns = first + tl.arange(0, HOW.COPY_COLUMNS)
        for i in tl.static_range(BLOCK_M // COPY_ROWS):
            rows = i * COPY_ROWS + tl.arange(0, COPY_ROWS)
            in_run = (rows < M)[:, None] & (columns < last_tile * BLOCK_N)[None, :]
            parts = ()
            for step in tl.static_range(1, WORLD):
                source = place_of((rank + step) % WORLD, rank, WORLD).to(tl.int64) * M * sizes.pitch
                at = own + source + rows[:, None] * sizes.pitch + columns[None, :]
                part = tl.load(at, mask=in_run & (whole != 0), other=float("nan"))
                parts = parts + (part,)  # type: ignore[assignment]
            inside = in_run & (columns < sizes.N)[None, :]
            for step in tl.static_range(1, WORLD):
                to_rows = interleaved_row(rows, (rank + step) % WORLD, M, sizes.block, WORLD, True).to(tl.int64)
                tl.store(out + to_rows[:, None] * sizes.N + columns[None, :], parts[step - 1], mask=inside)
    event(use, copying, run, rank, COPY, TRACE)
    close(granted(left, TILES.THREADS), use)


def geometry(node: MatmulAllGather, launch: Launch, a: torch.Tensor, columns: int) -> Geometry:
    """Returns the Geometry for a [.., K] and columns N of a rank. A chunk is the run of one program."""
    M = math.prod(a.shape[:-1])
    config = select_tiles(rows=M, dtype=a.dtype, interpreted=launch.interpreted)
    config = config.for_arch(launch.workspace.capabilities.arch)
    tiles = ceil_div(columns, config.block_n)
    run_tiles = ceil_div(tiles, min(launch.programs(tiles, config), MAX_CHUNKS.value))
    return Geometry(
        M=M,
        N=columns,
        config=config,
        tiles=tiles,
        chunk_tiles=run_tiles,
        programs=ceil_div(tiles, run_tiles),
        nbytes=(node.world_size - 1) * M * tiles * config.block_n * a.element_size(),
    )


def copy_columns(sizes: Geometry, world_size: int, itemsize: int) -> int:
    """Returns the columns that a program copies at once, 2^n: a run's, or as many as fit in registers."""
    threads = 32 * sizes.config.num_warps
    most = threads * COPY_BYTES // (COPY_ROWS.value * (world_size - 1) * itemsize)
    wanted = 1 << (sizes.chunk_tiles * sizes.config.block_n - 1).bit_length()
    return min(wanted, 1 << (max(most, 16).bit_length() - 1))


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
        copied = copy_columns(sizes, node.world_size, a[0].element_size())
        return call.arguments(
            M=sizes.M,
            sizes=Sizes(sizes.N, block, pitch=sizes.tiles * sizes.config.block_n, terms=call.terms),
            run_tiles=sizes.chunk_tiles,
            HOW=call.how(few_rows=True)._replace(COPY_COLUMNS=copied),
        )

    return call.run(matmul_all_gather_kernel, arguments, out)
