"""The sums of a rank, in two launches: the products of all slots, and their weighted sums."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ditron_inductor.lowering.combine_experts.op import combine_experts
from ditron_inductor.lowering.expert_projections.experts_kernel import expert_projections
from ditron_inductor.task.nodes import ExpertsAllReduce


def local_sums(
    node: ExpertsAllReduce,
    x: torch.Tensor,
    matrices: torch.Tensor,
    experts: torch.Tensor,
    factors: torch.Tensor,
    extras: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    """Returns what this rank reduces, [T, N], contiguous. See the node for the operands."""
    (products,) = expert_projections(node.products, [x, experts, matrices])
    (total,) = combine_experts(node.sums, [products, factors.reshape(-1), *extras])
    return total
