"""Keeps what the calls of one site with operands of one form have in common.

The form of an operand is its shape, strides, dtype and device. What is kept under the key of a call may depend on the
key, on the group's workspace, and on what the ranks agreed on. The last two can change, so both are checked before
every use (docs/host_path.md).
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
"""The most calls that are kept. If there are more, as only dynamic shapes can cause, all of them are dropped."""

Form = tuple[torch.Size, tuple[int, ...], torch.dtype, int]


def form(x: torch.Tensor) -> Form:
    """Returns everything about x that a launch may depend on, except its address."""
    return x.shape, x.stride(), x.dtype, x.get_device()


@dataclass(frozen=True, eq=False)
class Prepared:
    """One site with operands of one form. eager, captured: what runs outside and inside CUDA graphs; often they are the
    same object. agreed: the result of `Workspace.agreed(what)`, the local size on which the ranks agreed. trial: the
    site's part of a trial (see trials.py), None if none is running.
    """

    workspace: Workspace | Holder
    eager: Chosen
    captured: Chosen
    what: str
    agreed: tuple[tuple[int, ...], tuple[int, ...]] | None
    trial: SiteTrial | None = None

    def holds(self) -> bool:
        """Returns whether the workspace, the agreed size and the trial are still those for which it was prepared.
        Raises RuntimeError if the group of the workspace does not exist any more.
        """
        workspace = self.workspace
        if not workspace.is_current() or workspace.agreed(self.what) is not self.agreed:
            return False
        return self.trial is None or self.trial.is_running()

    def now(self) -> Chosen:
        """Returns what runs a call on the current stream. If a trial is running, this counts the call."""
        if self.eager is self.captured and self.trial is None:
            return self.eager
        assert not isinstance(self.workspace, Holder)
        if self.workspace.shared.order.is_capturing():
            return self.captured
        return self.eager if self.trial is None else self.trial.next()


class PreparedCalls:
    """All prepared calls, by key."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Prepared] = {}

    def find(self, key: Hashable) -> Callable[..., Any] | None:
        """Returns what runs the call `key`, and notes the choice as the site's last one. Returns None if nothing is
        prepared, or if it does not hold any more. Raises RuntimeError if the group of the workspace does not exist any
        more.
        """
        prepared = self._known.get(key)
        if prepared is None or not prepared.holds():
            return None
        chosen = prepared.now()
        here = recording.here()
        if here is not None:
            here.found(prepared, chosen)
        return chosen.noted()

    def keep(self, key: Hashable, prepared: Prepared) -> None:
        """Uses `prepared` for the call `key` from now on, until its workspace is released."""
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
            key: prepared
            for key, prepared in self._known.items()
            if isinstance(prepared.workspace, Holder) or prepared.workspace.shared is not shared
        }
