"""All passes read the functional collectives of a graph by the functions of this module."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.distributed import ProcessGroup, distributed_c10d

from ditron_inductor.device import groups
from ditron_inductor.passes.graph import proofs
from ditron_inductor.passes.graph.reasons import ReasonCode
from ditron_inductor.task.nodes import REDUCE_OPS

c10d: Any = torch.ops._c10d_functional

ALL_GATHER: object = c10d.all_gather_into_tensor.default
REDUCE_SCATTER: object = c10d.reduce_scatter_tensor.default
ALL_REDUCE: object = c10d.all_reduce.default
ALL_TO_ALL: object = c10d.all_to_all_single.default
SHARD_DIM: object = torch.ops._dtensor.shard_dim_alltoall.default
WAIT: object = c10d.wait_tensor.default
SINGLE: dict[object, object] = {
    c10d.all_reduce_coalesced.default: ALL_REDUCE,
    c10d.all_reduce_coalesced_.default: ALL_REDUCE,
    c10d.all_gather_into_tensor_coalesced.default: ALL_GATHER,
    c10d.reduce_scatter_tensor_coalesced.default: REDUCE_SCATTER,
}
"""The collective of one tensor for each coalesced one of several."""


@dataclass(frozen=True)
class Collective:
    """An all-gather, reduce-scatter or all-reduce whose group is known and whose result is waited for once. `operand`
    is what this rank contributes, `wait` the node that holds the result.
    """

    node: fx.Node
    wait: fx.Node
    operand: fx.Node
    world_size: int
    group_name: str
    reduce_op: str | None


def is_collective(node: fx.Node) -> bool:
    """Returns whether a node starts a collective, of any kind (waiting for one is no collective)."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target is WAIT:
        return False
    return target is SHARD_DIM or target.namespace in ("_c10d_functional", "_c10d_functional_autograd")


def collectives(graph: fx.Graph, target: object) -> Iterator[fx.Node]:
    """The nodes of one collective, in graph order, as they are before the caller changes the graph."""
    yield from [node for node in graph.nodes if node.op == "call_function" and node.target is target]


def read_collective(node: fx.Node, reduce_ops: Collection[str] = REDUCE_OPS) -> Collective | ReasonCode:
    """Proves the group, its size, the reduce op, one of these, and the wait of a collective."""
    bound = proofs.arguments(node)
    group = read_group(node)
    if isinstance(group, ReasonCode):
        return group
    group_name, world_size = group
    operand = bound["input"]
    reduce_op = bound.get("reduce_op")
    if reduce_op is not None and reduce_op not in reduce_ops:
        return ReasonCode.REDUCE_OP
    wait = proofs.sole_user(node)
    if wait is None or wait.target is not WAIT or proofs.tensor(wait) is None or proofs.tensor(operand) is None:
        return ReasonCode.WAIT_FORM
    return Collective(node, wait, operand, world_size, group_name, reduce_op)


def read_group(node: fx.Node) -> tuple[str, int] | ReasonCode:
    """Returns (name, size) of a collective's group: known here, of the size that the call names, of several ranks."""
    bound = proofs.arguments(node)
    group_name = bound["group_name"]
    world_size = group_size(group_name) if isinstance(group_name, str) else None
    if world_size is None:
        return ReasonCode.GROUP_UNKNOWN
    if bound.get("group_size", world_size) != world_size:
        return ReasonCode.WORLD_SIZE
    if world_size == 1:
        return ReasonCode.WORLD_SIZE_ONE
    return group_name, world_size


def group_sizes() -> dict[str, int]:
    """The number of ranks of every process group that this process knows, by name."""
    return {str(name): group.size() for group, name in distributed_c10d._world.pg_names.items()}


def group_size(group_name: str) -> int | None:
    """The number of ranks of a process group; None if this process knows no group of that name."""
    group = _group(group_name)
    return None if group is None else group.size()


def group_ranks(group_name: str) -> frozenset[int]:
    """The global ranks of a process group; none if this process knows no group of that name."""
    group = _group(group_name)
    return frozenset(() if group is None else distributed_c10d.get_process_group_ranks(group))


def _group(name: str) -> ProcessGroup | None:
    try:
        return groups.find(name)
    except (RuntimeError, ValueError):  # how torch says that the name is not registered
        return None
