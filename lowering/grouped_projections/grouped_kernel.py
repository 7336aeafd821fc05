"""grouped_projections: out_i[s] = x[rows[s]] @ weight_i[expert of s] in one launch, for many tokens, with an epilogue.

Problem. In front of the grouped matmul of a prompt, the rows of x are copied once for each expert that a token takes,
and behind it another kernel reads gate and up of all slots. Algorithm. One grid has a program for each pair of a tile
of slots and a tile of columns. The slots of a tile have one expert; a program finds them by the ends of the experts,
which only the device knows, so there are as many programs as the ends may need, and the others end at once. A program
loads the rows of x where they lie, so nothing is copied. Products that an epilogue combines, such as gate and up, are
computed in one tile. Nothing is communicated, and no program waits. Limits. K of x is contiguous, and so are K or the
columns of the weights. Anything else is computed by the library, which copies the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch.nn import functional

from ditron_inductor.core.matmul import Rows
from ditron_inductor.device.streams import handle_for
from ditron_inductor.lowering.config import INTERPRETER, Config
from ditron_inductor.lowering.epilogues import Arrangement, Finisher, arrange
from ditron_inductor.lowering.host.launch import ceil_div, widths_of
from ditron_inductor.lowering.host.launcher import Arguments, local_launcher
from ditron_inductor.lowering.host.local_calls import LocalCalls, facts_of
from ditron_inductor.lowering.projections.projections_kernel import (
    Places,
    pair_of,
    store_projections,
    tensors_of,
    tiles_of,
)
from ditron_inductor.task.nodes import GroupedProjections
from ditron_inductor.task.torch_dtypes import OPERAND_DTYPES

SHAPES = {
    16: Config(block_m=16, block_n=128, block_k=128, num_warps=4, num_stages=4).validate(),
    32: Config(block_m=32, block_n=128, block_k=64, num_warps=4, num_stages=5).validate(),
    64: Config(block_m=64, block_n=128, block_k=64, num_warps=4, num_stages=4).validate(),
    128: Config(block_m=128, block_n=128, block_k=64, num_warps=8, num_stages=4).validate(),
}
"""The tile shapes by their slots: the largest one that is not larger than the mean number of slots of an expert. They
have not been measured.
"""
ALIGNMENT = 16
"""The bytes at whose multiples torch's grouped matmul wants rows to begin."""
PAIRED_COLUMNS = 64
"""The columns of a tile of 128 slots and two weights, whose two accumulators need the registers of one."""
Runner = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, Sequence[torch.Tensor], Sequence[torch.Tensor]], list[torch.Tensor]
]
"""A function of (x, rows, ends, weights, extra tensors)."""


class Sizes(NamedTuple):
    """The numbers of rows of x, of slots, of experts and of tiles of columns, K, the elements from row to row of x,
    and, for each weight, the stride from expert to expert.
    """

    T: Any
    S: Any
    E: Any
    tiles: Any
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
    places = begin + tl.arange(0, BLOCK_M)
    inside = (places >= 0) & (places < end)
    row = tl.load(slots[0] + places, mask=inside, other=0)
    row = tl.where(row < 0, row + sizes.T, row)
    return expert, places, row, inside & (row >= 0) & (row < sizes.T)


