"""Proves that rows are the sum of a reduced tensor, biases and a residual, in the order in which a Task node adds them.

    all_reduce -> (+ bias) -> (+ second bias) -> (norm) -> (* scale) -> (+ residual) = total

Each step may be missing, and views that keep the order may stand anywhere. Of few rows a second tensor may be added
in front of the residual, as a shared expert that every rank computes as a whole: it is then added to the residual
first. What is reduced is the result of a `matmul_all_reduce` node or of an all-reduce. The scale is a number, one
element or a row. The last sum may be one of fp32, of tensors that are converted for it: then the total is what it is
rounded to (see `norm_forms`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from operator import getitem
from typing import Any

import torch
from torch import fx

from ditron_inductor.passes.graph import proofs
from ditron_inductor.passes.graph.collectives import ALL_REDUCE, WAIT
from ditron_inductor.passes.graph.norm_forms import FoundNorm, find_norm, roundings, rsqrt_before, widened_terms
from ditron_inductor.task import schema
from ditron_inductor.task.nodes import MatmulAllReduceRmsNorm
from ditron_inductor.task.sequence_cost import NORM_BYTES
from ditron_inductor.task.torch_dtypes import ACTIVATION_DTYPES

aten = torch.ops.aten


@dataclass(frozen=True)
class Added:
    """A tensor that is added in front of the residual. steps: the views and the product by the scale that stand between
    the two sums, the innermost first.
    """

    node: fx.Node
    steps: tuple[fx.Node, ...]


@dataclass(frozen=True)
class Sum:
    """`total` = post(reduced + bias + second_bias) * scale + residual. launch: the node that reduces. between: the
    nodes from `reduced` to the total, without the total. views: the views among them, and those behind the total up to
    `rows`. unrounded: the total is the sum in fp32. added: what is added beside the residual.
    """

    launch: fx.Node
    reduced: fx.Node
    biases: tuple[fx.Node, ...]
    post: FoundNorm | None
    scale: fx.Node | float | None
    residual: fx.Node | None
    total: fx.Node
    between: tuple[fx.Node, ...]
    views: tuple[fx.Node, ...]
    views_behind: tuple[fx.Node, ...]
    unrounded: bool
    added: Added | None

    @property
    def totals(self) -> list[fx.Node]:
        """The nodes that are the rounded total."""
        return roundings(self.total) if self.unrounded else [self.total]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the rounded total."""
        terms = widened_terms(self.total) if self.unrounded else None
        value = proofs.fake(self.total if terms is None else terms[0])
        return value.dtype

    @property
    def kept(self) -> int:
        """The leading nodes of `between` that may be used elsewhere too: the reduced tensor and views of it."""
        return next((i for i, node in enumerate(self.between) if i and node not in self.views), len(self.between))


def find_sum(rows: fx.Node) -> Sum | None:
    """Returns the sum that the rows are, if they come from an all-reduce, and otherwise None."""
    *views_behind, total = _views(rows)
    for way in _ways(total):
        *between, reduced = way.nodes
        between = [reduced, *between[:0:-1]] if between else []
        launch = proofs.operand(reduced)
        terms = _terms(way)
        if terms is not None:
            views = [node for node in between[1:] if proofs.keeps_order(node)]
            biases, residual, added = terms
            tail = total, tuple(between), tuple(views), tuple(views_behind[::-1]), way.unrounded, added
            return Sum(launch, reduced, biases, way.post, way.scale, residual, *tail)
    return None


def _terms(way: _Way) -> tuple[tuple[fx.Node, ...], fx.Node | None, Added | None] | None:
    """Returns (the biases in the order in which they are added, the residual, what is added to it first), if a node can
    add what the way adds.
    """
    biases, residual, beside = list[fx.Node](), None, None
    for index, (add, other) in enumerate(way.steps):
        value, added = proofs.tensor(add), proofs.tensor(other)
        if value is None or added is None or (added.dtype != value.dtype and not way.unrounded):
            return None
        # A norm and a scale stand between the biases and the residual.
        behind = way.parted is not None and index < way.parted
        if proofs.same_shape(added.shape, value.shape) and residual is None and not biases:
            if way.parted is not None and not behind:
                return None
            residual = other
        elif proofs.same_shape(added.shape, value.shape) and beside is None and _may_add(way, other, residual):
            beside = Added(other, _between(way, add))
        elif proofs.is_row(added, value.shape[-1]) and len(biases) < 2 and not behind:
            biases.insert(0, other)
        else:
            return None
    return tuple(biases), residual, beside


def _may_add(way: _Way, node: fx.Node, residual: fx.Node | None) -> bool:
    """Returns whether a tensor could be added to the residual first, which takes a kernel that reads and writes as many
    bytes: for few of them, the launches that are spared take longer. In float16 that sum may overflow.
    """
    if residual is None or way.post is not None or way.unrounded:
        return False
    value = proofs.fake(node)
    in_rows = all(map(proofs.row_major, (value, proofs.fake(residual))))
    plain = value.dtype in (torch.bfloat16, torch.float32) and in_rows
    return plain and proofs.known(value.numel() * value.dtype.itemsize <= NORM_BYTES)


