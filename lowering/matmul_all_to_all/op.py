"""How `matmul_all_to_all` runs: its strategies, and the library's matmuls and collective."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ditron_inductor.lowering.host.kind import Chunked, Lowering, Tile
from ditron_inductor.lowering.matmul_all_to_all import chunked, tile
from ditron_inductor.task import reference
from ditron_inductor.task.nodes import MatmulAllToAll


def library(node: MatmulAllToAll, operands: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """What runs such calls by the library; see `Library`."""
    return functools.partial(
        reference.matmul_all_to_all,
        gather_dim=node.gather_dim,
        parts=node.parts,
        world_size=node.world_size,
        group_name=node.group_name,
    )


LOWERING = Lowering(
    MatmulAllToAll,
    library,
    Tile(tile.geometry, tile.matmul_all_to_all),
    Chunked(chunked.obstacle, chunked.geometry, chunked.matmul_all_to_all),
)
