"""Norms as parts of nodes: in front of a gather, or behind a reduction."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from ditron_inductor.task.dtypes import FLOAT32
from ditron_inductor.task.node import Output, Shape
from ditron_inductor.task.policy import check

T = TypeVar("T")


@dataclass(frozen=True)
class Norm:
    """A normalisation of rows [.., N], computed in fp32. In a `layer` norm scaled = (x - mean) / sqrt(variance + eps),
    and in an `rms` norm scaled = x / sqrt(mean of x * x + eps). The result is scaled * weight + shift.

    plus_one: the weight counts as 1 + weight. round_first: scaled is rounded to the dtype of x first, as in Llama. The
    form `none` means that there is no norm behind a reduction, but only `post`, the norm of the reduced rows.

    unrounded: x is the sum of two tensors before it is rounded, as in vLLM: both are widened to fp32 and added, and the
    norm is that of the fp32 sum. The total, which is returned, is this sum rounded.
    """

    form: str = "rms"
    eps: float = 1e-6
    plus_one: bool = False
    round_first: bool = False
    unrounded: bool = False

    def verify(self, kind: str) -> None:
        check(self.form in NORMS, kind, "norm", self.form, f"one of {', '.join(NORMS)}")
        check(0.0 <= self.eps < math.inf, kind, "eps", self.eps, "a number, 0 or more")

    def verify_sum(self, kind: str, extras: tuple[str, ...]) -> None:
        """Checks that there is a sum before it is rounded, where that is what is normalised."""
        added = "residual" in extras and self.form != NO_NORM
        check(added or not self.unrounded, kind, "norm", self, "a norm of rounded rows, as no residual is added")


NO_NORM = "none"
NORMS: tuple[str, ...] = ("rms", "layer", NO_NORM)
MOST_NORM_COLUMNS = 16384
"""The most elements of a row that is normalised in the registers of one program."""
EXTRAS: tuple[str, ...] = (
    *("bias", "second_bias", "post_weight", "post_shift", "residual", "weight", "shift", "other_weight", "other_shift"),
    "scale",
)
"""The tensors that a reduction with a norm may have besides its operands, in the order of its arguments."""
SAVED: tuple[str, ...] = ("reduced", "post_mean", "post_rstd", "mean", "rstd", "scaled", "other")
"""Further outputs of a node with a norm, in order: what a backward saves, and the norm by the other weight."""
AS_SUM: tuple[str, ...] = ("normed", "total", "reduced", "other")
"""The outputs that have the shape and the dtype of the sum."""
SHARD_EXTRAS: tuple[str, ...] = ("residual", "weight", "shift")
SHARD_SAVED: tuple[str, ...] = ("mean", "rstd", "scaled")
"""The outputs of `SAVED` that the norm in front of a gather may have."""


@dataclass(frozen=True)
class ShardNorm:
    """The norm that computes the shard of a gather from x: total = x + residual, rounded to the dtype of x, and shard =
    norm(total), or the norm of the sum before it is rounded (see `Norm`). extras: the operands that are present, of
    `SHARD_EXTRAS`. With a residual the total is an output too. saved: the outputs of `SHARD_SAVED`, as for a reduction
    with a norm.
    """

    norm: Norm
    extras: tuple[str, ...] = ()
    saved: tuple[str, ...] = ()
    post: ClassVar[Norm | None] = None
    factor: ClassVar[float] = 1.0

    @property
    def returned(self) -> tuple[str, ...]:
        """The names of the node's outputs that are not computed from the gathered tensor."""
        return (*("total",) * ("residual" in self.extras), *self.saved)

    def verify(self, kind: str) -> None:
        self.norm.verify(kind)
        check(self.norm.form != NO_NORM, kind, "norm", self.norm.form, "a norm")
        self.norm.verify_sum(kind, self.extras)
        verify_names(kind, "extras", self.extras, SHARD_EXTRAS)
        verify_names(kind, "saved", self.saved, SHARD_SAVED)


def norm_returns(norm: Norm, saved: tuple[str, ...]) -> tuple[str, ...]:
    """The names of the outputs of a reduction with this norm, without the token."""
    return (*("normed",) * (norm.form != NO_NORM), "total", *saved)


def norm_form(name: str, shape: Shape) -> tuple[tuple[Any, ...], str]:
    """Returns the shape and the dtype of the output of this name, for a sum of this shape [.., N] (see `Output`)."""
    if name in AS_SUM:
        return tuple(shape), ""
    return tuple(shape) if name == "scaled" else (*shape[:-1], 1), FLOAT32.short


def norm_outputs(names: Sequence[str], shape: Shape) -> list[Output]:
    """Returns the outputs of these names, for a sum of this shape [.., N]."""
    return [Output(*norm_form(name, shape)) for name in names]


def by_names(known: Sequence[str], given: Sequence[str], operands: Sequence[T]) -> tuple[T | None, ...]:
    """The operands of the names that are given, in the places of all known names; None in the other places."""
    found = dict(zip(given, operands, strict=True))
    return tuple(found.get(name) for name in known)


def verify_names(kind: str, field: str, names: tuple[str, ...], known: tuple[str, ...]) -> None:
    in_order = names == tuple(name for name in known if name in names)
    check(in_order, kind, field, names, f"names out of {', '.join(known)}, in this order")
