"""projections: out_i = x @ weight_i for all weights in one launch, for a few rows (decoding), with an epilogue.

Problem. A product of few rows takes as long as reading its weight. One rank's part of a projection is small: a
library's launch for it ends before it has filled the GPU, and the next launch begins behind it. Algorithm. One grid has
a program for each tile of 64 columns of any weight (see `matmul_tile_of_few_rows`), or for each column if there is one
row (see core/matmul_row.py). If these are fewer than the SMs, the rows of a tile are divided among several programs,
which read the weight from the L2 cache together. Products that an epilogue combines, such as gate and up, are computed
in one tile with half the size of a K step, those of one row in steps of both. Nothing is communicated, and no
program waits. Limits. There are few rows, and K of the weights is contiguous. Anything else is
computed by the library, one product after the other, with one launch for the epilogue.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ditron_inductor.core.matmul import Rows, Weight, weight_of
from ditron_inductor.core.matmul_pair import interleaved_pair_of_few_rows, matmul_pair_of_few_rows
from ditron_inductor.core.matmul_row import product_of_few_rows
from ditron_inductor.core.overlap import let_next_begin
from ditron_inductor.device.streams import handle_for
from ditron_inductor.lowering.config import Config, select_projections_config
from ditron_inductor.lowering.epilogues import (
    Arrangement,
    Finisher,
    arrange,
    elements_at,
    extras_or,
    store_outputs,
    unpacked,
)
from ditron_inductor.lowering.host.launch import ceil_div, widths_of
from ditron_inductor.lowering.host.launcher import Arguments, local_launcher
from ditron_inductor.lowering.host.local_calls import LocalCalls, facts_of
from ditron_inductor.lowering.overlapping import launch_options, overlap_for
from ditron_inductor.lowering.tiles import pair_of, tiles_of
from ditron_inductor.task.nodes import MOST_PROJECTED_ROWS, Projections
from ditron_inductor.task.torch_dtypes import OPERAND_DTYPES

Runner = Callable[[torch.Tensor, Sequence[torch.Tensor], Sequence[torch.Tensor]], list[torch.Tensor]]
"""A function of (x, weights, extra tensors)."""


class Places(NamedTuple):
    """The rows of the outputs that a tile is stored at, and the expert of its weights, 0 where there are no experts."""

    rows: Any
    expert: Any


@triton.jit(do_not_specialize=["M"])
def projections_kernel(
    x, weights, extras, outs, M, K, widths, GROUPS: tl.constexpr, EPILOGUE: tl.constexpr, TILES: tl.constexpr,
    PAIR: tl.constexpr,
):  # fmt: skip
    """See the module. x is [M, K], contiguous; weights, extras and outs are tuples of pointers, see Widths. GROUPS: the
    weights that are multiplied in one tile. PAIR: the Tiles of two weights.
    """
    let_next_begin(TILES.OVERLAP)
    BLOCK_M: tl.constexpr = TILES.BLOCK_M
    # Tiles of one row are for one row.
    blocks = 1 if BLOCK_M == 1 else tl.cdiv(M, BLOCK_M)
    # Programs of the same columns follow each other, so a weight is read from memory once.
    places = tl.program_id(0) % blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = Rows(x + places.to(tl.int64) * K, places < (1 if BLOCK_M == 1 else M))
    tile = tl.program_id(0) // blocks
    if EPILOGUE is None:
        store_products(tile, rows, places, weights, outs, widths, K, TILES)
    else:
        store_projections(
            tile, rows, Places(places, 0), weights, extras, outs, widths, K, GROUPS, EPILOGUE, TILES, PAIR
        )


@triton.jit
def store_products(tile, rows, places, weights, outs, widths, K, TILES: tl.constexpr):
    """Does `store_projections` for weights with contiguous K, without an epilogue, and for tiles that there are. The
    weight of a program is chosen at run time, so all run the same instructions.
    """
    NUM_WEIGHTS: tl.constexpr = len(weights)
    BLOCK_N: tl.constexpr = TILES.BLOCK_N
    pointer, out, stride, N = weights[0], outs[0], widths.strides_bn[0], widths.columns[0]
    first = 0
    begin = 0
    for i in tl.static_range(1, NUM_WEIGHTS):
        begin += tl.cdiv(widths.columns[i - 1], BLOCK_N)
        reached = tile >= begin
        first = tl.where(reached, begin, first)
        pointer, out = tl.where(reached, weights[i], pointer), tl.where(reached, outs[i], out)
        stride = tl.where(reached, widths.strides_bn[i], stride)
        N = tl.where(reached, widths.columns[i], N)
    column = (tile - first) * BLOCK_N
    acc = product_of_few_rows(rows, Weight(pointer, 1, stride), column, N, K, TILES).T
    offs_n = column + tl.arange(0, BLOCK_N)
    at = out + places.to(tl.int64)[:, None] * N + offs_n[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=rows.inside[:, None] & (offs_n < N)[None, :])


@triton.jit
def store_projections(
    tile, rows, places, weights, extras, outs, widths, K, GROUPS: tl.constexpr, EPILOGUE: tl.constexpr,
    TILES: tl.constexpr, PAIR: tl.constexpr,
):  # fmt: skip
    """Computes tile number `tile`, counted through all groups of weights, of these Rows, and stores it at these Places.
    It does nothing if the number is negative. One weight for two products has its columns in turns; PAIR has the Tiles
    of such a weight. See `projections_kernel`.
    """
    NUM_WEIGHTS: tl.constexpr = len(weights)
    BLOCK_N: tl.constexpr = TILES.BLOCK_N
    NUM_GROUPS: tl.constexpr = GROUPS.NUM_GROUPS
    # Outputs have the dtype of the rows where the epilogue says nothing else.
    DTYPE: tl.constexpr = rows.pointers.dtype.element_ty
    for g in tl.static_range(NUM_GROUPS):
        N = widths.columns[unpacked(GROUPS.FIRST_WEIGHTS, g)]
        tiles = tl.cdiv(N, BLOCK_N)
        if (tile >= 0) & (tile < tiles):
            column = tile * BLOCK_N
            if unpacked(GROUPS.NUM_TOGETHER, g) == 2:
                first = weight_of(weights, widths, unpacked(GROUPS.FIRST_WEIGHTS, g))
                if NUM_WEIGHTS == 1:
                    accs = interleaved_pair_of_few_rows(rows, first, column, N, K, TILES, PAIR)
                else:
                    second = weight_of(weights, widths, unpacked(GROUPS.FIRST_WEIGHTS, g) + 1)
                    accs = matmul_pair_of_few_rows(rows, first, second, column, N, K, PAIR)
            else:
                weight = weight_of(weights, widths, unpacked(GROUPS.FIRST_WEIGHTS, g))
                accs = (product_of_few_rows(rows, weight, column, N, K, TILES).T,)
            offs_n = column + tl.arange(0, BLOCK_N)
            store_group(accs, places, rows.inside, offs_n, N, extras, outs, g, GROUPS, DTYPE, EPILOGUE)
        # For the program whose tile this was, it is negative from now on.
        tile -= tiles


@triton.jit
def store_group(
    accs, places, inside, offs_n, N, extras, outs, g: tl.constexpr, GROUPS: tl.constexpr, DTYPE: tl.constexpr,
    EPILOGUE: tl.constexpr,
):  # fmt: skip
    """Stores the outputs of group g at these Places and columns. accs: the accumulators of the group's products.
    inside: which of the places there are. DTYPE: the dtype of the products.
    """
    elements = elements_at(places.rows, offs_n, inside[:, None], (offs_n < N)[None, :], N, places.expert)
    store_outputs(
        accs, 1, extras, outs, elements, g, unpacked(GROUPS.NUM_TOGETHER, g), unpacked(GROUPS.FIRST_OUTS, g),
        unpacked(GROUPS.NUM_OUTS, g), DTYPE, EPILOGUE,
    )  # fmt: skip


def prepare(
    node: Projections, x: torch.Tensor, weights: Sequence[torch.Tensor], extras: Sequence[torch.Tensor], strategy: str
) -> Runner:
    """Returns what computes the outputs for operands of these forms: the kernel if it can run, and otherwise the
    library. In the interpreter, which is slow, the kernel runs only if `tile` is forced.
    """
    M, K = x.shape
    if x.device.type == "cpu" and strategy != "tile":
        return by_library(node, x, extras)
    fits = 0 < M <= MOST_PROJECTED_ROWS and K > 0 and x.dtype in OPERAND_DTYPES and x.is_contiguous()
    if not fits or any(weight.stride(0) != 1 for weight in weights) or facts_of(x.device).tile_problem:
        return by_library(node, x, extras)
    facts = facts_of(x.device)
    arrangement = arrange(node.parsed, node.num_weights)
    config = select_projections_config(
        rows=M,
        columns=[weights[arrangement.weights[first]].shape[1] for first in arrangement.first_weights],
        paired=arrangement.together > 1,
        dtype=x.dtype,
        interpreted=x.device.type == "cpu",
        num_sms=facts.num_sms,
    ).for_arch(facts.arch)
    launcher = local_launcher(projections_kernel, x.device)
    # These are made now, because a closure would keep the operands alive.
    overlap = overlap_for(facts.arch, M, node.overlap)
    arguments = _arguments(x, [weights[index] for index in arrangement.weights], arrangement, config, overlap)

    def run(x: torch.Tensor, weights: Sequence[torch.Tensor], extras: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        outs, tensors = tensors_of(arrangement, M, x, weights, extras)
        launcher(handle_for(x), lambda: arguments, (), (), tensors)
        return outs

    return run


def tensors_of(
    arrangement: Arrangement,
    rows: int,
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    extras: Sequence[torch.Tensor],
) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Returns the new outputs of a call, with so many rows, and the tensors that the kernel takes by name."""
    outs = arrangement.new_outputs(x, rows, weights)
    tensors = {
        "x": x,
        "weights": tuple(weights[index] for index in arrangement.weights),
        "extras": extras_or(x, extras),
        "outs": tuple(outs[index] for index in arrangement.outputs),
    }
    return outs, tensors


