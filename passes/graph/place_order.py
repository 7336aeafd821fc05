"""Proofs that the order of a sort of slots does not matter, since it is undone behind all that lies in it.

    ids [S] -> sort -> getitem 0, the sorted ids, and getitem 1, the slot at each place [S]
    index(x, [slots // k]), index(weights, [slots])     rows by place: row p belongs to the slot at place p
    ops by row, grouped matmuls of rows by place        are by place again
    index_put(.., [slots], 0 .. S - 1)                  the place of each slot
    index(rows by place, [places])                      are by slot, in whatever order the slots were sorted
    index_put, index_add, scatter_add of rows by place  the same
    histc(the sorted ids)                               has no order

If every reader of the sort is one of these, then another order of the slots gives the same result, such as the order in
which they are.
"""

from __future__ import annotations

import enum
from operator import getitem
from typing import Any

import torch
from torch import fx

from ditron_inductor.passes.graph import expert_rows, proofs
from ditron_inductor.passes.graph.expressions import POINTWISE
from ditron_inductor.passes.graph.sorts import QUOTIENTS, SORTS

aten = torch.ops.aten
IOTA = torch.ops.prims.iota.default
BY_ELEMENT: frozenset[object] = frozenset(
    {
        *POINTWISE,
        *QUOTIENTS,
        aten.where.self,
        aten.ge.Scalar,
        aten.gt.Scalar,
        aten.le.Scalar,
        aten.lt.Scalar,
        aten.eq.Scalar,
        aten.ne.Scalar,
        aten.logical_not.default,
        aten.clone.default,
    }
)
"""Ops of which an element of the result depends on the elements of the operands at its place, which may be spread."""
ADDING = ("aten::scatter_add", "aten::index_add", "aten::index_put")
WITHOUT_ORDER: frozenset[object] = frozenset({aten.histc.default, aten.bincount.default})


class Kind(enum.Enum):
    """What a node has in the order of the sort."""

    SORT = enum.auto()
    ROWS = enum.auto()
    """A tensor whose first dimension are the places, or a tuple of such tensors."""
    SLOTS = enum.auto()
    """The slot at each place, a special case of rows."""
    PLACES = enum.auto()
    """The place of each slot."""
    UNORDERED = enum.auto()
    """Nothing in the order of the sort, though it was made of what has."""


ROWWISE = (Kind.ROWS, Kind.SLOTS)


def kinds_of(sort: fx.Node) -> dict[fx.Node, Kind] | None:
    """Returns all nodes that have something in the order of a sort of one dimension; None if its order may matter."""
    bound = proofs.arguments(sort)
    ids = proofs.tensor(bound["self"])
    if sort.target not in SORTS or ids is None or ids.ndim != 1:
        return None
    kinds = {sort: Kind.SORT}
    node = sort.next
    while node.op != "root":
        if any(source in kinds for source in node.all_input_nodes):
            found = _kind(node, kinds, ids.shape[0])
            if found is None:
                return None
            if found is not Kind.UNORDERED:
                kinds[node] = found
        node = node.next
    return kinds


def _kind(node: fx.Node, kinds: dict[fx.Node, Kind], S: Any) -> Kind | None:
    """Returns the kind of a node that reads what has one; None if it depends on the order otherwise."""
    if node.op != "call_function":
        return None
    read = {kinds[source] for source in node.all_input_nodes if source in kinds}
    if read == {Kind.SORT}:
        return None if node.target is not getitem else Kind.ROWS if node.args[1] == 0 else Kind.SLOTS
    if node.target is aten.index.Tensor:
        return _of_index(node, kinds)
    if _is_adding(node):
        return _of_adding(node, kinds, S)
    if Kind.PLACES in read:
        return None
    if node.target in WITHOUT_ORDER:
        # Weights of what is counted have an order.
        return Kind.UNORDERED if len(node.all_input_nodes) == 1 else None
    if node.target is proofs.GROUPED:
        return Kind.ROWS if _multiplies_rows(node, kinds) else None
    return Kind.ROWS if _is_by_row(node, kinds, S) else None


def _of_index(node: fx.Node, kinds: dict[fx.Node, Kind]) -> Kind | None:
    """The kind of index(table, [rows])."""
    table, indices = node.args
    assert isinstance(table, fx.Node) and isinstance(indices, (list, tuple))
    if len(indices) != 1 or not isinstance(indices[0], fx.Node):
        return None
    value = proofs.tensor(indices[0])
    if value is None or value.ndim != 1 or value.dtype not in (torch.int64, torch.int32):
        return None
    named, indexed = kinds.get(indices[0]), kinds.get(table)
    if named is Kind.PLACES and indexed in ROWWISE:
        return Kind.UNORDERED
    return Kind.ROWS if named in ROWWISE and indexed is None else None


