"""The workspaces of this process, one per process group and device, made at first use and released with the group."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist

from ditron_inductor.device import groups
from ditron_inductor.device.calibrate import PollRates
from ditron_inductor.device.capabilities import probe
from ditron_inductor.device.handshake import AgreedOptions, agree_options, shake_hands
from ditron_inductor.device.session import meet
from ditron_inductor.device.watchdog import Watchdog
from ditron_inductor.device.workspace import SharedWorkspace, Workspace
from ditron_inductor.errors import DitronCaptureError, DitronDiverged, DitronHandshakeError

logger = logging.getLogger(__name__)

_Key = tuple[str, torch.device]

FIRST_TIMEOUT_S = 120.0


class Registry:
    """All workspaces of a process. A workspace belongs to a process group object. If the group's name comes to mean
    another group, that group gets a workspace of its own.

    first_timeout_s: the least time that ranks wait for each other on the host, and in the first call of a site,
    whatever the limit of a call is, because a peer may still be compiling.
    """

    def __init__(self, first_timeout_s: float = FIRST_TIMEOUT_S) -> None:
        self.first_timeout_s = first_timeout_s
        self._bound: dict[tuple[str, torch.device, AgreedOptions], Workspace] = {}
        self._shared: dict[_Key, SharedWorkspace] = {}
        self._retired: list[SharedWorkspace] = []
        self._table: str | Callable[[], str] = ""
        self._offers: weakref.WeakKeyDictionary[SharedWorkspace, str] = weakref.WeakKeyDictionary()
        self._rates = PollRates()
        self._watchdog = Watchdog()
        self._lock = threading.RLock()

    def use_table(self, table: str | Callable[[], str]) -> None:
        """Sets the text of the table of measured choices that this rank offers to groups that shake hands from now on.

        If it is a function, it is called when a group shakes hands. A group that has shaken hands keeps its table; a
        warning says so.
        """
        self._table = table
        if callable(table):
            return
        with self._lock:
            for shared in [known for known, offer in self._offers.items() if offer != table]:
                del self._offers[shared]
                logger.warning(
                    "group '%s' keeps the table of measured choices that it took at its first use",
                    shared.group.name,
                )

    def get(self, group_name: str, device: torch.device, options: AgreedOptions) -> Workspace:
        """Returns the workspace of a group. Collective at the group's first use and at the first use of `options` in
        it.

        device: where the tensors of the call live. Raises DitronHandshakeError naming ranks that do not come in time,
        DitronOptionsMismatch, DitronCaptureError, and RuntimeError when there is no such group.
        """
        workspace = self._bound.get((group_name, device, options))
        if workspace is not None and workspace.group.is_current():
            return workspace
        with self._lock:
            return self._bind(group_name, device, options)

    def of_group(self, process_group: dist.ProcessGroup) -> list[SharedWorkspace]:
        """The workspaces of a group, on all devices, by device name."""
        with self._lock:
            found = [s for s in self._shared.values() if s.group.process_group() is process_group]
            return sorted(found, key=lambda shared: str(shared.device))

    def release(self, shared: SharedWorkspace) -> None:
        """Forgets a workspace and frees its memory. The next use of its group makes a new one."""
        with self._lock:
            self._bound = {key: ws for key, ws in self._bound.items() if ws.shared is not shared}
            self._shared = {key: other for key, other in self._shared.items() if other is not shared}
        self._offers.pop(shared, None)
        shared.release()

    def _bind(self, group_name: str, device: torch.device, options: AgreedOptions) -> Workspace:
        exact = _exact(device)
        self._release_retired(exact)
        shared = self._shared.get((group_name, exact))
        if shared is not None and not shared.group.is_current():
            self.release(shared)
            shared = None
        group = groups.resolve(group_name, exact) if shared is None else shared.group
        timeout_s = options.timeout_s or group.timeout_s
        if shared is None:
            shared = self._open(group, exact, options, timeout_s)
        elif not any(ws.shared is shared and ws.options == options for ws in self._bound.values()):
            self._agree(shared, options, timeout_s)
        workspace = Workspace(shared, options, timeout_s, self.first_timeout_s)
        self._bound[group_name, exact, options] = workspace
        return workspace

    def _agree(self, shared: SharedWorkspace, options: AgreedOptions, timeout_s: float) -> None:
        shared.check()
        try:
            agree_options(shared.session, options, max(timeout_s, self.first_timeout_s))
        except (DitronHandshakeError, DitronDiverged) as exc:
            shared.health.fail(exc)
            raise
        shared.timeouts.add(timeout_s)

    def _open(
        self, group: groups.Group, device: torch.device, options: AgreedOptions, timeout_s: float
    ) -> SharedWorkspace:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise DitronCaptureError(site=f"group '{group.name}'", problem="its workspace is made at its first call")
        with torch.inference_mode(False), torch.no_grad():
            first_s = max(timeout_s, self.first_timeout_s)
            session = meet(group, f"open/{device.type}", "begin to use the group", first_s)
            table = self._table() if callable(self._table) else self._table
            agreement = shake_hands(session, options, probe(device), table, first_s)
            shared = SharedWorkspace(session, device, agreement, self._rates, timeout_s)
            self._offers[shared] = table
            if agreement.capabilities.tile_available:
                shared.make_first_ring(options.workspace_limit, first_s)
        # Do this before the workspace can be found, because a workspace that is not watched must not be used.
        self._watchdog.watch(shared.health)
        self._shared[group.name, device] = shared
        process_group = group.process_group()
        assert process_group is not None
        ending = weakref.finalize(process_group, _retire, weakref.ref(self), weakref.ref(shared))
        ending.atexit = False
        return shared

    def _release_retired(self, device: torch.device) -> None:
        if self._retired and not (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            retired, self._retired = self._retired, []
            for shared in retired:
                self.release(shared)


def _exact(device: torch.device) -> torch.device:
    """Returns the device with its index, as tensors on it name it: "cuda" alone may mean another GPU later."""
    if device.type != "cuda":
        return torch.device(device.type)
    return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())


def _retire(registry_ref: weakref.ref[Registry], shared_ref: weakref.ref[SharedWorkspace]) -> None:
    """Frees the memory of a process group that no longer exists. It is freed at once, unless a graph is being captured,
    which forbids it.
    """
    registry, shared = registry_ref(), shared_ref()
    if registry is None or shared is None:
        return
    registry._retired.append(shared)
    registry._release_retired(shared.device)


workspaces = Registry()
"""The registry of this process."""
