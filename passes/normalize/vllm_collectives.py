"""vLLM's own collectives become functional collectives, if vLLM has registered its ops and a group by the name in the
call.

    vllm.all_reduce(x, name)                -> wait(all_reduce(x, "sum", group))
    vllm.all_gather(x, dim, W, name)        -> wait(all_gather_into_tensor(x, W, group)), for another dimension than
                                               the first split into W parts and concatenated along it
    vllm.reduce_scatter(x, dim, W, name)    -> wait(reduce_scatter_tensor(x, "sum", W, group)), for the second
                                               dimension of x split into W parts and concatenated along the first

`name` is a name of vLLM's, such as "tp:0", and no process group has it. vLLM keeps a table of its coordinators by name.
A coordinator sends by its `device_group`, so the group is taken from there. It must not fire on a name that the table
does not have, on a group that is not registered with torch or of another size than W, on an operand or result that is
not known to be contiguous, on parts of a dynamic size, or on vLLM's scatter of a third or later dimension, which
divides another one. Such a call stays as it is, with a reason.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.distributed import distributed_c10d

from ditron_inductor.passes.graph import proofs, rewriting
from ditron_inductor.passes.graph.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, WAIT, group_size
from ditron_inductor.passes.graph.reasons import ReasonCode, leave_alone

aten = torch.ops.aten

PATTERN = "vllm_collectives"
NAMESPACE = "vllm"
PARALLEL_STATE = "vllm.distributed.parallel_state"
SCATTERED_DIMS = 2
SCHEMAS = {
    "all_reduce": ["tensor", "group_name"],
    "all_gather": ["tensor", "dim", "world_size", "group_name"],
    "reduce_scatter": ["tensor", "dim", "world_size", "group_name"],
}


@dataclass(frozen=True)
class Match:
    """A call of vLLM's op `name` on `operand`, and the group of torch that it stands for. dim: not negative."""

    node: fx.Node
    name: str
    operand: fx.Node
    dim: int
    world_size: int
    group_name: str


def is_vllm_collective(node: fx.Node) -> bool:
    """Returns whether a node calls one of the ops that are read here."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target.namespace == NAMESPACE and target._opname in SCHEMAS


def group_names() -> dict[str, str]:
    """Returns torch's names of vLLM's groups, by vLLM's names. A rewrite depends on these beside the graph."""
    # Use only modules that this process has loaded itself. The table is vLLM's own, and another version may have none.
    table: Mapping[str, Callable[[], Any]] = getattr(sys.modules.get(PARALLEL_STATE), "_groups", {})
    names: dict[str, str] = {}
    for name, coordinator in sorted(table.items()):
        group = getattr(coordinator(), "device_group", None)
        known = None if group is None else distributed_c10d._world.pg_names.get(group)
        if known is not None:
            names[name] = str(known)
    return names


def find_vllm_collective(node: fx.Node, names: Mapping[str, str]) -> Match | ReasonCode:
    """Proves that a call of vLLM's does what the functional collective of a group does."""
    assert isinstance(node.target, torch._ops.OpOverload)
    name = node.target._opname
    if [argument.name for argument in node.target._schema.arguments] != SCHEMAS[name]:
        return ReasonCode.UNSUPPORTED_COLLECTIVE
    bound = proofs.arguments(node)
    group_name = names.get(bound["group_name"])
    world_size = None if group_name is None else group_size(group_name)
    if group_name is None or world_size is None:
        return ReasonCode.GROUP_UNKNOWN
    if bound.get("world_size", world_size) != world_size:
        return ReasonCode.WORLD_SIZE
    if world_size == 1:
        return ReasonCode.WORLD_SIZE_ONE
    operand, dim = bound["tensor"], bound.get("dim", 0)
    value, result = proofs.tensor(operand), proofs.tensor(node)
    if value is None or result is None or value.ndim == 0 or not isinstance(dim, int):
        return ReasonCode.UNSUPPORTED_COLLECTIVE
    if not -value.ndim <= dim < value.ndim or not proofs.row_major(value) or not proofs.row_major(result):
        return ReasonCode.UNSUPPORTED_COLLECTIVE
    match = Match(node, name, operand, dim % value.ndim, world_size, group_name)
    return _rejected_sizes(match, value, result) or match


def _rejected_sizes(match: Match, value: torch.Tensor, result: torch.Tensor) -> ReasonCode | None:
    """Returns None if the result has the functional form's sizes, writable as arguments; otherwise why not."""
    dim, world_size = match.dim, match.world_size
    sizes = list(value.shape)
    if match.name == "all_gather":
        sizes[dim] = sizes[dim] * world_size
        parted = value.shape[0]
    elif match.name == "reduce_scatter":
        if dim >= SCATTERED_DIMS:
            return ReasonCode.UNSUPPORTED_COLLECTIVE
        if proofs.known(sizes[dim] % world_size != 0):
            return ReasonCode.UNEVEN_SHARDS
        sizes[dim] = parted = sizes[dim] // world_size
    if not proofs.same_shape(tuple(sizes), tuple(result.shape)) or value.dtype != result.dtype:
        return ReasonCode.SHAPE_UNPROVEN
    if dim != 0 and not isinstance(parted, int):
        return ReasonCode.SHAPE_UNPROVEN
    return None


def rewrite(graph: fx.Graph, match: Match) -> None:
    """Replaces vLLM's op by the functional collective, its wait, and what stands around them."""
    node, world_size, group = match.node, match.world_size, match.group_name
    shape = tuple(node.meta["val"].shape)
    with graph.inserting_before(node):
        if match.name == "all_reduce":
            found = _waited(graph, ALL_REDUCE, (match.operand, "sum", group), node, shape)
        elif match.name == "all_gather":
            first, *others = match.operand.meta["val"].shape
            stacked = (first * world_size, *others)
            found = _waited(graph, ALL_GATHER, (match.operand, world_size, group), node, stacked)
            if match.dim != 0:
                found = rewriting.regrouped(graph, found, 0, match.dim, world_size, node)
        else:
            operand = match.operand
            if match.dim != 0:
                operand = rewriting.regrouped(graph, operand, match.dim, 0, world_size, node)
            scattered = list(operand.meta["val"].shape)
            scattered[0] = shape[0]
            found = _waited(graph, REDUCE_SCATTER, (operand, "sum", world_size, group), node, tuple(scattered))
    node.replace_all_uses_with(found)
    graph.erase_node(node)


def _waited(graph: fx.Graph, target: Any, args: tuple[Any, ...], origin: fx.Node, shape: tuple[Any, ...]) -> fx.Node:
    started = rewriting.call(graph, target, args, origin, shape)
    return rewriting.call(graph, WAIT, (started,), origin, shape)


def replace_vllm_collectives(graph: fx.Graph) -> int:
    """Rewrites vLLM's collectives where the result is proved to be the same, and returns how many."""
    found = [node for node in graph.nodes if node.op == "call_function" and is_vllm_collective(node)]
    names = group_names() if found else {}
    count = 0
    for node in found:
        match = find_vllm_collective(node, names)
        if isinstance(match, ReasonCode):
            leave_alone(node, PATTERN, match)
        else:
            rewrite(graph, match)
            count += 1
    return count
