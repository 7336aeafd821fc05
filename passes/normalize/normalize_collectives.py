"""Collectives and the ops around them get one form, so that the fusions have to read only this form.

    vllm.X(.., "tp:0")                                 -> _c10d_functional.X(..), see `vllm_collectives`
    _c10d_functional_autograd.X(..)                    -> _c10d_functional.X(..)
    X_out(x, .., out=empty(..)), buffer unused         -> X(x, ..)
    a buffer that gathered pieces fill                 -> a cat of them, see `fill_buffers`
    keyword arguments of a collective                  -> positional arguments
    view / _unsafe_view behind or before a collective  -> reshape
    two equal views of one tensor (reshape, permute,   -> one (inference graphs hold one per consumer)
      split, getitem, slice, cat)
    such nodes that nothing uses                       -> gone
    sizes read from such nodes (dynamic shapes)        -> read elsewhere, see `sizes`

`split`, `split_with_sizes` and slices stay as they are: `proofs.piece` reads all of them as (source, dim, start,
length).

Only nodes that are reached from a collective through views, splits and cats are changed, upwards and downwards. It must
not fire on an `_out` form whose buffer is anything but a fresh `empty` of its own, because something else then reads,
or owns, the buffer.

A collective that no fusion covers at all gets its reason here.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ditron_inductor.options import Options
from ditron_inductor.passes.graph import proofs, rewriting
from ditron_inductor.passes.graph.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    SHARD_DIM,
    WAIT,
    c10d,
    is_collective,
)
from ditron_inductor.passes.graph.reasons import ReasonCode, leave_alone
from ditron_inductor.passes.graph.sizes import read_elsewhere
from ditron_inductor.passes.normalize.fill_buffers import EMPTIES, fill_buffers
from ditron_inductor.passes.normalize.vllm_collectives import replace_vllm_collectives

aten = torch.ops.aten

PATTERN = "normalize_collectives"
COVERED: frozenset[object] = frozenset({ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, ALL_TO_ALL, SHARD_DIM})
SUMMED: frozenset[object] = proofs.MATMULS | proofs.ORDER_KEEPING | {aten.add.Tensor}
CHAIN: frozenset[object] = proofs.MAY_KEEP_ORDER | proofs.SLICES | frozenset({aten.cat.default})


@dataclass(frozen=True)
class Match:
    """A collective in another form: `target` is its plain functional op, `arguments` that op's positional arguments."""

    node: fx.Node
    target: torch._ops.OpOverload
    arguments: tuple[Any, ...]
    buffer: fx.Node | None


def find_other_form(node: fx.Node) -> Match | None:
    """The plain form of a collective, if `node` is one that has a plain form and is not in it."""
    assert isinstance(node.target, torch._ops.OpOverload)
    name = node.target._opname.removesuffix("_out")
    if name not in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "all_to_all_single"):
        return None
    target: torch._ops.OpOverload = getattr(c10d, name).default
    bound = proofs.arguments(node)
    buffer = bound.pop("out", None)
    if buffer is not None and not _owned(buffer, node):
        return None
    if target is node.target and not node.kwargs:
        return None
    return Match(node, target, tuple(bound[argument.name] for argument in target._schema.arguments), buffer)


def _owned(buffer: fx.Node, node: fx.Node) -> bool:
    """Whether `buffer` is fresh memory that only `node` knows, laid out as the functional form returns it."""
    value = proofs.tensor(buffer)
    return buffer.target in EMPTIES and set(buffer.users) == {node} and value is not None and proofs.row_major(value)


def rewrite(graph: fx.Graph, match: Match) -> fx.Node:
    """Replaces a collective by its plain form."""
    with graph.inserting_before(match.node):
        plain = graph.call_function(match.target, match.arguments)
    plain.meta.update(rewriting.copied_meta(match.node))
    match.node.replace_all_uses_with(plain)
    graph.erase_node(match.node)
    if match.buffer is not None:
        graph.erase_node(match.buffer)
    return plain


