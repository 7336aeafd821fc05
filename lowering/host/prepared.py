"""What the calls of one site with operands of one form have in common, worked out once and kept.

A form is all of an operand but its address and its values: shape, strides, dtype, device. What is kept under the key of
a call must follow from the key, from the group's workspace, and from what the ranks agreed on. The last two change: a
workspace ends (its group is destroyed or made again, or a reset drops it), and a local size is agreed on again when it
has changed, or after a reset. Both are looked at before every use, so that the ranks meet at the same calls as if
nothing were kept.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch

from ditron_inductor.device import Workspace
from ditron_inductor.device.meetings import Holder
from ditron_inductor.lowering.host.chosen import Chosen
from ditron_inductor.lowering.host.recording import recording
from ditron_inductor.lowering.host.trials import SiteTrial

MOST_CALLS = 4096
"""Kept at a time; beyond that all are forgotten. Only dynamic shapes make so many."""

Form = tuple[torch.Size, tuple[int, ...], torch.dtype, int]


def form(x: torch.Tensor) -> Form:
    """All that a launch may depend on, but for addresses."""
    return x.shape, x.stride(), x.dtype, x.get_device()


@dataclass(frozen=True, eq=False)
class Prepared:
    """One site with operands of one form.

    eager, captured: what runs outside and inside CUDA graphs; often the same. agreed: the local size of `what` as the
    ranks agreed on it, see Workspace.agreed. trial: the site's part of a trial that is running, see trials.py.
    """

    workspace: Workspace | Holder
    eager: Chosen
    captured: Chosen
    what: str
    agreed: tuple[int, int] | None
    trial: SiteTrial | None = None

    def holds(self) -> bool:
        """Whether workspace, agreed size and trial are still those it was prepared for.

        Raises RuntimeError when there is no group of the workspace's name any more.
        """
        workspace = self.workspace
        if not workspace.is_current() or workspace.agreed(self.what) is not self.agreed:
            return False
        return self.trial is None or self.trial.is_running()

    def now(self) -> Chosen:
        """What runs a call on the current stream. Where a trial is running this counts the call."""
        if self.eager is self.captured and self.trial is None:
            return self.eager
        assert not isinstance(self.workspace, Holder)
        if self.workspace.shared.order.is_capturing():
            return self.captured
        return self.eager if self.trial is None else self.trial.next()


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
