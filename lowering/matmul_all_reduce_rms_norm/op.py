"""Declares how `matmul_all_reduce_rms_norm` runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ditron_inductor.lowering.epilogues import preparer_of
from ditron_inductor.lowering.host.kind import Chunked, Lowering, Tile
from ditron_inductor.lowering.matmul_all_reduce_rms_norm import chunked, tile
from ditron_inductor.lowering.norms import norm_library
from ditron_inductor.lowering.norms.add_norm import Outputs
from ditron_inductor.task import reference
from ditron_inductor.task.nodes import MatmulAllReduceRmsNorm


def library(node: MatmulAllReduceRmsNorm, operands: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """Returns what runs such calls by the library; see `kind.Library`."""
    a, b, *_ = node.split(operands)
    device = a[0].device
    normalise = norm_library.normaliser(node, [*a[0].shape[:-1], b[0].shape[1]], device)
    preparer = preparer_of(node.reduction, device)

    def call(
        a: Sequence[torch.Tensor],
        b: Sequence[torch.Tensor],
        bias: torch.Tensor | None,
        given: tuple[torch.Tensor | None, ...],
        extras: Sequence[torch.Tensor] = (),
    ) -> Outputs:
        product = reference.sum_of_products(a, b, bias).contiguous()
        if preparer is not None:
            preparer.prepare(product, extras)
        return normalise(norm_library.reduced(node, product), given)

    return call


LOWERING = Lowering(
    MatmulAllReduceRmsNorm,
    library,
    Tile(tile.geometry, tile.matmul_all_reduce_rms_norm),
    Chunked(chunked.geometry, chunked.matmul_all_reduce_rms_norm, chunked.in_band),
)
