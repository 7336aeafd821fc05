"""What a node of a graph launches, a Task node or a collective that no pass fused, and for which group."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ditron_inductor.options import Options
from ditron_inductor.passes.graph.proofs import arguments
from ditron_inductor.task import schema
from ditron_inductor.task.nodes import TASK_KINDS

GROUP_ARGUMENT = "group_name"


def is_task(node: fx.Node) -> bool:
    """Returns whether the node is a call of one of the Task ops."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return target.namespace == schema.NAMESPACE and target._opname in TASK_KINDS


def takes_local(graph: fx.Graph, kind: str, options: Options) -> bool:
    """Returns whether calls of a kind that communicates nothing may be made: the options allow them, and the graph
    holds a Task node, without which it is left to Inductor.
    """
    allowed = kind in options.fusions and options.strategy != "library"
    return allowed and any(is_task(node) for node in graph.nodes)


def launches_collective(node: fx.Node) -> bool:
    """Returns whether the node launches a collective: any op of others that names a process group."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace == schema.NAMESPACE:
        return False
    return any(argument.name == GROUP_ARGUMENT for argument in target._schema.arguments)


def group_of(node: fx.Node) -> Any:
    """The name of the group of a Task node or of a collective; a node of the graph where that is not a constant."""
    if is_task(node):
        return schema.node_from_call(node.target, node.args).group_name
    return arguments(node)[GROUP_ARGUMENT]
