"""What a mask that a graph computes shows of the keys: proved from `arange`, comparisons and choices between numbers.

Every tensor on the way is an integer that is affine in its own indices (`Affine`), a conjunction or a disjunction of
such integers being at least 0 (`Truth`), or one of two numbers by such a truth (`Choice`). Views, slices, and indexing
by affine tensors replace indices; nothing is ever computed element by element. What is none of these raises `Unknown`
with the node: an input of the graph, or an op that is not known here.

A mask is understood if it shows row i the keys j with `j <= i + c`, and maybe `j >= i + d`. The constant c is this
rank's alone: where the program's queries are at `rank * S + arange(S)` every rank's graph has another one. So it
decides nothing but what this rank computes; the length of a window, c - d + 1, is everybody's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ditron_inductor.passes import mask_values, proofs
from ditron_inductor.passes.mask_values import FALSE, TRUE, Affine, Choice, Truth, Value
from ditron_inductor.task.all_gather_attention import LONGEST_WINDOW, Mask

aten = torch.ops.aten
prims = torch.ops.prims

INTEGERS = (torch.int32, torch.int64)
DEEPEST = 64
"""Nodes between a mask and the ranges it is made of: many times what programs have."""


class Unknown(Exception):
    """A node that is none of what this module knows."""

    def __init__(self, node: fx.Node) -> None:
        super().__init__(node.name)
        self.node = node


class Masks:
    """The values of a graph's nodes, each found once.

    known: those of placeholders, in a graph of numbers alone (what FlexAttention does to one score): affine in
    `indices` numbers, which stand for dimensions that every node has.
    """

    def __init__(self, known: dict[fx.Node, Value] | None = None, indices: int = 0) -> None:
        self._values: dict[fx.Node, Value] = dict(known or {})
        self._indices = indices
        self._depth = 0

    def value(self, node: fx.Node) -> Value:
        """Raises Unknown."""
        if node not in self._values:
            # No network is followed up to its inputs.
            if self._depth == DEEPEST:
                raise Unknown(node)
            self._depth += 1
            try:
                self._values[node] = self._find(node)
            finally:
                self._depth -= 1
        return self._values[node]

    def _find(self, node: fx.Node) -> Value:
        find = _READERS.get(node.target) if node.op == "call_function" else None
        if find is None or proofs.tensor(node) is None:
            raise Unknown(node)
        found = find(self, node)
        if found is None:
            raise Unknown(node)
        tensor = proofs.tensor(node)
        assert tensor is not None
        return self.converted(node, found, tensor.dtype)

    def converted(self, node: fx.Node, value: Value, dtype: torch.dtype) -> Value:
        """A value with the dimensions of `node` in a dtype. Raises Unknown where an integer wraps, or is cut off."""
        shape: Sequence[Any] = _shape(node)
        if self._indices:
            shape = (mask_values.LONGEST,) * self._indices
        value = mask_values.mapped(value, lambda term: mask_values.clean(term, shape))
        found: Value | None = value
        if isinstance(value, Choice):
            yes, no = (mask_values.rounded(number, dtype) for number in (value.yes, value.no))
            found = None if yes is None or no is None else Choice(value.truth, yes, no)
        elif isinstance(value, Affine):
            found = value if mask_values.fits(value, shape, dtype) else None
        if found is None:
            raise Unknown(node)
        return found

    def ndim(self, node: fx.Node) -> int:
        """Dimensions of a node's value."""
        shape = _shape(node)
        if self._indices and shape:
            raise Unknown(node)
        return len(shape) + self._indices

    def operand(self, node: fx.Node, argument: object) -> Value:
        """A tensor as broadcast to the dimensions of `node`, or a number."""
        ndim = self.ndim(node)
        if not isinstance(argument, fx.Node):
            if not isinstance(argument, (bool, int, float)):
                raise Unknown(node)
            return mask_values.number(argument, ndim)
        added = ndim - self.ndim(argument)
        return mask_values.mapped(self.value(argument), lambda term: Affine(term.const, (0,) * added + term.coefs))

    def compared(self, node: fx.Node) -> tuple[Value, Value]:
        """Both operands of a comparison, in the dtype in which they are compared."""
        both = node.args[:2]
        given: Any = [proofs.tensor(one) if isinstance(one, fx.Node) else one for one in both]
        dtype = torch.result_type(*given)
        left, right = (self.converted(node, self.operand(node, one), dtype) for one in both)
        return left, right


