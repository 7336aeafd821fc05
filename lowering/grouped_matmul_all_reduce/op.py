"""Declares how `grouped_matmul_all_reduce` runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ditron_inductor.lowering.expert_sums.grouped_library import by_library
from ditron_inductor.lowering.expert_sums.reduced_kernel import geometry, reduced_experts
from ditron_inductor.lowering.host.kind import Lowering, Tile, bound
from ditron_inductor.task import reference
from ditron_inductor.task.nodes import GroupedMatmulAllReduce


def library(node: GroupedMatmulAllReduce, operands: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """Returns what runs such calls by the library; see `kind.Library`. On a GPU one kernel adds up the slots."""
    return by_library(node, bound(reference.all_reduce_, node))


LOWERING = Lowering(GroupedMatmulAllReduce, library, tile=Tile(geometry, reduced_experts))
