"""The values that `masks` knows of tensors: affine integers, truths about them, and choices between two numbers.

Integers are mathematical integers here. `fits` and `rounded` say whether a dtype can hold them; nothing is proved of an
integer that wraps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ditron_inductor.passes.attention.affine import Affine

LEAST = -1e30
"""A number that no score comes near: programs hide keys by -inf, a dtype's least number, or one as low as this."""


@dataclass(frozen=True)
class Truth:
    """A condition: all of the terms are at least 0, or, if not `every`, at least one of them is."""

    terms: frozenset[Affine]
    every: bool = True

    def negated(self) -> Truth:
        # For an integer t, not (t >= 0) is -t - 1 >= 0.
        terms = (term.scaled(-1) for term in self.terms)
        return Truth(frozenset(replace(term, const=term.const - 1) for term in terms), not self.every)

    def both(self, other: Truth) -> Truth | None:
        """Returns `self and other`; None if that is neither a conjunction nor a disjunction of terms."""
        for first, second in ((self, other), (other, self)):
            if not first.terms:
                return second if first.every else first
        if all(truth.every or len(truth.terms) == 1 for truth in (self, other)):
            return Truth(self.terms | other.terms)
        return None


TRUE, FALSE = Truth(frozenset()), Truth(frozenset(), every=False)


@dataclass(frozen=True)
class Selection:
    """A choice between two numbers: `yes` where the truth holds, and otherwise `no`."""

    truth: Truth
    yes: float
    no: float


Value = Affine | Truth | Selection


def fits(term: Affine, shape: Sequence[Any], dtype: torch.dtype) -> bool:
    """Returns whether a dtype holds a term everywhere."""
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        return term.is_constant
    lowest, highest = term.bounds(shape)
    return torch.iinfo(dtype).min <= lowest and highest <= torch.iinfo(dtype).max


def hides(number: float, dtype: torch.dtype) -> bool:
    """Returns whether a score that this number is added to, or replaces, counts for nothing beside one as it is."""
    return number <= max(LEAST, torch.finfo(dtype).min)


def rounded(number: float, dtype: torch.dtype) -> float | None:
    """Returns the number as a dtype holds it; None if the dtype cannot hold it."""
    if dtype.is_floating_point:
        return torch.tensor(number, dtype=torch.float64).to(dtype).item()
    if dtype == torch.bool or dtype.is_complex or not math.isfinite(number) or number != int(number):
        return None
    return number if torch.iinfo(dtype).min <= number <= torch.iinfo(dtype).max else None


def mapped(value: Value, change: Callable[[Affine], Affine]) -> Value:
    if isinstance(value, Affine):
        return change(value)
    if isinstance(value, Truth):
        return replace(value, terms=frozenset(map(change, value.terms)))
    return replace(value, truth=replace(value.truth, terms=frozenset(map(change, value.truth.terms))))


def number(number: bool | int | float, ndim: int) -> Value:
    if isinstance(number, bool):
        return TRUE if number else FALSE
    return Affine(number, (0,) * ndim) if isinstance(number, int) else Selection(TRUE, number, number)


def as_choice(value: Value) -> Selection | None:
    if isinstance(value, Affine):
        return Selection(TRUE, value.const, value.const) if value.is_constant else None
    return Selection(value, 1.0, 0.0) if isinstance(value, Truth) else value


def compared(term: Affine) -> Truth:
    if not term.is_constant:
        return Truth(frozenset((term,)))
    return TRUE if term.const >= 0 else FALSE
