"""The node kinds of a reduction with a norm behind it, with and without a matmul in front."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Self, TypeVar

from ditron_inductor.task.codec import INLINED
from ditron_inductor.task.exchange import REDUCED_PRODUCT, Exchange
from ditron_inductor.task.expert_nodes import CombineExperts
from ditron_inductor.task.matmul_nodes import REDUCE_OPS, MatmulAllReduce, product_slots, split_products
from ditron_inductor.task.node import Output, Shape, Shapes, Sizes, Slots, TaskNode, single
from ditron_inductor.task.norms import EXTRAS, NO_NORM, SAVED, Norm, by_names, norm_outputs, norm_returns, verify_names
from ditron_inductor.task.policy import OVERLAPS, Policy, check, verify_common

T = TypeVar("T")


@dataclass(frozen=True)
class ReductionWithNorm(TaskNode):
    """What the two nodes with a norm have in common. extras: the operands that are present, of `EXTRAS`. post: a norm
    of the reduced rows alone, before the residual is added. With it there may be no norm behind (`NO_NORM`), and then
    no output of such a norm. saved: further outputs, of `SAVED`. The output `other` is the same norm of the same rows,
    with another weight and shift. factor: a number that the rows are multiplied by before the residual is added; the
    operand `scale` is a row [N] in its place.
    """

    kind: ClassVar[str]
    overlaps: ClassVar[tuple[str, ...]] = OVERLAPS
    sums_slots: ClassVar[bool] = False
    """Whether the node may add up what the experts of each token return, before it reduces the sums."""
    reduce_op: str
    norm: Norm
    extras: tuple[str, ...]
    world_size: int
    group_name: str
    site: str
    policy: Policy = field(metadata=INLINED)
    post: Norm | None = None
    saved: tuple[str, ...] = ()
    factor: float = field(default=1.0, kw_only=True)

    def verify(self) -> None:
        check(self.reduce_op in REDUCE_OPS, self.kind, "reduce_op", self.reduce_op, f"one of {', '.join(REDUCE_OPS)}")
        self.norm.verify(self.kind)
        if self.post is not None:
            self.post.verify(self.kind)
            check(self.post.form != NO_NORM, self.kind, "post", self.post.form, "a norm")
        if self.norm.form == NO_NORM:
            check(self.post is not None, self.kind, "norm", self.norm.form, "a norm, as there is none before it")
            of_norm = {"weight", "shift", "other_weight", "other_shift", "mean", "rstd", "scaled", "other"}
            behind = of_norm & {*self.extras, *self.saved}
            check(not behind, self.kind, "norm", self.norm.form, f"a norm, as there are {', '.join(sorted(behind))}")
        self.norm.verify_sum(self.kind, self.extras)
        check(self.post is None or not self.post.unrounded, self.kind, "post", self.post, "a norm of rounded rows")
        fits = self.factor == 1.0 or "scale" not in self.extras
        check(fits and math.isfinite(self.factor), self.kind, "factor", self.factor, "a number, and 1.0 beside a scale")
        for name, names, known in (("extras", self.extras, EXTRAS), ("saved", self.saved, SAVED)):
            verify_names(self.kind, name, names, known)
            no_post = self.post is not None or not any(operand.startswith("post_") for operand in names)
            check(no_post, self.kind, name, names, "without names of a norm before the residual, as there is none")
        given = {"other_weight", "other_shift"} & {*self.extras}
        no_other = not given or "other" in self.saved
        check(no_other, self.kind, "extras", self.extras, "without those of another norm, as it is not returned")
        verify_common(self.kind, self.world_size, self.group_name, self.policy)

    def normed_columns(self, sizes: Sizes) -> Any:
        return sizes.n

    @property
    def returned(self) -> tuple[str, ...]:
        """The names of the outputs, without the token."""
        return norm_returns(self.norm, self.saved)

    @property
    def norm_pattern(self) -> str:
        """The reduction, what is added to it, and the norms."""
        biases = " + bias" * sum(name in self.extras for name in ("bias", "second_bias"))
        post = "" if self.post is None else f" -> {self.post.form} norm"
        post += " * scale" if "scale" in self.extras else "" if self.factor == 1.0 else f" * {self.factor}"
        residual = " + residual" * ("residual" in self.extras)
        twice = "other" in self.saved
        norm = "" if self.norm.form == NO_NORM else f" -> {'two ' * twice}{self.norm.form} norm{'s' * twice}"
        return f"all_reduce({self.reduce_op}){biases}{post}{residual}{norm}"


@dataclass(frozen=True)
class AllReduceRmsNorm(ReductionWithNorm):
    """reduced = all_reduce(x, reduce_op), total = post(reduced + bias + second_bias) * scale + residual, normed =
    norm(total); all bit-identical on every rank.

    x and these outputs are [.., N]. The residual has as many elements; biases, weights, shifts and the scale have N.
    Every sum, the result of `post` and the scaled rows are rounded to the dtype of x; a norm that is `unrounded` is
    that of the last sum before it is rounded. The other saved outputs are fp32: mean and rstd = 1 / sqrt(variance +
    eps) are [.., 1], and scaled is [.., N] (see `Norm`). Names that begin with `post_` are those of `post`.

    With a `top_k` the operand x is [T * top_k, N], what its experts return for each of T tokens, token by token, and
    what is reduced is their weighted sum [T, N], see `CombineExperts`: factors is a floating-point [T * top_k], and
    added, with `has_added`, is [T, N].
    """

    kind: ClassVar[str] = "all_reduce_rms_norm"
    sums_slots: ClassVar[bool] = True
    exchange: ClassVar[Exchange] = REDUCED_PRODUCT
    computes: ClassVar[str] = "norm"
    host_us: ClassVar[Mapping[str, float]] = {"library": 60.0, "tile": 36.0}
    # A reduction without a matmul has no product that could be cut.
    strategies: ClassVar[tuple[str, ...]] = ("library", "tile")
    top_k: int = field(default=0, kw_only=True)
    has_added: bool = field(default=False, kw_only=True)

    @property
    def pattern(self) -> str:
        return f"{self.sums.pattern} -> {self.norm_pattern}" if self.top_k else self.norm_pattern

    @property
    def sums(self) -> CombineExperts:
        """The weighted sum of the products as a node of its own."""
        return CombineExperts(self.top_k, self.has_added, strategy=self.policy.strategy, in_order=True)

    def verify(self) -> None:
        super().verify()
        check(self.top_k >= 0, self.kind, "top_k", self.top_k, "a number of experts, or 0 if nothing is summed")
        added = self.top_k > 0 or not self.has_added
        check(added, self.kind, "has_added", self.has_added, "False where nothing is summed")

    def slots(self) -> Slots:
        summed = (*("factors",) * (self.top_k > 0), *("added",) * self.has_added)
        return (("x", None), *single(self.extras), *single(summed))

    def contributed(self, shapes: Shapes) -> Shape:
        *leading, N = shapes["x"]
        return (leading[0] // self.top_k, N) if self.top_k else shapes["x"]

    def sizes(self, shapes: Shapes) -> Sizes:
        *leading, N = self.contributed(shapes)
        return Sizes(math.prod(leading), N, 1, "k", (math.prod(leading), N))

    def outputs(self, shapes: Shapes) -> list[Output]:
        return norm_outputs(self.returned, self.contributed(shapes))

    def split(self, operands: Sequence[T]) -> tuple[Any, ...]:
        """Returns (x, the tensors of the norm, see `EXTRAS`, and then, if products are summed, the factors and what is
        added, or None).
        """
        end = 1 + len(self.extras)
        x, of_norm, summed = operands[0], by_names(EXTRAS, self.extras, operands[1:end]), operands[end:]
        return (x, of_norm, *((*summed, None)[:2] if self.top_k else ()))


@dataclass(frozen=True)
class MatmulAllReduceRmsNorm(ReductionWithNorm):
    """Like `AllReduceRmsNorm` with x = sum_i a_i @ b_i + product_bias, the sum that `MatmulAllReduce` reduces.
    has_bias: whether there is a product_bias, a row that every rank adds before the reduction. num_extras, epilogue:
    those of an epilogue that has only a part before the reduction.
    """

    kind: ClassVar[str] = "matmul_all_reduce_rms_norm"
    ahead: ClassVar[str] = "b"
    exchange: ClassVar[Exchange] = REDUCED_PRODUCT
    # The norm costs all strategies the same.
    planned_as: ClassVar[str] = MatmulAllReduce.kind
    reduces: ClassVar[type[MatmulAllReduce]] = MatmulAllReduce
    """The node whose result this one normalises."""
    num_products: int = 1
    has_bias: bool = False
    num_extras: int = 0
    epilogue: str = ""

    @property
    def pattern(self) -> str:
        return f"{self.reduction.sum_pattern} -> {self.norm_pattern}"

    def sizes(self, shapes: Shapes) -> Sizes:
        return self.reduction.sizes(shapes)

    def contributed(self, shapes: Shapes) -> Shape | None:
        return self.reduction.sum_shape(shapes)

    def timed(self, shapes: Shapes) -> tuple[TaskNode, Shapes] | None:
        return self.reduction, self.of_reduction(shapes)

    def of_reduction(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """What the node without its norm has of these operands, by its names."""
        return {name: given["product_bias" if name == "bias" else name] for name, _ in self.reduction.slots()}

    def outputs(self, shapes: Shapes) -> list[Output]:
        return norm_outputs(self.returned, self.reduction.sum_shape(shapes))

    def slots(self) -> Slots:
        products = product_slots(self.num_products, self.has_bias, "product_bias")
        return (*products, *single(self.extras), *self.reduction.extra_slots())

    def split(
        self, operands: Sequence[T]
    ) -> tuple[Sequence[T], Sequence[T], T | None, Sequence[T | None], Sequence[T]]:
        """Returns (first operands, second operands, their bias, tensors of the norm, see `EXTRAS`, extra tensors)."""
        a, b, bias, behind = split_products(self.num_products, self.has_bias, operands)
        count = len(self.extras)
        return a, b, bias, by_names(EXTRAS, self.extras, behind[:count]), behind[count:]

    @classmethod
    def behind(cls, reduction: MatmulAllReduce, norm: Norm, extras: tuple[str, ...], **of_norm: Any) -> Self:
        """The node of a reduction with norms behind it."""
        parts = {field.name: getattr(reduction, field.name) for field in fields(reduction)}
        return cls(norm=norm, extras=extras, **parts, **of_norm)

    @property
    def without_norm(self) -> MatmulAllReduce:
        return self.reduction

    @functools.cached_property
    def reduction(self) -> MatmulAllReduce:
        """The node without its norm."""
        return MatmulAllReduce(**{field.name: getattr(self, field.name) for field in fields(MatmulAllReduce)})

    def verify(self) -> None:
        super().verify()
        self.reduction.verify()
        parsed = self.reduction.parsed
        fits = parsed is None or parsed.behind is None
        check(fits, self.kind, "epilogue", self.epilogue, "one without a part behind the reduction")
