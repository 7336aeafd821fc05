"""matmul_all_reduce_rms_norm, strategy `tile`: a launch of matmul_all_reduce, then a launch of the sums and the norm.

For the few rows of decoding everything is one launch (see lowering/matmul_all_reduce/one_shot.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ditron_inductor.lowering import sums
from ditron_inductor.lowering.host.launch import Launch
from ditron_inductor.lowering.matmul_all_reduce import one_shot
from ditron_inductor.lowering.matmul_all_reduce.op import TILE
from ditron_inductor.lowering.norms.add_norm import AddNorm, Outputs, make_add_norm
from ditron_inductor.task.nodes import MatmulAllReduceRmsNorm


@dataclass(frozen=True)
class Geometry:
    """The layout of a call: that of the product, and the kernel of the norm, None if it is in one launch."""

    product: sums.Geometry
    add_norm: AddNorm | None

    @property
    def nbytes(self) -> int:
        return self.product.nbytes


def geometry(node: MatmulAllReduceRmsNorm, launch: Launch, a: torch.Tensor, columns: int) -> Geometry:
    """Returns the Geometry for a [.., K]. columns: N."""
    product = TILE.geometry(node.reduction, launch, a, columns)
    if one_shot.takes_norm(launch, product):
        return Geometry(product, None)
    return Geometry(product, make_add_norm(node, [*a.shape[:-1], columns], a.device))


def matmul_all_reduce_rms_norm(
    node: MatmulAllReduceRmsNorm,
    launch: Launch,
    sizes: Geometry,
    a: Sequence[torch.Tensor],
    b: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    given: tuple[torch.Tensor | None, ...],
    extras: Sequence[torch.Tensor] = (),
) -> Outputs:
    """Returns (normed, total) [.., N], with equal bits on all ranks, and what is saved, for a_i [.., K_i], b_i [K_i, N]
    and bias [N]. extras: the extra tensors of the epilogue. given: see nodes.EXTRAS.
    """
    if sizes.add_norm is None:
        return one_shot.matmul_all_reduce_rms_norm(node, launch, sizes.product, a, b, bias, given, extras)
    (reduced,) = TILE.run(node.reduction, launch, sizes.product, a, b, bias, extras)
    return sizes.add_norm(reduced, given)
