"""Declares how `grouped_matmul_reduce_scatter` runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ditron_inductor.lowering.expert_sums.grouped_library import by_library
from ditron_inductor.lowering.expert_sums.reduced_kernel import geometry, reduced_experts
from ditron_inductor.lowering.host.kind import Lowering, Tile
from ditron_inductor.task import reference
from ditron_inductor.task.nodes import GroupedMatmulReduceScatter


def library(node: GroupedMatmulReduceScatter, operands: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """Returns what runs such calls by the library; see `kind.Library`. On a GPU one kernel adds up the slots."""

    def reduce(total: torch.Tensor) -> torch.Tensor:
        return reference.reduce_scatter(
            total.unflatten(0, (node.outer, -1)),
            scatter_dim=1,
            reduce_op=node.reduce_op,
            world_size=node.world_size,
            group_name=node.group_name,
        ).flatten(0, 1)

    return by_library(node, reduce)


LOWERING = Lowering(GroupedMatmulReduceScatter, library, tile=Tile(geometry, reduced_experts))
