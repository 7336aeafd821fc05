"""How `matmul_all_reduce_rms_norm` runs: its strategies, and the library's calls with a kernel behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ditron_inductor.lowering.all_reduce_rms_norm import library as norm_library
from ditron_inductor.lowering.host.kind import Chunked, Lowering, Tile
from ditron_inductor.lowering.matmul_all_reduce_rms_norm import chunked, tile
from ditron_inductor.task.nodes import MatmulAllReduceRmsNorm


def library(node: MatmulAllReduceRmsNorm, operands: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """What runs such calls by the library; see `Library`."""
    a, b, *_ = node.split(operands)
    return norm_library.make(node, [*a[0].shape[:-1], b[0].shape[1]], a[0].device)


LOWERING = Lowering(
    MatmulAllReduceRmsNorm,
    library,
    Tile(tile.geometry, tile.matmul_all_reduce_rms_norm),
    Chunked(chunked.obstacle, chunked.geometry, chunked.matmul_all_reduce_rms_norm),
)
