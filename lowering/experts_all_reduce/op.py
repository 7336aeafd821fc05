"""Declares how `experts_all_reduce` runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ditron_inductor.lowering.expert_sums.local_sums import local_sums
from ditron_inductor.lowering.experts_all_reduce import chunked, tile
from ditron_inductor.lowering.host.kind import Chunked, Lowering, Tile, bound
from ditron_inductor.task import reference
from ditron_inductor.task.nodes import ExpertsAllReduce


def library(node: ExpertsAllReduce, operands: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """Returns what runs such calls by the library; see `kind.Library`. Only the reduction is the library's."""
    reduce = bound(reference.all_reduce_, node)
    return lambda *given: [reduce(local_sums(node, *given))]


LOWERING = Lowering(
    ExpertsAllReduce,
    library,
    Tile(tile.geometry, tile.experts_all_reduce),
    Chunked(chunked.geometry, chunked.experts_all_reduce),
)
