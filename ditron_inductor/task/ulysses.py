"""The projections around attention whose heads and sequence change places between ranks (Ulysses): two node kinds.

Outside of the attention every rank holds a part of the sequence and all heads, inside of it the whole sequence and a
part of the heads. An all-to-all changes one into the other, with the same number of rows and of columns for every rank:

    matmul_all_to_all    product [P, S, parts, W, C]  ->  out [P, W, S, parts, C]           columns scattered
    all_to_all_matmul    x [P, W, S, parts, C]  ->  received [P, S, parts, W, C], times w   rows scattered

The dimension W is that of the ranks: before, which rank an element goes to; after, which it came from. Each tensor has
its rows [P, S], or [P, W, S], in its dimensions but the last one, and [parts, W, C], or [parts, C], in the last. parts
is 1, or 3 where queries, keys and values lie side by side and each of them has its own heads.

Besides the nodes, here are their ops: schemas and fake implementations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ditron_inductor.task.policy import Policy, check, common_text, verify_common
from ditron_inductor.task.schemas import SITE

if TYPE_CHECKING:
    import torch

MOST_SUMMED = 8
"""Products that are added up, as in a reduction."""


@dataclass(frozen=True)
class MatmulAllToAll:
    """out = all_to_all(sum_i a_i @ b_i + bias): of every rank's product, in rank order, this rank's columns.

    a_i [.., S, .., K_i] with S at `gather_dim`, never the last dimension, b_i [K_i, N], bias a row [N] where there is
    one, N = parts * W * C; out is [.., W*S, .., parts * C].
    """

    kind: ClassVar[str] = "matmul_all_to_all"
    gather_dim: int
    parts: int
    world_size: int
    group_name: str
    site: str
    policy: Policy
    num_products: int = 1
    has_bias: bool = False

    def verify(self) -> None:
        check(self.gather_dim >= 0, self.kind, "gather_dim", self.gather_dim, "a dimension, 0 or more")
        check(self.parts >= 1, self.kind, "parts", self.parts, "at least one part")
        within = 1 <= self.num_products <= MOST_SUMMED
        check(within, self.kind, "num_products", self.num_products, f"at least one matmul, and at most {MOST_SUMMED}")
        verify_common(self.kind, self.world_size, self.group_name, self.policy)

    def text(self) -> str:
        return (
            f"{self.kind}(gather_dim={self.gather_dim}, parts={self.parts}, num_products={self.num_products}, "
            f"has_bias={self.has_bias}, {common_text(self.world_size, self.group_name, self.site, self.policy)})"
        )


@dataclass(frozen=True)
class AllToAllMatmul:
    """out = received @ weight, received = all_to_all(x): of every rank's x, in rank order as columns, this rank's rows.

    x [.., W*S, .., parts * C] with W*S at `scatter_dim`, never the last dimension; received [.., S, .., K] with K =
    parts * W * C, weight [K, N], out [rows, N] with all dimensions of received but the last one flattened into rows.
    """

    kind: ClassVar[str] = "all_to_all_matmul"
    scatter_dim: int
    parts: int
    return_received: bool
    world_size: int
    group_name: str
    site: str
    policy: Policy

    def verify(self) -> None:
        check(self.scatter_dim >= 0, self.kind, "scatter_dim", self.scatter_dim, "a dimension, 0 or more")
        check(self.parts >= 1, self.kind, "parts", self.parts, "at least one part")
        verify_common(self.kind, self.world_size, self.group_name, self.policy)

    def text(self) -> str:
        return (
            f"{self.kind}(scatter_dim={self.scatter_dim}, parts={self.parts}, return_received={self.return_received}, "
            f"{common_text(self.world_size, self.group_name, self.site, self.policy)})"
        )


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


def schemas() -> dict[str, str]:
    """By kind."""
    return {
        MatmulAllToAll.kind: (
            "(Tensor[] a, Tensor[] b, Tensor? bias, Tensor? token, int gather_dim, int parts, "
            f"{SITE}) -> (Tensor, Tensor)"
        ),
        AllToAllMatmul.kind: (
            "(Tensor x, Tensor weight, Tensor? token, int scatter_dim, int parts, bool return_received, "
            f"{SITE}) -> Tensor[]"
        ),
    }


def fakes(new_token: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Callable[..., object]]:
    """The fake implementations by kind."""

    def matmul_all_to_all(
        a: Sequence[torch.Tensor],
        b: Sequence[torch.Tensor],
        bias: torch.Tensor | None,
        token: torch.Tensor | None,
        gather_dim: int,
        parts: int,
        world_size: int,
        *others: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shape = gathered_shape(a[0].shape, b[0].shape[1], gather_dim, world_size)
        return a[0].new_empty(shape), new_token(a[0])

    def all_to_all_matmul(
        x: torch.Tensor,
        weight: torch.Tensor,
        token: torch.Tensor | None,
        scatter_dim: int,
        parts: int,
        return_received: bool,
        world_size: int,
        *others: Any,
    ) -> list[torch.Tensor]:
        shape = received_shape(x.shape, scatter_dim, world_size)
        outputs = [x.new_empty([math.prod(shape[:-1]), weight.shape[1]])]
        return [*outputs, *([x.new_empty(shape)] if return_received else []), new_token(x)]

    return {MatmulAllToAll.kind: matmul_all_to_all, AllToAllMatmul.kind: all_to_all_matmul}


def node_of(kind: str, value: dict[str, Any], world_size: int, group_name: str, site: str, policy: Policy) -> Any:
    """The node that a call stands for, by the values of its arguments."""
    common = world_size, group_name, site, policy
    if kind == AllToAllMatmul.kind:
        return AllToAllMatmul(int(value["scatter_dim"]), int(value["parts"]), bool(value["return_received"]), *common)
    assert len(value["a"]) == len(value["b"]), (
        f"{kind}: {len(value['a'])} first operands, {len(value['b'])} second ones"
    )
    has_bias = value["bias"] is not None
    return MatmulAllToAll(int(value["gather_dim"]), int(value["parts"]), *common, len(value["a"]), has_bias)
