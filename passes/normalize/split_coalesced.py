"""One collective of several tensors becomes single collectives, for those tensors that a fusion takes.

Before:

    mm [M, N], x -> all_reduce_coalesced([mm, x, y]) -> getitem 0 -> wait
                                                     -> getitem 1 -> wait
                                                     -> getitem 2 -> wait

After, if the first tensor is fused and the others are not:

    mm -> all_reduce -> wait
    x, y -> all_reduce_coalesced([x, y]) -> getitem 0 -> wait
                                         -> getitem 1 -> wait

The single collectives take the place of the coalesced one, in the order of its list and in front of the rest of it. The
tensors that no fusion takes stay together, because one launch is better than several. `try_forms` decides which tensors
are taken.

The in-place form means the same for a tensor that is taken, because a fusion proves that only the collective uses the
product. The rest of the list stays in place.

It must not fire when
* the list of tensors is itself the result of an op (`_foreach_div`): then there is no operand to read;
* the list of results is used as a whole, or one of them is taken out twice.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import fx

from ditron_inductor.passes.graph import proofs, rewriting
from ditron_inductor.passes.graph.collectives import SINGLE, c10d

IN_PLACE: object = c10d.all_reduce_coalesced_.default


@dataclass(frozen=True)
class Match:
    """A coalesced collective: `operands[i]` gives `results[i]`, which is None if nothing uses that result."""

    node: fx.Node
    operands: tuple[fx.Node, ...]
    results: tuple[fx.Node | None, ...]


def find_coalesced(node: fx.Node) -> Match | None:
    """Reads a coalesced collective member by member; None if the node is not one, or cannot be read."""
    if node.op != "call_function" or node.target not in SINGLE or node.kwargs:
        return None
    operands = node.args[0]
    if not isinstance(operands, (list, tuple)) or any(proofs.tensor(operand) is None for operand in operands):
        return None
    results: list[fx.Node | None] = [None] * len(operands)
    for user in node.users:
        index = user.args[1] if user.target is getitem and user.args[0] is node else None
        if not isinstance(index, int) or not 0 <= index < len(results) or results[index] is not None:
            return None
        results[index] = user
    return Match(node, tuple(operand for operand in operands if isinstance(operand, fx.Node)), tuple(results))


def rewrite(graph: fx.Graph, match: Match, taken: Collection[int]) -> dict[int, fx.Node]:
    """Makes single collectives of the members `taken`, and of the last member if only one is left. Returns them."""
    node, singles = match.node, dict[int, fx.Node]()
    left = [index for index in range(len(match.operands)) if index not in taken]
    if len(left) == 1 and node.target is not IN_PLACE and match.results[left[0]] is not None:
        taken, left = range(len(match.operands)), []
    for index in sorted(taken):
        result = match.results[index]
        assert result is not None
        with graph.inserting_before(node):
            singles[index] = _single(graph, match, index, result)
        result.replace_all_uses_with(singles[index])
        graph.erase_node(result)
    if not left:
        graph.erase_node(node)
        return singles
    node.args = ([match.operands[index] for index in left], *node.args[1:])
    node.meta["val"] = [node.meta["val"][index] for index in left]
    node.meta.pop("eager_input_vals", None)
    for position, index in enumerate(left):
        result = match.results[index]
        if result is not None:
            result.args = (node, position)
    return singles


def _single(graph: fx.Graph, match: Match, index: int, result: fx.Node) -> fx.Node:
    target: Any = SINGLE[match.node.target]
    assert isinstance(target, torch._ops.OpOverload)
    single = graph.call_function(target, (match.operands[index], *match.node.args[1:]))
    single.meta.update(rewriting.copied_meta(match.node))
    single.meta["val"] = result.meta["val"]
    return single
