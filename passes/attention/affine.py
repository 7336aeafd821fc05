"""Integers that are affine in the indices of a tensor, except for jumps. The positions in a sequence are such integers.

`Affine(3, (0, 1), (Threshold(1, 8, 24),))` of two indices is 3 + i_1, and 24 more where i_1 >= 8. These are the
positions of two chunks, one behind the other. Views, slices, and indexing by such integers substitute the indices.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ditron_inductor.passes.graph import proofs

LONGEST = 2**24
"""The assumed size of a dimension whose size is not known, when it is checked that an integer does not wrap."""


MOST_STEPS = 1024
"""The most jumps that a view may make of an index. Programs need only a few for each rank."""


class NotAffine(ValueError):
    """The result of an operation is not `Affine`."""


class Threshold(NamedTuple):
    """A jump: `jump` is added where the index of `dim` is at least `at`, a positive number."""

    dim: int
    at: int
    jump: int


@dataclass(frozen=True)
class Affine:
    """const + the sum of coefs[d] * index d + the steps. The coefficient of a dimension of one element is 0, and no two
    steps are at one place.
    """

    const: int
    coefs: tuple[int, ...]
    steps: tuple[Threshold, ...] = ()

    @property
    def is_constant(self) -> bool:
        return not any(self.coefs) and not self.steps

    def scaled(self, factor: int) -> Affine:
        steps = (step._replace(jump=step.jump * factor) for step in self.steps)
        return affine(self.const * factor, tuple(coef * factor for coef in self.coefs), steps)

    def plus(self, other: Affine) -> Affine:
        coefs = tuple(map(sum, zip(self.coefs, other.coefs, strict=True)))
        return affine(self.const + other.const, coefs, (*self.steps, *other.steps))

    def at(self, indices: Sequence[Affine], shape: Sequence[Any]) -> Affine:
        """Returns the integer with other indices substituted. Each of them is given by the indices of the result, a
        tensor of this shape. Raises NotAffine.
        """
        found = Affine(self.const, (0,) * len(shape))
        for coef, index in zip(self.coefs, indices, strict=True):
            found = found.plus(index.scaled(coef))
        for step in self.steps:
            found = found.plus(_reached(indices[step.dim], step.at, shape).scaled(step.jump))
        return found

    def widened(self, added: int) -> Affine:
        """Returns the integer as one of a tensor that has `added` more dimensions in front."""
        steps = tuple(step._replace(dim=step.dim + added) for step in self.steps)
        return Affine(self.const, (0,) * added + self.coefs, steps)

    def narrowed(self, dropped: int) -> Affine:
        """Returns the integer without the first `dropped` dimensions, along which it must be constant."""
        steps = tuple(step._replace(dim=step.dim - dropped) for step in self.steps)
        return Affine(self.const, self.coefs[dropped:], steps)

    def depends_on(self, dims: Iterable[int]) -> bool:
        """Returns whether the integer differs along any of these dimensions."""
        return any(self.coefs[dim] or any(step.dim == dim for step in self.steps) for dim in dims)

    def steps_of(self, dim: int) -> dict[int, int]:
        """The jumps along a dimension by their places."""
        return {step.at: step.jump for step in self.steps if step.dim == dim}

    def cleaned(self, shape: Sequence[Any]) -> Affine:
        """Returns the integer without coefficients and steps that make no difference in a tensor of this shape."""
        ones = [proofs.known_equal(size, 1) for size in shape]
        coefs = tuple(0 if is_one else coef for coef, is_one in zip(self.coefs, ones, strict=True))
        steps = (step for step in self.steps if not ones[step.dim] and not _behind(step.at, shape[step.dim]))
        return replace(self, coefs=coefs, steps=tuple(steps))

    def bounds(self, shape: Sequence[Any]) -> tuple[int, int]:
        """Returns (smallest, largest) value in a tensor of this shape."""
        lowest = highest = self.const
        for dim, (coef, size) in enumerate(zip(self.coefs, shape, strict=True)):
            runs = self.runs(dim, size if isinstance(size, int) else LONGEST)
            values = [value for run in runs for value in run.ends(coef)] or [0]
            lowest, highest = lowest + min(values), highest + max(values)
        return lowest, highest

    def runs(self, dim: int, size: int) -> Iterator[Run]:
        """Yields the runs of indices between the steps along a dimension."""
        steps = sorted((at, jump) for at, jump in self.steps_of(dim).items() if at < size)
        edges = [0, *(at for at, _ in steps), size]
        ahead = itertools.accumulate((jump for _, jump in steps), initial=0)
        for first, end, far in zip(edges, edges[1:], ahead, strict=False):
            if first < end:
                yield Run(first, end, far)


class Run(NamedTuple):
    """Indices first .. end, the end excluded, and the sum of the jumps in front of them."""

    first: int
    end: int
    far: int

    def ends(self, coef: int) -> tuple[int, int]:
        return self.far + coef * self.first, self.far + coef * (self.end - 1)


def affine(const: int, coefs: tuple[int, ...], steps: Iterable[Threshold]) -> Affine:
    """Makes an `Affine` of any steps. Steps in front of the first index become a part of the constant."""
    jumps: dict[tuple[int, int], int] = {}
    for dim, at, jump in steps:
        if at <= 0:
            const += jump
        else:
            jumps[dim, at] = jumps.get((dim, at), 0) + jump
    return Affine(const, coefs, tuple(Threshold(*place, jump) for place, jump in sorted(jumps.items()) if jump))


def _behind(at: int, size: Any) -> bool:
    return isinstance(size, int) and at >= size


def reached(index: Affine, shape: Sequence[Any]) -> Affine:
    """Returns the integer that is 1 where `index` is at least 0, and otherwise 0. Raises NotAffine."""
    return _reached(index, 0, shape)


def _reached(index: Affine, at: int, shape: Sequence[Any]) -> Affine:
    """Returns the integer that is 1 where an index of a tensor of this shape is at least `at`, and otherwise 0."""
    dims = [dim for dim in range(len(shape)) if index.depends_on((dim,))]
    nothing = (0,) * len(shape)
    if not dims:
        return Affine(int(index.const >= at), nothing)
    if len(dims) > 1:
        return _leading(index, at, shape, dims)
    (dim,) = dims
    coef, size = index.coefs[dim], shape[dim]
    steps: list[Threshold] = []
    length = size if isinstance(size, int) else LONGEST
    for first, end, far in index.runs(dim, length):
        # far + const + coef * i >= at
        missing = at - far - index.const
        begin, stop = first, end
        if coef > 0:
            begin = max(first, -(-missing // coef))
        elif coef < 0:
            stop = min(end, missing // coef + 1)
        elif missing > 0:
            stop = first
        if begin < stop:
            steps += [Threshold(dim, begin, 1), *([Threshold(dim, stop, -1)] if stop < length else [])]
    return affine(0, nothing, steps)


def _leading(index: Affine, at: int, shape: Sequence[Any], dims: Sequence[int]) -> Affine:
    """Does what `_reached` does for an index of several dimensions. The outermost decides, or raises NotAffine."""
    if index.steps or not all(isinstance(shape[dim], int) and index.coefs[dim] > 0 for dim in dims):
        raise NotAffine
    first = max(dims, key=lambda dim: index.coefs[dim])
    coef = index.coefs[first]
    begin = -(-(at - index.const) // coef)
    rest = sum(index.coefs[dim] * (shape[dim] - 1) for dim in dims if dim != first)
    if begin > 0 and coef * (begin - 1) + rest + index.const >= at:
        raise NotAffine
    return affine(0, (0,) * len(shape), [Threshold(first, begin, 1)]).cleaned(shape)


def product(first: Affine, other: Affine) -> Affine:
    """The product of two integers: one is constant, or both only jump, along one dimension. Raises NotAffine."""
    for factor, value in ((first, other), (other, first)):
        if factor.is_constant:
            return value.scaled(factor.const)
    dims = {step.dim for step in (*first.steps, *other.steps)}
    if any(first.coefs) or any(other.coefs) or len(dims) != 1:
        raise NotAffine
    (dim,) = dims
    edges = sorted({step.at for step in (*first.steps, *other.steps)})
    before = first.const * other.const
    steps = []
    for edge in edges:
        values = [value.const + sum(step.jump for step in value.steps if step.at <= edge) for value in (first, other)]
        steps.append(Threshold(dim, edge, values[0] * values[1] - before))
        before = values[0] * values[1]
    return affine(first.const * other.const, first.coefs, steps)


def floored(value: Affine, divisor: int, shape: Sequence[Any]) -> Affine:
    """Returns value // divisor. The value goes up by one along one dimension, or is constant. Raises NotAffine."""
    dims = [dim for dim in range(len(shape)) if value.depends_on((dim,))]
    if not dims and divisor > 0:
        return replace(value, const=value.const // divisor)
    if len(dims) != 1 or divisor <= 0 or value.coefs[dims[0]] != 1 or not isinstance(shape[dims[0]], int):
        raise NotAffine
    (dim,) = dims
    steps: list[Threshold] = []
    before = value.const // divisor
    for first, end, far in value.runs(dim, shape[dim]):
        ahead = value.const + far
        places = range(first + 1 + (-(first + 1) - ahead) % divisor, end, divisor)
        if len(steps) + len(places) >= MOST_STEPS:
            raise NotAffine
        for place in (first, *places):
            steps.append(Threshold(dim, place, (ahead + place) // divisor - before))
            before = (ahead + place) // divisor
    return affine(value.const // divisor, (0,) * len(shape), steps)


def reshaped(source: Sequence[Any], result: Sequence[Any]) -> list[Affine] | None:
    """Returns the index of each dimension of `source` by those of `result`, a view of it in order; None if unknown."""
    found: list[Affine] = []
    nowhere = Affine(0, (0,) * len(result))
    wide = [dim for dim, size in enumerate(result) if not proofs.known_equal(size, 1)]
    left = list(source)
    while left:
        if proofs.known_equal(left[0], 1):
            found.append(nowhere)
            left.pop(0)
            continue
        if not wide:
            return None
        size, dim = left[0], wide[0]
        if proofs.known_equal(result[dim], size):
            found.append(_along(dim, len(result)))
            left.pop(0)
            wide.pop(0)
            continue
        if not isinstance(size, int) or not isinstance(result[dim], int):
            return None
        taken = _divided(size, result, wide) if result[dim] < size else _merged(left, dim, result)
        if taken is None:
            return None
        parts, used, gone = taken
        found += parts
        del left[:used], wide[:gone]
    return found if not wide else None


def _along(dim: int, ndim: int, coef: int = 1) -> Affine:
    return Affine(0, tuple(coef * int(place == dim) for place in range(ndim)))


Taken = tuple[list[Affine], int, int]
"""(indices of dimensions of the source, the number of these dimensions, the number of dimensions of the result)."""


def _divided(size: int, result: Sequence[Any], wide: Sequence[int]) -> Taken | None:
    """Handles one dimension of the source that becomes several dimensions of the result."""
    index, rest = Affine(0, (0,) * len(result)), size
    for count, dim in enumerate(wide, 1):
        length = result[dim]
        if not isinstance(length, int) or length == 0 or rest % length:
            return None
        rest //= length
        index = index.plus(_along(dim, len(result), rest))
        if rest == 1:
            return [index], 1, count
    return None


def _merged(left: Sequence[Any], dim: int, result: Sequence[Any]) -> Taken | None:
    """Handles several dimensions of the source that become one dimension of the result."""
    found: list[Affine] = []
    rest = result[dim]
    # The index along `dim`, less what the dimensions so far make of it.
    index = _along(dim, len(result))
    for count, size in enumerate(left, 1):
        if not isinstance(size, int) or size == 0 or rest % size:
            return None
        rest //= size
        if rest == 1:
            return [*found, index], count, 1
        places = range(rest, result[dim], rest)
        if len(places) > MOST_STEPS:
            return None
        # The index starts from 0 again with each index of the outer dimension.
        steps = (Threshold(dim, place, 1 - size if place % (rest * size) == 0 else 1) for place in places)
        found.append(affine(0, (0,) * len(result), steps))
        index = index.plus(found[-1].scaled(-rest))
    return None
