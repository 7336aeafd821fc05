"""Attention that a program writes out (matmul, softmax, matmul) beside gathered keys and values: seen, and left alone.

    q, gathered k -> views -> bmm -> .. -> exp -> .. -> bmm <- views <- gathered v

None of our kernels takes what stands between the two matmuls, which may be anything. Nothing here proves that it is a
softmax; what is said of the gathers is the reason why they are left alone, and what to write instead.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import fx

from ditron_inductor.passes import proofs
from ditron_inductor.passes.attention import FOLLOWED, source_of
from ditron_inductor.passes.collectives import is_collective
from ditron_inductor.passes.reasons import ReasonCode

aten = torch.ops.aten

VIEWS = FOLLOWED | {aten.expand.default}
EXPONENTIALS: frozenset[object] = frozenset({aten.exp.default, aten._softmax.default})
MOST_BETWEEN = 64
"""Nodes between the two matmuls: masks, casts and the softmax are a third of that."""


@dataclass(frozen=True)
class Written:
    """The second matmul, the gathered tensors that it and the first one read, and what the reason is."""

    node: fx.Node
    gathered: tuple[fx.Node, ...]
    code: ReasonCode


def find_written(graph: fx.Graph, gathered: Collection[fx.Node]) -> list[Written]:
    """The attentions that are written out, of any of the `gathered` tensors."""
    found = []
    for node in graph.find_nodes(op="call_function", target=aten.bmm.default):
        weights, values = node.args
        assert isinstance(weights, fx.Node) and isinstance(values, fx.Node)
        above = _above(weights)
        if not any(one.target in EXPONENTIALS for one in above):
            continue
        products = [one for one in above if one.target is aten.bmm.default]
        operands = [values, *(one for product in products for one in product.all_input_nodes)]
        read = tuple(end for end in map(_end, operands) if end in gathered)
        capped = any(one.target is aten.tanh.default for one in above)
        if read:
            code = ReasonCode.ATTENTION_SOFTCAP if capped else ReasonCode.ATTENTION_WRITTEN_OUT
            found.append(Written(node, read, code))
    return found


def _above(weights: fx.Node) -> list[fx.Node]:
    """What the weights are computed from, up to the next matmuls, these included."""
    found: dict[fx.Node, None] = {}
    left = [weights]
    while left and len(found) < MOST_BETWEEN:
        node = left.pop(0)
        if node in found or node.op != "call_function" or is_collective(node):
            continue
        found[node] = None
        if node.target not in proofs.MATMULS:
            left += node.all_input_nodes
    return list(found)


def _end(node: fx.Node) -> fx.Node:
    """What a node is a view or a repetition of."""
    while node.op == "call_function" and node.target in VIEWS and isinstance(node.args[0], fx.Node):
        node = node.args[0] if node.target is aten.expand.default else source_of(node)
    return node
