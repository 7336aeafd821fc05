"""Proves that two nodes of a graph are the same computation: each layer of a model may write down what all share."""

from __future__ import annotations

import torch
from torch import fx

from ditron_inductor.passes.graph import rewriting

DEEPEST = 8
"""The most steps up to where two computations meet. Positions and block tables need four."""


def same_value(left: object, right: object, deepest: int = DEEPEST) -> bool:
    """Returns whether two arguments are the same, or are computed by the same ops of the same."""
    if left is right:
        return True
    if isinstance(left, fx.Node) and isinstance(right, fx.Node):
        alike = left.target is right.target and _is_pure(left) and deepest > 0
        return alike and same_value((left.args, left.kwargs), (right.args, right.kwargs), deepest - 1)
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same_value(left[key], right[key], deepest) for key in left)
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(
            same_value(mine, other, deepest) for mine, other in zip(left, right, strict=True)
        )
    return type(left) is type(right) and left == right


def _is_pure(node: fx.Node) -> bool:
    """Returns whether a node computes the same again from the same operands. What `empty` holds is anything."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace not in ("aten", "prims"):
        return False
    return not rewriting.is_pinned(node) and "empty" not in node.target.name()
