"""experts_all_reduce_rms_norm, strategy `tile`: a launch of experts_all_reduce, then a launch of the sums and the norm.

For one token everything is one launch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ditron_inductor.lowering.experts_all_reduce import tile
from ditron_inductor.lowering.host.launch import Launch
from ditron_inductor.lowering.matmul_all_reduce_rms_norm.tile import Geometry, with_norm
from ditron_inductor.lowering.norms.add_norm import Outputs
from ditron_inductor.task.nodes import ExpertsAllReduceRmsNorm


def geometry(node: ExpertsAllReduceRmsNorm, launch: Launch, x: torch.Tensor, columns: int) -> Geometry:
    """Returns the Geometry for x [S, K]. columns: N."""
    product = tile.geometry(node.reduction, launch, x, columns)
    return with_norm(node, launch, product, [product.M, product.N], x.device)


def experts_all_reduce_rms_norm(
    node: ExpertsAllReduceRmsNorm,
    launch: Launch,
    sizes: Geometry,
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
    call = tile.ExpertsCall(node, launch, sizes.product, x, matrices, experts, factors)
    extras = [one.contiguous() for one in extras]
    if sizes.add_norm is None:
        return call.reduced_and_normed(given, extras)
    (reduced,) = call.reduced(extras)
    return sizes.add_norm(reduced, given)
