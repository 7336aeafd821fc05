"""Launches of few tokens begin before the launch in front of them has ended, and load weights meanwhile.

    all_reduce_rms_norm -> getitem -> projections(.., weights of the graph's inputs) -> matmul_all_reduce_rms_norm -> ..
    leads                             follows                                           follows

A launch that follows (see core/overlap.py) reads its weights while the launches in front of it go on, and everything
else when these have ended. So the weights have to be complete when it begins. What may go on then is a row of launches
that each let the next one begin. Those of Ditron that do so lead or follow, and write no weights; a library's may do so
too. So a call follows only if it depends on a norm of this graph that does not. Whatever computes that norm makes an
ordinary launch, on each rank and by each strategy, and an ordinary launch begins when all in front of it has ended. So
all that ran in front of the graph has ended when a call behind the norm begins, and what runs in the graph writes no
inputs that are read as weights.

Nothing is communicated, so ranks need not agree on it. It must not fire if
* the call is not on a GPU;
* the call does not depend on a reduction with a norm in this graph;
* a weight that is loaded ahead is no input of the graph, or a view of one, or something writes into it;
* Inductor's own kernels overlap (`triton.enable_pdl`): they may copy a weight, and count on kernels that let the next
  one begin with their last loads only.
"""

from __future__ import annotations

from collections.abc import Container
from operator import getitem

import torch
from torch import fx
from torch._inductor import config as inductor_config

from ditron_inductor.options import Options
from ditron_inductor.passes.graph import proofs, rewriting
from ditron_inductor.task import schema
from ditron_inductor.task.node import Node
from ditron_inductor.task.nodes import ReductionWithNorm

DEVICES = ("cuda",)


def overlap_launches(graph: fx.Graph, *, options: Options) -> int:
    """Lets calls of few tokens lead and follow; see the module. Returns how many follow."""
    if getattr(inductor_config.triton, "enable_pdl", False):
        return 0
    count = 0
    behind: set[fx.Node] = set()
    written = proofs.written_memory(graph)
    for node in graph.nodes:
        task = schema.node_of(node)
        depends = any(source in behind for source in node.all_input_nodes)
        if not depends and not isinstance(task, ReductionWithNorm):
            continue
        behind.add(node)
        if task is not None and task.overlaps and _is_on_gpu(node):
            follows = depends and _may_follow(node, task, written)
            rewriting.change_task(node, task.overlapping("follows" if follows else "leads"))
            count += follows
    return count


def _is_on_gpu(call: fx.Node) -> bool:
    (first, *_) = schema.operands_of(call)
    return proofs.fake(first).device.type in DEVICES


def _may_follow(call: fx.Node, task: Node, written: Container[int | None]) -> bool:
    """Returns whether launches of the call can follow, and whatever they load ahead is complete when they begin."""
    weights = schema.operand(call, task.ahead) if task.ahead else ()
    return "follows" in task.overlaps and all(_is_given(weight, written) for weight in weights)


def _is_given(weight: fx.Node, written: Container[int | None]) -> bool:
    """Returns whether a weight is an input of the graph, or a view of one, in memory that is not `written`."""
    source, memory = weight, proofs.memory(weight)
    while (view := _view_behind(source)) is not None:
        source = proofs.operand(view)
        if proofs.memory(source) != memory:
            # Some of these ops copy what they cannot view.
            return False
    return source.op in ("placeholder", "get_attr") and memory is not None and memory not in written


def _view_behind(node: fx.Node) -> fx.Node | None:
    """Returns the op, perhaps a view, that makes a tensor, or of whose results it is one; None if it is no such op."""
    call = node.args[0] if node.target is getitem else node
    is_view = isinstance(call, fx.Node) and isinstance(call.target, torch._ops.OpOverload) and call.target.is_view
    return call if is_view else None  # type: ignore[return-value]
