"""Launches of few tokens begin before the launch in front of them has ended, and load weights meanwhile.

    all_reduce_rms_norm -> getitem -> projections(.., weights of the graph's inputs) -> matmul_all_reduce_rms_norm -> ..
    leads                             follows                                           follows

A launch that follows (see core/overlap.py) reads its weights while the launches in front of it go on, and everything
else when these have ended. So the weights have to be complete when it begins. What may go on then is a row of launches
that each let the next one begin. Ditron's are such launches, and write no weights; those of a library may be such as
well. So a call follows only if it depends on a norm of this graph that does not follow. Whatever computes that norm
begins when all in front of it has ended, on each rank and by each strategy. So all that ran in front of the graph has
ended when a call behind it begins, and what runs in the graph writes no inputs that are read as weights.

Nothing is communicated, so ranks need not agree on it. It must not fire if
* the call is not on a GPU;
* the call does not depend on a reduction with a norm in this graph;
* a weight that is loaded ahead is no input of the graph, or a view of one, or something writes into it;
* Inductor's own kernels let others begin early (`triton.enable_pdl`), as they may copy a weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch._inductor import config as inductor_config

from ditron_inductor.options import Options
from ditron_inductor.passes.graph import proofs, rewriting
from ditron_inductor.passes.graph.all_to_all import written
from ditron_inductor.task import schema
from ditron_inductor.task.nodes import MatmulAllReduceRmsNorm, Projections, ReductionWithNorm

DEVICES = ("cuda",)
AHEAD: dict[type[Any], str] = {MatmulAllReduceRmsNorm: "b", Projections: "weights"}
"""The operands that a launch of a kind loads ahead."""


def overlap_launches(graph: fx.Graph, *, options: Options) -> int:
    """Lets calls of few tokens follow; see the module. Returns how many."""
    if getattr(inductor_config.triton, "enable_pdl", False):
        return 0
    count = 0
    behind: set[fx.Node] = set()
    for node in graph.nodes:
        task = schema.node_of(node)
        depends = any(source in behind for source in node.all_input_nodes)
        if depends or isinstance(task, ReductionWithNorm):
            behind.add(node)
        if depends and task is not None and _may_follow(node, task):
            rewriting.change_task(node, _following(task))
            count += 1
    return count


def _may_follow(call: fx.Node, task: Any) -> bool:
    """Returns whether a launch of the call can follow, and whatever it loads ahead is complete when it begins."""
    if not isinstance(task, (Projections, ReductionWithNorm)):
        return False
    (first, *_) = schema.operands_of(call)
    name = AHEAD.get(type(task))
    weights: Sequence[fx.Node] = schema.operand(call, name) if name else ()
    return proofs.fake(first).device.type in DEVICES and all(map(_is_given, weights)) and written(weights) is None


def _is_given(weight: fx.Node) -> bool:
    """Returns whether a weight is an input of the graph, or a view of one."""
    while isinstance(weight.target, torch._ops.OpOverload) and weight.target.is_view:
        weight = proofs.operand(weight)
    return weight.op in ("placeholder", "get_attr")


def _following(task: Any) -> Any:
    if isinstance(task, ReductionWithNorm):
        return replace(task, policy=replace(task.policy, follows=True))
    return replace(task, follows=True)
