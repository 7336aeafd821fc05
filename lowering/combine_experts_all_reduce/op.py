"""Declares how `combine_experts_all_reduce` runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ditron_inductor.lowering.combine_experts_all_reduce import chunked
from ditron_inductor.lowering.expert_sums import runs
from ditron_inductor.lowering.host.kind import Chunked, Lowering, bound
from ditron_inductor.task import reference
from ditron_inductor.task.nodes import CombineExpertsAllReduce


def library(node: CombineExpertsAllReduce, operands: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """Returns what runs such calls by the library; see `kind.Library`. On a GPU one kernel adds up the slots."""
    return runs.then(node, operands, bound(reference.all_reduce_, node))


LOWERING = Lowering(
    CombineExpertsAllReduce, library, chunked=Chunked(chunked.geometry, chunked.combine_experts_all_reduce)
)
