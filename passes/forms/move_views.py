"""Views of a gathered tensor that hide its rows from a matmul move in front of the gather.

Before, where the matmul contracts several dimensions of the gathered tensor, in any order:

    x [B, S, H, D] -> all_gather -> wait -> split .. cat [B, W*S, H, D] -> permute [B, W*S, D, H]
      -> reshape [B*W*S, D*H] -> mm

After, with K = D*H:

    x -> permute [B, S, D, H] -> reshape [B, S, K] -> all_gather -> wait -> split .. cat [B, W*S, K]
      -> reshape [B, W*S, D, H] -> reshape [B*W*S, D*H] -> mm

`torch.einsum("bshd,hdn->bsn")` writes its products in this way. A gather copies elements, so moving them before gives
the same bits. If the new order needs a copy, only the shard is copied, and not the whole tensor. Permutes may move the
gathered dimension too (batch and sequence change places). `try_forms` does this for a gather that a fusion then takes.

It must not fire when
* the gathered tensor, or a view before the last permute, is used elsewhere;
* the contracted dimensions are not the last dimensions, or the gathered dimension is among them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ditron_inductor.passes.graph import proofs, rewriting
from ditron_inductor.passes.graph.collectives import ALL_GATHER, WAIT, Collective, read_collective
from ditron_inductor.passes.graph.gathered import Gathered, gathered_tensor

aten = torch.ops.aten

MOVED: frozenset[object] = proofs.TRANSPOSES | {aten.unsqueeze.default}


@dataclass(frozen=True)
class Match:
    """A gather whose result is first used by `moved`, one after the other, unsqueezes and permutes. `gather_dim` is the
    gathered dimension behind them. The dimensions from `merged` on become the last one.
    """

    collective: Collective
    gathered: Gathered
    moved: tuple[fx.Node, ...]
    gather_dim: int
    merged: int

    @property
    def last(self) -> fx.Node:
        """The node that the new gathered tensor replaces."""
        return self.moved[-1] if self.moved else self.gathered.node


def find_moved(node: fx.Node) -> Match | None:
    """Proves that the first views of a gather may stand before it, and that this changes what a matmul sees."""
    if node.op != "call_function" or node.target is not ALL_GATHER:
        return None
    collective = read_collective(node)
    if not isinstance(collective, Collective):
        return None
    gathered = gathered_tensor(collective)
    # A matrix, transposed or not, is the business of the fusion.
    if not isinstance(gathered, Gathered) or gathered.node.meta["val"].ndim == 2:
        return None
    moved, dim = _moved(gathered)
    last = moved[-1] if moved else gathered.node
    value = proofs.fake(last)
    merged = _merged(last, value, dim)
    if merged is None or (not moved and merged == value.ndim - 1):
        return None
    return Match(collective, gathered, moved, dim, merged)


def _moved(gathered: Gathered) -> tuple[tuple[fx.Node, ...], int]:
    """Returns (unsqueezes and permutes up to the last that moves rows or columns, the gathered dimension behind)."""
    chain, found = list[fx.Node](), tuple[fx.Node, ...]()
    dim = at = gathered.dim
    node = proofs.sole_user(gathered.node)
    while node is not None and node.target in MOVED and (value := proofs.tensor(node)) is not None:
        chain.append(node)
        if node.target is aten.unsqueeze.default:
            new = proofs.arguments(node)["dim"] % value.ndim
            at += new <= at
        else:
            at = proofs.permutation(node).index(at)
            if not proofs.keeps_order(node):
                found, dim = tuple(chain), at
        node = proofs.sole_user(node)
    return found, dim


def _merged(last: fx.Node, value: torch.Tensor, dim: int) -> int | None:
    """The first of the last dimensions, all behind `dim`, that matmuls contract as one; None if there is none."""
    widths = [
        shape[-1]
        for view in proofs.views_down(last)
        if len(shape := view.meta["val"].shape) > 1
        for user in view.users
        if user.target in (aten.mm.default, aten.bmm.default) and user.args[0] is view
    ]
    width = 1
    for first in range(value.ndim - 1, dim, -1):
        width = width * value.shape[first]
        if widths and all(proofs.known_equal(other_width, width) for other_width in widths):
            return first
    return None


def rewrite(graph: fx.Graph, match: Match) -> fx.Node:
    """Gathers the shard behind its views, and returns the new gather."""
    old, whole, dim = match.collective, match.last.meta["val"].shape, match.gather_dim
    times = old.world_size
    with graph.inserting_before(old.node):
        shard = old.operand
        for view in match.moved:
            shard = _viewed(graph, view, shard)
        # The sizes of the whole tensor, as arguments.
        sizes = [_size(graph, shard, place) for place in range(len(whole))]
        sizes[dim] = whole[dim] if isinstance(whole[dim], int) else -1
        shard = _merged_shard(graph, match, shard, sizes)
        chunk = _size(graph, shard, 0)
        value = shard.meta["val"]
        flat = (value.shape[0] * times, *value.shape[1:])
        gather = rewriting.call(graph, ALL_GATHER, (shard, times, old.group_name), old.node, flat)
    with graph.inserting_before(match.last):
        result = rewriting.call(graph, WAIT, (gather,), old.wait, flat)
        if dim > 0:
            chunks = rewriting.call(graph, aten.split.Tensor, (result, chunk), old.wait, flat)
            strides = rewriting.contiguous_strides(value.shape)
            chunks.meta["val"] = [rewriting.fake_like(value, value.shape, strides)] * times
            parts = [rewriting.output(graph, chunks, index, old.wait) for index in range(times)]
            shape = (*value.shape[:dim], value.shape[dim] * times, *value.shape[dim + 1 :])
            result = rewriting.call(graph, aten.cat.default, (parts, dim), old.wait, shape)
        result = rewriting.call(graph, aten.reshape.default, (result, sizes), match.last, tuple(whole))
    match.last.replace_all_uses_with(result)
    rewriting.erase_unused(graph, [*match.gathered.steps, *match.moved])
    return gather


def _size(graph: fx.Graph, node: fx.Node, dim: int) -> Any:
    """A size of a tensor as an argument: an int, or a new node that asks for it."""
    length = node.meta["val"].shape[dim]
    if isinstance(length, int):
        return length
    asked = graph.call_function(aten.sym_size.int, (node, dim))
    asked.meta["val"] = length
    return asked


def _viewed(graph: fx.Graph, view: fx.Node, shard: fx.Node) -> fx.Node:
    """Applies an unsqueeze or permute of the gathered tensor to the shard instead."""
    node = graph.call_function(view.target, (shard, *view.args[1:]), view.kwargs)  # type: ignore[arg-type]
    node.meta.update(rewriting.copied_meta(view))
    value = shard.meta["val"]
    shape, strides = list(value.shape), list(value.stride())
    if view.target is aten.unsqueeze.default:
        dim = proofs.arguments(view)["dim"] % (value.ndim + 1)
        strides.insert(dim, shape[dim] * strides[dim] if dim < value.ndim else 1)
        shape.insert(dim, 1)
    else:
        order = proofs.permutation(view)
        shape, strides = [shape[place] for place in order], [strides[place] for place in order]
    node.meta["val"] = rewriting.fake_like(value, tuple(shape), tuple(strides))
    return node


def _merged_shard(graph: fx.Graph, match: Match, shard: fx.Node, sizes: list[Any]) -> fx.Node:
    """The shard with its last dimensions as one, in row-major order. `sizes` are the whole's, as arguments."""
    value = shard.meta["val"]
    if not proofs.row_major(value):
        shard = rewriting.row_major_copy(graph, shard, shard)
    if match.merged == value.ndim - 1:
        return shard
    width = math.prod(value.shape[match.merged :])
    first = [*sizes[: match.merged], width if isinstance(width, int) else -1]
    first[match.gather_dim] = _size(graph, shard, match.gather_dim)
    return rewriting.call(graph, aten.reshape.default, (shard, first), shard, (*value.shape[: match.merged], width))
