"""experts_all_reduce_rms_norm, strategy `chunked`: the sums of a rank, and one kernel that reduces and normalises."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ditron_inductor.lowering.expert_sums.local_sums import local_sums
from ditron_inductor.lowering.host.launch import Launch
from ditron_inductor.lowering.matmul_all_reduce_rms_norm.chunked import Small, reduced_and_normed, small
from ditron_inductor.lowering.norms.add_norm import Outputs
from ditron_inductor.task.nodes import ExpertsAllReduceRmsNorm


def geometry(node: ExpertsAllReduceRmsNorm, launch: Launch, x: torch.Tensor, columns: int, k: int) -> Small:
    """Returns the Geometry for x [S, K]. columns: N. k: the largest K on any rank."""
    # Of the tensor that is multiplied only the number of its rows counts.
    return small(node, launch, x[: x.shape[0] // node.top_k], columns)


def experts_all_reduce_rms_norm(
    node: ExpertsAllReduceRmsNorm,
    launch: Launch,
    sizes: Small,
    x: torch.Tensor,
    matrices: torch.Tensor,
    experts: torch.Tensor,
    factors: torch.Tensor,
    given: tuple[torch.Tensor | None, ...],
    extras: Sequence[torch.Tensor] = (),
) -> Outputs:
    """Returns (normed, total) [T, N], with equal bits on all ranks, and what is saved. given: see nodes.EXTRAS. extras:
    what is added to the sums of a rank.
    """
    total = local_sums(node.reduction, x, matrices, experts, factors, extras)
    return reduced_and_normed(node, launch, sizes, total, given)
