"""Rows that are picked from gathered chunks are picked where the gather put them, so nobody puts the chunks together.

Before, for a gather along an inner dimension that is left to the library, in front of the experts of a mixture:

    all_gather -> wait [W*B, S, K] -> split .. cat [B, W*S, K] -> reshape [B*W*S, K] -> index(reshape, rows)

After:

    all_gather -> wait [W*B, S, K] -> reshape [W*B*S, K] -> index(reshape, places of rows)

Row t of the tensor that was put together is row s of chunk (b, w), with t = (b * W + w) * S + s, and lies in row
(w * B + b) * S + s of what is waited for. The places are computed from `rows` in one kernel with what made these.
Dimensions behind the gathered one count as part of S, and those before it as part of B. The rows have the same bits.

It must not fire when
* anything but such picks reads the tensor;
* a row may be negative, which counts from the end, or lie behind the last one: quotients of the order of a sort do not;
* a size is known only at run time, or a part of the gathered tensor is taken (see `find_whole_gather`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ditron_inductor.options import Options
from ditron_inductor.passes.graph import proofs, rewriting
from ditron_inductor.passes.graph.collectives import ALL_GATHER, collectives
from ditron_inductor.passes.graph.sorts import sorted_slots
from ditron_inductor.passes.normalize.share_gathers import Match as Gather
from ditron_inductor.passes.normalize.share_gathers import find_whole_gather

aten = torch.ops.aten


@dataclass(frozen=True)
class Match:
    """A gather, the views of what is put together, and the picks from them, in the graph's order. B, S: see above."""

    gather: Gather
    views: tuple[fx.Node, ...]
    picks: tuple[fx.Node, ...]
    B: int
    S: int


def find_index_chunks(node: fx.Node) -> Match | None:
    """Proves that rows are picked from what the gather `node` gathers, as drawn above, and nothing else reads it."""
    gather = find_whole_gather(node)
    if gather is None or gather.dim == 0:
        return None
    shard = proofs.fake(gather.collective.operand)
    if gather.dim >= shard.ndim - 1 or not all(isinstance(length, int) for length in shard.shape):
        return None
    views = tuple(proofs.views_down(gather.gathered))
    picks = dict.fromkeys(user for view in views for user in view.users if user not in views)
    if not picks or not all(_picks_rows(pick, views, shard.shape[-1]) for pick in picks):
        return None
    B, S = math.prod(shard.shape[: gather.dim]), math.prod(shard.shape[gather.dim : -1])
    return Match(gather, views, tuple(sorted(picks)), B, S)


def _picks_rows(pick: fx.Node, views: tuple[fx.Node, ...], columns: int) -> bool:
    """Returns whether a node picks rows of K columns from one of the views, which has all the rows that are named."""
    indexed = proofs.indexed_rows(pick)
    if indexed is None:
        return False
    table, rows = indexed
    slots, (length, depth) = sorted_slots(rows), proofs.fake(table).shape
    if table not in views or slots is None or depth != columns:
        return False
    order, k = slots
    return proofs.known((proofs.fake(order).numel() - 1) // k < length)


def rewrite(graph: fx.Graph, match: Match) -> None:
    """Picks from what is waited for."""
    collective = match.gather.collective
    columns = proofs.fake(collective.operand).shape[-1]
    places: dict[fx.Node, fx.Node] = {}
    for pick in match.picks:
        _, rows = proofs.indexed_rows(pick) or (None, None)
        assert rows is not None
        with graph.inserting_before(pick):
            table = rewriting.shaped(graph, collective.wait, (match.B * match.S * collective.world_size, columns))
            if rows not in places:
                places[rows] = _places(graph, rows, match, collective.world_size)
            picked = rewriting.computed(graph, aten.index.Tensor, (table, [places[rows]]), pick)
        pick.replace_all_uses_with(picked)
    rewriting.erase_unused(graph, [*match.picks, *match.views, *match.gather.steps[2:]])


def _places(graph: fx.Graph, rows: fx.Node, match: Match, W: int) -> fx.Node:
    """Inserts the rows of what is waited for that hold `rows` [..] of what was put together."""

    def step(target: Any, *args: Any, **named: Any) -> fx.Node:
        node = rewriting.call(graph, target, args, rows, tuple(proofs.fake(rows).shape))
        node.kwargs = named
        return node

    divide, rest = aten.div.Tensor_mode, aten.remainder.Scalar
    chunk, s = step(divide, rows, match.S, rounding_mode="floor"), step(rest, rows, match.S)
    b, w = step(divide, chunk, W, rounding_mode="floor"), step(rest, chunk, W)
    moved = step(aten.add.Tensor, step(aten.mul.Tensor, w, match.B), b)
    return step(aten.add.Tensor, step(aten.mul.Tensor, moved, match.S), s)


def index_chunks(graph: fx.Graph, *, options: Options) -> int:
    """Picks rows from chunks wherever that is proved; returns from how many gathers."""
    if not options.fusions:
        return 0
    count = 0
    for node in collectives(graph, ALL_GATHER):
        match = find_index_chunks(node)
        if match is not None:
            rewrite(graph, match)
            count += 1
    return count
