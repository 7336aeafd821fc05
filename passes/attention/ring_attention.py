"""Recognises ring attention, which attends to the keys of one rank after the other, as torch's `context_parallel` does.
It is left alone.

    cat(k, v) -> all_gather -> part of rank r - 1, of r - 2, .. -> attention -> merged by logarithms of sums
    cat(k, v) -> all_to_all: all to rank r + 1 -> attention, and again all_to_all -> ..
    its backward -> gradients of keys and values + those of the rank in front -> all_to_all: all to rank r + 1 -> ..

What a rank attends to depends on the rank: which parts and how many, all rows or the second half, all keys of a part or
the first half. So the graphs differ in their ops, not only in constants, and no rank can prove from its own graph what
the others will find in theirs. If the causal rows of a rank see only its own keys, the rank has a gather that it never
reads. And a gradient that comes from a neighbour is whatever that rank's program computes; on this rank it is any
tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import getitem

import torch
from torch import fx

from ditron_inductor.passes.attention.attention_calls import BACKWARD, FORWARD, operands, views_above
from ditron_inductor.passes.graph import proofs
from ditron_inductor.passes.graph.collectives import ALL_GATHER, ALL_TO_ALL, WAIT

aten = torch.ops.aten

# Gradients are put together, and added up, on their way.
MOVES: frozenset[object] = (
    proofs.MAY_KEEP_ORDER
    | proofs.SLICES
    | proofs.CASTS
    | {aten.cat.default, aten.slice_scatter.default, aten.add.Tensor, ALL_TO_ALL, WAIT}
)


def ring_attention(collective: fx.Node) -> fx.Node | None:
    """Returns the attention whose keys and values, or their gradients, a collective passes around, or None."""
    kernels = [node for node in collective.graph.nodes if node.target in FORWARD or node.target in BACKWARD]
    passed_on = collective.target is ALL_TO_ALL and _is_passed_on(collective)
    if not kernels or not (passed_on or collective.target is ALL_GATHER):
        return None
    waits = [user for user in collective.users if user.target is WAIT]
    for kernel in kernels:
        chains = [views_above(operand, waits) or () for operand in operands(kernel)[1:]]
        if any(view.target in proofs.SLICES for chain in chains for view in chain):
            return kernel
        gradients = {user for user in kernel.users if user.target is getitem and user.args[1] in (1, 2)}
        if passed_on and kernel.target in BACKWARD and gradients & set(_made_of(collective)):
            return kernel
        # Nobody reads what is gathered.
        if not any(wait.users for wait in waits) and _roots(*operands(kernel)[1:]) == _roots(*_parts(collective)):
            return kernel
    return None


def _is_passed_on(exchange: fx.Node) -> bool:
    """Returns whether an all-to-all sends everything to one rank, and gets everything from one."""
    bound = proofs.arguments(exchange)
    both = bound["output_split_sizes"], bound["input_split_sizes"]
    return all(
        isinstance(splits, (list, tuple)) and len(splits) > 1 and sum(size != 0 for size in splits) == 1
        for splits in both
    )


def _made_of(collective: fx.Node) -> Iterator[fx.Node]:
    """Yields what is sent, and the nodes from which moves and sums make it."""
    return proofs.reached(collective.all_input_nodes, lambda node: node.all_input_nodes if node.target in MOVES else ())


def _parts(collective: fx.Node) -> list[fx.Node]:
    """Returns what is sent, or the parts from which it is concatenated."""
    (operand, *_) = collective.all_input_nodes
    whole = proofs.views_up(operand)[-1]
    return whole.all_input_nodes if whole.target is aten.cat.default else [whole]


def _roots(*nodes: fx.Node) -> set[fx.Node]:
    """The tensors that nodes are views of."""
    return {proofs.views_up(node)[-1] for node in nodes}
