"""A sum of reductions becomes one reduction of the sum.

Before, with order-keeping views and other summands in any place:

    a [M, N] -> all_reduce -> wait -.
    b [M, N] -> all_reduce -> wait -+-> add -> add [M, N]
    x [M, N] -----------------------------------'

After, where the last of the two reductions stood:

    a, b -> add [M, N] -> all_reduce -> wait -> add [M, N]
    x ------------------------------------------'

Parallel attention and MLP blocks contain such a sum, and so do mixtures of experts with an expert that all tokens use;
there the all-reduces may have different views. Reduce-scatters along one dimension are merged in the same way. If
`split` and `cat` move chunks first, the sum stands in front of these. The result is that of eager mode up to rounding.

It must not fire when
* a reduction is used by something other than the sum, a partial sum by something other than the next one, or a summand
  is scaled (`alpha`) or has another dtype;
* groups, reduce ops, shapes or scattered dimensions differ, or the op is neither sum nor avg, or avg of whole numbers;
* the operand of a reduce-scatter is padded: only the last rank cuts its result then, and would not see the sum. An
  unpadded operand is the same on all ranks and is cut on none;
* each reduction would be fused alone, but the merged one would not (tried on a copy of the graph).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ditron_inductor.options import Options
from ditron_inductor.passes.absorb.prepare_products import find_prepared
from ditron_inductor.passes.fuse.fusions import takes
from ditron_inductor.passes.graph import proofs, rewriting
from ditron_inductor.passes.graph.collectives import ALL_REDUCE, REDUCE_SCATTER, WAIT, Collective, read_collective
from ditron_inductor.passes.graph.reasons import refused
from ditron_inductor.task.nodes import ReducedSum

aten = torch.ops.aten


@dataclass(frozen=True)
class SummedReduction:
    """One reduction in a sum: `leaf` is the summand, a view of the result that only the sum uses. `source` is the
    tensor that is reduced, before `between` (splits, pieces, cat) moves the chunks of `scatter_dim`.
    """

    collective: Collective
    leaf: fx.Node
    source: fx.Node
    scatter_dim: int
    between: tuple[fx.Node, ...]


@dataclass(frozen=True)
class Match:
    """The sum at `root`: the reductions to merge, in graph order, the other summands, and all its additions."""

    root: fx.Node
    reductions: tuple[SummedReduction, ...]
    others: tuple[fx.Node, ...]
    additions: tuple[fx.Node, ...]


def find_merged(root: fx.Node) -> Match | None:
    """Proves that the addition `root` adds results of two or more reductions that could be one; None if it does not."""
    if not _adds(root):
        return None
    leaves, additions = _summands(root)
    found = [reduction for leaf in leaves if (reduction := _read(leaf, root)) is not None]
    for first in found:
        equal = [reduction for reduction in found if _same_form(reduction, first)]
        if len(equal) > 1:
            equal.sort(key=lambda reduction: reduction.collective.node)
            merged = {reduction.leaf for reduction in equal}
            others = tuple(leaf for leaf in leaves if leaf not in merged)
            return Match(root, tuple(equal), others, tuple(additions))
    return None


def _adds(node: fx.Node) -> bool:
    """Returns whether a node adds two tensors of one dtype, unscaled."""
    if node.op != "call_function" or node.target is not aten.add.Tensor:
        return False
    bound = proofs.arguments(node)
    values = [proofs.tensor(tensor_node) for tensor_node in (node, bound["self"], bound["other"])]
    dtypes = {None if value is None else value.dtype for value in values}
    return None not in dtypes and len(dtypes) == 1 and bound["alpha"] == 1


def _summands(root: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """Returns the terms at `root`, and the additions, each of its shape and used only by the next."""
    leaves, additions, pending = list[fx.Node](), list[fx.Node](), [root]
    whole = root.meta["val"].shape
    while pending:
        node = pending.pop()
        inner = _adds(node) and proofs.sole_user(node) is not None and proofs.same_shape(node.meta["val"].shape, whole)
        if node is root or inner:
            additions.append(node)
            bound = proofs.arguments(node)
            pending += [bound["other"], bound["self"]]
        else:
            leaves.append(node)
    return leaves, additions


def _read(leaf: fx.Node, root: fx.Node) -> SummedReduction | None:
    """The reduction whose result `leaf` is a view of, if only the sum uses it."""
    chain = proofs.views_up(leaf)
    wait = chain[-1]
    if wait.target is not WAIT or any(proofs.sole_user(step) is None for step in chain):
        return None
    node, value = wait.args[0], proofs.tensor(leaf)
    if not isinstance(node, fx.Node) or node.target not in (ALL_REDUCE, REDUCE_SCATTER) or value is None:
        return None
    collective = read_collective(node)
    if refused(collective) or not proofs.same_shape(value.shape, root.meta["val"].shape):
        return None
    if node.target is ALL_REDUCE:
        return SummedReduction(collective, leaf, collective.operand, 0, ())
    return _read_scatter(collective, leaf)


def _read_scatter(collective: Collective, leaf: fx.Node) -> SummedReduction | None:
    cat = collective.operand
    if cat.target is not aten.cat.default:
        unpadded = not proofs.padded(cat)
        return SummedReduction(collective, leaf, cat, 0, ()) if unpadded else None
    chunks = proofs.regrouped(cat, collective.world_size)
    if refused(chunks) or chunks.cat_dim != 0 or proofs.sole_user(cat) is None:
        return None
    if proofs.padded(chunks.source):
        return None
    return SummedReduction(collective, leaf, chunks.source, chunks.split_dim, (*chunks.between, cat))


def _same_form(first: SummedReduction, other: SummedReduction) -> bool:
    left, right = first.collective, other.collective
    kinds = [(at.node.target, at.group_name, at.reduce_op) for at in (left, right)]
    dims = [(each.scatter_dim, bool(each.between)) for each in (first, other)]
    if kinds[0] != kinds[1] or dims[0] != dims[1]:
        return False
    # A mean of whole numbers is cut, and so would be the sums, at other places.
    if left.reduce_op == "avg" and not proofs.fake(left.wait).is_floating_point():
        return False
    if left.node.target is ALL_REDUCE and all(_is_static(each.source) for each in (first, other)):
        # Order-keeping views bring both results to the sum's shape, so they can bring the operands to it.
        return True
    return proofs.same_shape(_shape(first.source), _shape(other.source)) and proofs.same_shape(
        _shape(left.wait), _shape(right.wait)
    )


def _is_static(node: fx.Node) -> bool:
    return all(isinstance(size, int) for size in _shape(node))


def _shape(node: fx.Node) -> tuple[Any, ...]:
    return tuple(node.meta["val"].shape)


def rewrite(graph: fx.Graph, match: Match) -> fx.Node:
    """Replaces the sum and returns what remains of it: the merged reduction's result, with the other summands added."""
    last = match.reductions[-1]
    start = last.collective.node
    for node in last.between:
        start.prepend(node)
    with graph.inserting_before(last.between[0] if last.between else start):
        total = _sum(graph, [reduction.source for reduction in match.reductions], last.source)
    for node in (*last.between, start):
        if last.source in node.all_input_nodes:
            node.replace_input_with(last.source, total)
            node.meta.pop("eager_input_vals", None)
    with graph.inserting_before(match.root):
        result = _sum(graph, [last.leaf, *match.others], match.root)
    match.root.replace_all_uses_with(result)
    gone = [*match.additions]
    for reduction in match.reductions[:-1]:
        gone += [*proofs.views_up(reduction.leaf), reduction.collective.node, *reduction.between]
    rewriting.erase_unused(graph, gone)
    return result