def _is_adding(node: fx.Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target._schema.name in ADDING


def _of_adding(node: fx.Node, kinds: dict[fx.Node, Kind], S: Any) -> Kind | None:
    """The kind of an op that puts or adds rows to the rows of another tensor that are named."""
    bound = proofs.arguments(node)
    if bound["self"] in kinds or bound.get("dim", 0) != 0:
        return None
    source = bound.get("source", bound.get("src", bound.get("values")))
    named = bound.get("index")
    if "indices" in bound:
        if len(bound["indices"]) != 1:
            return None
        (named,) = bound["indices"]
    if not isinstance(named, fx.Node) or not isinstance(source, fx.Node) or kinds.get(named) not in ROWWISE:
        return None
    numbers, values, given = proofs.fake(named), proofs.fake(source), proofs.fake(bound["self"])
    if numbers.dtype not in (torch.int64, torch.int32):
        # A mask counts the places.
        return None
    adds = "indices" not in bound or bool(bound["accumulate"])
    if kinds.get(source) in ROWWISE:
        # Of fewer dimensions, the first one would not be that of the places.
        whole = "indices" not in bound or values.ndim == numbers.ndim + given.ndim - 1
        fits = whole and proofs.known_equal(numbers.shape[0], values.shape[0])
        # Without adding, every slot has to be named once.
        return Kind.UNORDERED if fits and (adds or kinds[named] is Kind.SLOTS) else None
    counts = not adds and kinds[named] is Kind.SLOTS and source not in kinds and _counts(source, S)
    return Kind.PLACES if counts and proofs.same_shape(tuple(given.shape), (S,)) else None


def _counts(node: fx.Node, S: Any) -> bool:
    """Returns whether a node is 0, 1, .. S - 1."""
    source = proofs.views_up(node)[-1]
    value = proofs.tensor(source)
    if source.target is not IOTA or value is None or (source.kwargs.get("start"), source.kwargs.get("step")) != (0, 1):
        return False
    return bool(proofs.known(value.shape[0] == S))


def _multiplies_rows(grouped: fx.Node, kinds: dict[fx.Node, Kind]) -> bool:
    """Returns whether a grouped matmul multiplies rows by place by the matrices of the experts that were sorted."""
    bound = proofs.arguments(grouped)
    others = [bound[name] for name in ("mat2", "offs", "bias")]
    if kinds.get(bound["self"]) not in ROWWISE or any(other in kinds for other in others):
        return False
    return experts_of(grouped, kinds) is not None


def experts_of(grouped: fx.Node, kinds: dict[fx.Node, Kind]) -> fx.Node | None:
    """Returns the sorted ids if they are the experts of the rows that a grouped matmul multiplies; else None."""
    bound = proofs.arguments(grouped)
    num_experts = proofs.fake(bound["mat2"]).shape[0]
    (sort,) = (node for node, kind in kinds.items() if kind is Kind.SORT)
    ids = next((user for user in sort.users if user.target is getitem and user.args[1] == 0), None)
    if ids is None or not isinstance(num_experts, int):
        return None
    return ids if expert_rows.are_experts_of_rows(ids, bound["offs"], num_experts) else None


def _is_by_row(node: fx.Node, kinds: dict[fx.Node, Kind], S: Any) -> bool:
    """Returns whether row p of a result is made of row p of what lies by place, and of what all rows share."""
    if node.target is getitem:
        # A part of a split.
        return True
    rows = [source for source in node.all_input_nodes if source in kinds]
    if node.target in proofs.CUTS:
        given = proofs.fake(proofs.operand(node))
        return len(rows) == 1 and int(proofs.arguments(node)["dim"]) % given.ndim != 0
    value = proofs.tensor(node)
    if value is None or value.ndim == 0 or not proofs.known(value.shape[0] == S):
        return False
    if proofs.keeps_order(node) and proofs.known_equal(proofs.fake(rows[0]).shape[0], S):
        return True
    if node.target is aten.expand.default:
        return proofs.fake(rows[0]).ndim == value.ndim
    return node.target in BY_ELEMENT and all(_lies_along(source, value, kinds) for source in node.all_input_nodes)


def _lies_along(source: fx.Node, value: torch.Tensor, kinds: dict[fx.Node, Kind]) -> bool:
    """Returns whether an operand has a row for each row of the result if it lies by place, else one for all of them."""
    given = proofs.tensor(source)
    if given is None:
        return False
    if source in kinds:
        return given.ndim == value.ndim
    return given.ndim < value.ndim or bool(proofs.known_equal(given.shape[0], 1))
