"""How `all_to_all_matmul` runs: its strategies, and the library's matmuls and collective."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ditron_inductor.lowering.all_to_all_matmul import chunked, tile
from ditron_inductor.lowering.host.kind import Chunked, Lowering, Tile
from ditron_inductor.task import reference
from ditron_inductor.task.nodes import AllToAllMatmul


def library(node: AllToAllMatmul, operands: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """What runs such calls by the library; see `Library`."""
    return functools.partial(
        reference.all_to_all_matmul,
        scatter_dim=node.scatter_dim,
        parts=node.parts,
        return_received=node.return_received,
        world_size=node.world_size,
        group_name=node.group_name,
    )


LOWERING = Lowering(
    AllToAllMatmul,
    library,
    Tile(tile.geometry, tile.all_to_all_matmul),
    Chunked(chunked.obstacle, chunked.geometry, chunked.all_to_all_matmul),
)
