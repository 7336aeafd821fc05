"""A pass writes a reduce-scatter or an all-gather along any dimension by these functions, in the forms that fusions
read.

    dimension 0               x -> reduce_scatter -> wait
    others of size 1 before   x -> reshape [S, ..] -> reduce_scatter -> wait -> reshape [1, .., S/W, ..]
    any other                 x -> split -> getitem x W -> cat (dimension 0) -> reduce_scatter -> wait

The forms behind a gather are alike. All sizes of what is scattered are known. Of what is gathered, one size may be
known only at run time, but not the first one if another dimension is gathered.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ditron_inductor.passes.graph import proofs, rewriting
from ditron_inductor.passes.graph.collectives import ALL_GATHER, REDUCE_SCATTER, WAIT

aten = torch.ops.aten


def scattered(graph: fx.Graph, x: fx.Node, dim: int, reduce_op: str, world_size: int, group_name: str) -> fx.Node:
    """Inserts the reduce-scatter of `x` along `dim` at the graph's insertion point; returns this rank's chunk."""
    shape = list(x.meta["val"].shape)
    result = [*shape[:dim], shape[dim] // world_size, *shape[dim + 1 :]]
    flat = math.prod(shape[:dim]) == 1
    operand, part = x, result
    if dim and flat:
        operand, part = _reshaped(graph, x, shape[dim:]), result[dim:]
    elif dim:
        operand = rewriting.regrouped(graph, x, dim, 0, world_size, x)
    start = rewriting.call(graph, REDUCE_SCATTER, (operand, reduce_op, world_size, group_name), x, tuple(part))
    wait = rewriting.call(graph, WAIT, (start,), x, tuple(part))
    return _reshaped(graph, wait, result) if dim and flat else wait


def gathered(graph: fx.Graph, part: fx.Node, dim: int, world_size: int, group_name: str) -> fx.Node:
    """Inserts the all-gather of all ranks' chunks along `dim` at the graph's insertion point; returns the whole."""
    shape = list(part.meta["val"].shape)
    result = [*shape[:dim], shape[dim] * world_size, *shape[dim + 1 :]]
    flat = proofs.known_equal(math.prod(shape[:dim]), 1)
    operand = _reshaped(graph, part, shape[dim:]) if dim and flat else part
    sent = list(operand.meta["val"].shape)
    whole = (sent[0] * world_size, *sent[1:])
    start = rewriting.call(graph, ALL_GATHER, (operand, world_size, group_name), part, whole)
    wait = rewriting.call(graph, WAIT, (start,), part, whole)
    if not dim:
        return wait
    return _reshaped(graph, wait, result) if flat else rewriting.regrouped(graph, wait, 0, dim, world_size, part)


def _reshaped(graph: fx.Graph, x: fx.Node, shape: Sequence[Any]) -> fx.Node:
    """Returns a row-major tensor in this shape, of which one size at most is known only at run time: itself, or a
    reshape, which is inserted.
    """
    if proofs.same_shape(tuple(proofs.fake(x).shape), tuple(shape)):
        return x
    sizes = [length if isinstance(length, int) else -1 for length in shape]
    return rewriting.call(graph, aten.reshape.default, (x, sizes), x, tuple(shape))
