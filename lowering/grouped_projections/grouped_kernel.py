"""grouped_projections: out_i[s] = x[rows[s]] @ weight_i[expert of s] in one launch, for many tokens, with an epilogue.

Problem. In front of the grouped matmul of a prompt, the rows of x are copied once for each expert that a token takes,
and behind it another kernel reads gate and up of all slots. Algorithm. One grid has a program for each pair of a tile
of slots and a tile of columns. The slots of a tile have one expert; a program finds them by the ends of the experts,
which only the device knows, so there are as many programs as the ends may need, and the others end at once. A program
loads the rows of x where they lie, so nothing is copied. Products that an epilogue combines, such as gate and up, are
computed as one product whose columns alternate. Nothing is communicated, and no program waits. Limits. K of x is
contiguous, and so are K or the columns of the weights. Anything else is computed by the library, which copies the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch.nn import functional

from ditron_inductor.core.matmul import Rows, weight_of
from ditron_inductor.core.matmul_rows import matmul_interleaved_pair, matmul_pair_in_one, matmul_rows
from ditron_inductor.core.order import grouped
from ditron_inductor.device.streams import handle_for
from ditron_inductor.lowering.config import INTERPRETER, Config
from ditron_inductor.lowering.epilogues import Arrangement, Finisher, arrange, unpacked
from ditron_inductor.lowering.expert_projections.experts_kernel import products_of
from ditron_inductor.lowering.expert_sums.grouped_library import experts_of_rows
from ditron_inductor.lowering.host.launch import ceil_div, widths_of
from ditron_inductor.lowering.host.launcher import Arguments, local_launcher
from ditron_inductor.lowering.host.local_calls import LocalCalls, facts_of
from ditron_inductor.lowering.projections.projections_kernel import Places, store_group, tensors_of
from ditron_inductor.lowering.tiles import tiles_of
from ditron_inductor.task.epilogue_torch import without_kinds, without_tables
from ditron_inductor.task.nodes import GroupedProjections
from ditron_inductor.task.torch_dtypes import OPERAND_DTYPES

SHAPES = {
    64: Config(block_m=64, block_n=128, block_k=64, num_warps=4, num_stages=5).validate(),
    128: Config(block_m=128, block_n=256, block_k=64, num_warps=8, num_stages=4).validate(),
}
"""The tile shapes by their slots: the largest one that is not larger than the mean number of slots of an expert. Two
products that are computed together have half of the columns each.
"""
WIDE_TILES, WIDE_GROUP = 32, 16
"""With so many tiles of columns, an expert's weight does not stay in the L2 cache from one tile of slots to the next:
so many tiles of slots take a tile of columns together.
"""
ALIGNMENT = 16
"""The bytes at whose multiples torch's grouped matmul wants rows to begin."""
Runner = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, Sequence[torch.Tensor], Sequence[torch.Tensor]], list[torch.Tensor]
]
"""A function of (x, rows, ends, weights, extra tensors)."""


class Sizes(NamedTuple):
    """The numbers of rows of x, of slots, of experts, of tiles of slots and of tiles of columns, K, the elements from
    row to row of x, and, for each weight, the stride from expert to expert.
    """

    T: Any
    S: Any
    E: Any
    num_m: Any
    num_n: Any
    K: Any
    pitch: Any
    strides_be: Any


@triton.jit
def tile_of_slots(number, slots, sizes, BLOCK_M: tl.constexpr, EXPERTS: tl.constexpr):
    """Returns (the expert of tile of slots number `number`, its slots [BLOCK_M], their rows of x, which of them exist).
    Behind the last tile the expert is E or more, and nothing exists. slots: see `grouped_projections_kernel`. EXPERTS:
    a power of two of at least E.
    """
    experts = tl.arange(0, EXPERTS)
    last = tl.load(slots[1] + experts, mask=experts < sizes.E, other=0)
    first = tl.load(slots[1] + experts - 1, mask=(experts > 0) & (experts < sizes.E), other=0)
    # Whatever the ends and the rows are, only what exists is read.
    last = tl.minimum(last, sizes.S)
    counts = tl.maximum(last - first, 0)
    tiles = (counts + (BLOCK_M - 1)) // BLOCK_M
    upto = tl.cumsum(tiles, 0)
    expert = tl.sum((upto <= number).to(tl.int32))
    mine = experts == expert
    begin = tl.sum(tl.where(mine, first + (number - (upto - tiles)) * BLOCK_M, 0))
    end = tl.sum(tl.where(mine, last, 0))
    # The place of an element of an output may need 64 bits.
    places = begin.to(tl.int64) + tl.arange(0, BLOCK_M)
    inside = (places >= 0) & (places < end)
    row = tl.load(slots[0] + places, mask=inside, other=0)
    row = tl.where(row < 0, row + sizes.T, row)
    return expert, places, row, inside & (row >= 0) & (row < sizes.T)


