"""Rotary embeddings in a graph: a tensor whose heads are turned by angles, however that is written.

The last dimension of x is cut into two halves x0 and x1. Turned by angles it is

    (x0 * cos - x1 * sin, x1 * cos + x0 * sin)

It may be written half by half, with a table for both halves, or with whole heads as x * cos + cat(-x1, x0) * sin. A
tensor is read as a sum of terms for each of its halves: a sign, a half of x, and what it is multiplied by.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import fx

from ditron_inductor.passes.attention.attention_parts import CASTS
from ditron_inductor.passes.attention.roots import widens
from ditron_inductor.passes.graph import proofs
from ditron_inductor.task.torch_dtypes import ACTIVATION_DTYPES

aten = torch.ops.aten

MOST_NODES = 40
"""The most nodes of a rotary embedding: twice as many as any form has."""
SUMS = {aten.add.Tensor: 1, aten.sub.Tensor: -1}


@dataclass(frozen=True)
class Term:
    """sign * half `half` of x, times half `table_half` of `table`; of a table for both halves this is None."""

    sign: int
    half: int
    table: fx.Node | None = None
    table_half: int | None = None


Terms = frozenset[Term]
Halves = tuple[Terms, Terms]
"""The terms of the first half of a tensor and those of its second half."""


@dataclass(frozen=True)
class Rotation:
    """x turned by angles. cos and sin have as many columns as x, or half as many, which are for both halves; in other
    dimensions than the first and the last one they have size 1.
    """

    x: fx.Node
    cos: fx.Node
    sin: fx.Node

    @property
    def angles(self) -> tuple[tuple[fx.Node, int, int], ...]:
        """Returns (what it is a view of, its rows, its columns) of cos and of sin. Equal ones hold equal angles."""
        values = [(table, proofs.fake(table)) for table in (self.cos, self.sin)]
        return tuple(
            (proofs.views_up(table)[-1], value.numel() // value.shape[-1], value.shape[-1]) for table, value in values
        )


def read_rotation(node: fx.Node) -> Rotation | None:
    """Returns the Rotation that a tensor [.., D] is; None if it is something else."""
    # The result may be rounded, and nothing on the way to it.
    node = proofs.operand(node) if node.target in CASTS else node
    reader = _TermReader.of(node)
    if reader is None:
        return None
    halves = reader.whole(node)
    if halves is None:
        return None
    tables = [[term.table for term in halves[0] if (term.sign, term.half) == one] for one in ((1, 0), (-1, 1))]
    if [len(found) for found in tables] != [1, 1]:
        return None
    ((cos,), (sin,)) = tables
    if cos is None or sin is None:
        return None
    for parts in ((None, None), (0, 1)):
        first = frozenset({Term(1, 0, cos, parts[0]), Term(-1, 1, sin, parts[0])})
        second = frozenset({Term(1, 1, cos, parts[1]), Term(1, 0, sin, parts[1])})
        if halves == (first, second):
            return Rotation(reader.x, cos, sin)
    return None


@dataclass(frozen=True)
class _TermReader:
    """Reads the terms of tensors that are computed of x, which has an even last dimension."""

    x: fx.Node

    @classmethod
    def of(cls, node: fx.Node) -> _TermReader | None:
        """Returns the reader for the tensor whose pieces `node` is computed of; None if there is none."""
        pending, seen = [node], set[fx.Node]()
        while pending and len(seen) <= MOST_NODES:
            one = pending.pop()
            if one in seen or one.op != "call_function":
                continue
            seen.add(one)
            part = proofs.piece(one)
            if part is not None and proofs.alike(part.source, node):
                size = proofs.fake(node).shape[-1]
                return cls(_uncast(part.source)) if isinstance(size, int) and size % 2 == 0 else None
            if one.target in (*SUMS, *CASTS, aten.mul.Tensor, aten.neg.default, aten.cat.default):
                pending += one.all_input_nodes
        return None

    @property
    def size(self) -> int:
        """The last dimension of x."""
        return int(proofs.fake(self.x).shape[-1])

    def whole(self, node: object) -> Halves | None:
        """Returns the terms of a tensor of the shape of x."""
        if not isinstance(node, fx.Node) or not proofs.alike(node, self.x):
            return None
        if _uncast(node) is self.x:
            return frozenset({Term(1, 0)}), frozenset({Term(1, 1)})
        if node.target is aten.cat.default:
            bound = proofs.arguments(node)
            parts, last = bound["tensors"], proofs.fake(node).ndim - 1
            if len(parts) != 2 or bound["dim"] % (last + 1) != last:
                return None
            return _both(*map(self.half, parts))
        if widens(node):
            return self.whole(node.args[0])
        if node.target is aten.neg.default:
            found = self.whole(node.args[0])
            return None if found is None else (_negated(found[0]), _negated(found[1]))
        if node.target in SUMS and proofs.arguments(node)["alpha"] == 1:
            one, other = (self.whole(given) for given in node.args[:2])
            if one is None or other is None:
                return None
            return _both(_sum(node, one[0], other[0]), _sum(node, one[1], other[1]))
        if node.target is aten.mul.Tensor:
            for given, table in (node.args, node.args[::-1]):
                found = self.whole(given)
                if found is None or not isinstance(table, fx.Node) or not self._is_table(table, self.size):
                    continue
                return _both(*(_multiplied(half, table, index) for index, half in enumerate(found)))
        return None

    def half(self, node: object) -> Terms | None:
        """Returns the terms of a tensor of the shape of half of x."""
        if not isinstance(node, fx.Node) or node.op != "call_function":
            return None
        value, size = proofs.tensor(node), self.size // 2
        if value is None or not proofs.known_equal(value.shape[-1], size):
            return None
        part = proofs.piece(node)
        if part is not None:
            last = proofs.fake(part.source).ndim - 1
            right = _uncast(part.source) is self.x and part.dim == last and part.start in (0, size)
            return frozenset({Term(1, int(part.start == size))}) if right else None
        if widens(node):
            return self.half(node.args[0])
        if node.target is aten.neg.default:
            found = self.half(node.args[0])
            return None if found is None else _negated(found)
        if node.target in SUMS and proofs.arguments(node)["alpha"] == 1:
            one, other = (self.half(given) for given in node.args[:2])
            return None if one is None or other is None else _sum(node, one, other)
        if node.target is aten.mul.Tensor:
            for given, table in (node.args, node.args[::-1]):
                found = self.half(given)
                if found is not None and isinstance(table, fx.Node) and self._is_table(table, size):
                    return _multiplied(found, table, None)
        return None

    def _is_table(self, table: fx.Node, columns: int) -> bool:
        """Returns whether a tensor has so many columns, and the same angles along all dimensions but the first one."""
        value, like = proofs.tensor(table), proofs.fake(self.x)
        if value is None or value.dtype not in ACTIVATION_DTYPES or not 0 < value.ndim <= like.ndim:
            return False
        inner = value.shape[:-1] if value.ndim < like.ndim else value.shape[1:-1]
        ones = all(proofs.known_equal(size, 1) for size in inner)
        return ones and proofs.known_equal(value.shape[-1], columns)


def _both(first: Terms | None, second: Terms | None) -> Halves | None:
    """Returns the terms of both halves; None if one is not known."""
    return None if first is None or second is None else (first, second)


def _uncast(node: fx.Node) -> fx.Node:
    """Returns what a tensor was before casts to wider types."""
    while widens(node):
        node = proofs.operand(node)
    return node


def _negated(terms: Iterable[Term]) -> Terms:
    return frozenset(Term(-term.sign, term.half, term.table, term.table_half) for term in terms)


def _sum(node: fx.Node, left: Terms, right: Terms) -> Terms | None:
    """Returns the terms of a sum or a difference; None if a term comes twice."""
    if SUMS[node.target] < 0:  # type: ignore[index]
        right = _negated(right)
    return None if left & right else left | right


def _multiplied(terms: Terms, table: fx.Node, table_half: int | None) -> Terms | None:
    """Returns the terms multiplied by a table; None if one is already."""
    if any(term.table is not None for term in terms):
        return None
    return frozenset(Term(term.sign, term.half, table, table_half) for term in terms)
