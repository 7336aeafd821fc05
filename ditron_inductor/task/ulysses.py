"""The projections around attention whose heads and sequence change places between ranks (Ulysses): two node kinds.

Outside of the attention every rank holds a part of the sequence and all heads, inside of it the whole sequence and a
part of the heads. An all-to-all changes one into the other, with the same number of rows and of columns for every rank:

    matmul_all_to_all    product [P, S, parts, W, C]  ->  out [P, W, S, parts, C]           columns scattered
    all_to_all_matmul    x [P, W, S, parts, C]  ->  received [P, S, parts, W, C], times w   rows scattered

The dimension W is that of the ranks: before, which rank an element goes to; after, which it came from. Each tensor has
its rows [P, S], or [P, W, S], in its dimensions but the last one, and [parts, W, C], or [parts, C], in the last. parts
is 1, or 3 where queries, keys and values lie side by side and each of them has its own heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from ditron_inductor.task.codec import INLINED
from ditron_inductor.task.exchange import EXCHANGED_OPERAND, EXCHANGED_PRODUCT, Exchange
from ditron_inductor.task.node import Node, Slots, single
from ditron_inductor.task.policy import Policy, check, verify_common

T = TypeVar("T")

MOST_SUMMED = 8
"""Products that are added up, as in a reduction."""


@dataclass(frozen=True)
class MatmulAllToAll(Node):
    """out = all_to_all(sum_i a_i @ b_i + bias): of every rank's product, in rank order, this rank's columns.

    a_i [.., S, .., K_i] with S at `gather_dim`, never the last dimension, b_i [K_i, N], bias a row [N] where there is
    one, N = parts * W * C; out is [.., W*S, .., parts * C].
    """

    kind: ClassVar[str] = "matmul_all_to_all"
    exchange: ClassVar[Exchange | None] = EXCHANGED_PRODUCT
    host_us: ClassVar[Mapping[str, float]] = {"library": 90.0, "chunked": 210.0, "tile": 42.0}
    gather_dim: int
    parts: int
    world_size: int
    group_name: str
    site: str
    policy: Policy = field(metadata=INLINED)
    num_products: int = 1
    has_bias: bool = False

    def slots(self) -> Slots:
        bias: Slots = (("bias", None),) if self.has_bias else ()
        return (("a", self.num_products), ("b", self.num_products), *bias)

    def split(self, operands: Sequence[T]) -> tuple[Sequence[T], Sequence[T], T | None]:
        """(first operands, second ones, bias)."""
        count = self.num_products
        return operands[:count], operands[count : 2 * count], operands[2 * count] if self.has_bias else None

    def verify(self) -> None:
        check(self.gather_dim >= 0, self.kind, "gather_dim", self.gather_dim, "a dimension, 0 or more")
        check(self.parts >= 1, self.kind, "parts", self.parts, "at least one part")
        within = 1 <= self.num_products <= MOST_SUMMED
        check(within, self.kind, "num_products", self.num_products, f"at least one matmul, and at most {MOST_SUMMED}")
        verify_common(self.kind, self.world_size, self.group_name, self.policy)


@dataclass(frozen=True)
class AllToAllMatmul(Node):
    """out = received @ weight, received = all_to_all(x): of every rank's x, in rank order as columns, this rank's rows.

    x [.., W*S, .., parts * C] with W*S at `scatter_dim`, never the last dimension; received [.., S, .., K] with K =
    parts * W * C, weight [K, N], out [rows, N] with all dimensions of received but the last one flattened into rows.
    """

    kind: ClassVar[str] = "all_to_all_matmul"
    exchange: ClassVar[Exchange | None] = EXCHANGED_OPERAND
    host_us: ClassVar[Mapping[str, float]] = {"library": 90.0, "chunked": 210.0, "tile": 42.0}
    scatter_dim: int
    parts: int
    return_received: bool
    world_size: int
    group_name: str
    site: str
    policy: Policy = field(metadata=INLINED)

    def slots(self) -> Slots:
        return single(("x", "weight"))

    def split(self, operands: Sequence[T]) -> tuple[T, T]:
        """(x, weight)."""
        return operands[0], operands[1]

    def verify(self) -> None:
        check(self.scatter_dim >= 0, self.kind, "scatter_dim", self.scatter_dim, "a dimension, 0 or more")
        check(self.parts >= 1, self.kind, "parts", self.parts, "at least one part")
        verify_common(self.kind, self.world_size, self.group_name, self.policy)


def gathered_shape(shape: Sequence[Any], columns: Any, gather_dim: int, world_size: int) -> list[Any]:
    """Of what a `MatmulAllToAll` returns: shape, of a_i, and columns, N; sizes may be symbolic."""
    result = [*shape[:-1], columns // world_size]
    result[gather_dim] = result[gather_dim] * world_size
    return result


def received_shape(shape: Sequence[Any], scatter_dim: int, world_size: int) -> list[Any]:
    """Of what an `AllToAllMatmul` multiplies; shape: of x. Sizes may be symbolic."""
    result = [*shape[:-1], shape[-1] * world_size]
    result[scatter_dim] = result[scatter_dim] // world_size
    return result
