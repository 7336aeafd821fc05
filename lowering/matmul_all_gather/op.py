"""How `matmul_all_gather` runs: its strategies, and the library's matmuls and collective."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ditron_inductor.lowering.host.kind import Lowering, Tile
from ditron_inductor.lowering.matmul_all_gather import tile
from ditron_inductor.task import reference
from ditron_inductor.task.nodes import MatmulAllGather


def library(node: MatmulAllGather, operands: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """What runs such calls by the library; see `Library`."""
    return functools.partial(
        reference.matmul_all_gather,
        gather_dim=node.gather_dim,
        world_size=node.world_size,
        group_name=node.group_name,
    )


LOWERING = Lowering(
    MatmulAllGather,
    library,
    Tile(tile.geometry, tile.matmul_all_gather),
)
