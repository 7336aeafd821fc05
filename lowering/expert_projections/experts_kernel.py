"""expert_projections: out_i[s] = x[row of s] @ weight_i[experts[s]] in one launch, for a few tokens, with an epilogue.

Problem. In a decode step every token takes a few of many experts. The matmuls take as long as reading the weights of
the experts that some token takes. The usual forms copy these weights first, one matrix for each slot, or sort the
tokens by expert in several launches. Algorithm. One grid has a program for each pair of an expert and a tile of
columns. If there are fewer slots than experts, the pairs are of slots and tiles, and the first slot of an expert stands
for all of its slots. A program reads all slots, which are few, and masks the tokens that do not take its expert, so
nothing is sorted or copied. The tokens are the rows of one tile (see `matmul_tile_of_few_rows`), and each weight is
read once. Products that an epilogue combines, such as gate and up, are computed in one tile, or, for one token with
long rows, in steps of both; if their columns lie in turns in one weight, a tile of twice the columns is computed
and then separated. Slots of other ranks' experts get zeros: from their own program, or from those of the first expert.
With more tokens than a tile has rows, the slots are ordered by expert first (slot_order.py). An expert has more slots
than a tile only where many tokens take it, so nearly all weights are still read once; others are read again from the L2
cache. Nothing is communicated, and no program waits. Limits. There are at most some hundred tokens, K of x is
contiguous, and so are K or the columns of the weights, and the experts of one token differ. Anything else is computed
by the library, which copies the weights of each slot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ditron_inductor.core.matmul import Rows
from ditron_inductor.device.streams import handle_for
from ditron_inductor.lowering.config import EXPERTS, PAIRED_EXPERTS, ROW, Config, select_few_rows_config
from ditron_inductor.lowering.epilogues import Arrangement, Finisher, arrange, unpacked
from ditron_inductor.lowering.expert_projections import slot_order
from ditron_inductor.lowering.host.launch import ceil_div, widths_of
from ditron_inductor.lowering.host.launcher import Arguments, local_launcher
from ditron_inductor.lowering.host.local_calls import LocalCalls, facts_of
from ditron_inductor.lowering.projections.projections_kernel import Places, store_projections, tensors_of
from ditron_inductor.lowering.tiles import pair_of, tiles_of
from ditron_inductor.task.epilogue_torch import without_kinds, without_tables
from ditron_inductor.task.nodes import (
    MOST_EXPERT_TOKENS,
    MOST_ORDERED_TOKENS,
    ExpertProjections,
    ProductsOfExperts,
)
from ditron_inductor.task.torch_dtypes import OPERAND_DTYPES

LEAST_ROW = 2048
"""The least K with which the row of a single token is multiplied without tensor cores. Each program looks for its slot
first, and a program for a short column does little else: on an H100 the down projections of Qwen3 30B (K = 384) and
235B (768) took 12.6 and 41.4 us instead of 7.2 and 19.9.
"""

Runner = Callable[[torch.Tensor, torch.Tensor, Sequence[torch.Tensor], Sequence[torch.Tensor]], list[torch.Tensor]]
"""A function of (x, experts, weights, extra tensors)."""


class Sizes(NamedTuple):
    """The numbers of tokens, of experts and of tiles of one expert, K, and, for each weight, the stride from expert to
    expert.
    """

    T: Any
    E: Any
    tiles: Any
    K: Any
    strides_be: Any


class How(NamedTuple):
    """How tokens take experts, known at compile time: TOP_K experts each, BY_TOKEN as in the node, and whether programs
    are of slots (BY_SLOT) or of experts, and whether slots may be absent. RANKS and SLOTS: powers of two of at least
    TOP_K and the number of slots.
    """

    TOP_K: Any
    RANKS: Any
    SLOTS: Any
    BY_TOKEN: Any
    BY_SLOT: Any
    HAS_ABSENT: Any


@triton.jit
def expert_projections_kernel(
    x, experts, weights, extras, outs, sizes, widths, GROUPS: tl.constexpr, EPILOGUE: tl.constexpr,
    TILES: tl.constexpr, PAIR: tl.constexpr, HOW: tl.constexpr,
):  # fmt: skip
    """See the module. The arguments are those of `projections_kernel`, Sizes and How."""
    TOP_K: tl.constexpr = HOW.TOP_K
    number = tl.program_id(0) // sizes.tiles
    tile = tl.program_id(0) % sizes.tiles
    slots = tl.arange(0, HOW.SLOTS)
    taken = tl.load(experts + slots, mask=slots < sizes.T * TOP_K, other=-1)
    if HOW.BY_SLOT:
        expert = tl.load(experts + number)
        # An earlier slot has the same expert: its program computes this slot too.
        idle = tl.sum(((taken == expert) & (slots < number)).to(tl.int32)) > 0
    else:
        expert = number.to(tl.int64)
        idle = tl.sum((taken == expert).to(tl.int32)) == 0
    if HOW.HAS_ABSENT:
        absent = (taken >= sizes.E) & ((slots == number) if HOW.BY_SLOT else (number == 0))
        store_zeros(tl.where(tl.sum(absent.to(tl.int32)) > 0, tile, -1), slots, absent, outs, widths, GROUPS, TILES)
        idle = idle | (expert >= sizes.E)
    tokens = tl.arange(0, TILES.BLOCK_M)
    ranks = tl.arange(0, HOW.RANKS)
    inside = (tokens < sizes.T)[:, None] & (ranks < TOP_K)[None, :]
    hits = tl.load(experts + tokens[:, None] * TOP_K + ranks[None, :], mask=inside, other=-1) == expert
    # The experts of a token differ, so at most one of its slots is hit.
    places = tokens * TOP_K + tl.sum(tl.where(hits, ranks[None, :], 0), 1)
    numbers = tokens if HOW.BY_TOKEN else places
    # A program that is not idle has a slot, which a single token takes.
    inside = tokens < 1 if TILES.BLOCK_M == 1 else tl.sum(hits.to(tl.int32), 1) > 0
    rows = Rows(x + numbers.to(tl.int64) * sizes.K, inside)
    of_expert = ()
    NUM_WEIGHTS: tl.constexpr = len(weights)
    for i in tl.static_range(NUM_WEIGHTS):
        of_expert = of_expert + (weights[i] + expert * sizes.strides_be[i],)  # type: ignore[assignment]
    tile = tl.where(idle, -1, tile)
    store_projections(
        tile, rows, Places(places, expert), of_expert, extras, outs, widths, sizes.K, GROUPS, EPILOGUE, TILES, PAIR
    )


@triton.jit
def ordered_projections_kernel(
    x, order, weights, extras, outs, sizes, widths, GROUPS: tl.constexpr, EPILOGUE: tl.constexpr,
    TILES: tl.constexpr, PAIR: tl.constexpr, HOW: tl.constexpr,
):  # fmt: skip
    """Does the same for more tokens than a tile has rows. A program multiplies the slots of its expert, as many at once
    as its tile has rows; if slots may be absent, the programs of one more expert store their zeros. order: see
    `slot_order_kernel`. The other arguments are those of `expert_projections_kernel`.
    """
    TOP_K: tl.constexpr = HOW.TOP_K
    number = tl.program_id(0) // sizes.tiles
    tile = tl.program_id(0) % sizes.tiles
    ends = order + sizes.T * TOP_K + number
    end = tl.load(ends + 1)
    expert = number.to(tl.int64)
    of_expert = ()
    NUM_WEIGHTS: tl.constexpr = len(weights)
    for i in tl.static_range(NUM_WEIGHTS):
        of_expert = of_expert + (weights[i] + expert * sizes.strides_be[i],)  # type: ignore[assignment]
    for first in range(tl.load(ends), end, TILES.BLOCK_M):
        at = first + tl.arange(0, TILES.BLOCK_M)
        inside = at < end
        slots = tl.load(order + at, mask=inside, other=0)
        if HOW.HAS_ABSENT:
            absent = number == sizes.E
            store_zeros(tl.where(absent, tile, -1), slots, inside, outs, widths, GROUPS, TILES)
            mine = tl.where(absent, -1, tile)
        else:
            mine = tile
        numbers = slots // TOP_K if HOW.BY_TOKEN else slots
        rows = Rows(x + numbers.to(tl.int64) * sizes.K, inside)
        store_projections(
            mine, rows, Places(slots, expert), of_expert, extras, outs, widths, sizes.K, GROUPS, EPILOGUE, TILES, PAIR
        )


@triton.jit
def store_zeros(tile, rows, there, outs, widths, GROUPS: tl.constexpr, TILES: tl.constexpr):
    """Stores zeros in those `rows` that are `there`, in the columns of tile number `tile`, counted as
    `store_projections` does. It does nothing if the number is negative.
    """
    BLOCK_N: tl.constexpr = TILES.BLOCK_N
    NUM_GROUPS: tl.constexpr = GROUPS.NUM_GROUPS
    for g in tl.static_range(NUM_GROUPS):
        N = widths.columns[unpacked(GROUPS.FIRST_WEIGHTS, g)]
        tiles = tl.cdiv(N, BLOCK_N)
        if (tile >= 0) & (tile < tiles):
            columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
            inside = there[:, None] & (columns < N)[None, :]
            NUM_OUTS: tl.constexpr = unpacked(GROUPS.NUM_OUTS, g)
            for i in tl.static_range(NUM_OUTS):
                out = outs[unpacked(GROUPS.FIRST_OUTS, g) + i]
                tl.store(out + rows.to(tl.int64)[:, None] * N + columns[None, :], 0.0, mask=inside)
        tile -= tiles


def prepare(
    node: ExpertProjections,
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: Sequence[torch.Tensor],
    extras: Sequence[torch.Tensor],
    strategy: str,
) -> Runner:
    """Returns what computes the outputs for operands of these forms: the kernel if it can run, and otherwise the
    library. In the interpreter, which is slow, the kernel runs only if `tile` is forced.
    """
    tokens, K = experts.shape[0] // node.top_k, x.shape[1]
    if x.device.type == "cpu" and strategy != "tile":
        return by_library(node, x, extras)
    fits = 0 < tokens <= MOST_ORDERED_TOKENS and K > 0 and x.dtype in OPERAND_DTYPES
    lies = x.is_contiguous() and experts.is_contiguous() and all(1 in weight.stride()[1:] for weight in weights)
    if not (fits and lies) or 0 in weights[0].shape or facts_of(x.device).tile_problem:
        return by_library(node, x, extras)
    arrangement = arrange(node.parsed, node.num_weights)
    if node.interleaved and len(arrangement.groups) > 1:
        return by_library(node, x, extras)
    facts = facts_of(x.device)
    sorts = tokens > MOST_EXPERT_TOKENS
    across = any(weight.stride(1) != 1 for weight in weights)
    # Of many tokens there are programs enough, whatever their tiles are.
    shapes = shapes_of(arrangement.together > 1 and not sorts, across=across, interleaved=node.interleaved)
    interpreted = x.device.type == "cpu"
    if not (sorts or across) and (interpreted or K >= LEAST_ROW):
        shapes = {1: ROW, **shapes}
    E = weights[0].shape[0]
    rows = rows_of_a_tile(experts.shape[0], E) if sorts else tokens
    config = select_few_rows_config(rows=rows, dtype=x.dtype, interpreted=interpreted, shapes=shapes)
    launcher = local_launcher(ordered_projections_kernel if sorts else expert_projections_kernel, x.device)
    order_of = slot_order.prepare(experts.shape[0], E, x.device) if sorts else None
    # These are made now, because a closure would keep the operands alive.
    arguments = _arguments(node, x, experts, weights, arrangement, config.for_arch(facts.arch), sorts)

    def run(
        x: torch.Tensor, experts: torch.Tensor, weights: Sequence[torch.Tensor], extras: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        outs, tensors = tensors_of(arrangement, experts.shape[0], x, products_of(node, weights), extras)
        tensors |= {"experts": experts} if order_of is None else {"order": order_of(experts)}
        if node.interleaved:
            tensors["weights"] = tuple(weights)
        launcher(handle_for(x), lambda: arguments, (), (), tensors)
        return outs

    return run


def rows_of_a_tile(slots: int, experts: int) -> int:
    """Returns how many slots of an expert are multiplied at once: about twice their mean, so that few experts have
    more of them.
    """
    return next((rows for rows in EXPERTS if rows * experts >= 2 * slots), max(EXPERTS))


def shapes_of(together: bool, *, across: bool, interleaved: bool) -> Mapping[int, Config]:
    """Returns the tile shapes by the largest number of tokens. together: of two weights that are multiplied in one
    tile. across: the columns of a weight are contiguous, of which narrow tiles would read short pieces. interleaved: of
    one weight with two products in turns, which is read in tiles of twice the columns.
    """
    if interleaved:
        return {most: replace(config, block_n=config.block_n // 2) for most, config in EXPERTS.items()}
    return PAIRED_EXPERTS if together and not across else EXPERTS


def products_of(node: ProductsOfExperts, stored: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Returns the weight of each product, or views of every second column of one weight; so also of what the library
    makes of these weights.
    """
    return [stored[0][..., half::2] for half in range(2)] if node.interleaved else stored


