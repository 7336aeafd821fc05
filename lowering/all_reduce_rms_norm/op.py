"""Declares how `all_reduce_rms_norm` runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ditron_inductor.lowering.all_reduce_rms_norm import norm_in_band, norm_kernel
from ditron_inductor.lowering.expert_sums.combine_kernel import sums_of_slots
from ditron_inductor.lowering.host.kind import Lowering, Tile
from ditron_inductor.lowering.host.launch import Launch
from ditron_inductor.lowering.norms import norm_library
from ditron_inductor.lowering.norms.add_norm import Outputs
from ditron_inductor.task.nodes import AllReduceRmsNorm


def library(node: AllReduceRmsNorm, operands: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """Returns what runs such calls by the library; see `kind.Library`. Only the reduction is the library's."""
    first = operands[0]
    normalise = norm_library.normaliser(node, list(node.contributed({"x": first.shape})), first.device)

    def call(x: torch.Tensor, given: tuple[torch.Tensor | None, ...], *slots: torch.Tensor | None) -> Outputs:
        rows = summed(node, x, *slots) if slots else x.clone(memory_format=torch.contiguous_format)
        return normalise(norm_library.reduced(node, rows), given)

    return call


def summed(
    node: AllReduceRmsNorm, products: torch.Tensor, factors: torch.Tensor | None, added: torch.Tensor | None
) -> torch.Tensor:
    """Returns what a rank reduces, [T, N], contiguous, if products are summed. See the node for the operands."""
    (total,) = sums_of_slots(node.sums, [one for one in (products, factors, added) if one is not None])
    return total


def geometry(node: AllReduceRmsNorm, launch: Launch, x: torch.Tensor, columns: int) -> norm_kernel.Geometry:
    """Returns the Geometry for x [.., N]. columns: N."""
    # Of the tensor only the number of its rows counts.
    return norm_kernel.geometry(node, launch, x[: len(x) // node.top_k] if node.top_k else x, columns)


def tile(
    node: AllReduceRmsNorm,
    launch: Launch,
    sizes: norm_kernel.Geometry,
    x: torch.Tensor,
    given: tuple[torch.Tensor | None, ...],
    *slots: torch.Tensor | None,
) -> Outputs:
    """Returns the Outputs for x, with the products of experts summed in the same launch if that sends in band. slots:
    if products are summed, their factors and what is added, or None.
    """
    if not slots:
        return norm_kernel.all_reduce_rms_norm(node, launch, sizes, x, given)
    if sizes.in_band is None:
        return norm_kernel.all_reduce_rms_norm(node, launch, sizes, summed(node, x, *slots), given, in_place=True)
    products = x.contiguous()
    return norm_in_band.all_reduce_rms_norm(node, launch, sizes.M, sizes.N, sizes.in_band, products, given, *slots)


LOWERING = Lowering(AllReduceRmsNorm, library, Tile(geometry, tile))
