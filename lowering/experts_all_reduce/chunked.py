"""experts_all_reduce, strategy `chunked`: the sums of a rank, and one kernel behind them that reduces them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ditron_inductor.lowering.all_reduce import all_reduce_kernel
from ditron_inductor.lowering.expert_sums.local_sums import local_sums
from ditron_inductor.lowering.host.launch import Launch
from ditron_inductor.task.nodes import ExpertsAllReduce


def geometry(
    node: ExpertsAllReduce, launch: Launch, x: torch.Tensor, columns: int, k: int
) -> all_reduce_kernel.Geometry:
    """Returns the Geometry for x [S, K]. columns: N. k: the largest K on any rank."""
    rows = x.shape[0] // node.top_k
    return all_reduce_kernel.geometry_of(launch, node.world_size, rows, columns, x.element_size())


def experts_all_reduce(
    node: ExpertsAllReduce,
    launch: Launch,
    sizes: all_reduce_kernel.Geometry,
    x: torch.Tensor,
    matrices: torch.Tensor,
    experts: torch.Tensor,
    factors: torch.Tensor,
    extras: Sequence[torch.Tensor] = (),
) -> list[torch.Tensor]:
    """Returns [the reduced sums [T, N]], with equal bits on all ranks. extras: what is added to the sums of a rank."""
    total = local_sums(node, x, matrices, experts, factors, extras)
    return all_reduce_kernel.reduced(node, launch, sizes, total)
