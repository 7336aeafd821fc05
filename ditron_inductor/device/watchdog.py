"""Failures that kernels find: the record that a kernel wrote becomes an error with names, at the next call and in the
log.

A kernel whose wait expired, or that met another site's flag, writes one record to memory that the host reads without
asking the device (protocol rules 8 and 10). The next call of the workspace raises the error. If the main thread of the
process is in a long synchronisation, this may be late, so a daemon thread logs the failure as soon as the record
exists.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import threading
import time
import weakref
from collections.abc import Callable

import torch

from ditron_inductor.core import layout as words
from ditron_inductor.device import slot_layout
from ditron_inductor.device.groups import Group
from ditron_inductor.device.sites import SiteNames
from ditron_inductor.errors import DitronDiverged, DitronError, DitronPoisoned, DitronTimeout

logger = logging.getLogger(__name__)

PERIOD_S = 0.5
"""How often the thread looks. At ten times a second 30 ranks that had nothing to do took a quarter of a core."""


class Health:
    """The health of one workspace: its failure record and the error that was made from it, if any. `record` is int64
    [RECORD_WORDS], pinned for a CUDA workspace. `timeout_s` is the time limit of its kernels' waits.
    """

    def __init__(self, group: Group, sites: SiteNames, device: torch.device) -> None:
        self.record = torch.zeros(
            slot_layout.RECORD_WORDS, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda"
        )
        self.timeout_s = 0.0
        self._on_host = device.type == "cpu"
        self._begun_at: float | None = None
        self._group = group
        self._sites = sites
        # Reads the word itself: a tensor's item() costs microseconds, and every call asks.
        self._state = ctypes.c_int64.from_address(self.record.data_ptr() + 8 * words.STATE.value)
        self._error: DitronError | None = None
        self._cause = ""
        self._lock = threading.Lock()

    def begin(self, timeout_s: float) -> None:
        """Notes that a call begins whose waits end after so many seconds."""
        self.timeout_s = timeout_s
        if self._on_host:
            self._begun_at = time.monotonic()

    def _waited_s(self) -> float:
        """Returns how long the present call's kernel has waited, if the host knows, and otherwise the limit. The host
        knows it in the interpreter, where a limit counts polls, and a poll takes longer on a busy machine.
        """
        return self.timeout_s if self._begun_at is None else max(self.timeout_s, time.monotonic() - self._begun_at)

    def failed(self) -> bool:
        """Returns whether the workspace may not be used until it is reset. Costs well under a microsecond."""
        return self._state.value != 0 or bool(self._cause)

    def check(self, not_begun: Callable[[int, int], list[int]] = lambda slot, epoch: []) -> None:
        """Raises the failure, if there is one: at first as DitronTimeout or DitronDiverged, later as DitronPoisoned.
        not_begun: is asked which ranks have not begun the launch of a use of a slot.
        """
        error = self.error()
        if self._cause:
            raise DitronPoisoned(group_name=self._group.name, cause=self._cause)
        if error is not None:
            error = self._with_absent(error, not_begun)
            self._cause = str(error)
            # Raise a copy: the traceback of a raised error keeps its callers' tensors as long as we keep the error.
            raise type(error)(**error.fields)

    def fail(self, cause: BaseException) -> None:
        """Notes an exception, raised elsewhere, that leaves this rank's calls out of step with the other ranks."""
        if not self._cause:
            self._cause = f"{type(cause).__name__}: {cause}"

    def error(self) -> DitronError | None:
        """Returns what a kernel found, as an error, or None. It is read once; names come from the group's store."""
        if self._state.value == 0 and self._error is None:
            return None
        with self._lock:
            if self._error is None and self._state.value != 0:
                self._error = self._describe(self.record.tolist())
            return self._error

    def clear(self) -> None:
        """Forgets the failure. No kernel of the workspace may be running."""
        with self._lock:
            self.record.zero_()
            self._error = None
            self._cause = ""

    def _describe(self, record: list[int]) -> DitronError:
        # Before the names are looked up, which may take a while.
        waited_s = self._waited_s()
        expected_site, expected_epoch = slot_layout.unpack(record[words.RECORD_EXPECTED.value])
        seen_site, seen_epoch = slot_layout.unpack(record[words.RECORD_SEEN.value])
        rank, peer = record[words.RECORD_RANK.value], record[words.RECORD_PEER.value]
        site = self._sites.text(expected_site)
        peer_site = self._sites.text(seen_site)
        if record[words.STATE.value] == words.DIVERGED.value:
            return DitronDiverged(rank=rank, site=site, peer=peer, peer_site=peer_site)
        chunk: int | str = record[words.RECORD_CHUNK.value]
        slot = record[words.RECORD_SLOT.value]
        seen = f"use {seen_epoch}, by '{peer_site}'"
        if chunk == words.CREDIT_ROW.value:
            chunk = f"credit of slot {slot}"
            # The next call would have given it, and the word names the site of that call.
            expected = f"its next call after use {expected_epoch} of the slot"
            seen = f"the one after use {seen_epoch}, '{peer_site}'"
        elif chunk == words.REVOKED_ROW.value:
            chunk = f"what it had in slot {slot}"
            expected = f"use {expected_epoch} of the slot to last until this rank had read it"
        else:
            expected = f"use {expected_epoch} of slot {slot} by this site"
        return DitronTimeout(
            rank=rank,
            seconds=waited_s,
            site=site,
            peer=peer,
            chunk=chunk,
            expected=expected,
            seen=seen if seen_epoch else "nothing from it yet",
            absent="",
        )

    def _with_absent(self, error: DitronError, not_begun: Callable[[int, int], list[int]]) -> DitronError:
        """Adds the ranks that have not begun the call, if these are not just the one that was waited for."""
        if not isinstance(error, DitronTimeout) or self._group.world_size == 2:
            return error
        slot, chunk = self.record[words.RECORD_SLOT.value].item(), self.record[words.RECORD_CHUNK.value].item()
        _, epoch = slot_layout.unpack(int(self.record[words.RECORD_EXPECTED.value].item()))
        # The credit that a launch waits for is of the use before it.
        ranks = not_begun(int(slot), epoch + 1 if chunk == words.CREDIT_ROW.value else epoch)
        if not ranks or ranks == [error.fields["peer"]]:
            return error
        numbers = ", ".join(map(str, ranks))
        who = f"Rank {numbers} has" if len(ranks) == 1 else f"Ranks {numbers} have"
        return DitronTimeout(**error.fields | {"absent": f"{who} not begun this call, or failed before it. "})