@triton.jit
def grouped_projections_kernel(
    x, slots, weights, extras, outs, sizes, widths, GROUPS: tl.constexpr, EPILOGUE: tl.constexpr,
    TILES: tl.constexpr, APART: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """See the module. slots: pointers to the row of x of each slot, int64 [S], and to the experts' ends. The other
    arguments are those of `projections_kernel`, Sizes, and those of `matmul_pair_in_one` and `tile_of_slots`.
    """
    number, tile = grouped(tl.program_id(0), sizes.num_m, sizes.num_n, TILES.GROUP_M)
    expert, places, row, there = tile_of_slots(number, slots, sizes, TILES.BLOCK_M, EXPERTS)
    tile = tl.where(expert < sizes.E, tile, -1)
    taken = Rows(x + row * sizes.pitch, there)
    of_expert = ()
    NUM_WEIGHTS: tl.constexpr = len(weights)
    for i in tl.static_range(NUM_WEIGHTS):
        of_expert = of_expert + (weights[i] + expert.to(tl.int64) * sizes.strides_be[i],)  # type: ignore[assignment]
    # Outputs have the dtype of the rows where the epilogue says nothing else.
    DTYPE: tl.constexpr = x.dtype.element_ty
    NUM_GROUPS: tl.constexpr = GROUPS.NUM_GROUPS
    for g in tl.static_range(NUM_GROUPS):
        N = widths.columns[unpacked(GROUPS.FIRST_WEIGHTS, g)]
        tiles = tl.cdiv(N, TILES.BLOCK_N // unpacked(GROUPS.NUM_TOGETHER, g))
        if (tile >= 0) & (tile < tiles):
            column = tile * (TILES.BLOCK_N // unpacked(GROUPS.NUM_TOGETHER, g))
            weight = weight_of(of_expert, widths, unpacked(GROUPS.FIRST_WEIGHTS, g))
            if unpacked(GROUPS.NUM_TOGETHER, g) == 2 and NUM_WEIGHTS == 1:
                accs = matmul_interleaved_pair(taken, weight, column, N, sizes.K, TILES)
            elif unpacked(GROUPS.NUM_TOGETHER, g) == 2:
                other = weight_of(of_expert, widths, unpacked(GROUPS.FIRST_WEIGHTS, g) + 1)
                accs = matmul_pair_in_one(taken, weight, other, column, N, sizes.K, TILES, APART)
            else:
                offs_n = column + tl.arange(0, TILES.BLOCK_N)
                columns = weight.pointer + offs_n.to(tl.int64) * weight.stride_n
                accs = (matmul_rows(taken, columns, offs_n < N, weight.stride_k, sizes.K, TILES),)
            offs_n = column + tl.arange(0, TILES.BLOCK_N // unpacked(GROUPS.NUM_TOGETHER, g))
            store_group(accs, Places(places, expert), there, offs_n, N, extras, outs, g, GROUPS, DTYPE, EPILOGUE)
        # For the program whose tile this was, it is negative from now on.
        tile -= tiles


def prepare(
    node: GroupedProjections,
    x: torch.Tensor,
    rows: torch.Tensor,
    ends: torch.Tensor,
    weights: Sequence[torch.Tensor],
    extras: Sequence[torch.Tensor],
    strategy: str,
) -> Runner:
    """Returns what computes the outputs for operands of these forms: the kernel if it can run, and otherwise the
    library. In the interpreter, which is slow, the kernel runs only if `tile` is forced.
    """
    if x.device.type == "cpu" and strategy != "tile":
        return by_library(node, x, extras)
    (S, E), arrangement = (len(rows), len(ends)), arrange(node.parsed, node.num_weights)
    fits = S > 0 and 0 not in x.shape and x.dtype in OPERAND_DTYPES and 0 not in weights[0].shape
    lies = fits and _lies(node, x, rows, ends, weights, arrangement)
    if not lies or facts_of(x.device).tile_problem or (node.interleaved and len(arrangement.groups) > 1):
        return by_library(node, x, extras)
    config = config_for(slots=S, experts=E, dtype=x.dtype, interpreted=x.device.type == "cpu")
    config = config.for_arch(facts_of(x.device).arch)
    launcher = local_launcher(grouped_projections_kernel, x.device)

    def run(
        x: torch.Tensor,
        rows: torch.Tensor,
        ends: torch.Tensor,
        weights: Sequence[torch.Tensor],
        extras: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:
        outs, tensors = tensors_of(arrangement, S, x, products_of(node, weights), extras)
        tensors["slots"] = rows, ends
        if node.interleaved:
            tensors["weights"] = tuple(weights)
        launcher(handle_for(x), lambda: _arguments(node, x, S, weights, arrangement, config), (), (), tensors)
        return outs

    return run


def _lies(
    node: GroupedProjections,
    x: torch.Tensor,
    rows: torch.Tensor,
    ends: torch.Tensor,
    weights: Sequence[torch.Tensor],
    arrangement: Arrangement,
) -> bool:
    """Returns whether the kernel can read operands that lie in memory as these."""
    strides = [weight.stride()[1:] for weight in products_of(node, weights)]
    together = [[strides[index] for index in group.products] for group in arrangement.groups]
    alike = all(len({*of_group}) == 1 for of_group in together)
    contiguous = x.stride(1) == 1 and rows.is_contiguous() and ends.is_contiguous()
    return alike and contiguous and all(1 in weight.stride()[1:] for weight in weights)


def config_for(*, slots: int, experts: int, dtype: torch.dtype, interpreted: bool) -> Config:
    """Returns the tile shape."""
    if interpreted:
        return replace(INTERPRETER, block_m=16)
    mean = ceil_div(slots, experts)
    found = SHAPES[max(size for size in SHAPES if size <= max(mean, min(SHAPES)))]
    # fp32 operands need twice as much shared memory.
    return replace(found, block_k=found.block_k // 2) if dtype == torch.float32 else found


def by_library(node: GroupedProjections, x: torch.Tensor, extras: Sequence[torch.Tensor]) -> Runner:
    """Returns what copies the rows, multiplies them by the library, and then computes the epilogue."""
    parsed = node.parsed
    # `reduced`: no matmul of the library adds a bias to these products.
    finisher = None if parsed is None else Finisher(without_kinds(parsed), x, extras, reduced=True)

    def run(
        x: torch.Tensor,
        rows: torch.Tensor,
        ends: torch.Tensor,
        weights: Sequence[torch.Tensor],
        extras: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:
        taken = x[rows]
        made = products_of(node, [multiplied(taken, weight, ends) for weight in weights])
        products = [product.contiguous() for product in made]
        if finisher is None or parsed is None:
            return products
        return finisher.finish(products, without_tables(parsed, extras, experts_of_rows(ends, len(rows)))[1])

    return run


def multiplied(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Returns torch's grouped matmul. It takes matrices whose rows begin at multiples of 16 bytes, and half of a weight
    may have others.
    """
    columns = weight.shape[2]
    missing = -columns % (ALIGNMENT // weight.element_size())
    if weight.stride(2) == 1 and missing:
        weight = functional.pad(weight, (0, missing))
    return torch._grouped_mm(rows, weight, offs=ends)[:, :columns].contiguous()


def _arguments(
    node: GroupedProjections,
    x: torch.Tensor,
    S: int,
    weights: Sequence[torch.Tensor],
    arrangement: Arrangement,
    config: Config,
) -> Arguments:
    """Returns the Arguments of a launch for S slots."""
    E, separate = weights[0].shape[0], products_of(node, weights)
    ordered = [separate[index] for index in arrangement.weights]
    # A weight with two products in turns is read as it lies.
    stored = weights if node.interleaved else ordered
    # A tile's columns are those of all its products.
    num_n = sum(
        ceil_div(len(group.products) * ordered[first].shape[2], config.block_n)
        for first, group in zip(arrangement.first_weights, arrangement.groups, strict=True)
    )
    # Every expert may have a tile that is not full.
    num_m = ceil_div(S, config.block_m) + min(E, S)
    strides_be = tuple(weight.stride(0) for weight in stored)
    widths = widths_of([weight[0] for weight in ordered[: len(stored)]])
    values: dict[str, Any] = {
        "sizes": Sizes(x.shape[0], S, E, num_m, num_n, x.shape[1], x.stride(0), strides_be),
        "widths": widths._replace(strides_bn=tuple(weight.stride(2) for weight in stored)),
        "GROUPS": arrangement.packed_groups,
        "EPILOGUE": arrangement.function,
        "TILES": tiles_of(x, config)._replace(GROUP_M=WIDE_GROUP if num_n >= WIDE_TILES else 1),
        "APART": _apart(stored),
        "EXPERTS": triton.next_power_of_2(E),
        **config.options,
    }
    return Arguments(programs=num_m * num_n, values=values)


def _apart(weights: Sequence[torch.Tensor]) -> int:
    """Returns a number of elements of which the distances of the weights, and of their experts, are multiples."""
    size = weights[0].element_size()
    aligned = all(weight.data_ptr() % ALIGNMENT == weight.stride(0) * size % ALIGNMENT == 0 for weight in weights)
    return ALIGNMENT // size if aligned else 1


grouped_projections: LocalCalls[GroupedProjections] = LocalCalls(prepare)
"""Returns the products of all slots, or the epilogue of these products and of the extra tensors. operands: x, rows,
ends, weights and extra tensors as `GroupedProjections` describes them. The results [S, N_i] are contiguous.
"""
