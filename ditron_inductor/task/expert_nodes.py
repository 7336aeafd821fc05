"""The node kinds of a mixture of experts: its matmuls for few tokens, which communicate nothing, and the reduction of
what the experts return for many tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from ditron_inductor.task.codec import INLINED
from ditron_inductor.task.exchange import REDUCED_PRODUCT, Exchange
from ditron_inductor.task.matmul_nodes import MOST_PROJECTED_ROWS, REDUCE_OPS, LocalProducts
from ditron_inductor.task.node import Output, Shape, Shapes, Sizes, Slots, TaskNode, single
from ditron_inductor.task.policy import Policy, check, verify_common

T = TypeVar("T")


@dataclass(frozen=True)
class ExpertProjections(LocalProducts):
    """out_i[s] = x[row of s] @ weight_i[experts[s]] for every slot s and every weight i, or what an epilogue makes of
    that. A slot is a token's use of one expert; each of the T tokens has `top_k` of them. No site. experts is int64 [T
    * top_k], token by token, and the experts of one token differ. x is [T, K] if `by_token`: all slots of a token have
    its row. Otherwise x is [T * top_k, K], with a row for each slot. weight_i is [E, K, N_i], a matrix for each of E
    experts, and out_i [T * top_k, N_i].
    """

    kind: ClassVar[str] = "expert_projections"
    top_k: int
    by_token: bool
    num_weights: int
    num_extras: int = 0
    epilogue: str = ""
    strategy: str = "auto"

    def verify(self) -> None:
        check(self.top_k >= 1, self.kind, "top_k", self.top_k, "at least one expert for each token")
        super().verify()

    def slots(self) -> Slots:
        return (("x", None), ("experts", None), ("weights", self.num_weights), *self.extra_slots())

    def sizes(self, shapes: Shapes) -> Sizes:
        S, K = shapes["experts"][0], shapes["x"][1]
        return Sizes(S, sum(shape[2] for shape in shapes["weights"]), K, "n", (S, K))

    def outputs(self, shapes: Shapes) -> list[Output]:
        return self.made([(shapes["experts"][0], shape[2]) for shape in shapes["weights"]])

    def split(self, operands: Sequence[T]) -> tuple[T, T, Sequence[T], Sequence[T]]:
        """Returns (x, experts, weights, extra tensors)."""
        end = 2 + self.num_weights
        return operands[0], operands[1], operands[2:end], operands[end:]


MOST_EXPERT_TOKENS = MOST_PROJECTED_ROWS
"""The most tokens of `ExpertProjections`: all rows of an expert are in one tile of its kernel."""


@dataclass(frozen=True)
class GroupedMatmulAllReduce(TaskNode):
    """out = all_reduce(combined + added), combined[t] = sum_j scale[s] * (x[s] @ weight[expert of s]) with s = places[t
    * top_k + j]; with equal bits on all ranks. j counts the `top_k` experts that token t takes.

    x [S, K] has a row for each of S = T * top_k slots, sorted by expert: a slot is a token's use of one expert. weight
    is [E, K, N]. ends is int32 [E]: the slots of the experts up to e end at ends[e]. places is int64 [S], token by
    token, and scale is [S], of any dtype. added [T, N], if there is one, is what an expert returns that all tokens use.
    out is [T, N]. The products are rounded to the dtype of x. Their sum is added up in fp32, with `added`, and rounded
    once.
    """

    kind: ClassVar[str] = "grouped_matmul_all_reduce"
    exchange: ClassVar[Exchange] = REDUCED_PRODUCT
    # It has not been measured on GPUs yet.
    by_default: ClassVar[bool] = False
    # How many slots an expert has is known on the device alone: no table has times of it.
    computes: ClassVar[str] = "experts"
    host_us: ClassVar[Mapping[str, float]] = {"library": 110.0, "chunked": 500.0}
    strategies: ClassVar[tuple[str, ...]] = ("library", "chunked")
    num_outputs: ClassVar[int] = 1
    reduce_op: str
    top_k: int
    world_size: int
    group_name: str
    site: str
    policy: Policy = field(metadata=INLINED)
    has_added: bool = False

    @property
    def pattern(self) -> str:
        added = " + all tokens' expert" * self.has_added
        return f"grouped matmul -> sum of {self.top_k} experts{added} -> all_reduce({self.reduce_op})"

    def verify(self) -> None:
        check(self.reduce_op in REDUCE_OPS, self.kind, "reduce_op", self.reduce_op, f"one of {', '.join(REDUCE_OPS)}")
        check(self.top_k >= 1, self.kind, "top_k", self.top_k, "at least one expert for each token")
        verify_common(self.kind, self.world_size, self.group_name, self.policy)

    def slots(self) -> Slots:
        return single(("x", "weight", "ends", "places", "scale", *("added",) * self.has_added))

    def sizes(self, shapes: Shapes) -> Sizes:
        # As many operations as the products of all slots, and the bytes of the reduction.
        T, N = self.contributed(shapes)
        return Sizes(T, N, shapes["weight"][1] * self.top_k, "k", (T, N))

    def contributed(self, shapes: Shapes) -> Shape:
        return (shapes["places"][0] // self.top_k, shapes["weight"][2])

    def outputs(self, shapes: Shapes) -> list[Output]:
        return [Output(tuple(self.contributed(shapes)))]

    def split(self, operands: Sequence[T]) -> tuple[Any, ...]:
        """Returns (x, weight, ends, places, scale, added or None)."""
        return (*operands, None)[:6]
