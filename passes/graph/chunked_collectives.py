"""A pass writes a reduce-scatter or an all-gather along any dimension by these functions, in the forms that fusions
read.

    dimension 0               x -> reduce_scatter -> wait
    others of size 1 before   x -> reshape [S, ..] -> reduce_scatter -> wait -> reshape [1, .., S/W, ..]
    any other                 x -> split -> getitem x W -> cat (dimension 0) -> reduce_scatter -> wait

The forms behind a gather are alike. All sizes are known.
"""

from __future__ import annotations

import math

from torch import fx

from ditron_inductor.passes.graph import rewriting
from ditron_inductor.passes.graph.collectives import ALL_GATHER, REDUCE_SCATTER, WAIT


def scattered(graph: fx.Graph, x: fx.Node, dim: int, reduce_op: str, world_size: int, group_name: str) -> fx.Node:
    """Inserts the reduce-scatter of `x` along `dim` at the graph's insertion point; returns this rank's chunk."""
    shape = list(x.meta["val"].shape)
    result = [*shape[:dim], shape[dim] // world_size, *shape[dim + 1 :]]
    flat = math.prod(shape[:dim]) == 1
    operand, part = x, result
    if dim and flat:
        operand, part = rewriting.shaped(graph, x, tuple(shape[dim:])), result[dim:]
    elif dim:
        operand = rewriting.regrouped(graph, x, dim, 0, world_size, x)
    start = rewriting.call(graph, REDUCE_SCATTER, (operand, reduce_op, world_size, group_name), x, tuple(part))
    wait = rewriting.call(graph, WAIT, (start,), x, tuple(part))
    return rewriting.shaped(graph, wait, tuple(result)) if dim and flat else wait


def gathered(graph: fx.Graph, part: fx.Node, dim: int, world_size: int, group_name: str) -> fx.Node:
    """Inserts the all-gather of all ranks' chunks along `dim` at the graph's insertion point; returns the whole."""
    shape = list(part.meta["val"].shape)
    result = [*shape[:dim], shape[dim] * world_size, *shape[dim + 1 :]]
    flat = math.prod(shape[:dim]) == 1
    operand = rewriting.shaped(graph, part, tuple(shape[dim:])) if dim and flat else part
    sent = list(operand.meta["val"].shape)
    whole = (sent[0] * world_size, *sent[1:])
    start = rewriting.call(graph, ALL_GATHER, (operand, world_size, group_name), part, whole)
    wait = rewriting.call(graph, WAIT, (start,), part, whole)
    if not dim:
        return wait
    if flat:
        return rewriting.shaped(graph, wait, tuple(result))
    return rewriting.regrouped(graph, wait, 0, dim, world_size, part)