def normalize_collectives(graph: fx.Graph, *, options: Options) -> int:
    """Brings collectives and their surroundings into one form; returns how many nodes changed or went."""
    count = replace_vllm_collectives(graph)
    for node in [node for node in graph.nodes if node.op == "call_function" and is_collective(node)]:
        match = find_other_form(node)
        if match is not None:
            node = rewrite(graph, match)
            count += 1
        if node.target not in COVERED:
            leave_alone(node, PATTERN, ReasonCode.UNSUPPORTED_COLLECTIVE)
    count += fill_buffers(graph)
    chain = _surroundings(graph)
    ends = _ends(graph, chain)
    count += read_elsewhere(graph, lambda node: node in chain or node in ends)
    count += _views_to_reshapes(chain)
    count += _merge_equal(graph, chain)
    return count + _erase_dead(graph, chain)


def _surroundings(graph: fx.Graph) -> set[fx.Node]:
    """The views, splits and cats that are reached from a collective's operands or result through such nodes only."""
    pending = [
        node for node in graph.nodes if node.op == "call_function" and (is_collective(node) or node.target is WAIT)
    ]
    found: set[fx.Node] = set()
    for node in pending:
        _collect(node, found, downwards=True)
        _collect(node, found, downwards=False)
    return found


def _collect(node: fx.Node, found: set[fx.Node], *, downwards: bool) -> None:
    pending = [node]
    while pending:
        current = pending.pop()
        for other in current.users if downwards else current.all_input_nodes:
            if other.op == "call_function" and other.target in CHAIN and other not in found:
                found.add(other)
                pending.append(other)


def _ends(graph: fx.Graph, chain: set[fx.Node]) -> set[fx.Node]:
    """Returns collectives, waits, and the nodes in front of a chain: matmuls, their sums, and views among these."""
    calls = [node for node in graph.nodes if node.op == "call_function"]
    found = {node for node in calls if is_collective(node) or node.target is WAIT}
    pending = [*chain, *found]
    while pending:
        for other in pending.pop().all_input_nodes:
            if other.op == "call_function" and other.target in SUMMED and other not in found:
                found.add(other)
                if other.target not in proofs.MATMULS:
                    pending.append(other)
    return found


def _views_to_reshapes(chain: set[fx.Node]) -> int:
    """Replaces views by reshapes, which do not depend on strides: a rewrite may change those. Returns how many."""
    views = [node for node in chain if node.target in rewriting.VIEWS]
    rewriting.reshape_views(views)
    return len(views)


def _merge_equal(graph: fx.Graph, chain: set[fx.Node]) -> int:
    """Keeps the first of several nodes with the same op and arguments."""
    first: dict[Hashable, fx.Node] = {}
    merged = 0
    for node in [node for node in graph.nodes if node in chain]:
        # A program clones a tensor because it needs memory of its own.
        if node.target is aten.clone.default:
            continue
        kept = first.setdefault(_key(node), node)
        if kept is not node and not _are_two_results(node, kept):
            node.replace_all_uses_with(kept)
            graph.erase_node(node)
            chain.discard(node)
            merged += 1
    return merged


def _are_two_results(node: fx.Node, other: fx.Node) -> bool:
    """Returns whether the graph returns two pieces of memory, and would return one of them twice."""
    if proofs.memory(node) is not None and proofs.memory(node) == proofs.memory(other):
        return False
    return proofs.is_returned(node) and proofs.is_returned(other)


def _key(node: fx.Node) -> Hashable:
    def frozen(item: Any) -> Hashable:
        if isinstance(item, (list, tuple)):
            return tuple(frozen(element) for element in item)
        if isinstance(item, dict):
            return tuple((key, frozen(value)) for key, value in item.items())
        # An int equals the bool and the float of its value.
        return (type(item), item)

    return (node.target, frozen(node.args), frozen(node.kwargs))


def _erase_dead(graph: fx.Graph, chain: set[fx.Node]) -> int:
    dead = 0
    for node in reversed(graph.nodes):
        if node in chain and not node.users:
            graph.erase_node(node)
            dead += 1
    return dead
