"""matmul_all_reduce, strategy `tile` for a few rows: out = all_reduce(sum_i a_i @ b_i + bias) in one launch, one-shot.

Problem. It is that of two_shot.py in decoding: the product takes as long as reading the weight does, the tensor that is
reduced is small, and the time behind the last tile is that of the signals that follow each other. Algorithm. A program
computes a tile, puts it into the slot of every rank, including its own, and tells all peers at once. It adds up a tile,
in rank order and in fp32, after it has sent its next tile, or if there is none. So there is one signal between the last
tile and the result. Operands are loaded by pointers, which is faster for so few rows. Every rank adds the same rounded
partial tiles, so all get equal bits. An epilogue is computed on the sum before it is stored, and its part before the
reduction on a tile before the tile is sent. If a norm follows (lowering/matmul_all_reduce_rms_norm), the program that
adds up this GPU's last tile normalises all rows, which are few. Signal protocol. Flag row `tile` has one word for each
source. Before its first push a program waits for the credits of all peers. A program that waits for a tile has sent all
tiles that it took before, in ticket order. A local counter tells which tile is the last; nobody waits for it. Limits.
There is one flag for each tile; see `fits`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ditron_inductor.core.layout import MAX_CHUNKS, TILE_TICKET
from ditron_inductor.core.matmul import matmul_tile_of_few_rows, parts_of, plus_bias
from ditron_inductor.core.signals import (
    arrive,
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
from ditron_inductor.core.trace import SUM, TILE, event, now
from ditron_inductor.lowering.config import select_few_rows_config
from ditron_inductor.lowering.epilogues import arrange, elements_at, prepared, store_sum
from ditron_inductor.lowering.host.launch import Launch, ceil_div
from ditron_inductor.lowering.host.launcher import Arguments
from ditron_inductor.lowering.norms.rows import (
    all_outputs,
    block_of,
    constants_of,
    finish_all,
    pointers,
    reduced_outputs,
)
from ditron_inductor.lowering.sums import Geometry, How, SumCall, carrying
from ditron_inductor.task.nodes import MatmulAllReduce, MatmulAllReduceRmsNorm

MOST_ROWS = 64
"""With more rows, sending every partial tile to every rank takes longer than a second round of signals."""

MOST_NORM_ROWS = 1
"""The most rows that one program normalises (on an H200, 4 rows of 8192 took 4 us longer than a launch)."""
MOST_NORM_ELEMENTS = 64
"""The most elements of a row in each thread of that program."""


class Sizes(NamedTuple):
    """The columns N of the output, and the Terms of the sum. The number of rows changes from call to call."""

    N: Any
    terms: Any


def fits(launch: Launch, rows: int, columns: int) -> bool:
    """Returns whether [rows, columns] is reduced in one shot: few rows, and flags for the narrowest tiles."""
    return 0 < rows <= MOST_ROWS and columns <= 16 * MAX_CHUNKS.value


def takes_norm(launch: Launch, sizes: Geometry) -> bool:
    """Returns whether a norm is computed in the same launch."""
    few = fits(launch, sizes.M, sizes.N) and sizes.M <= MOST_NORM_ROWS
    return few and block_of(sizes.N) <= MOST_NORM_ELEMENTS * 32 * sizes.config.num_warps


@triton.jit(do_not_specialize=["M", "rank"])
def matmul_all_reduce_kernel(
    operands, extras, outs, given, pointers, rank, M, sizes, functions, HOW: tl.constexpr,
    TRACE: tl.constexpr = 0,
):  # fmt: skip
    """See the module. operands: pointers to the a_i [M, K_i], M <= BLOCK_M, with contiguous K, to the b_i [K_i, N], see
    Terms, and to the bias [N], or anything if there is none. extras: the tensors that the epilogue's Functions read.
    outs: the outputs of the epilogue, or the sum, [M, N] contiguous. With HOW.NORMS there is no EPILOGUE: `outs` are
    the sum and then the outputs of `rows.finish_all`, which reads `given`.
    """
    PRE: tl.constexpr = functions.PRE
    EPILOGUE: tl.constexpr = functions.EPILOGUE
    NORMS: tl.constexpr = HOW.NORMS
    ROW: tl.constexpr = HOW.ROW
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
    ticket = granted(request, TILES.THREADS)
    N = sizes.N
    tiles = tl.cdiv(N, BLOCK_N)
    dtype: tl.constexpr = lefts[0].dtype.element_ty
    own = data(use, rank, dtype)
    slots = ()
    for i in tl.static_range(WORLD):
        slots = slots + (data(use, (rank + i) % WORLD, dtype),)  # type: ignore[assignment]
    offs_m = tl.arange(0, BLOCK_M)
    in_block = offs_m[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    in_m = (offs_m < M)[:, None] & (in_block >= 0)
    # `ok` says whether this program may send; it is -1 until the answers have been read.
    ok = tl.full((), -1, tl.int32)
    # `previous` is the tile that was sent last and is not added up yet.
    previous = tl.full((), -1, tl.int32)
    left = request
    if ticket >= tiles:
        # Do this only for a program without a tile: others would wait for the epoch before their product.
        left = leave(use, ticket, due, TILES.THREADS, True)
    while (ticket < tiles) | (previous >= 0):
        if ticket >= tiles:
            # This is the last round, and its wait the last one.
            left = leave(use, ticket, due, TILES.THREADS, True)
        current = tl.full((), -1, tl.int32)
        if ticket < tiles:
            began = now(TRACE)
            request = request_ticket(use, TILE_TICKET, TILES.THREADS, True)
            acc = matmul_tile_of_few_rows(lefts, M, rights, sizes.terms, ticket * BLOCK_N, N, TILES)
            acc = plus_bias(acc, bias, ticket * BLOCK_N, N, BLOCK_N, HOW.HAS_BIAS)
            if PRE is not None:
                whole_n = ticket * BLOCK_N + tl.arange(0, BLOCK_N)
                elements = elements_at(offs_m, whole_n, (offs_m < M)[:, None], (whole_n < N)[None, :], N)
                acc = prepared(acc, extras, elements, dtype, PRE)
            if ok < 0:
                ok = timed_may_send(asked, due, use, ticket, WORLD, TILES.THREADS, TRACE)
            if ok != 0:
                block = (rank * tiles + ticket).to(tl.int64) * (BLOCK_M * BLOCK_N)
                partial = acc.to(dtype)
                for i in tl.static_range(WORLD):
                    tl.store(slots[i] + block + in_block, partial, mask=in_m)
                # The tile lies in every peer's slot. A tile without credits is neither sent nor published.
                publish_all(use, ticket, WORLD)
            if ticket == 0:
                settle(tl.where(ok != 0, due, 0), use, WORLD)
            event(use, began, ticket, rank, TILE, TRACE)
            current = ticket
            ticket = granted(request, TILES.THREADS)
        if previous >= 0:
            # Acquire: the peers' partial tiles are visible. This program stored its own one before a barrier.
            adding = now(TRACE)
            whole = ok & timed_wait_all(use, previous, WORLD, TRACE)
            total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            for source in tl.static_range(WORLD):
                block = (source * tiles + previous).to(tl.int64) * (BLOCK_M * BLOCK_N)
                total += tl.load(own + block + in_block, mask=in_m & (whole != 0), other=float("nan")).to(tl.float32)
            if HOW.AVERAGE:
                total = total / WORLD
            offs_n = previous * BLOCK_N + tl.arange(0, BLOCK_N)
            elements = elements_at(offs_m, offs_n, (offs_m < M)[:, None], (offs_n < N)[None, :], N)
            if NORMS is None:
                store_sum(total, whole, extras, outs, elements, dtype, EPILOGUE)
            else:
                store_sum(total, whole, extras, outs[:1], elements, dtype, None)
                # When the last tile arrives, the stores of all tiles are visible to its program.
                if arrive(pointers.counters, tiles):
                    finish_all(outs[0], given, outs[1:], M, N, ROW, NORMS)
            event(use, adding, previous, rank, SUM, TRACE)
        previous = current
    close(granted(left, TILES.THREADS), use)


def geometry(node: MatmulAllReduce, launch: Launch, a: torch.Tensor, columns: int) -> Geometry:
    """Returns the Geometry for a [.., K], with the rows, columns and tiles of the output. columns: N."""
    M = math.prod(a.shape[:-1])
    config = select_few_rows_config(rows=M, dtype=a.dtype, interpreted=launch.interpreted)
    config = config.for_arch(launch.workspace.capabilities.arch)
    tiles = ceil_div(columns, config.block_n)
    return carrying(
        launch, a.dtype, config, (M, columns), tiles=tiles, computed=tiles, places=node.world_size * tiles, boxes=0,
        arrangement=arrange(node.parsed, 1),
    )  # fmt: skip


def matmul_all_reduce(
    node: MatmulAllReduce,
    launch: Launch,
    sizes: Geometry,
    a: Sequence[torch.Tensor],
    b: Sequence[torch.Tensor],
    bias: torch.Tensor | None = None,
    extras: Sequence[torch.Tensor] = (),
) -> list[torch.Tensor]:
    """Returns the outputs [.., N] for a_i [.., K_i], b_i [K_i, N], bias [N] and the epilogue's extra tensors."""
    outs = sizes.arrangement.new_outputs_of_sum(a[0], [*a[0].shape[:-1], sizes.N])
    call = SumCall(node, launch, sizes, a, b, bias)
    call.reduce(matmul_all_reduce_kernel, lambda: _arguments(call, call.how(few_rows=True), given=None), extras, outs)
    return outs


