"""A pass writes a reduce-scatter or an all-gather along any dimension by these functions, in the forms that fusions
read.

    dimension 0               x -> reduce_scatter -> wait
    others of size 1 before   x -> reshape [S, ..] -> reduce_scatter -> wait -> reshape [1, .., S/W, ..]
    any other                 x -> split -> getitem x W -> cat (dimension 0) -> reduce_scatter -> wait

The forms behind a gather are alike. All sizes are known.
"""

from __future__ import annotations

import math
from operator import getitem
from typing import Any

import torch
from torch import fx

from ditron_inductor.passes.graph import rewriting
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
        operand = _regrouped(graph, x, result[dim], dim, 0, world_size)
    start = rewriting.call(graph, REDUCE_SCATTER, (operand, reduce_op, world_size, group_name), x, tuple(part))
    wait = rewriting.call(graph, WAIT, (start,), x, tuple(part))
    return _reshaped(graph, wait, result) if dim and flat else wait


def gathered(graph: fx.Graph, part: fx.Node, dim: int, world_size: int, group_name: str) -> fx.Node:
    """Inserts the all-gather of all ranks' chunks along `dim` at the graph's insertion point; returns the whole."""
    shape = list(part.meta["val"].shape)
    result = [*shape[:dim], shape[dim] * world_size, *shape[dim + 1 :]]
    flat = math.prod(shape[:dim]) == 1
    operand = _reshaped(graph, part, shape[dim:]) if dim and flat else part
    sent = list(operand.meta["val"].shape)
    whole = (sent[0] * world_size, *sent[1:])
    start = rewriting.call(graph, ALL_GATHER, (operand, world_size, group_name), part, whole)
    wait = rewriting.call(graph, WAIT, (start,), part, whole)
    if not dim:
        return wait
    return _reshaped(graph, wait, result) if flat else _regrouped(graph, wait, shape[0], 0, dim, world_size)


def _reshaped(graph: fx.Graph, x: fx.Node, shape: list[int]) -> fx.Node:
    return rewriting.call(graph, aten.reshape.default, (x, shape), x, tuple(shape))


def _regrouped(graph: fx.Graph, x: fx.Node, length: int, split_dim: int, cat_dim: int, world_size: int) -> fx.Node:
    """Inserts split, getitem and cat: the chunks of one dimension, put together along another."""
    shape: list[Any] = list(x.meta["val"].shape)
    shape[split_dim] = length
    split = graph.call_function(aten.split.Tensor, (x, length, split_dim))
    split.meta.update(rewriting.copied_meta(x))
    chunk = rewriting.fake_like(x.meta["val"], tuple(shape), rewriting.contiguous_strides(shape))
    split.meta["val"] = [chunk] * world_size
    pieces = [rewriting.call(graph, getitem, (split, index), x, tuple(shape)) for index in range(world_size)]
    shape[cat_dim] *= world_size
    return rewriting.call(graph, aten.cat.default, (pieces, cat_dim), x, tuple(shape))
