"""Declares how `experts_all_reduce_rms_norm` runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ditron_inductor.lowering.expert_sums.local_sums import local_sums
from ditron_inductor.lowering.experts_all_reduce_rms_norm import chunked, tile
from ditron_inductor.lowering.host.kind import Chunked, Lowering, Tile
from ditron_inductor.lowering.matmul_all_reduce_rms_norm.chunked import in_band
from ditron_inductor.lowering.norms import norm_library
from ditron_inductor.lowering.norms.add_norm import Outputs
from ditron_inductor.task.nodes import ExpertsAllReduceRmsNorm


def library(node: ExpertsAllReduceRmsNorm, operands: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """Returns what runs such calls by the library; see `kind.Library`. Only the reduction is the library's."""
    x, matrices, *_ = node.split(operands)
    normalise = norm_library.normaliser(node, [x.shape[0] // node.top_k, matrices.shape[2]], x.device)

    def call(
        x: torch.Tensor,
        matrices: torch.Tensor,
        experts: torch.Tensor,
        factors: torch.Tensor,
        given: tuple[torch.Tensor | None, ...],
        extras: Sequence[torch.Tensor] = (),
    ) -> Outputs:
        total = local_sums(node.reduction, x, matrices, experts, factors, extras)
        return normalise(norm_library.reduced(node, total), given)

    return call


LOWERING = Lowering(
    ExpertsAllReduceRmsNorm,
    library,
    Tile(tile.geometry, tile.experts_all_reduce_rms_norm),
    Chunked(chunked.geometry, chunked.experts_all_reduce_rms_norm, in_band),
)
