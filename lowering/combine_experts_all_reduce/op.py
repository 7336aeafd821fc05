"""Declares how `combine_experts_all_reduce` runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ditron_inductor.lowering.combine_experts import combine_kernel
from ditron_inductor.lowering.combine_experts_all_reduce import chunked
from ditron_inductor.lowering.host.kind import Chunked, Lowering
from ditron_inductor.task import reference
from ditron_inductor.task.nodes import CombineExpertsAllReduce


def library(node: CombineExpertsAllReduce, operands: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """Returns what runs such calls by the library; see `kind.Library`. On a GPU one kernel adds up the slots."""
    products, places, scale, added = node.split(operands)
    combine = combine_kernel.prepare(node, products, places, scale, added, "library")

    def call(
        products: torch.Tensor, places: torch.Tensor, scale: torch.Tensor, added: torch.Tensor | None
    ) -> torch.Tensor:
        (total,) = combine(products, places, scale, added)
        return reference.all_reduce_(
            total, reduce_op=node.reduce_op, world_size=node.world_size, group_name=node.group_name
        )

    return call


LOWERING = Lowering(
    CombineExpertsAllReduce, library, chunked=Chunked(chunked.geometry, chunked.combine_experts_all_reduce)
)
