"""What the plan is asked about a call, from its node, its problem and the group's workspace."""

from __future__ import annotations

from typing import Any

from ditron_inductor.lowering.host.launch import Launch
from ditron_inductor.task.plan import PlanRequest
from ditron_inductor.task.problem import NOTHING, Problem, Requirement


def requirement(launch: Launch, nbytes: int, reason: str = "") -> Requirement:
    """What a strategy wants whose slot holds so many bytes; reason: why it cannot run, empty where it can."""
    return Requirement(launch.workspace.footprint(nbytes), reason)


def plan_request(
    launch: Launch,
    node: Any,
    problem: Problem,
    *,
    tile: Requirement = NOTHING,
    chunked: Requirement = NOTHING,
) -> PlanRequest:
    """The question of one call of a node, whose problem has to be equal on all ranks.

    tile, chunked: what these strategies want; nothing for a strategy that the kind lacks.
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
        strict=node.policy.strict,
    )