def matmul_all_reduce_rms_norm(
    node: MatmulAllReduceRmsNorm,
    launch: Launch,
    sizes: Geometry,
    a: Sequence[torch.Tensor],
    b: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    given: tuple[torch.Tensor | None, ...],
    extras: Sequence[torch.Tensor] = (),
) -> tuple[torch.Tensor, ...]:
    """Returns (normed, total), and what is saved, with the norm in the same launch. given: see nodes.EXTRAS."""
    out = a[0].new_empty([*a[0].shape[:-1], sizes.N])
    outputs = reduced_outputs(node, out)
    call = SumCall(node, launch, sizes, a, b, bias)

    def arguments() -> Arguments:
        constants = constants_of(node, stores_reduced=False)
        how = call.how(few_rows=True)._replace(NORMS=constants.pop("NORMS"), ROW=block_of(sizes.N))
        return _arguments(call, how, **constants)

    outs = [out, *all_outputs(node, outputs)]
    call.reduce(matmul_all_reduce_kernel, arguments, extras, outs, given=pointers(given, out))
    return outputs


def _arguments(call: SumCall, how: How, **others: Any) -> Arguments:
    sizes = call.sizes
    return call.arguments(M=sizes.M, sizes=Sizes(sizes.N, call.terms), HOW=how, **others)
