"""matmul_all_reduce_rms_norm, strategy `tile`: matmul_all_reduce in one launch, then the sums and the norm in one.

For the few rows of decoding all of it is one launch, see lowering/matmul_all_reduce/one_shot.py.
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
    """Sizes that all ranks share: those of the reduced product, and the kernel behind it, None if that is in one."""

    product: sums.Geometry
    add_norm: AddNorm | None

    @property
    def nbytes(self) -> int:
        return self.product.nbytes


def geometry(node: MatmulAllReduceRmsNorm, launch: Launch, a: torch.Tensor, columns: int) -> Geometry:
    """a [.., K]; columns: N. Equal on all ranks."""
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
    """a_i [.., K_i], b_i [K_i, N], bias [N], extras as the node's epilogue reads them; returns (normed, total) [.., N],
    the same bits on every rank, and what is saved.
    """
    if sizes.add_norm is None:
        return one_shot.matmul_all_reduce_rms_norm(node, launch, sizes.product, a, b, bias, given, extras)
    (reduced,) = TILE.run(node.reduction, launch, sizes.product, a, b, bias, extras)
    return sizes.add_norm(reduced, given)