def by_library(node: ExpertProjections, x: torch.Tensor, extras: Sequence[torch.Tensor]) -> Runner:
    """Returns what copies the weights of each slot, multiplies them by the library, and then computes the epilogue."""
    parsed = node.parsed
    # `reduced`: no matmul of the library adds a bias to these products.
    finisher = None if parsed is None else Finisher(without_kinds(parsed), x, extras, reduced=True)

    def run(
        x: torch.Tensor, experts: torch.Tensor, weights: Sequence[torch.Tensor], extras: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        rows = x.repeat_interleave(node.top_k, 0) if node.by_token else x
        there = experts.clamp(max=weights[0].shape[0] - 1) if node.has_absent else experts
        products = [_by_copies(rows, there, weight, MOST_EXPERT_TOKENS * node.top_k) for weight in weights]
        outs = [product.contiguous() for product in products_of(node, products)]
        if finisher is not None and parsed is not None:
            outs = finisher.finish(outs, without_tables(parsed, extras, there)[1])
        if node.has_absent:
            absent = (experts != there).unsqueeze(1)
            outs = [out.masked_fill_(absent, 0.0) for out in outs]
        return outs

    return run


def _by_copies(rows: torch.Tensor, experts: torch.Tensor, weight: torch.Tensor, most: int) -> torch.Tensor:
    """Returns the products of rows with their experts' weights, of which at most so many are copied at once."""
    parts = zip(rows.split(most), experts.split(most), strict=True)
    found = [torch.bmm(row.unsqueeze(1), weight.index_select(0, expert)).squeeze(1) for row, expert in parts]
    return found[0] if len(found) == 1 else torch.cat(found)


def _arguments(
    node: ExpertProjections,
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: Sequence[torch.Tensor],
    arrangement: Arrangement,
    config: Config,
    sorts: bool,
) -> Arguments:
    """Returns the Arguments of a launch. sorts: the slots are ordered first; there is a program for each expert then,
    and one more if slots may be absent.
    """
    S, E = experts.shape[0], weights[0].shape[0]
    tile, separate = tiles_of(x, config), products_of(node, weights)
    ordered = [separate[index] for index in arrangement.weights]
    tiles = sum(ceil_div(ordered[first].shape[2], config.block_n) for first in arrangement.first_weights)
    # A weight with two products in turns is read as it lies.
    stored = weights if node.interleaved else ordered
    columns = widths_of([weight[0] for weight in ordered[: len(stored)]])
    strides = tuple(weight.stride(2) for weight in stored)
    how = How(
        TOP_K=node.top_k,
        RANKS=triton.next_power_of_2(node.top_k),
        SLOTS=triton.next_power_of_2(S),
        BY_TOKEN=node.by_token,
        BY_SLOT=S <= E and not sorts,
        HAS_ABSENT=node.has_absent,
    )
    values: dict[str, Any] = {
        "sizes": Sizes(S // node.top_k, E, tiles, x.shape[1], tuple(weight.stride(0) for weight in stored)),
        "widths": columns._replace(strides_bn=strides),
        "GROUPS": arrangement.packed_groups,
        "EPILOGUE": arrangement.function,
        "TILES": tile,
        "PAIR": tile._replace(BLOCK_N=2 * tile.BLOCK_N) if node.interleaved else pair_of(tile),
        "HOW": how,
        **config.options,
    }
    return Arguments(programs=tiles * (E + node.has_absent if sorts else min(S, E)), values=values)


expert_projections: LocalCalls[ExpertProjections] = LocalCalls(prepare)
"""Returns the products of all slots, or the epilogue of these products and of the extra tensors. operands: x, experts,
weights and extra tensors as `ExpertProjections` describes them. The results [S, N_i] are contiguous.
"""