def loses_fusion(graph: fx.Graph, match: Match) -> bool:
    """Returns whether fusions would take every reduction of the match, but not the one that they are merged into."""
    if not all(_is_fused(reduction.collective.node) for reduction in match.reductions):
        return False
    copy, twins = rewriting.copied(graph)
    twin = find_merged(twins[match.root])
    assert twin is not None
    rewrite(copy, twin)
    return not _is_fused(twin.reductions[-1].collective.node)


def _is_fused(node: fx.Node) -> bool:
    return takes(node, lambda kind: issubclass(kind, ReducedSum), find_prepared)


def _sum(graph: fx.Graph, terms: Sequence[fx.Node], like: fx.Node) -> fx.Node:
    """Adds the terms, each seen as the shape of `like` if it is as large, one after the other."""
    value = like.meta["val"]

    def seen(term: fx.Node) -> fx.Node:
        if not _is_static(term) or _shape(term) == _shape(like) or term.meta["val"].numel() != value.numel():
            return term
        return rewriting.call(graph, aten.reshape.default, (term, list(value.shape)), term, tuple(value.shape))

    total = seen(terms[0])
    for term in terms[1:]:
        total = rewriting.call(graph, aten.add.Tensor, (total, seen(term)), like, value.shape, value.stride())
    return total


def merge_reductions(graph: fx.Graph, *, options: Options) -> int:
    """Merges the reductions of every sum that holds several; returns how many reductions went."""
    count = 0
    if not options.fusions:
        return count
    # Begin with the last addition of a sum, because it covers the whole sum.
    pending = list(graph.find_nodes(op="call_function", target=aten.add.Tensor))
    while pending:
        root: fx.Node | None = pending.pop()
        while root is not None and (match := find_merged(root)) is not None and not loses_fusion(graph, match):
            count += len(match.reductions) - 1
            pending = [node for node in pending if node not in match.additions]
            result = rewrite(graph, match)
            root = result if result.target is aten.add.Tensor else None
    return count
