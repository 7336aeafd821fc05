"""How `matmul_all_reduce` runs: its strategies, and the library's matmuls and collective."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ditron_inductor.lowering.all_reduce import chunked
from ditron_inductor.lowering.epilogues import finished
from ditron_inductor.lowering.host.kind import Chunked, Lowering, Tile
from ditron_inductor.lowering.matmul_all_reduce import tile
from ditron_inductor.task import reference
from ditron_inductor.task.nodes import MatmulAllReduce


def library(node: MatmulAllReduce, operands: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """What runs such calls by the library; see `Library`."""
    reduce = functools.partial(
        reference.matmul_all_reduce,
        reduce_op=node.reduce_op,
        world_size=node.world_size,
        group_name=node.group_name,
    )
    return finished(reduce, node, operands[0])


LOWERING = Lowering(
    MatmulAllReduce,
    library,
    Tile(tile.geometry, tile.matmul_all_reduce),
    Chunked(chunked.obstacle, chunked.geometry, chunked.reduced_sum),
)
