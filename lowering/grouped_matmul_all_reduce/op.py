"""Declares how `grouped_matmul_all_reduce` runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ditron_inductor.lowering.grouped_matmul_all_reduce import chunked
from ditron_inductor.lowering.grouped_matmul_all_reduce.combine import Combiner
from ditron_inductor.lowering.host.kind import Chunked, Lowering
from ditron_inductor.task import reference
from ditron_inductor.task.nodes import GroupedMatmulAllReduce


def library(node: GroupedMatmulAllReduce, operands: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """Returns what runs such calls by the library; see `kind.Library`. On a GPU one kernel adds up the slots."""
    weight = operands[1]
    combine = Combiner(node, weight.shape[2], weight.device) if weight.is_cuda else None

    def call(
        x: torch.Tensor,
        weight: torch.Tensor,
        ends: torch.Tensor,
        places: torch.Tensor,
        scale: torch.Tensor,
        added: torch.Tensor | None,
    ) -> torch.Tensor:
        products = reference.grouped_products(x, weight, ends)
        if combine is None:
            total = reference.combined(products, places, scale, added, node.top_k)
        else:
            total = x.new_empty(places.shape[0] // node.top_k, weight.shape[2])
            combine(products, places, scale, added, 0, total)
        return reference.all_reduce_(
            total, reduce_op=node.reduce_op, world_size=node.world_size, group_name=node.group_name
        )

    return call


LOWERING = Lowering(
    GroupedMatmulAllReduce, library, chunked=Chunked(chunked.geometry, chunked.grouped_matmul_all_reduce)
)
