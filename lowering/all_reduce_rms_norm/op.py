"""Declares how `all_reduce_rms_norm` runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ditron_inductor.lowering.all_reduce_rms_norm import norm_kernel
from ditron_inductor.lowering.host.kind import Lowering, Tile
from ditron_inductor.lowering.norms import norm_library
from ditron_inductor.lowering.norms.add_norm import Outputs
from ditron_inductor.task.nodes import AllReduceRmsNorm


def library(node: AllReduceRmsNorm, operands: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """Returns what runs such calls by the library; see `kind.Library`."""
    normalise = norm_library.normaliser(node, list(operands[0].shape), operands[0].device)

    def call(x: torch.Tensor, given: tuple[torch.Tensor | None, ...]) -> Outputs:
        return normalise(norm_library.reduced(node, x.clone(memory_format=torch.contiguous_format)), given)

    return call


LOWERING = Lowering(AllReduceRmsNorm, library, Tile(norm_kernel.geometry, norm_kernel.all_reduce_rms_norm))
