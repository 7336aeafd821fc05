"""Reductions behind the experts of a mixture by the library: torch's grouped matmul, and one kernel for the sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ditron_inductor.lowering.expert_sums.combine_kernel import prepare
from ditron_inductor.task.nodes import ReducedExperts


def by_library(
    node: ReducedExperts, operands: Sequence[torch.Tensor], reduce: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[..., Any]:
    """Returns a function of node.split(operands). reduce: reduces the sums [T, N] by the library."""
    x, weight, _, places, scale, added = node.split(operands)
    combine = prepare(node.sums, x.new_empty(x.shape[0], weight.shape[2]), places, scale, added, "library")

    def call(
        x: torch.Tensor,
        weight: torch.Tensor,
        ends: torch.Tensor,
        places: torch.Tensor,
        scale: torch.Tensor,
        added: torch.Tensor | None,
    ) -> torch.Tensor:
        (total,) = combine(torch._grouped_mm(x, weight, offs=ends), places, scale, added)
        return reduce(total)

    return call
