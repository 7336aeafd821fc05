"""The masks that a graph computes from `arange`, comparisons and choices between numbers, with a proof of their values.

Every tensor on the way has one of three kinds of values: an integer that is affine in the indices of the tensor
(`Affine`), a condition that all, or any, of such integers are at least 0 (`Truth`), or a choice between two numbers by
such a condition (`Selection`). Views, slices, and indexing by affine tensors substitute indices; nothing is ever
computed element by element. Any other node raises `UnknownMask` with the node: an input of the graph, or an op that is
not known here.

`shown_masks` says which keys such a mask shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ditron_inductor.passes.attention import affine, mask_values
from ditron_inductor.passes.attention.affine import Affine, NotAffine, Threshold
from ditron_inductor.passes.attention.mask_values import FALSE, TRUE, Selection, Truth, Value
from ditron_inductor.passes.graph import proofs

aten = torch.ops.aten
prims = torch.ops.prims

INTEGERS = (torch.int32, torch.int64)
DEEPEST = 64
"""The most nodes between a mask and the ranges from which it is computed. Programs have far fewer."""


class UnknownMask(Exception):
    """Raised for a node whose value this module does not know."""

    def __init__(self, node: fx.Node) -> None:
        super().__init__(node.name)
        self.node = node


class Masks:
    """The values of the nodes of a graph, each of them found once. known: the values of placeholders in a graph that
    works on single numbers, as FlexAttention's functions of one score do. They are affine in numbers that stand for the
    indices of dimensions of these `sizes`, and every node has these sizes.
    """

    def __init__(self, known: dict[fx.Node, Value] | None = None, sizes: tuple[Any, ...] = ()) -> None:
        self._values: dict[fx.Node, Value] = dict(known or {})
        self._sizes = sizes
        self._depth = 0

    def value(self, node: fx.Node) -> Value:
        """Returns the value of a node. Raises UnknownMask."""
        if node not in self._values:
            # No network is followed up to its inputs.
            if self._depth == DEEPEST:
                raise UnknownMask(node)
            self._depth += 1
            try:
                self._values[node] = self._find(node)
            finally:
                self._depth -= 1
        return self._values[node]

    def _find(self, node: fx.Node) -> Value:
        find = _READERS.get(node.target) if node.op == "call_function" else None
        if find is None or proofs.tensor(node) is None:
            raise UnknownMask(node)
        try:
            found = find(self, node)
        except NotAffine:
            raise UnknownMask(node) from None
        if found is None:
            raise UnknownMask(node)
        tensor = proofs.fake(node)
        return self.converted(node, found, tensor.dtype)

    def converted(self, node: fx.Node, value: Value, dtype: torch.dtype) -> Value:
        """Returns a value with the dimensions of `node` in a dtype. Raises UnknownMask if an integer does not fit."""
        shape = self.shape(node)
        value = mask_values.mapped(value, lambda term: term.cleaned(shape))
        found: Value | None = value
        if isinstance(value, Selection):
            yes, no = (mask_values.rounded(number, dtype) for number in (value.yes, value.no))
            found = None if yes is None or no is None else Selection(value.truth, yes, no)
        elif isinstance(value, Affine):
            found = value if mask_values.fits(value, shape, dtype) else None
        if found is None:
            raise UnknownMask(node)
        return found

    def shape(self, node: fx.Node) -> tuple[Any, ...]:
        shape = shape_of(node)
        if self._sizes and shape:
            raise UnknownMask(node)
        return self._sizes or shape

    def operand(self, node: fx.Node, argument: object) -> Value:
        """Returns the value of a tensor, broadcast to the dimensions of `node`, or of a number."""
        ndim = len(self.shape(node))
        if not isinstance(argument, fx.Node):
            if not isinstance(argument, (bool, int, float)):
                raise UnknownMask(node)
            return mask_values.number(argument, ndim)
        added = ndim - len(self.shape(argument))
        return mask_values.mapped(self.value(argument), lambda term: term.widened(added))

    def compared(self, node: fx.Node) -> tuple[Value, Value]:
        """Returns both operands of a comparison in the dtype in which they are compared."""
        both = node.args[:2]
        given: Any = [proofs.tensor(operand) if isinstance(operand, fx.Node) else operand for operand in both]
        dtype = torch.result_type(*given)
        left, right = (self.converted(node, self.operand(node, operand), dtype) for operand in both)
        return left, right


def shape_of(node: fx.Node) -> tuple[Any, ...]:
    value = proofs.tensor(node)
    if value is None:
        raise UnknownMask(node)
    return tuple(value.shape)


# Readers: each the value of a node, or None.


def _iota(masks: Masks, node: fx.Node) -> Value | None:
    bound = proofs.arguments(node)
    start, step = bound["start"], bound["step"]
    return Affine(start, (step,)) if isinstance(start, int) and isinstance(step, int) else None


def hiding(node: fx.Node, value: Value) -> tuple[Truth, float] | None:
    """Returns (the truth where a float is 0, its number elsewhere), if adding that number hides a score."""
    tensor = proofs.tensor(node)
    if not isinstance(value, Selection) or tensor is None or not tensor.dtype.is_floating_point:
        return None
    if value == Selection(TRUE, 0.0, 0.0):
        return TRUE, -math.inf
    lowest = min(value.yes, value.no)
    if max(value.yes, value.no) != 0.0 or not mask_values.hides(lowest, tensor.dtype):
        return None
    return (value.truth if value.yes == 0.0 else value.truth.negated()), lowest


def _full(masks: Masks, node: fx.Node) -> Value | None:
    bound = proofs.arguments(node)
    number, tensor = bound.get("fill_value", bound.get("s")), proofs.tensor(node)
    if not isinstance(number, (bool, int, float)) or tensor is None:
        return None
    if tensor.dtype == torch.bool:
        return TRUE if number else FALSE
    return mask_values.number(float(number) if tensor.dtype.is_floating_point else int(number), len(masks.shape(node)))


def _sum(sign: int) -> Callable[[Masks, fx.Node], Value | None]:
    def read(masks: Masks, node: fx.Node) -> Value | None:
        left, right = (masks.operand(node, operand) for operand in node.args[:2])
        if proofs.arguments(node).get("alpha", 1) != 1:
            return None
        first, other = (_as_affine(value, masks.shape(node)) for value in (left, right))
        if first is not None and other is not None:
            return first.plus(other.scaled(sign))
        shows = [hiding(node, term) for term in (left, right)]
        if sign < 0 or shows[0] is None or shows[1] is None:
            return None
        both = shows[0][0].both(shows[1][0])
        # A key that is hidden twice is hidden, by a number that is no larger.
        return None if both is None else Selection(both, 0.0, max(shows[0][1], shows[1][1]))

    return read


def _product(masks: Masks, node: fx.Node) -> Value | None:
    left, right = (masks.operand(node, operand) for operand in node.args[:2])
    if isinstance(left, Truth) and isinstance(right, Truth):
        return left.both(right)
    for first, other in ((left, right), (right, left)):
        integer = _as_affine(first, masks.shape(node)) if isinstance(other, Affine) and other.is_constant else None
        if integer is not None and isinstance(other, Affine):
            return integer.scaled(other.const)
        choice, kept = mask_values.as_choice(first), mask_values.as_choice(other)
        if choice is None or kept is None or (kept.yes, kept.no) != (1.0, 0.0):
            continue
        # Infinity times 0 is no number.
        if not math.isfinite(choice.yes) or not math.isfinite(choice.no):
            continue
        # `choice` where `kept`, else 0.
        if choice.no == 0.0 or choice.truth == TRUE:
            both = choice.truth.both(kept.truth)
            return None if both is None else Selection(both, choice.yes, 0.0)
        if choice.yes == 0.0:
            both = choice.truth.negated().both(kept.truth)
            return None if both is None else Selection(both, choice.no, 0.0)
    return None


def _quotient(masks: Masks, node: fx.Node) -> Value | None:
    rounding = proofs.arguments(node).get("rounding_mode", "floor")
    return _floored(masks, node) if rounding == "floor" else None


def _floored(masks: Masks, node: fx.Node) -> Affine | None:
    """Returns one operand divided by the other and rounded down. The other operand has to be a number."""
    left, right = (masks.operand(node, operand) for operand in node.args[:2])
    if not isinstance(left, Affine) or not isinstance(right, Affine) or not right.is_constant:
        return None
    return affine.floored(left, right.const, masks.shape(node))


def _remainder(masks: Masks, node: fx.Node) -> Value | None:
    quotient, (left, right) = _floored(masks, node), (masks.operand(node, operand) for operand in node.args[:2])
    if quotient is None or not isinstance(left, Affine) or not isinstance(right, Affine):
        return None
    return left.plus(quotient.scaled(-right.const))


def _negative(masks: Masks, node: fx.Node) -> Value | None:
    value = masks.operand(node, node.args[0])
    return value.scaled(-1) if isinstance(value, Affine) else None


def _comparison(sign: int, least: int) -> Callable[[Masks, fx.Node], Value | None]:
    """Makes the reader of the comparison sign * (left - right) >= least."""

    def read(masks: Masks, node: fx.Node) -> Value | None:
        left, right = (_as_affine(value, masks.shape(node)) for value in masks.compared(node))
        if left is None or right is None:
            return None
        term = left.plus(right.scaled(-1)).scaled(sign)
        return mask_values.compared(replace(term, const=term.const - least))

    return read


def _equal(masks: Masks, node: fx.Node) -> Truth | None:
    left, right = masks.compared(node)
    if isinstance(left, Affine) and isinstance(right, Affine):
        term = left.plus(right.scaled(-1))
        return mask_values.compared(term).both(mask_values.compared(term.scaled(-1)))
    choice, number = mask_values.as_choice(left), mask_values.as_choice(right)
    if choice is None or number is None or number.truth != TRUE:
        return None
    same = choice.yes == number.yes, choice.no == number.yes
    return {
        (True, True): TRUE,
        (True, False): choice.truth,
        (False, True): choice.truth.negated(),
        (False, False): FALSE,
    }[same]


def _unequal(masks: Masks, node: fx.Node) -> Value | None:
    found = _equal(masks, node)
    return None if found is None else found.negated()


def _truths(masks: Masks, node: fx.Node) -> list[Truth]:
    found = [masks.operand(node, operand) for operand in node.args[:2]]
    if not all(isinstance(value, Truth) for value in found):
        raise UnknownMask(node)
    return [value for value in found if isinstance(value, Truth)]


def _and(masks: Masks, node: fx.Node) -> Value | None:
    left, right = _truths(masks, node)
    return left.both(right)


def _or(masks: Masks, node: fx.Node) -> Value | None:
    left, right = _truths(masks, node)
    neither = left.negated().both(right.negated())
    return None if neither is None else neither.negated()


def _not(masks: Masks, node: fx.Node) -> Value | None:
    value = masks.operand(node, node.args[0])
    return value.negated() if isinstance(value, Truth) else None


def _where(masks: Masks, node: fx.Node) -> Value | None:
    truth, *branches = (masks.operand(node, arg) for arg in node.args)
    yes, no = map(mask_values.as_choice, branches)
    if isinstance(truth, Truth) and (yes is None or no is None):
        shape = masks.shape(node)
        first, second = (_as_affine(branch, shape) for branch in branches)
        return None if first is None or second is None else _one_of(truth, first, second, shape)
    if not isinstance(truth, Truth) or yes is None or no is None:
        return None
    if yes.truth != TRUE:
        # Exchange the branches, so that one case less has to be handled.
        truth, yes, no = truth.negated(), no, yes
    if yes.truth != TRUE:
        return None
    if no.truth == TRUE:
        chosen: Selection | None = Selection(truth, yes.yes, no.yes)
    elif yes.yes in (no.yes, no.no):
        # `yes` holds where the truth or the other choice's own truth (or its opposite) does: the negation of neither.
        own = no.truth if yes.yes == no.yes else no.truth.negated()
        other = no.no if yes.yes == no.yes else no.yes
        neither = truth.negated().both(own.negated())
        chosen = None if neither is None else Selection(neither.negated(), yes.yes, other)
    else:
        chosen = None
    tensor = proofs.tensor(node)
    if chosen is not None and tensor is not None and tensor.dtype == torch.bool:
        return _as_truth(chosen)
    return chosen


def _one_of(truth: Truth, yes: Affine, no: Affine, shape: Sequence[Any]) -> Affine | None:
    """Returns the integer that is `yes` where the truth holds, and otherwise `no`."""
    if len(truth.terms) != 1:
        return None
    (term,) = truth.terms
    return no.plus(affine.product(affine.reached(term, shape), yes.plus(no.scaled(-1))))


def _as_affine(value: Value, shape: Sequence[Any]) -> Affine | None:
    """Returns a value of this shape as an integer. A choice between two integers becomes an integer that jumps."""
    if not isinstance(value, Selection) or not isinstance(value.yes, int) or not isinstance(value.no, int):
        return value if isinstance(value, Affine) else None
    yes, no = (Affine(number, (0,) * len(shape)) for number in (value.yes, value.no))
    return _one_of(value.truth, yes, no, shape) if value.truth.terms else (yes if value.truth.every else no)


def _as_truth(choice: Selection) -> Truth:
    if bool(choice.yes) == bool(choice.no):
        return TRUE if choice.yes else FALSE
    return choice.truth if choice.yes else choice.truth.negated()


def _cast(masks: Masks, node: fx.Node) -> Value | None:
    value, tensor = masks.operand(node, node.args[0]), proofs.fake(node)
    if isinstance(value, Affine):
        if tensor.dtype in INTEGERS:
            return value
        value = mask_values.as_choice(value) or value
    if isinstance(value, Affine):
        return None
    if tensor.dtype == torch.bool:
        return value if isinstance(value, Truth) else _as_truth(value)
    # A number that is not an integer is not cut off (see `converted`).
    return mask_values.as_choice(value)


def _view(masks: Masks, node: fx.Node) -> Value | None:
    """Reads an op that takes elements of another tensor at other indices."""
    part = proofs.piece(node) if node.target in proofs.SLICES else None
    source = node.args[0] if part is None else part.source
    if node.target in proofs.ORDER_KEEPING:
        # Skip the views in between, where an integer may jump at every index.
        while isinstance(source, fx.Node) and source.target in proofs.ORDER_KEEPING:
            source = source.args[0]
    if not isinstance(source, fx.Node) or len(masks.shape(node)) != len(shape_of(node)):
        return None
    inner = proofs.unpadded(node)
    if inner is not None:
        return masks.value(inner)
    indices = _indices(node, shape_of(source), shape_of(node))
    return (
        None
        if indices is None
        else mask_values.mapped(masks.value(source), lambda term: term.at(indices, shape_of(node)))
    )


def _padded(masks: Masks, node: fx.Node) -> Value | None:
    """Reads a padding by nothing, as `create_block_mask` writes for a mask whose sizes its blocks divide."""
    source, pads = node.args[:2]
    unchanged = isinstance(pads, (list, tuple)) and all(proofs.known_equal(pad, 0) for pad in pads)
    return masks.value(source) if unchanged and isinstance(source, fx.Node) else None


def _indices(node: fx.Node, source: tuple[Any, ...], result: tuple[Any, ...]) -> list[Affine] | None:
    """Returns the index of each dimension of the source in terms of the indices of the result."""
    ndim = len(result)

    def along(dim: int, start: int = 0) -> Affine:
        return Affine(start, tuple(int(place == dim) for place in range(ndim)))

    nowhere = Affine(0, (0,) * ndim)
    if node.target in proofs.TRANSPOSES:
        order = proofs.permutation(node)
        return [along(order.index(dim)) for dim in range(len(source))]
    if node.target is aten.expand.default:
        added = ndim - len(source)
        return [nowhere if proofs.known_equal(size, 1) else along(dim + added) for dim, size in enumerate(source)]
    if node.target in (aten.flip.default, prims.rev.default):
        dims = {dim % ndim for dim in proofs.arguments(node)["dims"]}
        if not all(isinstance(source[dim], int) for dim in dims):
            return None
        return [
            along(dim).scaled(-1).plus(replace(nowhere, const=source[dim] - 1)) if dim in dims else along(dim)
            for dim in range(ndim)
        ]
    if node.target is aten.select.int:
        dim, index = (proofs.arguments(node)[name] for name in ("dim", "index"))
        if not isinstance(index, int):
            return None
        dim %= len(source)
        if index < 0:
            if not isinstance(source[dim], int):
                return None
            index += source[dim]
        picked = replace(nowhere, const=index)
        return [picked if place == dim else along(place - (place > dim)) for place in range(len(source))]
    if node.target in proofs.SLICES:
        part = proofs.piece(node)
        if part is None or not isinstance(part.start, int):
            return None
        return [along(dim, part.start if dim == part.dim else 0) for dim in range(ndim)]
    return affine.reshaped(source, result)


def _index(masks: Masks, node: fx.Node) -> Value | None:
    """Reads indexing by one affine tensor for each dimension."""
    source, given = node.args
    if not isinstance(source, fx.Node) or not isinstance(given, (list, tuple)) or len(given) != len(shape_of(source)):
        return None
    found = [masks.operand(node, index) if isinstance(index, fx.Node) else None for index in given]
    indices = [value for value in found if isinstance(value, Affine)]
    if len(indices) != len(found):
        return None
    shape = shape_of(node)
    # Negative indices count from the end, which is not handled.
    inside = all(index.bounds(shape)[0] >= 0 for index in indices)
    return mask_values.mapped(masks.value(source), lambda term: term.at(indices, shape)) if inside else None


def _cat(masks: Masks, node: fx.Node) -> Value | None:
    """Reads a cat of parts with one slope. It jumps where a part begins that does not continue the one before."""
    bound = proofs.arguments(node)
    dim, parts = bound["dim"] % len(shape_of(node)), bound["tensors"]
    found, sizes = [masks.value(part) for part in parts], [shape_of(part)[dim] for part in parts]
    values = [value for value in found if isinstance(value, Affine)]
    if len(values) != len(found) or not all(isinstance(size, int) and size > 0 for size in sizes):
        return None
    # A part of one element has no slope. If all parts have one element, the slope is 1 if their values differ, and
    # otherwise 0.
    slopes = {value.coefs[dim] for value, size in zip(values, sizes, strict=True) if size > 1}
    slope = slopes.pop() if slopes else int(len({value.const for value in values}) > 1)
    others = {
        (tuple(coef for place, coef in enumerate(value.coefs) if place != dim), _elsewhere(value, dim))
        for value in values
    }
    if slopes or len(others) != 1:
        return None
    steps = list(_elsewhere(values[0], dim))
    start, behind = 0, values[0].const
    for value, size in zip(values, sizes, strict=True):
        own = value.steps_of(dim)
        steps.append(Threshold(dim, start, value.const - slope * start - behind))
        steps += [Threshold(dim, start + at, jump) for at, jump in own.items()]
        behind = value.const - slope * start + sum(own.values())
        start += size
    coefs = tuple(slope if place == dim else coef for place, coef in enumerate(values[0].coefs))
    return affine.affine(values[0].const, coefs, steps)


def _elsewhere(value: Affine, dim: int) -> tuple[Threshold, ...]:
    return tuple(step for step in value.steps if step.dim != dim)


def _running_sum(masks: Masks, node: fx.Node) -> Value | None:
    """Reads a running sum of zeros."""
    value = masks.operand(node, node.args[0])
    zero = value == FALSE or (isinstance(value, Affine) and value.const == 0 and value.is_constant)
    return Affine(0, (0,) * len(shape_of(node))) if zero else None


_READERS: dict[object, Callable[[Masks, fx.Node], Value | None]] = {
    prims.iota.default: _iota,
    aten.full.default: _full,
    aten.full_like.default: _full,
    aten.scalar_tensor.default: _full,
    aten.add.Tensor: _sum(1),
    aten.add.Scalar: _sum(1),
    aten.sub.Tensor: _sum(-1),
    aten.sub.Scalar: _sum(-1),
    aten.mul.Tensor: _product,
    aten.mul.Scalar: _product,
    aten.neg.default: _negative,
    aten.div.Tensor_mode: _quotient,
    aten.div.Scalar_mode: _quotient,
    aten.floor_divide.default: _quotient,
    aten.remainder.Tensor: _remainder,
    aten.remainder.Scalar: _remainder,
    aten.ge.Tensor: _comparison(1, 0),
    aten.ge.Scalar: _comparison(1, 0),
    aten.gt.Tensor: _comparison(1, 1),
    aten.gt.Scalar: _comparison(1, 1),
    aten.le.Tensor: _comparison(-1, 0),
    aten.le.Scalar: _comparison(-1, 0),
    aten.lt.Tensor: _comparison(-1, 1),
    aten.lt.Scalar: _comparison(-1, 1),
    aten.eq.Tensor: _equal,
    aten.eq.Scalar: _equal,
    aten.ne.Tensor: _unequal,
    aten.ne.Scalar: _unequal,
    aten.bitwise_and.Tensor: _and,
    aten.logical_and.default: _and,
    aten.bitwise_or.Tensor: _or,
    aten.logical_or.default: _or,
    aten.bitwise_not.default: _not,
    aten.logical_not.default: _not,
    aten.where.self: _where,
    prims.convert_element_type.default: _cast,
    aten._to_copy.default: _cast,
    aten.index.Tensor: _index,
    aten.constant_pad_nd.default: _padded,
    aten.cat.default: _cat,
    aten.cumsum.default: _running_sum,
    **dict.fromkeys(
        proofs.ORDER_KEEPING
        | proofs.TRANSPOSES
        | proofs.SLICES
        | {aten.expand.default, aten.select.int, aten.flip.default, prims.rev.default},
        _view,
    ),
}
