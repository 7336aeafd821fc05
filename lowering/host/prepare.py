"""The first call of a site with operands of one form: what the ranks agreed on, sizes, the plan, the choice.

The first call finds the group's workspace, asks the plan for a strategy, lays out the slot, and keeps all that; later
calls look it up (prepared.py). What the ranks must decide alike follows from sizes that all of them share, from what
rank 0 has of its own, as the meeting of the graph told everybody, and from one dimension that only the local weight has
(columns of an all-gather's weights, K of what is summed up, of all products together). Its largest value on any rank
takes its place; the ranks agree on it once for each site, since it may change later on one rank alone: where the
gathered tensor is a weight, it is this rank's number of tokens. No layout has to follow it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ditron_inductor.device import AgreedOptions, groups, workspaces
from ditron_inductor.device.meetings import meetings
from ditron_inductor.errors import DitronRunsUnfused
from ditron_inductor.lowering import costs
from ditron_inductor.lowering.host.chosen import Chosen
from ditron_inductor.lowering.host.kind import Lowering, Runner
from ditron_inductor.lowering.host.launch import Launch
from ditron_inductor.lowering.host.planning import plan_request, requirement
from ditron_inductor.lowering.host.prepared import Prepared, PreparedCalls
from ditron_inductor.lowering.host.trials import choose_both
from ditron_inductor.lowering.norms import rows as norms
from ditron_inductor.task import schema
from ditron_inductor.task.node import Sizes
from ditron_inductor.task.nodes import TaskNode
from ditron_inductor.task.plan import Choice, PlanRequest
from ditron_inductor.task.policy import shared_site
from ditron_inductor.task.problem import Problem, Requirement
from ditron_inductor.task.torch_dtypes import precision_of

Possible = Callable[[Any, Launch, torch.Tensor, Sizes], tuple[PlanRequest, dict[str, Runner]]]
"""A function of the node, the launch, the tensor that is communicated, and the sizes that all ranks agreed on."""
WORDS = {"n": "columns", "k": "K"}
"""What messages call the size that only this rank need have."""


def prepare_matmul(
    lowering: Lowering, calls: PreparedCalls, key: Hashable, node: TaskNode, operands: Sequence[torch.Tensor]
) -> Callable[..., Any]:
    """What runs a call of a kind with matmuls, or with a norm; see `prepare`."""
    sizes = node.sizes(schema.shapes_of(node.named(operands)))
    possible = functools.partial(_possible_as_agreed, lowering)
    return prepare(calls, key, node, operands[0], lowering.library(node, operands), sizes, possible)


def prepare(
    calls: PreparedCalls,
    key: Hashable,
    node: TaskNode,
    x: torch.Tensor,
    library: Callable[..., Any],
    sizes: Sizes,
    possible: Possible,
    *,
    rows_decide: bool = False,
) -> Callable[..., Any]:
    """What runs a call, kept in `calls` under `key`. Collective where the ranks have to agree on something first.

    x: the tensor that is communicated, or multiplied before it is. sizes: those of this rank. possible: what the plan
    is asked, and the strategies that may run. rows_decide: whether the size that only this rank has depends on the
    rows, as that of attention does, which grows with the sequence.
    """
    node.verify()
    reason = meetings.library_reason(node.group_name, node.site)
    if reason:
        return _by_library(calls, key, node, x, library, reason, sizes)
    policy = node.policy
    options = AgreedOptions(policy.strategy, policy.workspace_limit, policy.timeout_s, policy.trials)
    workspace = workspaces.get(node.group_name, x.device, options)
    name = f"{shared_site(node.site) or node.kind} {node.kind}"
    launch = Launch(workspace, f"{name}[{'x'.join(map(str, sizes.wire))}] {str(x.dtype).removeprefix('torch.')}")
    own, shared = (sizes.n, sizes.k) if sizes.local == "n" else (sizes.k, sizes.n)
    what = f"{WORDS[sizes.local]} of {name} beside {shared} {x.dtype}"
    if rows_decide:
        what += f", {sizes.m} rows"
    largest: dict[str, Any] = {sizes.local: workspace.largest(what, own)}
    agreed = replace(sizes, **largest)
    eager = captured = Chosen(library)
    trial = None
    # Whatever the local size is: with none of the others there is nothing to communicate.
    if sizes.m * shared > 0:
        request, runners = possible(node, launch, x, agreed)
        runners = {"library": library, **runners}
        eager, captured, trial = choose_both(workspace, node, sizes.wire, request, runners)
    prepared = Prepared(workspace, eager, captured, what, workspace.agreed(what), trial)
    calls.keep(key, prepared)
    if eager is not captured and workspace.shared.is_first(launch.site_text):
        # Makes what a capture needs and cannot make: memory, compiled kernels. The same call on all ranks.
        return captured.noted()
    return prepared.now().noted()


def _by_library(
    calls: PreparedCalls,
    key: Hashable,
    node: TaskNode,
    x: torch.Tensor,
    library: Callable[..., Any],
    reason: str,
    sizes: Sizes,
) -> Callable[..., Any]:
    """A call that the ranks agreed to run by the library: without a workspace, since a peer may have no use for one."""
    if node.policy.strict and node.policy.strategy != "library":
        raise DitronRunsUnfused(site=shared_site(node.site), reason=reason)
    m, n, k = sizes.m, sizes.n, sizes.k
    problem = Problem(node.planned_as or node.kind, m, n, k, precision_of(x.dtype), node.world_size, captured=False)
    wants = Requirement(reason=reason)
    request = PlanRequest(
        problem, node.site, node.policy.strategy, node.policy.workspace_limit, x.device.type, "", wants, wants
    )
    chosen = Chosen(library, (node.group_name, request, Choice("library", reason, None, "meeting")))
    calls.keep(key, Prepared(meetings.holder(groups.find(node.group_name)), chosen, chosen, "", None))
    return chosen.noted()


def _possible_as_agreed(
    lowering: Lowering, node: TaskNode, launch: Launch, x: torch.Tensor, sizes: Sizes
) -> tuple[PlanRequest, dict[str, Runner]]:
    """As `_possible`, planned with what rank 0 has of its own."""
    leader = meetings.leader(node.group_name, node.site)
    planned = replace(node, **json.loads(leader)) if leader else node
    return _possible(lowering, node, planned, launch, x, sizes)


def _possible(
    lowering: Lowering, node: TaskNode, planned: TaskNode, launch: Launch, x: torch.Tensor, sizes: Sizes
) -> tuple[PlanRequest, dict[str, Runner]]:
    """What the plan has to know, and the strategies that it may choose, as functions of the operands.

    planned: the node as rank 0 has it, by which all ranks choose alike.
    """
    m, n, k = sizes.m, sizes.n, sizes.k
    workspace = launch.workspace
    capabilities = workspace.capabilities
    tile_reason = capabilities.tile_reason or norms.obstacle(node.normed_columns(sizes))
    runners: dict[str, Runner] = {}
    in_tiles = Requirement(reason=tile_reason)
    if lowering.tile is not None:
        tile = lowering.tile.geometry(node, launch, x, n)
        in_tiles = requirement(launch, tile.nbytes, tile_reason)
        runners["tile"] = functools.partial(lowering.tile.run, node, launch, tile)
    # Its kernels want what those of `tile` want.
    chunked, in_chunks = None, Requirement(reason=tile_reason)
    if lowering.chunked is not None and not tile_reason:
        chunked = lowering.chunked.geometry(node, launch, x, n, k)
        in_chunks = requirement(launch, chunked.nbytes)
        runners["chunked"] = functools.partial(lowering.chunked.run, node, launch, chunked)
    problem = Problem(
        node.planned_as or node.kind,
        m,
        n,
        k,
        precision_of(x.dtype),
        node.world_size,
        captured=False,
        epilogue_bytes=costs.epilogue_bytes(planned, m, n, x.dtype),
        pre_bytes=costs.pre_bytes(planned, m, n, x.dtype),
        pair_bytes=costs.pair_bytes(planned, m, n, x.dtype),
        more_products=planned.more_products(x.shape),
        slices=node.slices(x.shape),
        in_band=lowering.chunked is not None and lowering.chunked.in_band(chunked),
    )
    return plan_request(launch, node, problem, tile=in_tiles, chunked=in_chunks), runners
