"""How `all_gather_matmul` runs: its strategies, and the library's collective and matmuls."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ditron_inductor.lowering.all_gather_matmul import chunked, tile
from ditron_inductor.lowering.all_gather_matmul.shard_norm import gather_library, make_shard
from ditron_inductor.lowering.epilogues import Finisher
from ditron_inductor.lowering.host.kind import Chunked, Lowering, Tile
from ditron_inductor.task.nodes import AllGatherMatmul


def library(node: AllGatherMatmul, operands: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """What runs such calls by the library; see `Library`."""
    shard, _, extras, _ = node.split(operands)
    parsed = node.parsed
    return functools.partial(
        gather_library,
        make_shard(node, shard.shape, shard.device),
        node=node,
        multiply=None if parsed is None else Finisher(parsed, shard, extras).multiply,
        gather_dim=node.gather_dim,
        world_size=node.world_size,
        group_name=node.group_name,
        return_gathered=node.return_gathered,
    )


LOWERING = Lowering(
    AllGatherMatmul,
    library,
    Tile(tile.geometry, tile.all_gather_matmul),
    Chunked(chunked.geometry, chunked.all_gather_matmul),
)
