"""Builds the plan's request for a call from its node, its problem and the group's workspace."""

from __future__ import annotations

from typing import Any

from ditron_inductor.lowering.host.launch import Launch
from ditron_inductor.task.plan import PlanRequest
from ditron_inductor.task.problem import NOTHING, Problem, Requirement


def requirement(launch: Launch, nbytes: int, reason: str = "") -> Requirement:
    """Returns what a strategy needs whose slot has `nbytes` bytes. reason: why it cannot run, or ''."""
    return Requirement(launch.workspace.footprint(nbytes), reason)


def plan_request(
    launch: Launch,
    node: Any,
    problem: Problem,
    *,
    tile: Requirement = NOTHING,
    chunked: Requirement = NOTHING,
) -> PlanRequest:
    """Returns the plan's request for one call of a node. The problem has to be equal on all ranks.

    tile, chunked: what these strategies need; NOTHING for a strategy that the kind lacks.
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
        launch_us=capabilities.launch_us,
    )