class Watchdog:
    """A daemon thread that logs the failures of all workspaces of a registry. It makes no CUDA call. It runs while
    there is something to watch, and ends before the interpreter does.
    """

    def __init__(self) -> None:
        self._watched: weakref.WeakSet[Health] = weakref.WeakSet()
        self._reported: weakref.WeakKeyDictionary[Health, DitronError] = weakref.WeakKeyDictionary()
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def watch(self, health: Health) -> None:
        """Reports on `health` from now on, as long as something else keeps it alive."""
        with self._lock:
            self._watched.add(health)
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="ditron-watchdog", daemon=True)
                # It may raise, and then the next call has to try again.
                thread.start()
                self._thread = thread
                atexit.register(self.close)

    def close(self) -> None:
        """Ends the thread, before the memory that it reads is freed."""
        thread = self._thread
        self._stop.set()
        if thread is not None:
            thread.join(5.0)

    def _run(self) -> None:
        while not self._stop.wait(PERIOD_S):
            self._report_all()
            with self._lock:
                if not self._watched:
                    self._thread = None
                    atexit.unregister(self.close)
                    return

    def _report_all(self) -> None:
        for health in list(self._watched):
            error = health.error()
            if error is not None and self._reported.get(health) is not error:
                self._reported[health] = error
                logger.error("%s: %s", type(error).__name__, error)
