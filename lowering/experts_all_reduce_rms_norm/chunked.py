"""experts_all_reduce_rms_norm, strategy `chunked`: the sums of a rank, then the kernel of all_reduce_rms_norm."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ditron_inductor.lowering.all_reduce_rms_norm import norm_kernel
from ditron_inductor.lowering.experts_all_reduce.local_sums import local_sums
from ditron_inductor.lowering.host.launch import Launch
from ditron_inductor.lowering.norms.add_norm import Outputs
from ditron_inductor.task.nodes import ExpertsAllReduceRmsNorm


def geometry(
    node: ExpertsAllReduceRmsNorm, launch: Launch, x: torch.Tensor, columns: int, k: int
) -> norm_kernel.Geometry:
    """Returns the Geometry for x [S, K]. columns: N. k: the largest K on any rank."""
    # Of the tensor that is reduced only the number of its rows counts.
    return norm_kernel.geometry(node, launch, x[: x.shape[0] // node.top_k], columns)


def in_band(sizes: norm_kernel.Geometry | None) -> bool:
    """Returns whether the kernel behind the sums sends in band."""
    return sizes is not None and sizes.in_band is not None


def experts_all_reduce_rms_norm(
    node: ExpertsAllReduceRmsNorm,
    launch: Launch,
    sizes: norm_kernel.Geometry,
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
    return norm_kernel.all_reduce_rms_norm(node, launch, sizes, total, given, in_place=True)
