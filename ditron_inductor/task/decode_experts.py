"""The node kinds of the second half of a decode step's experts: their second matmul, the weighted sum over the experts
of each token, and the reduction of that sum over the ranks, with and without a norm behind it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from ditron_inductor.task.codec import INLINED
from ditron_inductor.task.epilogue import Epilogue, parse
from ditron_inductor.task.exchange import REDUCED_PRODUCT, Exchange
from ditron_inductor.task.expert_nodes import CombineExperts, ExpertProjections
from ditron_inductor.task.matmul_nodes import REDUCE_OPS
from ditron_inductor.task.node import Output, Shape, Shapes, Sizes, Slots, TaskNode, single
from ditron_inductor.task.norm_nodes import SumWithNorm
from ditron_inductor.task.norms import EXTRAS, by_names
from ditron_inductor.task.policy import Policy, check, verify_common

T = TypeVar("T")
ADDED = parse("pre: mm0 + full(x0); mm0")
"""What adds a tensor of the shape of the sum before it is reduced."""
MOST_EXPERT_COLUMNS = 16384
"""The most columns of the sum: each tile of the narrowest ones has a flag."""
OPERANDS = ("x", "matrices", "experts", "factors")
"""The operands of both kinds, but for what is added and what belongs to a norm."""


@dataclass(frozen=True)
class ExpertsAllReduce(TaskNode):
    """out[t] = all_reduce(added[t] + sum_j factors[s] * (x[s] @ matrices[experts[s]])) with s = t * top_k + j,
    bit-identical on every rank. j counts the `top_k` experts that token t takes, which differ. A slot s is a token's use of one
    expert; there are S = T * top_k of them, token by token.

    x is [S, K], matrices [E, K, N] with a matrix for each of E experts, experts int64 [S], and factors a floating-point
    [S]. added [T, N], if there is one, has the dtype of x, as out [T, N] has. The products are rounded to this dtype,
    the sum of a rank is made in fp32 and rounded once before it is sent. A rank has its own slice of K.
    """

    kind: ClassVar[str] = "experts_all_reduce"
    exchange: ClassVar[Exchange] = REDUCED_PRODUCT
    computes: ClassVar[str] = "experts"
    host_us: ClassVar[Mapping[str, float]] = {"library": 110.0, "chunked": 80.0, "tile": 40.0}
    reduce_op: str
    top_k: int
    world_size: int
    group_name: str
    site: str
    policy: Policy = field(metadata=INLINED)
    has_added: bool = False

    @property
    def sum_pattern(self) -> str:
        """What is reduced, as text."""
        return f"matmul of experts -> {self.sums.pattern}"

    @property
    def pattern(self) -> str:
        return f"{self.sum_pattern} -> all_reduce({self.reduce_op})"

    @property
    def products(self) -> ExpertProjections:
        """The products of the slots as a node of its own."""
        return ExpertProjections(self.top_k, by_token=False, num_weights=1, strategy=self.policy.strategy)

    @property
    def sums(self) -> CombineExperts:
        """The sum of the products as a node of its own."""
        return CombineExperts(self.top_k, self.has_added, strategy=self.policy.strategy, in_order=True)

    @property
    def parsed(self) -> Epilogue | None:
        """What is done with the sum of the experts before it is reduced."""
        return ADDED if self.has_added else None

    def verify(self) -> None:
        check(self.top_k >= 1, self.kind, "top_k", self.top_k, "at least one expert for each token")
        check(self.reduce_op in REDUCE_OPS, self.kind, "reduce_op", self.reduce_op, f"one of {', '.join(REDUCE_OPS)}")
        verify_common(self.kind, self.world_size, self.group_name, self.policy)

    def slots(self) -> Slots:
        return single((*OPERANDS, *("added",) * self.has_added))

    def sum_shape(self, shapes: Shapes) -> tuple[Any, Any]:
        """Returns (T, N), the shape of the sum."""
        return shapes["x"][0] // self.top_k, shapes["matrices"][2]

    def contributed(self, shapes: Shapes) -> Shape:
        return self.sum_shape(shapes)

    def sizes(self, shapes: Shapes) -> Sizes:
        # As many operations, and the bytes of the reduction.
        return Sizes(*self.sum_shape(shapes), self.top_k * shapes["x"][1], "k", self.sum_shape(shapes))

    def outputs(self, shapes: Shapes) -> list[Output]:
        return [Output(self.sum_shape(shapes))]

    def split(self, operands: Sequence[T]) -> tuple[Any, ...]:
        """Returns (x, matrices, experts, factors, extra tensors)."""
        end = len(OPERANDS)
        return (*operands[:end], operands[end:])


@dataclass(frozen=True)
class ExpertsAllReduceRmsNorm(SumWithNorm):
    """Like `AllReduceRmsNorm` with the x [T, N] that `ExpertsAllReduce` reduces, whose operands stand in its place."""

    kind: ClassVar[str] = "experts_all_reduce_rms_norm"
    exchange: ClassVar[Exchange] = REDUCED_PRODUCT
    computes: ClassVar[str] = "experts"
    # The norm costs all strategies the same.
    planned_as: ClassVar[str] = ExpertsAllReduce.kind
    reduces: ClassVar[type[TaskNode]] = ExpertsAllReduce
    top_k: int = field(kw_only=True)
    has_added: bool = False

    def slots(self) -> Slots:
        return (*single(OPERANDS), *single(self.extras), *single(("added",) * self.has_added))

    def split(self, operands: Sequence[T]) -> tuple[Any, ...]:
        """Returns (x, matrices, experts, factors, tensors of the norm, see `EXTRAS`, extra tensors)."""
        end, last = len(OPERANDS), len(OPERANDS) + len(self.extras)
        return (*operands[:end], by_names(EXTRAS, self.extras, operands[end:last]), operands[last:])
