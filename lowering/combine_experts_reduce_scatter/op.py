"""Declares how `combine_experts_reduce_scatter` runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ditron_inductor.lowering.combine_experts_reduce_scatter import chunked
from ditron_inductor.lowering.expert_sums import runs
from ditron_inductor.lowering.host.kind import Chunked, Lowering
from ditron_inductor.task import reference
from ditron_inductor.task.nodes import CombineExpertsReduceScatter


def library(node: CombineExpertsReduceScatter, operands: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """Returns what runs such calls by the library; see `kind.Library`. On a GPU one kernel adds up the slots."""

    def reduce(total: torch.Tensor) -> torch.Tensor:
        return reference.reduce_scatter(
            total.unflatten(0, (node.outer, -1)),
            scatter_dim=1,
            reduce_op=node.reduce_op,
            world_size=node.world_size,
            group_name=node.group_name,
        ).flatten(0, 1)

    return runs.then(node, operands, reduce)


LOWERING = Lowering(
    CombineExpertsReduceScatter, library, chunked=Chunked(chunked.geometry, chunked.combine_experts_reduce_scatter)
)
