"""The legality of a graph with Task nodes: what must hold of every op call, and of the chain of tokens through them.

A violation is a mistake of a pass. It is found here, at compile time, and not as a wrong result or a hang.
"""

from __future__ import annotations

from collections import Counter
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ditron_inductor.errors import GraphVerificationError
from ditron_inductor.task import schema
from ditron_inductor.task.node import Node
from ditron_inductor.task.nodes import LOCAL_KINDS, TASK_KINDS, TaskNode
from ditron_inductor.task.rules import Given, rules_of


def task_calls(graph: fx.Graph) -> list[tuple[fx.Node, TaskNode]]:
    """The calls of our fused ops in graph order, each with the node that it stands for."""
    targets = {schema.overload(kind) for kind in TASK_KINDS}
    calls = [node for node in graph.nodes if node.op == "call_function" and node.target in targets]
    return [(call, schema.node_from_call(call.target, call.args)) for call in calls]


def local_calls(graph: fx.Graph) -> list[tuple[fx.Node, Node]]:
    """The calls of our ops that communicate nothing, each with the node that it stands for."""
    targets = map(schema.overload, LOCAL_KINDS)
    calls = [call for target in targets for call in graph.find_nodes(op="call_function", target=target)]
    return [(call, schema.node_from_call(call.target, call.args)) for call in calls]


def verify_graph(graph: fx.Graph) -> None:
    """Checks our nodes. Raises `InvalidTaskNode` for a field, `GraphVerificationError` for a call or the chain."""
    calls = task_calls(graph)
    for call, node in [*calls, *local_calls(graph)]:
        node.verify()
        _require(not call.kwargs, call, "has keyword arguments")
        given = len(schema.operands_of(call))
        _require(given == node.num_tensors, call, f"has {given} operands, and its node has {node.num_tensors}")
        _verify_operands(call, node)
        _verify_outputs(call, node)
    for call, task in calls:
        _require(bool(task.site), call, "has no site name")
    sites = Counter((task.group_name, task.site) for _, task in calls)
    for call, task in calls:
        alone = sites[task.group_name, task.site] == 1
        _require(alone, call, f"shares its site name {task.site!r} with another call of its group")
    _verify_tokens(calls)


def _verify_operands(call: fx.Node, task: Node) -> None:
    """Shapes, dtypes and devices of the tensors, as far as they are known: unknown sizes are not an error."""
    given: Given = {
        name: [_value(call, element) for element in value] if isinstance(value, list) else _value(call, value)
        for name, value in task.named(schema.operands_of(call)).items()
    }
    for condition, problem in rules_of(task, given):
        alternatives = condition if isinstance(condition, tuple) else (condition,)
        _require(any(map(_possible, alternatives)), call, problem)


def _verify_outputs(call: fx.Node, task: Node) -> None:
    """The call is taken apart by getitem only, and its fake outputs are as many as the schema says."""
    count = len(task.outputs(schema.shapes_from_call(call))) + isinstance(task, TaskNode)
    values = call.meta.get("val")
    _require(isinstance(values, (list, tuple)) and len(values) == count, call, f"does not return {count} tensors")
    for user in call.users:
        index = user.args[1] if user.target is getitem else None
        _require(isinstance(index, int) and 0 <= index < count, call, f"is used by {user.format_node()}")


def _verify_tokens(calls: list[tuple[fx.Node, TaskNode]]) -> None:
    """Every call but the first waits for the token of what stands before it; no token orders two things."""
    token_of = schema.overload("token_of")
    for index, (call, _) in enumerate(calls):
        token = call.args[schema.TOKEN]
        if token is None:
            _require(index == 0, call, "has no token, though another site comes before it")
            continue
        _require(isinstance(token, fx.Node), call, f"has no node as its token: {token!r}")
        assert isinstance(token, fx.Node)
        is_last_output = (
            token.target is getitem
            and isinstance(token.args[0], fx.Node)
            and token.args[1] == len(token.args[0].meta["val"]) - 1
        )
        _require(token.target is token_of or is_last_output, call, f"has a token that is none: {token.format_node()}")
        _require(len(token.users) == 1, call, f"shares its token {token} with another op")


def _value(call: fx.Node, argument: object) -> torch.Tensor:
    value = argument.meta.get("val") if isinstance(argument, fx.Node) else None
    _require(isinstance(value, torch.Tensor), call, f"has an operand that is no tensor: {argument!r}")
    assert isinstance(value, torch.Tensor)
    return value


def _possible(condition: Any) -> bool:
    """Returns whether a (symbolic) condition may hold: False only if it is certain not to."""
    negated: Any = (not condition) if isinstance(condition, bool) else torch.sym_not(condition)
    return not statically_known_true(negated)


def _require(holds: Any, call: fx.Node, problem: str) -> None:
    if not holds:
        raise GraphVerificationError(where="the Ditron passes", problem=f"{call.format_node()} {problem}")
