"""The reset of a group: its workspaces become usable again after a failure, whatever state its ranks are in."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ditron_inductor.device import groups
from ditron_inductor.device.meetings import meetings
from ditron_inductor.device.registry import Registry, workspaces
from ditron_inductor.device.replicas import replicas
from ditron_inductor.device.session import Session, meet
from ditron_inductor.device.workspace import SharedWorkspace

SLACK_S = 5.0


def reset(
    group: str | dist.ProcessGroup | None = None, *, timeout_s: float | None = None, registry: Registry | None = None
) -> None:
    """Brings all ranks of `group` (a group, its name, or None for the default group) back to a fresh start. Collective.

    Every rank has to call it, whether or not one of its calls failed. It waits for this rank's kernels, and then for
    all ranks. Then it sets epochs, flags, credits, tickets, call counts and failure records to zero. It also forgets
    what the ranks have agreed on for their graphs and compared of their inputs, so they do both again. Captured CUDA
    graphs stay valid. A workspace that not all ranks have is dropped, and made anew at its next use. Raises
    DitronHandshakeError, which names the ranks that do not come within `timeout_s` seconds; the group then still needs
    a reset. The default of `timeout_s` is twice the longest limit of the group's calls, because a rank may have begun
    to wait when another gave up, and at least what a first call may take. If the group has had no calls, it is the
    group's own timeout.
    """
    registry = workspaces if registry is None else registry
    found = registry.of_group(groups.find(group))
    joined = groups.resolve(group)
    if timeout_s is None:
        limits = [limit for shared in found for limit in shared.timeouts]
        timeout_s = max(2 * max(limits) + SLACK_S, registry.first_timeout_s) if limits else joined.timeout_s
    try:
        _reset(joined, found, timeout_s, registry)
    except BaseException as exc:
        for shared in found:
            shared.health.fail(exc)
        raise


def _reset(joined: groups.Group, found: list[SharedWorkspace], timeout_s: float, registry: Registry) -> None:
    session = meet(joined, "reset", "reset the group", timeout_s)
    ours = {shared.device.type: _state(shared) for shared in found}
    states = session.all_gather("reset the group: compare the workspaces", ours, timeout_s)
    for shared in found:
        shared.synchronize()
    session.all_gather("reset the group: end all kernels", None, timeout_s)
    for shared in found:
        peers = [state.get(shared.device.type) for state in states]
        if all(peer is not None and peer["name"] == shared.name for peer in peers):
            rings = set.intersection(*(set(peer["rings"]) for peer in peers))
            shared.restart(Session(joined, f"{session.name}/{shared.device.type}"), rings)
        else:
            registry.release(shared)
    process_group = joined.process_group()
    assert process_group is not None
    meetings.forget(process_group, session.name)
    replicas.forget(process_group)
    # Nobody writes into a heap before its owner has zeroed it.
    session.all_gather("reset the group: begin again", None, timeout_s)


def _state(shared: SharedWorkspace) -> dict[str, Any]:
    return {"name": shared.name, "rings": [generation.name for generation in shared.generations]}
