"""A sum of products whose collective keeps each element in its place: views of its operand are views of its result.

    a [M, K], b [K, N] -> mm -> reshape [B, S, N] -> .. -> all_reduce -> wait [B, S, N]

becomes

    [a [M, K]], [b [K, N]] -> a Task node -> getitem 0 [M, N] -> reshape [B, S, N] -> ..

with the very same view nodes behind the call. No size has to be known for that.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import fx

from ditron_inductor.passes.graph import proofs, rewriting
from ditron_inductor.passes.graph.collectives import Collective, read_collective
from ditron_inductor.passes.graph.products import FindProduct, Product, find_product
from ditron_inductor.passes.graph.reasons import ReasonCode, Refused, refused
from ditron_inductor.task.nodes import REDUCE_OPS, TaskNode


@dataclass(frozen=True)
class Match:
    """A product, or a sum of them, and the collective of it."""

    collective: Collective
    product: Product


def find_whole_sum(
    node: fx.Node, find: FindProduct | None = None, reduce_ops: Collection[str] = REDUCE_OPS
) -> Match | Refused:
    """Proves that the collective `node` reduces matmuls as drawn above, by one of these ops, or says why not. find:
    what reads the product, by default `find_product`.
    """
    collective = read_collective(node, reduce_ops)
    if isinstance(collective, ReasonCode):
        return collective
    product = (find or find_product)(collective.operand, (collective.node,))
    if refused(product):
        return product.at(proofs.views_up(collective.operand)[-1])
    return Match(collective, product)


def replace_whole_sum(graph: fx.Graph, match: Match, task: TaskNode) -> fx.Node:
    """Replaces the match by one call of `task` and returns that call."""
    collective, product, mm = match.collective, match.product, match.product.mm
    with graph.inserting_before(collective.node):
        values = (mm.meta["val"], rewriting.new_token(mm.meta["val"]))
        operands = {
            "a": [factors.lhs for factors in product.factors],
            "b": product.rights,
            "bias": rewriting.bias_row(graph, product.biases),
            "extras": product.epilogue[0],
        }
        call = rewriting.call_task(graph, task, operands, mm, values)
        reduced = rewriting.output(graph, call, 0, mm)
    result = reduced
    for view in reversed(product.views):
        # What it viewed may be an add.
        view.update_arg(0, result)
        collective.node.prepend(view)
        # What it viewed may have had another dtype too, between two casts.
        value: torch.Tensor = view.meta["val"]
        shape, strides = tuple(value.shape), tuple(value.stride())
        view.meta["val"] = rewriting.fake_like(value, shape, strides, mm.meta["val"].dtype)
        result = view
    collective.wait.replace_all_uses_with(result)
    rewriting.erase_unused(graph, [*product.steps, collective.node, collective.wait])
    return call
