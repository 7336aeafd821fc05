"""Dimensions as products of axes: where the elements of a tensor are after views, permutes and an all-to-all.

A tensor's dimension is a list of axes, outer ones first; a view that divides a dimension divides an axis, for every
tensor that has it:

    product [M, N]                 (m), (n)
    view [B, S, 3, W, C]           (b), (s), (q), (w), (c)      m = b * s, n = q * w * c
    permute to [W, B, S, 3, C]     (w), (b), (s), (q), (c)

Two tensors with the same axes in the same order hold the same elements in the same order. That is a proof, for every
value of symbolic sizes, because an axis is divided only where this is certain to be possible.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import fx

from ditron_inductor.passes.graph import proofs
from ditron_inductor.passes.graph.proofs import known_equal
from ditron_inductor.passes.graph.reasons import refused


class Axis:
    """A factor of a dimension, of a (symbolic) size; parts: the outer and the inner axis that it was divided into."""

    def __init__(self, size: Any) -> None:
        self.size = size
        self.parts: tuple[Axis, Axis] | None = None

    def divide(self, outer: Any) -> tuple[Axis, Axis]:
        """Returns the two parts of the axis, the first of size `outer`, which has to divide the axis's size."""
        assert self.parts is None
        self.parts = Axis(outer), Axis(self.size // outer)
        return self.parts


Dim = tuple[Axis, ...]
Layout = tuple[Dim, ...]


def leaves(axes: Iterable[Axis]) -> Iterator[Axis]:
    """The axes as far as they are divided now, without those of size 1."""
    for axis in axes:
        if axis.parts is not None:
            yield from leaves(axis.parts)
        elif not known_equal(axis.size, 1):
            yield axis


def flat(layout: Layout) -> list[Axis]:
    """Returns all axes in row-major order."""
    return [axis for dim in layout for axis in leaves(dim)]


def size_of(axes: Iterable[Axis]) -> Any:
    return math.prod(axis.size for axis in axes)


def of_shape(shape: Sequence[Any]) -> Layout:
    """A layout of new axes, one for each dimension."""
    return tuple((Axis(size),) for size in shape)


def reshaped(layout: Layout, shape: Sequence[Any]) -> Layout | None:
    """Returns the layout of an order-keeping view; None if it is not certain how the view divides the axes."""
    pending = deque(flat(layout))
    result: list[Dim] = []
    for size in shape:
        taken: list[Axis] = []
        rest = size
        while not known_equal(rest, 1):
            if not pending:
                return None
            axis = pending.popleft()
            if known_equal(axis.size, rest):
                rest = 1
            elif _divides(axis.size, rest):
                rest = rest // axis.size
            elif _divides(rest, axis.size):
                axis, inner = axis.divide(rest)
                pending.appendleft(inner)
                rest = 1
            else:
                return None
            taken.append(axis)
        result.append(tuple(taken))
    return None if pending else tuple(result)


def _divides(part: Any, whole: Any) -> bool:
    """Returns whether a size, other than 0, is certain to divide another one."""
    if isinstance(part, int) and isinstance(whole, int):
        return part > 0 and whole % part == 0
    return proofs.known(part > 0) and known_equal(whole % part, 0)


def without_lead(dim: Dim, size: Any) -> tuple[Axis, Dim] | None:
    """Returns (the outermost axis of a dimension, if of this size; the rest of the dimension), or None."""
    first, *rest = leaves(dim) if any(True for _ in leaves(dim)) else [Axis(1)]
    if known_equal(first.size, size):
        return first, tuple(rest)
    if not _divides(size, first.size):
        return None
    outer, inner = first.divide(size)
    return outer, (inner, *rest)


def moves(node: fx.Node) -> bool:
    """Returns whether a node holds the elements of its first argument, all of them, perhaps in another order."""
    if node.op != "call_function":
        return False
    if node.target in proofs.TRANSPOSES:
        return proofs.tensor(node) is not None and proofs.tensor(node.args[0]) is not None
    return proofs.keeps_order(node)


def moved(node: fx.Node, layout: Layout) -> Layout | None:
    """Returns the layout of a node that moves the elements of a tensor with this layout."""
    if node.target in proofs.TRANSPOSES:
        return tuple(layout[dim] for dim in proofs.permutation(node))
    value = proofs.fake(node)
    return reshaped(layout, value.shape)


def regrouped(chunks: proofs.Regrouped, world_size: int, layout: Layout) -> Layout | None:
    """The layout of equal chunks along one dimension, one for each rank, that were put together along another one."""
    lead = without_lead(layout[chunks.split_dim], world_size)
    if lead is None:
        return None
    ranks, rest = lead
    dims = [rest if dim == chunks.split_dim else axes for dim, axes in enumerate(layout)]
    dims[chunks.cat_dim] = (ranks, *dims[chunks.cat_dim])
    return tuple(dims)


def chunks_of(cat: fx.Node, world_size: int) -> proofs.Regrouped | None:
    """Returns the chunks of a cat of all equal chunks of one tensor, in order and as many dimensions, or None."""
    if cat.op != "call_function" or cat.target is not proofs.aten.cat.default:
        return None
    found = proofs.regrouped(cat, world_size)
    if refused(found):
        return None
    source, result = proofs.tensor(found.source), proofs.tensor(cat)
    return found if source is not None and result is not None and source.ndim == result.ndim else None
