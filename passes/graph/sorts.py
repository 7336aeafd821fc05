"""Proofs that a tensor is the order of a sort, or which row of such an order each of its numbers stands for.

In a backward graph they go by the marks of `normalize/mark_sorts.py`.
"""

from __future__ import annotations

import operator
from typing import cast

import torch
from torch import fx

from ditron_inductor.passes.graph import proofs

aten = torch.ops.aten
SORTS = (aten.sort.default, aten.sort.stable)
QUOTIENTS = (aten.div.Tensor_mode, aten.floor_divide.default)
SORTED = "ditron_sorted"
QUOTIENT = "ditron_quotient"


def is_order(node: fx.Node) -> bool:
    """Returns whether a node is the indices of a sort of one dimension, so that it has each of 0 to S - 1 once."""
    if node.op == "placeholder":
        return node.meta.get(SORTED) == node.name
    from_sort = node.target is operator.getitem and node.args[1] == 1 and proofs.operand(node).target in SORTS
    return bool(from_sort) and proofs.fake(node).ndim == 1


def is_written(node: fx.Node) -> bool:
    """Returns whether a node has rows written to places, which nothing is added to."""
    return node.target is aten.index_put.default and not proofs.arguments(node)["accumulate"]


def is_permutation(node: fx.Node) -> bool:
    """Returns whether a node has each of 0 to S - 1 once: it is the indices of a sort, or the place of each of them."""
    if is_order(node):
        return True
    if not is_written(node):
        return False
    bound = proofs.arguments(node)
    places, values = bound["indices"], bound["values"]
    in_order = len(places) == 1 and isinstance(places[0], fx.Node) and is_order(places[0])
    whole = in_order and proofs.alike(node, places[0]) and proofs.alike(values, places[0])
    return whole and proofs.counts_from(values, 0)


def quotient(node: fx.Node) -> tuple[fx.Node, int] | None:
    """Returns (what is divided, k) if a node is that by a number k, rounded down or towards zero."""
    if node.target not in QUOTIENTS or len(node.args) != 2:
        return None
    divided, k = node.args
    rounded = node.target is aten.floor_divide.default or node.kwargs.get("rounding_mode") is not None
    return (divided, k) if rounded and isinstance(divided, fx.Node) and isinstance(k, int) and k >= 1 else None


def sorted_slots(rows: fx.Node) -> tuple[fx.Node, int] | None:
    """Returns (the indices of a sort, k) if `rows` has their quotients by k."""
    if rows.op == "placeholder" and QUOTIENT in rows.meta:
        own, name, k = cast("tuple[str, str, int]", rows.meta[QUOTIENT])
        given = (one for one in rows.graph.find_nodes(op="placeholder") if one.name == name and is_order(one))
        order = next(given, None) if own == rows.name else None
        return None if order is None else (order, k)
    parts = quotient(rows)
    return parts if parts is not None and is_order(parts[0]) else None
