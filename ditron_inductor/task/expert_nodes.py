"""The node kind of the matmuls of a mixture of experts with few tokens. Nothing is communicated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from ditron_inductor.task.matmul_nodes import MOST_PROJECTED_ROWS, LocalProducts
from ditron_inductor.task.node import Output, Shapes, Sizes, Slots
from ditron_inductor.task.policy import check

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