def by_library(node: Projections, x: torch.Tensor, extras: Sequence[torch.Tensor]) -> Runner:
    """Returns what computes one product after the other by the library, and then the epilogue."""
    parsed = node.parsed
    if parsed is None:
        return lambda x, weights, extras: [x @ weight for weight in weights]
    return Finisher(parsed, x, extras).multiply


def _arguments(
    x: torch.Tensor, weights: Sequence[torch.Tensor], arrangement: Arrangement, config: Config, overlap: int
) -> Arguments:
    """Returns the Arguments of a launch. weights: in the kernel's order."""
    K = x.shape[1]
    tile = tiles_of(x, config, overlap, K)
    tiles = sum(ceil_div(weights[first].shape[1], config.block_n) for first in arrangement.first_weights)
    values: dict[str, Any] = {
        "M": x.shape[0],
        "K": K,
        "widths": widths_of(weights),
        "GROUPS": arrangement.packed_groups,
        "EPILOGUE": arrangement.function,
        "TILES": tile,
        "PAIR": pair_of(tile),
        **config.options,
        **launch_options(overlap),
    }
    return Arguments(programs=tiles * ceil_div(x.shape[0], config.block_m), values=values)


projections: LocalCalls[Projections] = LocalCalls(prepare)
"""Returns [x @ weight for weight in weights], or the epilogue of these products and of the extra tensors. operands: x
[M, K], weights [K, N_i], extra tensors. The results [M, N_i] are contiguous.
"""
