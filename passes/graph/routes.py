"""The ways of rows between a collective and a matmul: ops that move, convert and scale them, and those of routing."""

from __future__ import annotations

from collections.abc import Iterator
from operator import getitem

import torch
from torch import fx

from ditron_inductor.passes.graph import proofs
from ditron_inductor.passes.graph.collectives import WAIT
from ditron_inductor.passes.graph.slot_sums import DETERMINISTIC

aten = torch.ops.aten
PICKS: frozenset[object] = frozenset(
    {
        aten.index.Tensor,
        aten.index_select.default,
        aten.gather.default,
        aten.index_put.default,
        aten.index_add.default,
        aten.scatter_add.default,
        DETERMINISTIC,
    }
)
"""Ops that take rows by their numbers, or put them there."""
MOVES: frozenset[object] = proofs.MAY_KEEP_ORDER | proofs.SLICES | {aten.cat.default, aten.view.dtype, WAIT}
"""Ops that move elements, cut them apart and put them together, and change none."""
SCALES: frozenset[object] = frozenset({aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar})
ROUTES: frozenset[object] = PICKS | {aten.sum.dim_IntList, aten.add.Tensor, aten.where.self, getitem}
"""Ops that bring the slots of a token together, or the rows of an expert, and what takes one of several results."""


def upwards(node: fx.Node, through: frozenset[object]) -> Iterator[fx.Node]:
    """Yields the sources of `node` through ops of `through`, including the first sources that are no such op."""
    return proofs.reached(
        node.all_input_nodes, lambda source: source.all_input_nodes if is_one(source, through) else ()
    )


def downwards(node: fx.Node, through: frozenset[object]) -> Iterator[fx.Node]:
    """Yields the users of `node` through ops of `through`, including the first users that are no such op."""
    return proofs.reached(node.users, lambda user: user.users if is_one(user, through) else ())


def copies_weights(bmm: fx.Node) -> bool:
    """Returns whether a batched matmul multiplies copies of matrices, which are taken by the numbers of experts."""
    for operand in bmm.all_input_nodes:
        node = operand
        while node.target in proofs.MAY_KEEP_ORDER | proofs.CASTS:
            node = proofs.operand(node)
        indexed = proofs.arguments(node) if node.target is aten.index.Tensor else None
        if indexed is not None and len(indexed["indices"]) == 1 and proofs.fake(indexed["self"]).ndim >= 3:
            numbers = proofs.tensor(indexed["indices"][0])
            return numbers is not None and numbers.dtype in (torch.int64, torch.int32)
    return False


def is_one(node: fx.Node, ops: frozenset[object]) -> bool:
    """Returns whether a node calls one of the ops, by the op or by its name."""
    return node.target in ops or (isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name in ops)