def read_mask(node: fx.Node, queries: Any, keys: Any, *, hides: bool = False, lowest: float | None = None) -> Mask:
    """What a mask, or a bias that is added to the scores, of so many queries and keys shows. Raises Unknown.

    lowest: what a mask puts in the place of the others' scores; -inf without one. hides: it holds for those.
    """
    value, shape = Masks().value(node), _shape(node)
    if hides and isinstance(value, Truth):
        value = value.negated()
    if isinstance(value, Choice) and lowest is None:
        shown = _shown(node, value)
        if shown is None:
            raise Unknown(node)
        value, lowest = shown
    if not isinstance(value, Truth) or len(shape) < 2 or not proofs.same_shape(shape[-2:], (queries, keys)):
        raise Unknown(node)
    return shown_by(value, shape, node, -math.inf if lowest is None else lowest)


def shown_by(truth: Truth, shape: Sequence[Any], node: fx.Node, lowest: float = -math.inf) -> Mask:
    """What is shown where a truth holds that has queries and keys as its last two dimensions, of this shape; elsewhere
    `lowest` is added to the scores. Raises Unknown with the node.
    """
    queries, keys = shape[-2:]
    if truth == TRUE:
        return Mask("full")
    # With a dynamic length `rank * S` is a number on rank 0 alone: there it would be known, on other ranks not.
    if not isinstance(queries, int) or not isinstance(keys, int):
        raise Unknown(node)
    # Of one row nothing tells a bound that moves with the rows from one that does not.
    if not truth.every and len(truth.terms) != 1 or not proofs.known(queries > 1) or not proofs.known(keys > 1):
        raise Unknown(node)
    uppers, lowers = [], []
    for term in truth.terms:
        if any(term.coefs[:-2]):
            raise Unknown(node)
        if term.coefs[-2:] == (1, -1):
            uppers.append(term.const)
        elif term.coefs[-2:] == (-1, 1):
            lowers.append(term.const)
        elif all(term.coefs[-2:]) or not _holds(term, shape):
            raise Unknown(node)
    if not uppers:
        raise Unknown(node)
    offset = min(uppers)
    window = min(offset + min(lowers) + 1, LONGEST_WINDOW) if lowers else 0
    if lowers and window <= 0:
        raise Unknown(node)
    # With a finite number a row that sees nothing sees everything.
    each_sees = offset >= 0 and (not lowers or proofs.known(offset + queries - window < keys))
    if lowest != -math.inf and not each_sees:
        raise Unknown(node)
    return Mask("causal", window, offset)


def _holds(term: Affine, shape: Sequence[Any]) -> bool:
    """Whether a term is at least 0 everywhere."""
    pairs = zip(term.coefs, shape, strict=True)
    return proofs.known(term.const + sum(coef * (size - 1) for coef, size in pairs if coef < 0) >= 0)


def _shape(node: fx.Node) -> tuple[Any, ...]:
    value = proofs.tensor(node)
    if value is None:
        raise Unknown(node)
    return tuple(value.shape)


# Readers: each the value of a node, or None.


def _iota(masks: Masks, node: fx.Node) -> Value | None:
    bound = proofs.arguments(node)
    start, step = bound["start"], bound["step"]
    return Affine(start, (step,)) if isinstance(start, int) and isinstance(step, int) else None


def _shown(node: fx.Node, value: Value) -> tuple[Truth, float] | None:
    """(where a float is 0, what it is elsewhere), if that hides whatever it is added to."""
    tensor = proofs.tensor(node)
    if not isinstance(value, Choice) or tensor is None or not tensor.dtype.is_floating_point:
        return None
    if value == Choice(TRUE, 0.0, 0.0):
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
    return mask_values.number(float(number) if tensor.dtype.is_floating_point else int(number), masks.ndim(node))


