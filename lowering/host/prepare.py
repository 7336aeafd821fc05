"""Prepares the calls of a site with operands of one form: it finds the workspace, asks the plan, and lays out the slot.

The first call does this, and later calls look the result up (prepared.py). Whatever the ranks have to decide alike
depends only on

* sizes that all ranks share;
* the local facts of rank 0, such as its epilogue, which the meeting of the graph told everybody;
* one size that each rank has of its own: the number of columns of the weights behind an all-gather, or K of all
  products that are added up. It is replaced by its largest value on any rank, on which the ranks agree once for each
  site. (It may change later on one rank alone. If the gathered tensor is a weight, for instance, it is the rank's
  number of tokens.) No layout depends on it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ditron_inductor.device import groups
from ditron_inductor.device.meetings import Holder, meetings
from ditron_inductor.errors import DitronRunsUnfused
from ditron_inductor.lowering import costs
from ditron_inductor.lowering.host.chosen import Chosen
from ditron_inductor.lowering.host.kind import Lowering, Runner
from ditron_inductor.lowering.host.launch import Launch
from ditron_inductor.lowering.host.planning import launch_of, name_of, plan_request, requirement
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
"""A function of the node, the launch, the tensor that is communicated, and the sizes on which all ranks agreed. It
returns the plan's request and, by strategy, the functions of `node.split(operands)` that can run the call.
"""
WORDS = {"n": "columns", "k": "K"}
"""The names, in messages, of the sizes that may differ from rank to rank."""


def prepare_matmul(
    lowering: Lowering, calls: PreparedCalls, key: Hashable, node: TaskNode, operands: Sequence[torch.Tensor]
) -> Callable[..., Any]:
    """Returns what runs a call of a kind that multiplies or normalises; see `prepare`."""
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
    """Returns what runs a call, and keeps it in `calls` under `key`. It is collective if the ranks have to agree first.
    x: the tensor that is communicated, or multiplied before the result is communicated. sizes: those of this rank.
    rows_decide: whether the size that each rank has of its own depends on the number of rows, as that of attention
    does.
    """
    node.verify()
    reason = meetings.library_reason(node.group_name, node.site)
    if reason:
        return _by_library(calls, key, node, x, library, reason, sizes)
    launch = launch_of(node, x.device, x.dtype, sizes.wire)
    workspace = launch.workspace
    own, shared = (sizes.n, sizes.k) if sizes.local == "n" else (sizes.k, sizes.n)
    what = f"{WORDS[sizes.local]} of {name_of(node)} beside {shared} {x.dtype}"
    if rows_decide:
        what += f", {sizes.m} rows"
    largest: dict[str, Any] = {sizes.local: workspace.largest(what, own)}
    agreed = replace(sizes, **largest)
    eager = captured = Chosen(library)
    trial = None
    # If one of the shared sizes is 0, there is nothing to communicate, whatever the local size is.
    if sizes.m * shared > 0:
        request, runners = possible(node, launch, x, agreed)
        runners = {"library": library, **runners}
        eager, captured, trial = choose_both(workspace, node, sizes.wire, request, runners)
    prepared = Prepared(workspace, eager, captured, what, workspace.agreed(what), trial)
    return begun(calls, key, prepared, launch)


def begun(calls: PreparedCalls, key: Hashable, prepared: Prepared, launch: Launch) -> Callable[..., Any]:
    """Keeps a prepared call under `key`, and returns what runs its first call."""
    calls.keep(key, prepared)
    captured = prepared.captured
    if prepared.eager is not captured and captured.choice is not None:
        # This makes what a later capture needs and cannot make: memory and compiled kernels. All ranks do the same.
        if launch.workspace.shared.is_first(f"{launch.site_text} by {captured.choice[2].strategy}"):
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
    """Returns what runs a call that the ranks agreed to run by the library. It uses no workspace, because a peer that
    does not have the node makes none. Raises DitronRunsUnfused if the node's policy is strict.
    """
    if node.policy.strict and node.policy.strategy != "library":
        raise DitronRunsUnfused(site=shared_site(node.site), reason=reason)
    m, n, k = sizes.m, sizes.n, sizes.k
    problem = Problem(node.planned_as or node.kind, m, n, k, precision_of(x.dtype), node.world_size, captured=False)
    wants = Requirement(reason=reason)
    request = PlanRequest(
        problem, node.site, node.policy.strategy, node.policy.workspace_limit, x.device.type, "", wants, wants
    )
    chosen = Chosen(library, (node.group_name, request, Choice("library", reason, None, "meeting")))
    calls.keep(key, Prepared(Holder(meetings, groups.find(node.group_name)), chosen, chosen, "", None))
    return chosen.noted()


def _possible_as_agreed(
    lowering: Lowering, node: TaskNode, launch: Launch, x: torch.Tensor, sizes: Sizes
) -> tuple[PlanRequest, dict[str, Runner]]:
    """Does `_possible` with the local facts of rank 0 for the plan."""
    leader = meetings.leader(node.group_name, node.site)
    planned = replace(node, **json.loads(leader)) if leader else node
    return _possible(lowering, node, planned, launch, x, sizes)


def _possible(
    lowering: Lowering, node: TaskNode, planned: TaskNode, launch: Launch, x: torch.Tensor, sizes: Sizes
) -> tuple[PlanRequest, dict[str, Runner]]:
    """Returns what `Possible` returns. planned: the node with rank 0's local facts, equal on all ranks."""
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
    # The kernels of `chunked` have the same requirements as those of `tile`.
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
