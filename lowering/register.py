"""Binds the ops of the Task level to the strategies: one function a node kind, called once from the backend.

Each call finds the group's workspace, asks the plan for a strategy, and runs it. Whatever the ranks must decide alike
is computed here from sizes that all of them share; the one dimension that only the local weight has (columns of an
all-gather's weights, K of a reduction) is replaced by its largest value on any rank.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ditron_inductor.device import AgreedOptions, Workspace, workspaces
from ditron_inductor.lowering.all_gather_matmul import tile as gather
from ditron_inductor.lowering.launch import Launch
from ditron_inductor.lowering.matmul_all_reduce import tile as reduce
from ditron_inductor.lowering.matmul_reduce_scatter import tile as scatter
from ditron_inductor.task import ops, reference
from ditron_inductor.task.nodes import AllGatherMatmul, MatmulAllReduce, MatmulReduceScatter, Policy, TaskNode
from ditron_inductor.task.plan import PlanRequest, choose, decisions


def _open(node: TaskNode, x: torch.Tensor, sizes: Sequence[int]) -> Launch:
    """The launch of a call: its workspace, and its name with all the sizes that every rank must have alike."""
    policy = node.policy
    options = AgreedOptions(policy.strategy, policy.workspace_limit, policy.timeout_s)
    workspace = workspaces.get(node.group_name, x.device, options)
    return Launch(workspace, _site_text(node, tuple(sizes), x.dtype))


@functools.lru_cache(maxsize=65536)
def _site_text(node: TaskNode, sizes: tuple[int, ...], dtype: torch.dtype) -> str:
    node.verify()
    return f"{node.site or node.kind} {node.kind}[{'x'.join(map(str, sizes))}] {str(dtype).removeprefix('torch.')}"


def _local_size(workspace: Workspace, node: TaskNode, what: str, shared: int, dtype: torch.dtype, size: int) -> int:
    """The largest `size` on any rank; `shared`: the size beside it that all ranks have alike."""
    return workspace.largest(f"{what} of {node.site or node.kind} {node.kind} beside {shared} {dtype}", size)


def _uses_tile(node: TaskNode, launch: Launch, m: int, n: int, k: int, dtype: torch.dtype, nbytes: int) -> bool:
    workspace = launch.workspace
    capabilities = workspace.capabilities
    request = PlanRequest(
        site=node.site,
        kind=node.kind,
        m=m,
        n=n,
        k=k,
        dtype=dtype,
        world_size=node.world_size,
        strategy=node.policy.strategy,
        workspace_bytes=workspace.footprint(nbytes),
        workspace_limit=node.policy.workspace_limit,
        device_type=capabilities.device_type,
        device_name=capabilities.device_name,
        tile_available=capabilities.tile_available,
        tile_reason=capabilities.tile_reason,
        chunked_bytes=0,
        chunked_reason="no chunked lowering is bound",
    )
    choice = choose(request, workspace.table)
    decisions.note(node.group_name, request, choice)
    return choice.strategy == "tile"


def _all_gather_matmul(
    shard: torch.Tensor,
    weights: Sequence[torch.Tensor],
    token: torch.Tensor | None,
    gather_dim: int,
    return_gathered: bool,
    world_size: int,
    group_name: str,
    site: str,
    strategy: str,
    workspace_limit: int,
    timeout_s: float,
) -> list[torch.Tensor]:
    policy = Policy(strategy, workspace_limit, timeout_s)
    node = AllGatherMatmul(gather_dim, world_size, group_name, return_gathered, site, policy, len(weights))
    launch = _open(node, shard, shard.shape)
    K = shard.shape[-1]
    columns = _local_size(launch.workspace, node, "columns", K, shard.dtype, sum(w.shape[1] for w in weights))
    sizes = gather.geometry(node, launch, shard, columns)
    rows = world_size * sizes.rows
    if shard.numel() > 0 and _uses_tile(node, launch, rows, columns, K, shard.dtype, sizes.nbytes):
        outputs = gather.all_gather_matmul(node, launch, sizes, shard, weights)
    else:
        outputs = reference.all_gather_matmul(
            shard,
            weights,
            gather_dim=gather_dim,
            world_size=world_size,
            group_name=group_name,
            return_gathered=return_gathered,
        )
    return [*outputs, ops.new_token(shard)]


def _matmul_reduce_scatter(
    a: torch.Tensor,
    b: torch.Tensor,
    token: torch.Tensor | None,
    scatter_dim: int,
    reduce_op: str,
    world_size: int,
    group_name: str,
    site: str,
    strategy: str,
    workspace_limit: int,
    timeout_s: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    node = MatmulReduceScatter(
        scatter_dim, reduce_op, world_size, group_name, site, Policy(strategy, workspace_limit, timeout_s)
    )
    N = b.shape[1]
    launch = _open(node, a, (*a.shape[:-1], N))
    K = _local_size(launch.workspace, node, "K", N, a.dtype, b.shape[0])
    sizes = scatter.geometry(node, launch, a, N)
    rows = world_size * sizes.rows
    if rows * N > 0 and _uses_tile(node, launch, rows, N, K, a.dtype, sizes.nbytes):
        out = scatter.matmul_reduce_scatter(node, launch, sizes, a, b)
    else:
        out = reference.matmul_reduce_scatter(
            a, b, scatter_dim=scatter_dim, reduce_op=reduce_op, world_size=world_size, group_name=group_name
        )
    return out, ops.new_token(a)


def _matmul_all_reduce(
    a: torch.Tensor,
    b: torch.Tensor,
    token: torch.Tensor | None,
    reduce_op: str,
    world_size: int,
    group_name: str,
    site: str,
    strategy: str,
    workspace_limit: int,
    timeout_s: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    node = MatmulAllReduce(reduce_op, world_size, group_name, site, Policy(strategy, workspace_limit, timeout_s))
    M, N = math.prod(a.shape[:-1]), b.shape[1]
    launch = _open(node, a, (M, N))
    K = _local_size(launch.workspace, node, "K", N, a.dtype, b.shape[0])
    sizes = reduce.geometry(node, launch, a, N)
    if M * N > 0 and _uses_tile(node, launch, M, N, K, a.dtype, sizes.nbytes):
        out = reduce.matmul_all_reduce(node, launch, sizes, a, b)
    else:
        out = reference.matmul_all_reduce(a, b, reduce_op=reduce_op, world_size=world_size, group_name=group_name)
    return out, ops.new_token(a)


def _after(x: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    return x.view_as(x)


@functools.cache
def register() -> None:
    """Bind the implementations, once; further calls do nothing."""
    library: Any = ops.define()
    implementations: dict[str, Callable[..., object]] = {
        AllGatherMatmul.kind: _all_gather_matmul,
        MatmulReduceScatter.kind: _matmul_reduce_scatter,
        MatmulAllReduce.kind: _matmul_all_reduce,
        "after": _after,
        "after_": ops.do_nothing,
        "token_of": ops.new_token,
    }
    for name, implementation in implementations.items():
        library.impl(name, implementation, "CompositeExplicitAutograd")