def _sum(sign: int) -> Callable[[Masks, fx.Node], Value | None]:
    def read(masks: Masks, node: fx.Node) -> Value | None:
        left, right = (masks.operand(node, one) for one in node.args[:2])
        if proofs.arguments(node).get("alpha", 1) != 1:
            return None
        if isinstance(left, Affine) and isinstance(right, Affine):
            return left.plus(right.scaled(sign))
        shows = [_shown(node, one) for one in (left, right)]
        if sign < 0 or shows[0] is None or shows[1] is None:
            return None
        both = shows[0][0].both(shows[1][0])
        # Hidden twice is hidden, by a number that is no larger.
        return None if both is None else Choice(both, 0.0, max(shows[0][1], shows[1][1]))

    return read


def _product(masks: Masks, node: fx.Node) -> Value | None:
    left, right = (masks.operand(node, one) for one in node.args[:2])
    if isinstance(left, Truth) and isinstance(right, Truth):
        return left.both(right)
    for one, other in ((left, right), (right, left)):
        if isinstance(one, Affine) and isinstance(other, Affine) and not any(other.coefs):
            return one.scaled(other.const)
        choice, kept = mask_values.as_choice(one), mask_values.as_choice(other)
        if choice is None or kept is None or (kept.yes, kept.no) != (1.0, 0.0):
            continue
        # Infinity times 0 is no number.
        if not math.isfinite(choice.yes) or not math.isfinite(choice.no):
            continue
        # `choice` where `kept`, else 0.
        if choice.no == 0.0 or choice.truth == TRUE:
            both = choice.truth.both(kept.truth)
            return None if both is None else Choice(both, choice.yes, 0.0)
        if choice.yes == 0.0:
            both = choice.truth.negated().both(kept.truth)
            return None if both is None else Choice(both, choice.no, 0.0)
    return None


def _negative(masks: Masks, node: fx.Node) -> Value | None:
    value = masks.operand(node, node.args[0])
    return value.scaled(-1) if isinstance(value, Affine) else None


def _comparison(sign: int, least: int) -> Callable[[Masks, fx.Node], Value | None]:
    """sign * (left - right) >= least."""

    def read(masks: Masks, node: fx.Node) -> Value | None:
        left, right = masks.compared(node)
        if not isinstance(left, Affine) or not isinstance(right, Affine):
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
    found = [masks.operand(node, one) for one in node.args[:2]]
    if not all(isinstance(one, Truth) for one in found):
        raise Unknown(node)
    return [one for one in found if isinstance(one, Truth)]


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
    truth, *branches = (masks.operand(node, one) for one in node.args)
    yes, no = map(mask_values.as_choice, branches)
    if not isinstance(truth, Truth) or yes is None or no is None:
        return None
    if yes.truth != TRUE:
        # The other way round, for one case less.
        truth, yes, no = truth.negated(), no, yes
    if yes.truth != TRUE:
        return None
    if no.truth == TRUE:
        found: Choice | None = Choice(truth, yes.yes, no.yes)
    elif yes.yes in (no.yes, no.no):
        # yes where the truth or the other's own one (or its opposite) holds: the negation of neither.
        own = no.truth if yes.yes == no.yes else no.truth.negated()
        other = no.no if yes.yes == no.yes else no.yes
        neither = truth.negated().both(own.negated())
        found = None if neither is None else Choice(neither.negated(), yes.yes, other)
    else:
        found = None
    tensor = proofs.tensor(node)
    if found is not None and tensor is not None and tensor.dtype == torch.bool:
        return _as_truth(found)
    return found


def _as_truth(choice: Choice) -> Truth:
    if bool(choice.yes) == bool(choice.no):
        return TRUE if choice.yes else FALSE
    return choice.truth if choice.yes else choice.truth.negated()