@triton.jit
def grouped_projections_kernel(
    x, slots, weights, extras, outs, sizes, widths, GROUPS: tl.constexpr, EPILOGUE: tl.constexpr,
    TILES: tl.constexpr, PAIR: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """See the module. slots: pointers to the row of x of each slot, int64 [S], and to the experts' ends. The other
    arguments are those of `projections_kernel`, Sizes, and those of `tile_of_slots`.
    """
    number = tl.program_id(0) // sizes.tiles
    tile = tl.program_id(0) % sizes.tiles
    expert, places, row, there = tile_of_slots(number, slots, sizes, TILES.BLOCK_M, EXPERTS)
    of_expert = ()
    NUM_WEIGHTS: tl.constexpr = len(weights)
    for i in tl.static_range(NUM_WEIGHTS):
        of_expert = of_expert + (weights[i] + expert.to(tl.int64) * sizes.strides_be[i],)  # type: ignore[assignment]
    tile = tl.where(expert < sizes.E, tile, -1)
    store_projections(
        tile, Rows(x + row * sizes.pitch, there), Places(places, expert), of_expert, extras, outs, widths, sizes.K,
        GROUPS, EPILOGUE, TILES, PAIR,
    )  # fmt: skip


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
    fits = len(rows) > 0 and x.shape[1] > 0 and x.dtype in OPERAND_DTYPES and 0 not in weights[0].shape
    lies = x.stride(1) == 1 and rows.is_contiguous() and ends.is_contiguous()
    lies = lies and all(1 in weight.stride()[1:] for weight in weights)
    if not (fits and lies) or facts_of(x.device).tile_problem:
        return by_library(node, x, extras)
    S = len(rows)
    arrangement = arrange(node.parsed, node.num_weights)
    config = config_for(
        slots=S, experts=len(ends), dtype=x.dtype, together=arrangement.together > 1, interpreted=x.device.type == "cpu"
    )
    launcher = local_launcher(grouped_projections_kernel, x.device)
    # These are made now, because a closure would keep the operands alive.
    arguments = _arguments(x, S, len(ends), weights, arrangement, config.for_arch(facts_of(x.device).arch))

    def run(
        x: torch.Tensor,
        rows: torch.Tensor,
        ends: torch.Tensor,
        weights: Sequence[torch.Tensor],
        extras: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:
        outs, tensors = tensors_of(arrangement, S, x, weights, extras)
        tensors["slots"] = rows, ends
        launcher(handle_for(x), lambda: arguments, (), (), tensors)
        return outs

    return run


def config_for(*, slots: int, experts: int, dtype: torch.dtype, together: bool, interpreted: bool) -> Config:
    """Returns the tile shape. together: two weights are multiplied in one tile."""
    if interpreted:
        return replace(INTERPRETER, block_m=16)
    mean = ceil_div(slots, experts)
    found = SHAPES[max(size for size in SHAPES if size <= max(mean, min(SHAPES)))]
    if together and found.block_m == max(SHAPES):
        found = replace(found, block_n=PAIRED_COLUMNS)
    # fp32 operands need twice as much shared memory.
    return replace(found, block_k=found.block_k // 2) if dtype == torch.float32 else found


def by_library(node: GroupedProjections, x: torch.Tensor, extras: Sequence[torch.Tensor]) -> Runner:
    """Returns what copies the rows, multiplies them by the library, and then computes the epilogue."""
    parsed = node.parsed
    # `reduced`: no matmul of the library adds a bias to these products.
    finisher = None if parsed is None else Finisher(parsed, x, extras, reduced=True)

    def run(
        x: torch.Tensor,
        rows: torch.Tensor,
        ends: torch.Tensor,
        weights: Sequence[torch.Tensor],
        extras: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:
        taken = x[rows]
        products = [multiplied(taken, weight, ends) for weight in weights]
        return products if finisher is None else finisher.finish(products, extras)

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
    x: torch.Tensor, S: int, E: int, weights: Sequence[torch.Tensor], arrangement: Arrangement, config: Config
) -> Arguments:
    """Returns the Arguments of a launch."""
    tile = tiles_of(x, config)
    ordered = [weights[index] for index in arrangement.weights]
    columns = sum(ceil_div(ordered[first].shape[2], config.block_n) for first in arrangement.first_weights)
    # Every expert may have a tile that is not full.
    tiles = ceil_div(S, config.block_m) + min(E, S)
    values: dict[str, Any] = {
        "sizes": Sizes(
            x.shape[0], S, E, columns, x.shape[1], x.stride(0), tuple(weight.stride(0) for weight in ordered)
        ),
        "widths": widths_of([weight[0] for weight in ordered]),
        "GROUPS": arrangement.packed_groups,
        "EPILOGUE": arrangement.function,
        "TILES": tile,
        "PAIR": pair_of(tile),
        "EXPERTS": triton.next_power_of_2(E),
        **config.options,
    }
    return Arguments(programs=tiles * columns, values=values)


grouped_projections: LocalCalls[GroupedProjections] = LocalCalls(prepare)
"""Returns the products of all slots, or the epilogue of these products and of the extra tensors. operands: x, rows,
ends, weights and extra tensors as `GroupedProjections` describes them. The results [S, N_i] are contiguous.
"""
