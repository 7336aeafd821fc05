"""How `matmul_all_reduce` runs: its strategies, and the library's matmuls and collective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ditron_inductor.lowering.all_reduce import chunked
from ditron_inductor.lowering.epilogues import finished
from ditron_inductor.lowering.host.kind import Chunked, Lowering, Tile, bound
from ditron_inductor.lowering.matmul_all_reduce import one_shot, two_shot
from ditron_inductor.lowering.sums import few_or_many
from ditron_inductor.task import reference
from ditron_inductor.task.nodes import MatmulAllReduce

TILE = few_or_many(
    one_shot.fits,
    Tile(one_shot.geometry, one_shot.matmul_all_reduce),
    Tile(two_shot.geometry, two_shot.matmul_all_reduce),
)


def library(node: MatmulAllReduce, operands: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """What runs such calls by the library; see `Library`."""
    return finished(bound(reference.matmul_all_reduce, node), node, operands[0])


LOWERING = Lowering(
    MatmulAllReduce,
    library,
    TILE,
    Chunked(chunked.geometry, chunked.reduced_sum),
)
