"""How `matmul_reduce_scatter` runs: its strategies, and the library's matmuls and collective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ditron_inductor.lowering.epilogues import finished
from ditron_inductor.lowering.host.kind import Chunked, Lowering, Tile, bound
from ditron_inductor.lowering.matmul_reduce_scatter import chunked, tile
from ditron_inductor.task import reference
from ditron_inductor.task.nodes import MatmulReduceScatter


def library(node: MatmulReduceScatter, operands: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """What runs such calls by the library; see `Library`."""
    return finished(bound(reference.matmul_reduce_scatter, node), node, operands[0])


LOWERING = Lowering(
    MatmulReduceScatter,
    library,
    Tile(tile.geometry, tile.matmul_reduce_scatter),
    Chunked(chunked.geometry, chunked.matmul_reduce_scatter),
)