def _between(way: _Way, add: fx.Node) -> tuple[fx.Node, ...]:
    """Returns the views and the product between a sum of the way and its first one, the innermost first."""
    steps = way.nodes[1 : way.nodes.index(add)]
    return tuple(step for step in reversed(steps) if step.target is not aten.add.Tensor)


@dataclass(frozen=True)
class _Way:
    """The nodes from a total up to the reduced tensor `nodes[-1]`, the total first. steps: its sums, each with its
    other term, in this order. post: a norm on the way, of which only the result is among the nodes. scale: what the
    rows are multiplied by on the way. parted: how many steps there are before these two. unrounded: the total is a sum
    in fp32 (see `widened_terms`).
    """

    nodes: tuple[fx.Node, ...]
    steps: tuple[tuple[fx.Node, fx.Node], ...] = ()
    post: FoundNorm | None = None
    scale: fx.Node | float | None = None
    parted: int | None = None
    unrounded: bool = False

    def to(self, *nodes: fx.Node, **changes: Any) -> _Way:
        """The way to the last of these nodes."""
        return replace(self, nodes=(*self.nodes, *nodes), **changes)


def _ways(total: fx.Node) -> list[_Way]:
    """Returns the ways from a total to reduced tensors, by at most three sums and a norm, the latest one first."""
    found, pending = [], [_Way((total,))]
    while pending:
        way = pending.pop()
        way = replace(way, nodes=(*way.nodes[:-1], *_views(way.nodes[-1])))
        top = way.nodes[-1]
        is_first = top is total
        if _is_reduced(top):
            found.append(way)
        elif way.post is None and way.steps and way.parted in (None, len(way.steps)) and (post := _norm_up(top)):
            pending.append(way.to(post.x, post=post, parted=len(way.steps)))
        elif is_first and (terms := widened_terms(top)) is not None:
            for source, (mine, other) in zip(top.all_input_nodes, (terms, terms[::-1]), strict=True):
                pending.append(way.to(source, mine, steps=((top, other),), unrounded=True))
        elif top.target is aten.add.Tensor and top.kwargs.get("alpha", 1) == 1 and len(way.steps) < 3:
            for mine, other in _operands_of(top):
                if isinstance(other, fx.Node):
                    pending.append(way.to(mine, steps=(*way.steps, (top, other))))
        elif top.target is aten.mul.Tensor and way.parted is None:
            for mine, other in _operands_of(top):
                if (scale := _scale(top, mine, other)) is not None:
                    pending.append(way.to(mine, scale=scale, parted=len(way.steps)))
    order = {node: index for index, node in enumerate(total.graph.nodes)} if len(found) > 1 else {}
    return sorted(found, key=lambda way: order.get(way.nodes[-1], 0), reverse=True)


def _operands_of(node: fx.Node) -> Iterator[tuple[fx.Node, Any]]:
    """Each node that is an operand of a sum or product of two, with the other one; nothing for the square of a node."""
    left, right = node.args
    if left is not right:
        yield from ((mine, other) for mine, other in ((left, right), (right, left)) if isinstance(mine, fx.Node))


def _scale(product: fx.Node, rows: fx.Node, factor: Any) -> fx.Node | float | None:
    """What rows are multiplied by, if a node can do that: a number, or one element, or a row, in the rows' dtype."""
    value, scaled = proofs.tensor(rows), proofs.tensor(product)
    if value is None or scaled is None or value.dtype != scaled.dtype or value.dtype not in ACTIVATION_DTYPES:
        return None
    if not proofs.same_shape(value.shape, scaled.shape):
        return None
    if isinstance(factor, (int, float)):
        return float(factor) if math.isfinite(factor) else None
    other = proofs.tensor(factor)
    if other is None or other.dtype != value.dtype or other.device != value.device:
        return None
    is_element = all(proofs.known_equal(length, 1) for length in other.shape)
    return factor if is_element or proofs.is_row(other, value.shape[-1]) else None


def _views(node: fx.Node) -> list[fx.Node]:
    """Like `proofs.views_up`, but does not go beyond a reduced tensor."""
    chain = [node]
    while not _is_reduced(chain[-1]) and proofs.keeps_order(chain[-1]):
        chain.append(proofs.operand(chain[-1]))
    return chain


def _is_reduced(node: fx.Node) -> bool:
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node):
        return False
    if node.target is WAIT:
        return source.target is ALL_REDUCE
    if node.target is not getitem or node.args[1:] != (0,):
        return False
    return isinstance(schema.node_of(source), MatmulAllReduceRmsNorm.reduces)


def _norm_up(result: fx.Node) -> FoundNorm | None:
    rsqrt = rsqrt_before(result)
    norm = None if rsqrt is None else find_norm(rsqrt)
    return norm if isinstance(norm, FoundNorm) and norm.result is result else None
