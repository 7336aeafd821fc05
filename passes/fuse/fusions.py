"""The fusions of one collective with matmuls, in the order in which they run: a part of the pipeline.

Other passes ask this list, by what a kind declares, whether a collective could be fused, and never for a kind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from ditron_inductor.passes.fuse.all_gather_matmul import all_gather_matmul
from ditron_inductor.passes.fuse.all_to_all_matmul import all_to_all_matmul
from ditron_inductor.passes.fuse.grouped_matmul_all_reduce import grouped_matmul_all_reduce
from ditron_inductor.passes.fuse.grouped_matmul_reduce_scatter import grouped_matmul_reduce_scatter
from ditron_inductor.passes.fuse.matmul_all_gather import matmul_all_gather
from ditron_inductor.passes.fuse.matmul_all_reduce import matmul_all_reduce
from ditron_inductor.passes.fuse.matmul_all_to_all import matmul_all_to_all
from ditron_inductor.passes.fuse.matmul_reduce_scatter import matmul_reduce_scatter
from ditron_inductor.passes.graph.fusion import Fusion
from ditron_inductor.passes.graph.reasons import refused
from ditron_inductor.task.nodes import ReducedSum, TaskNode

FUSIONS: tuple[Fusion, ...] = (
    # Gathers before reductions: a matmul between both goes with its gather, and its result is reduced afterwards.
    all_gather_matmul,
    matmul_reduce_scatter,
    matmul_all_reduce,
    # Gathers of results: those that no matmul behind them has taken.
    matmul_all_gather,
    # All-to-alls, which share no matmul with the gathers above.
    matmul_all_to_all,
    all_to_all_matmul,
    # What the experts of a mixture return, which is no sum of matmuls.
    grouped_matmul_all_reduce,
    grouped_matmul_reduce_scatter,
)
"""A comment says why the fusion, or the fusions, below it stand at this place."""
REDUCTIONS: tuple[Fusion, ...] = tuple(fusion for fusion in FUSIONS if issubclass(fusion.node, ReducedSum))
"""The fusions of products that may be changed before they are reduced; `find` also takes what reads the product."""


def takes(node: fx.Node, of: Callable[[type[TaskNode]], bool], *given: Any) -> bool:
    """Whether a fusion whose kind is `of` those that are asked for would take a collective."""
    asked = (fusion for fusion in FUSIONS if node.target in fusion.ops and of(fusion.node))
    return any(not refused(fusion.find(node, *given)) for fusion in asked)
