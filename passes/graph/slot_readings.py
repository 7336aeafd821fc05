"""Reads a node as the sum over the slots of each token, in each of the ways in which people write it.

    rows [.., k, N] -> [cast] -> [mul(.., weights [.., k, 1])] -> [cast] -> sum over k
    bmm(weights [T, 1, k], rows [T, k, N])       which `einsum("tk,tkn->tn", ..)` and `weights.unsqueeze(1) @ rows` are
    bmm(permute(rows) [T, N, k], weights [T, k, 1])
    w[:, 0] * rows[:, 0] + w[:, 1] * rows[:, 1] + ..      a loop over the slots, from zeros or from another tensor on
    rows [T, N], or rows * weights [T, 1]                  one slot for each token, which nothing has to add up

All of them add up the same terms. They differ in what is rounded on the way, which no node rounds: it adds in fp32.

What is added one by one is a sum only if each of the slots 0 .. k - 1 is there once, with the weight of the same
number, and if nothing else reads a sum of some of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import getitem
from typing import Any

import torch
from torch import fx

from ditron_inductor.passes.graph import proofs

aten = torch.ops.aten
CAST = torch.ops.prims.convert_element_type.default
MOST_SLOTS = 64
"""The most slots of a token that are added one by one."""


@dataclass(frozen=True)
class Reading:
    """A sum over the slots of each token. rows: T * k * N elements, with k slots of a token after each other. sizes:
    (T, k, N). weights: one factor for each slot, T * k in this order, or None. total: the sum, T * N elements in this
    order. steps: the nodes from behind the rows to in front of the total. base: what the sum begins with, of the shape
    and dtype of the total, or None for zeros. unrolled: the slots are added one by one.
    """

    rows: fx.Node
    sizes: tuple[Any, int, Any]
    weights: fx.Node | None
    total: fx.Node
    steps: tuple[fx.Node, ...]
    base: fx.Node | None = None
    unrolled: bool = False

    @property
    def top_k(self) -> int:
        return self.sizes[1]


def casts(node: fx.Node) -> bool:
    """Returns whether a node casts one floating-point dtype to another, of which none has less than 16 bits: a rounding
    to so few is what the graph is for.
    """
    dtypes = [one.dtype for one in map(proofs.fake, (node, node.args[0]))] if node.target is CAST else []
    return bool(dtypes) and all(dtype.is_floating_point and dtype.itemsize >= 2 for dtype in dtypes)


def readings(total: fx.Node) -> Iterator[Reading]:
    """Yields the ways to read a node as a sum over slots; of what the slots are nothing is proved."""
    if proofs.tensor(total) is None:
        return
    read = READERS.get(total.target)
    for reading in () if read is None else read(total):
        *views, source = proofs.views_up(reading.rows)
        if casts(source):
            reading = replace(reading, rows=proofs.operand(source), steps=(source, *views, *reading.steps))
        yield reading


def weighs_products(bmm: fx.Node) -> bool:
    """Returns whether a batched matmul multiplies what other batched or grouped matmuls return for the slots of each
    token by the weights of these.
    """
    for reading in readings(bmm):
        source = proofs.views_up(reading.rows)[-1]
        if source.target is aten.index.Tensor:
            source = proofs.views_up(proofs.operand(source))[-1]
        if source.target in proofs.BATCHED or source.target is proofs.GROUPED:
            return True
    return False


def _sizes(shape: Sequence[Any]) -> tuple[Any, Any, Any]:
    """Returns (T, k, N) of rows of this shape."""
    return math.prod(shape[:-2]), shape[-2], shape[-1]


def _summed(total: fx.Node) -> Iterator[Reading]:
    """The rows may be cast before they are multiplied, and behind that."""
    summed, bound = proofs.operand(total), proofs.arguments(total)
    shape, dims = proofs.fake(summed).shape, bound["dim"] or ()
    # A sum of another kind of numbers would not be what is added up here.
    if len(shape) < 3 or [dim % len(shape) for dim in dims] != [len(shape) - 2] or bound["keepdim"]:
        return
    if not isinstance(shape[-2], int) or not proofs.fake(total).dtype.is_floating_point:
        return
    yield Reading(summed, _sizes(shape), None, total, ())
    product = proofs.operand(summed) if casts(summed) else summed
    factors = [factor for factor in product.args if isinstance(factor, fx.Node)]
    if product.target is not aten.mul.Tensor or len(factors) != 2:
        return
    for factor, weights in (factors, factors[::-1]):
        value = proofs.tensor(weights)
        if value is not None and proofs.same_shape(value.shape, (*shape[:-1], 1)) and proofs.alike(factor, product):
            rows = proofs.operand(factor) if casts(factor) else factor
            steps = [step for step in dict.fromkeys((factor, product, summed)) if step is not rows]
            yield Reading(rows, _sizes(shape), weights, total, tuple(steps))


def _multiplied(bmm: fx.Node) -> Iterator[Reading]:
    """Each batch is a token, whose weights are one row or one column."""
    for rows, weights, swapped in ((bmm.args[1], bmm.args[0], False), (bmm.args[0], bmm.args[1], True)):
        if not isinstance(rows, fx.Node) or not isinstance(weights, fx.Node):
            continue
        (tokens, *shape), factors = proofs.fake(rows).shape, proofs.fake(weights).shape
        k, columns = shape[::-1] if swapped else shape
        if not isinstance(k, int) or not proofs.known_equal(factors[2 if swapped else 1], 1):
            continue
        found = _in_order(rows, (k, columns) if swapped else None)
        if found is not None:
            yield Reading(found[0], (tokens, k, columns), weights, bmm, found[1])


def _in_order(node: fx.Node, swapped: tuple[Any, Any] | None) -> tuple[fx.Node, tuple[fx.Node, ...]] | None:
    """Returns (what has the elements of `node` in their order, the nodes behind it), where several permutes together
    may change nothing; None if they do. swapped: the last two sizes of what is wanted if its transpose is.
    """
    source, dims, steps = proofs.permuted(node)
    shape = proofs.fake(source).shape
    if swapped is not None:
        dims[-2:] = dims[-2:][::-1]
        if not proofs.same_shape(tuple(shape[dim] for dim in dims[-2:]), swapped):
            return None
    return (source, steps) if dims == sorted(dims) else None


@dataclass(frozen=True)
class _Slot:
    """A term of a sum that is written out: slot `number` of the rows, with the weight of this number or without one."""

    rows: fx.Node
    weights: fx.Node | None
    number: int
    steps: tuple[fx.Node, ...]


def _one_by_one(total: fx.Node) -> Iterator[Reading]:
    # A loop adds a slot last, so a long sum of other terms is not read through.
    if not any(_slot(term, total) for term in total.args if isinstance(term, fx.Node)):
        return
    slots: list[_Slot] = []
    others: list[fx.Node] = []
    sums = _terms_of(total, total, slots, others)
    if not slots or len(others) > 1:
        return
    rows, weights = slots[0].rows, slots[0].weights
    shape = proofs.fake(rows).shape
    same = all(slot.rows is rows and slot.weights is weights for slot in slots)
    k = shape[-2]
    if not same or not isinstance(k, int) or sorted(slot.number for slot in slots) != list(range(k)):
        return
    steps = dict.fromkeys((*(step for slot in slots for step in slot.steps), *sums))
    base = others[0] if others else None
    yield Reading(rows, _sizes(shape), weights, total, tuple(steps), base, unrolled=True)


def _terms_of(node: fx.Node, total: fx.Node, slots: list[_Slot], others: list[fx.Node]) -> list[fx.Node]:
    """Adds the terms of `node` to slots and others, and returns the sums in front of `total` that are read through. A
    sum without any slot is one term, and so is one behind `MOST_SLOTS`.
    """
    if (slot := _slot(node, total)) is not None:
        slots.append(slot)
        return []
    known = node is total or proofs.sole_user(node) is not None
    if known and len(slots) < MOST_SLOTS and _adds(node, total):
        before, found = len(slots), list[fx.Node]()
        inside: list[fx.Node] = []
        # Slots first, so that they are counted before the sum of all others is read.
        terms = [term for term in node.args if isinstance(term, fx.Node)]
        for term in sorted(terms, key=lambda term: term.target is aten.add.Tensor):
            found += _terms_of(term, total, slots, inside)
        if len(slots) > before:
            others += inside
            return found if node is total else [*found, node]
    if not proofs.is_full(node, 0):
        others.append(node)
    return []


def _adds(node: fx.Node, total: fx.Node) -> bool:
    """Returns whether a node adds two tensors of the shape and dtype of `total`."""
    terms = [term for term in node.args if isinstance(term, fx.Node)]
    if node.target is not aten.add.Tensor or node.kwargs or len(terms) != 2:
        return False
    dtype = proofs.fake(total).dtype
    return all(proofs.alike(one, total) and proofs.fake(one).dtype == dtype for one in (node, *terms))


def _slot(node: fx.Node, total: fx.Node) -> _Slot | None:
    """Reads a term as a slot of each token, perhaps with its weight, and cast before and behind that; None if it is
    none.
    """
    product = proofs.operand(node) if casts(node) else node
    factors = [factor for factor in product.args if isinstance(factor, fx.Node)]
    pairs: list[tuple[fx.Node, fx.Node | None]] = [(product, None)]
    if product.target is aten.mul.Tensor and len(factors) == 2:
        pairs = [(factors[0], factors[1]), (factors[1], factors[0])]
    for factor, weight in pairs:
        picked = _picked_through_casts(factor)
        if picked is None or not proofs.alike(factor, total):
            continue
        rows, dim, number, steps = picked
        shape = proofs.fake(rows).shape
        if dim != len(shape) - 2 or not proofs.same_shape((*shape[:dim], shape[-1]), proofs.fake(total).shape):
            continue
        behind = tuple(dict.fromkeys((*steps, product, node)))
        if weight is None:
            return _Slot(rows, None, number, behind)
        weights = _weights_at(weight, number, shape[:-1], total)
        if weights is not None:
            return _Slot(rows, weights, number, behind)
    return None


def _weights_at(weight: fx.Node, number: int, of_slots: tuple[Any, ...], total: fx.Node) -> fx.Node | None:
    """Returns the weights of all slots, of which `weight` [.., 1] has those of this number; None if it has not."""
    picked = _picked_through_casts(weight)
    if picked is None or not proofs.same_shape(proofs.fake(weight).shape, (*proofs.fake(total).shape[:-1], 1)):
        return None
    weights, dim, found, _ = picked
    shape, slots = tuple(proofs.fake(weights).shape), len(of_slots) - 1
    whole = proofs.same_shape(shape, of_slots) or proofs.same_shape(shape, (*of_slots, 1))
    return weights if whole and dim == slots and found == number else None


def _picked_through_casts(node: fx.Node) -> tuple[fx.Node, int, int, tuple[fx.Node, ...]] | None:
    """Returns (a tensor, one of its dimensions, a number, the nodes behind the tensor) if `node` has, perhaps cast,
    what is at this number of the dimension; else None.
    """
    *views, picked = proofs.views_up(node)
    cast = [picked] if casts(picked) else []
    if cast:
        *more, picked = proofs.views_up(proofs.operand(picked))
        views += more
    behind = (*views, *cast, picked)
    if picked.target is aten.select.int:
        bound = proofs.arguments(picked)
        source, number = proofs.fake(bound["self"]), bound["index"]
        dim = bound["dim"] % source.ndim
        if isinstance(number, int) and isinstance(source.shape[dim], int):
            return bound["self"], dim, number % source.shape[dim], behind
        return None
    part = proofs.piece(picked)
    if picked.target is getitem:
        behind += (proofs.operand(picked),)
    if part is None or not isinstance(part.start, int) or not proofs.known_equal(part.length, 1):
        return None
    return part.source, part.dim, part.start, behind


def _single(total: fx.Node) -> Iterator[Reading]:
    """Each token has one slot, whose weight stands behind what brings the slots into the order of the tokens."""
    # A number may be a symbol, which is a node as well.
    factors = [factor for factor in total.args if isinstance(factor, fx.Node) and proofs.tensor(factor) is not None]
    for factor, weights in (factors, factors[::-1]) if len(factors) == 2 else ():
        shape, scale = list(proofs.fake(total).shape), list(proofs.fake(weights).shape)
        while len(scale) == len(shape) > 1 and all(proofs.known_equal(one[-1], 1) for one in (shape, scale)):
            del shape[-1], scale[-1]
        if proofs.alike(factor, total) and proofs.same_shape((*scale,), (*shape[:-1], 1)) and len(shape) > 1:
            rows = proofs.operand(factor) if casts(factor) else factor
            steps = () if rows is factor else (factor,)
            yield Reading(rows, (math.prod(shape[:-1]), 1, shape[-1]), weights, total, steps, unrolled=True)


def _in_place(total: fx.Node) -> Iterator[Reading]:
    """Each token has one slot, and this op brings the slots into the order of the tokens."""
    shape = proofs.fake(total).shape
    if len(shape) == 2:
        yield Reading(total, (shape[0], 1, shape[1]), None, total, (), unrolled=True)


READERS: dict[object, Callable[[fx.Node], Iterator[Reading]]] = {
    aten.sum.dim_IntList: _summed,
    aten.bmm.default: _multiplied,
    aten.add.Tensor: _one_by_one,
    aten.mul.Tensor: _single,
    aten.index.Tensor: _in_place,
    aten.gather.default: _in_place,
    aten.index_put.default: _in_place,
}
"""How the ops that may add up the slots of a token are read."""
