"""Chains the Task nodes and the remaining collectives of their groups in graph order.

docs/order.md says why the launches form one chain, and why no form of collective needs a copy for that.

    before                                       after
    y, token = matmul_all_reduce(a, b, None)     y, token = matmul_all_reduce(a, b, None)
    h = all_gather_into_tensor(x, ..)            h = all_gather_into_tensor(after(x, token), ..)
                                                 token_1 = token_of(h)
    z, _ = matmul_all_reduce(c, d, None)         z, _ = matmul_all_reduce(c, d, token_1)

There is one chain across all groups that have a Task node, or two ranks in common with one that has. Collectives of
other groups stay as they are, and so do graphs without a Task node. If the graph holds a group as an object, or by
vLLM's name for it, it may be any group, so it is chained.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ditron_inductor.errors import GraphVerificationError
from ditron_inductor.options import Options
from ditron_inductor.passes.graph import proofs
from ditron_inductor.passes.graph.collectives import group_ranks
from ditron_inductor.passes.graph.launches import group_of, is_task, launches_collective
from ditron_inductor.passes.normalize.vllm_collectives import is_vllm_collective
from ditron_inductor.task import schema

# Inductor runs these in place, the first two on their input where nobody uses it afterwards, else on a copy.
REDUCED_IN_PLACE = ("all_reduce", "all_reduce_coalesced")
COPIED = (*REDUCED_IN_PLACE, "broadcast")
# `where` is a plain select for these; Inductor has none for the others (complex, float8).
SELECTABLE = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)


def find_chain(graph: fx.Graph) -> list[fx.Node]:
    """The launches to keep in order, Task nodes and collectives that no pass has fused, in graph order; empty for a
    graph without a Task node.
    """
    groups = {group_of(node) for node in graph.nodes if is_task(node)}
    chain: list[fx.Node] = []
    shares = functools.cache(lambda group: any(len(group_ranks(group) & group_ranks(one)) > 1 for one in groups))
    for node in graph.nodes:
        if is_task(node):
            chain.append(node)
        elif groups and launches_collective(node):
            group = group_of(node)
            if not isinstance(group, str) or is_vllm_collective(node) or shares(group):
                chain.append(node)
    return chain


def rewrite(graph: fx.Graph, chain: Sequence[fx.Node]) -> None:
    """Puts each launch of `chain` behind the one before it."""
    for previous, current in zip(chain, chain[1:], strict=False):
        token = _token_after(graph, previous)
        if is_task(current):
            current.update_arg(schema.TOKEN, token)
        else:
            _put_after(graph, current, token)


def order_collectives(graph: fx.Graph, *, options: Options) -> int:
    """Chains the launches, and returns how many were put behind another; 0 if the graph was chained before."""
    chain = find_chain(graph)
    if any(map(_is_chained, chain)):
        return 0
    rewrite(graph, chain)
    return max(len(chain) - 1, 0)


def _token_after(graph: fx.Graph, launch: fx.Node) -> fx.Node:
    """Returns the token that the launch returns, or a new token that depends on its first output."""
    value = launch.meta["val"]
    if is_task(launch):
        return _getitem(graph, launch, len(value) - 1)
    launched = _getitem(graph, launch, 0) if isinstance(value, (list, tuple)) else launch
    return _call_behind(graph, launched, schema.overload("token_of"), (launched,))


def _put_after(graph: fx.Graph, node: fx.Node, token: fx.Node) -> None:
    for position, given in enumerate(node.args):
        first = given[0] if isinstance(given, (list, tuple)) and given else given
        if not isinstance(first, fx.Node) or not isinstance(first.meta.get("val"), torch.Tensor):
            continue
        with graph.inserting_before(node):
            ordered = _ordered_input(graph, node, first, token)
        # One input is enough: the tensors of a list are launched together.
        new = [ordered, *given[1:]] if isinstance(given, (list, tuple)) else ordered
        node.update_arg(position, new)
        return
    raise GraphVerificationError(
        where="order_collectives", problem=f"{node.name} ({node.target}) has no tensor input that could be ordered"
    )


def _ordered_input(graph: fx.Graph, node: fx.Node, x: fx.Node, token: fx.Node) -> fx.Node:
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    if target._opname in REDUCED_IN_PLACE and _dies_at(graph, x, node):
        _call(graph, schema.overload("after_"), (x, token), node)
        return x
    if target._opname in COPIED and x.meta["val"].dtype in SELECTABLE:
        scalar = _call(graph, torch.ops.aten.squeeze.default, (token,), node)  # x may be a scalar itself
        condition = _call(graph, torch.ops.aten.ne.Scalar, (scalar, 0), node)
        return _call(graph, torch.ops.aten.where.self, (condition, x, x), node)
    return _call(graph, schema.overload("after"), (x, token), node)


def _dies_at(graph: fx.Graph, x: fx.Node, node: fx.Node) -> bool:
    """Returns whether nothing reads the memory of x after `node`, and the caller does not own it."""
    memory = proofs.memory(x)
    for other in graph.nodes:
        if proofs.memory(other) != memory:
            continue
        if other.op != "call_function" or any(node < user for user in other.users):
            return False
    return True


def _is_chained(launch: fx.Node) -> bool:
    """Returns whether something waits for the token of the launch."""
    value = launch.meta["val"]
    if is_task(launch):
        getitems = [user for user in launch.users if user.target is operator.getitem]
        return any(user.args[1] == len(value) - 1 and user.users for user in getitems)
    outputs = list(launch.users) if isinstance(value, (list, tuple)) else [launch]
    return any(user.target is schema.overload("token_of") for output in outputs for user in output.users)


def _getitem(graph: fx.Graph, node: fx.Node, index: int) -> fx.Node:
    """The existing getitem of an output, or a new one."""
    for user in node.users:
        if user.target is operator.getitem and user.args[1] == index:
            return user
    return _call_behind(graph, node, operator.getitem, (node, index))


def _call_behind(graph: fx.Graph, node: fx.Node, target: Any, args: tuple[Any, ...]) -> fx.Node:
    with graph.inserting_after(node):
        return _call(graph, target, args, node)


def _call(graph: fx.Graph, target: Any, args: tuple[Any, ...], origin: fx.Node) -> fx.Node:
    """A new call with its fake value, attributed to the source line of `origin`."""
    node = graph.call_function(target, args)
    node.meta["val"] = target(*(arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in args))
    for key in ("stack_trace", "nn_module_stack"):
        if key in origin.meta:
            node.meta[key] = origin.meta[key]
    return node
