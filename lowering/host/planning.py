"""Builds the plan's request for a call from its node, its problem and the group's workspace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ditron_inductor.device import AgreedOptions, workspaces
from ditron_inductor.lowering.host.launch import Launch
from ditron_inductor.task.plan import PlanRequest
from ditron_inductor.task.policy import number_of, shared_site
from ditron_inductor.task.problem import NOTHING, Problem, Requirement


def name_of(node: Any) -> str:
    """Returns the name of a node's site, without what differs between ranks."""
    return f"{shared_site(node.site) or node.kind} {node.kind}"


def launch_of(node: Any, device: torch.device, dtype: torch.dtype, sizes: Sequence[int]) -> Launch:
    """Returns the Launch of a node's calls, in the workspace of its group. sizes: those that all ranks share."""
    policy = node.policy
    options = AgreedOptions(policy.strategy, policy.workspace_limit, policy.timeout_s, policy.trials)
    workspace = workspaces.get(node.group_name, device, options)
    text = f"{name_of(node)}[{'x'.join(map(str, sizes))}] {str(dtype).removeprefix('torch.')}"
    return Launch(workspace, text, number_of(node.site))


def requirement(launch: Launch, nbytes: int, reason: str = "") -> Requirement:
    """Returns what a strategy needs whose slot has `nbytes` bytes. reason: why it cannot run, or ''."""
    return Requirement(launch.workspace.footprint(nbytes), reason)


def plan_request(
    launch: Launch, node: Any, problem: Problem, *, tile: Requirement = NOTHING, chunked: Requirement = NOTHING
) -> PlanRequest:
    """Returns the plan's request for one call of a node. The problem has to be equal on all ranks. tile, chunked: what
    these strategies need; NOTHING for a strategy that the kind lacks.
    """
    capabilities = launch.workspace.capabilities
    return PlanRequest(
        problem=problem,
        site=node.site,
        strategy=node.policy.strategy,
        workspace_limit=node.policy.workspace_limit,
        device_type=capabilities.device_type,
        device_name=capabilities.device_name,
        tile=tile,
        chunked=chunked,
        strict=node.policy.strict,
    )