def _cast(masks: Masks, node: fx.Node) -> Value | None:
    value, tensor = masks.operand(node, node.args[0]), proofs.tensor(node)
    assert tensor is not None
    if isinstance(value, Affine):
        if tensor.dtype in INTEGERS:
            return value
        value = mask_values.as_choice(value) or value
    if isinstance(value, Affine):
        return None
    if tensor.dtype == torch.bool:
        return value if isinstance(value, Truth) else _as_truth(value)
    # What is no integer is not cut off: see `converted`.
    return mask_values.as_choice(value)


def _view(masks: Masks, node: fx.Node) -> Value | None:
    """The elements of another tensor at other indices."""
    source = node.args[0]
    if not isinstance(source, fx.Node) or masks.ndim(node) != len(_shape(node)):
        return None
    part = proofs.piece(node) if node.target in proofs.SLICES else None
    if part is not None and part.source.target is aten.constant_pad_nd.default:
        inner, pads = part.source.args[0], part.source.args[1]
        assert isinstance(inner, fx.Node) and isinstance(pads, (list, tuple))
        # The padding behind, which is cut off again, keeps the memory aligned.
        if proofs.known_equal(part.start, 0) and part.dim == len(_shape(inner)) - 1 and len(pads) == 2 and pads[0] == 0:
            return masks.value(inner) if proofs.same_shape(_shape(inner), _shape(node)) else None
    indices = _indices(node, _shape(source), _shape(node))
    return (
        None
        if indices is None
        else mask_values.mapped(masks.value(source), lambda term: term.at(indices) if indices else term)
    )


def _indices(node: fx.Node, source: tuple[Any, ...], result: tuple[Any, ...]) -> list[Affine] | None:
    """Of each dimension of the source, by the indices of the result."""
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
    # Views: dimensions of one element come and go.
    wide = [dim for dim, size in enumerate(result) if not proofs.known_equal(size, 1)]
    found = []
    for size in source:
        if proofs.known_equal(size, 1):
            found.append(nowhere)
        elif wide and proofs.known_equal(result[wide[0]], size):
            found.append(along(wide.pop(0)))
        else:
            return None
    return found if not wide else None


def _index(masks: Masks, node: fx.Node) -> Value | None:
    """By one affine tensor for each dimension."""
    source, given = node.args
    if not isinstance(source, fx.Node) or not isinstance(given, (list, tuple)) or len(given) != len(_shape(source)):
        return None
    found = [masks.operand(node, one) if isinstance(one, fx.Node) else None for one in given]
    indices = [one for one in found if isinstance(one, Affine)]
    if len(indices) != len(found):
        return None
    inside = all(_holds(one, _shape(node)) for one in indices)
    return mask_values.mapped(masks.value(source), lambda term: term.at(indices)) if inside else None


def _cat(masks: Masks, node: fx.Node) -> Value | None:
    """Parts of one affine tensor, put together again."""
    bound = proofs.arguments(node)
    dim, parts = bound["dim"] % len(_shape(node)), bound["tensors"]
    found, sizes = [masks.value(part) for part in parts], [_shape(part)[dim] for part in parts]
    values = [one for one in found if isinstance(one, Affine)]
    if len(values) != len(found) or not all(isinstance(size, int) and size > 0 for size in sizes) or len(values) < 2:
        return None
    step = (values[1].const - values[0].const) // sizes[0]
    whole = Affine(values[0].const, tuple(step if place == dim else c for place, c in enumerate(values[0].coefs)))
    start = 0
    for value, size, part in zip(values, sizes, parts, strict=True):
        if mask_values.clean(replace(whole, const=whole.const + start * step), _shape(part)) != value:
            return None
        start += size
    return whole


def _running_sum(masks: Masks, node: fx.Node) -> Value | None:
    """Of nothing."""
    value = masks.operand(node, node.args[0])
    zero = value == FALSE or (isinstance(value, Affine) and value.const == 0 and not any(value.coefs))
    return Affine(0, (0,) * len(_shape(node))) if zero else None


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
    aten.cat.default: _cat,
    aten.cumsum.default: _running_sum,
    **dict.fromkeys(
        proofs.ORDER_KEEPING | proofs.TRANSPOSES | proofs.SLICES | {aten.expand.default, aten.select.int}, _view
    ),
}
