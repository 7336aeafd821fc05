"""matmul_all_reduce_rms_norm, strategy `chunked`: a library product and one kernel, or an all-reduce in parts and one
kernel.

The kernel of all_reduce_rms_norm reduces and normalises small products; of few rows it adds up parts of the product
too (see divided_product.py). Larger products are reduced in parts, as by matmul_all_reduce, and then one launch
computes the sums and the norm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ditron_inductor.lowering.all_reduce import all_reduce_kernel, chunked
from ditron_inductor.lowering.all_reduce_rms_norm import norm_in_band, norm_kernel
from ditron_inductor.lowering.chunked_exchange import Operands
from ditron_inductor.lowering.epilogues import Preparer, preparer_of
from ditron_inductor.lowering.host.launch import Launch, rows_of
from ditron_inductor.lowering.matmul_all_reduce_rms_norm.divided_product import DividedProduct, divided_product
from ditron_inductor.lowering.norms.add_norm import AddNorm, Outputs, make_add_norm
from ditron_inductor.task.nodes import MatmulAllReduceRmsNorm


@dataclass(frozen=True, eq=False)
class InParts:
    """The layout of a call in parts: that of the reduced product, and the kernel of the norm."""

    product: chunked.Parts
    add_norm: AddNorm

    @property
    def nbytes(self) -> int:
        return self.product.nbytes


@dataclass(frozen=True, eq=False)
class Small:
    """The layout of a call with one kernel behind the product. preparer: the epilogue's part before it, or None.
    divided: what computes the product in parts, which that kernel adds up, or None.
    """

    rows: norm_kernel.Geometry
    preparer: Preparer | None
    divided: DividedProduct | None

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes


Geometry = InParts | Small


def in_band(sizes: Geometry | None) -> bool:
    """Returns whether the kernel behind the product sends in band."""
    return isinstance(sizes, Small) and sizes.rows.in_band is not None


def geometry(node: MatmulAllReduceRmsNorm, launch: Launch, a: torch.Tensor, columns: int, k: int) -> Geometry:
    """Returns the Geometry for a [.., K]. columns: N. k: the largest K on any rank."""
    if all_reduce_kernel.fits(launch, math.prod(a.shape[:-1]) * columns, a.element_size()):
        rows, preparer = norm_kernel.geometry(node, launch, a, columns), preparer_of(node.reduction, a.device)
        alone = preparer is None and node.num_products == 1 and not node.has_bias
        divides = alone and rows.in_band is not None
        overlap = node.policy.overlap
        return Small(rows, preparer, divided_product(a, rows.M, columns, overlap) if divides else None)
    parts = chunked.parts_geometry(node.reduction, launch, a, columns, k)
    return InParts(parts, make_add_norm(node, [*a.shape[:-1], columns], a.device))


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
    if isinstance(sizes, InParts):
        (reduced,) = chunked.reduced_sum(node.reduction, launch, sizes.product, a, b, bias, extras)
        return sizes.add_norm(reduced, given)
    rows = sizes.rows
    product = a[0].new_empty([*a[0].shape[:-1], rows.N])
    lefts = [rows_of(left) for left in a]
    if sizes.divided is not None and rows.in_band is not None and sizes.divided.takes(lefts[0], b[0]):
        parts = sizes.divided.multiply(lefts[0], b[0])
        return norm_in_band.all_reduce_rms_norm(node, launch, rows.M, rows.N, rows.in_band, product, given, parts=parts)
    Operands([[left] for left in lefts], b, bias).multiply(0, product.view(rows.M, rows.N))
    if sizes.preparer is not None:
        sizes.preparer.prepare(product, extras)
    return norm_kernel.all_reduce_rms_norm(node, launch, rows, product, given, in_place=True)
