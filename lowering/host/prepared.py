"""What the calls of one site with operands of one form have in common, worked out once and kept.

A form is all of an operand but its address and its values: shape, strides, dtype, device. What is kept under the key of
a call must follow from the key, from the group's workspace, and from what the ranks agreed on. The last two change: a
workspace ends (its group is destroyed or made again, or a reset drops it), and a local size is agreed on again when it
has changed, or after a reset. Both are looked at before every use, so that the ranks meet at the same calls as if
nothing were kept.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ditron_inductor.device import Workspace
from ditron_inductor.device.meetings import Holder
from ditron_inductor.lowering.host.recording import recording
from ditron_inductor.task.plan import Choice, PlanRequest, choose, decisions
from ditron_inductor.task.watch import watch

MOST_CALLS = 4096
"""Kept at a time; beyond that all are forgotten. Only dynamic shapes make so many."""

Form = tuple[torch.Size, tuple[int, ...], torch.dtype, int]


def form(x: torch.Tensor) -> Form:
    """All that a launch may depend on, but for addresses."""
    return x.shape, x.stride(), x.dtype, x.get_device()


@dataclass(frozen=True, eq=False)
class Chosen:
    """A strategy.

    run: a function of the operands. choice: the group's name, the request and its choice, for `decisions`, or None
    where there is nothing to choose.
    """

    run: Callable[..., Any]
    choice: tuple[str, PlanRequest, Choice] | None = None

    def noted(self) -> Callable[..., Any]:
        """What to run, noted as the site's last choice."""
        if self.choice is not None:
            decisions.note(*self.choice)
            if watch.observer is not None:
                return watch.observer.call(self.run, *self.choice)
        return self.run


def choose_both(
    group_name: str, table: str, request: PlanRequest, runners: Mapping[str, Callable[..., Any]]
) -> tuple[Chosen, Chosen]:
    """What runs outside and inside CUDA graphs; one object if that is the same. table: the group's, of measurements."""
    captured = choose(request.inside_graphs(), table)
    eager = choose(request, table)
    if eager.strategy == captured.strategy:
        chosen = Chosen(runners[eager.strategy], (group_name, request, eager))
        return chosen, chosen
    eager = replace(eager, reason=f"{eager.reason}; inside CUDA graphs {captured.strategy}")
    captured = replace(captured, reason=f"inside CUDA graphs: {captured.reason}")
    return (
        Chosen(runners[eager.strategy], (group_name, request, eager)),
        Chosen(runners[captured.strategy], (group_name, request.inside_graphs(), captured)),
    )


@dataclass(frozen=True, eq=False)
class Prepared:
    """One site with operands of one form.

    eager, captured: what runs outside and inside CUDA graphs; often the same. agreed: the local size of `what` as the
    ranks agreed on it, see Workspace.agreed.
    """

    workspace: Workspace | Holder
    eager: Chosen
    captured: Chosen
    what: str
    agreed: tuple[int, int] | None

    def holds(self) -> bool:
        """Whether workspace and agreed size are still those it was prepared for.

        Raises RuntimeError when there is no group of the workspace's name any more.
        """
        workspace = self.workspace
        return workspace.is_current() and workspace.agreed(self.what) is self.agreed

    def now(self) -> Chosen:
        """What runs a call on the current stream."""
        if self.eager is self.captured:
            return self.eager
        assert not isinstance(self.workspace, Holder)
        return self.captured if self.workspace.shared.order.is_capturing() else self.eager


class PreparedCalls:
    """Prepared calls by key."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Prepared] = {}

    def find(self, key: Hashable) -> Callable[..., Any] | None:
        """What to run for the call `key`, if that still holds; notes the choice as the site's last one.

        Raises RuntimeError when there is no group of the workspace's name any more.
        """
        prepared = self._known.get(key)
        if prepared is None:
            return None
        if not prepared.holds():
            return None
        chosen = prepared.now()
        here = recording.here()
        if here is not None:
            here.found(prepared, chosen)
        return chosen.noted()

    def keep(self, key: Hashable, prepared: Prepared) -> None:
        """Use `prepared` for the call `key` from now on, until its workspace is released."""
        here = recording.here()
        if here is not None:
            here.found(prepared, None)
        if len(self._known) >= MOST_CALLS:
            self._known.clear()
        self._known[key] = prepared
        if not isinstance(prepared.workspace, Holder):
            prepared.workspace.shared.at_release.add(self._forget)

    def __len__(self) -> int:
        return len(self._known)

    def _forget(self, shared: object) -> None:
        self._known = {
            key: one
            for key, one in self._known.items()
            if isinstance(one.workspace, Holder) or one.workspace.shared is not shared
        }
