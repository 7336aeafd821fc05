"""Whether ranks compile, or have just compiled, so that a rank that meets knows whether a peer may still come.

A rank may bring its graph long after its peers, for instance because they have found theirs in a cache. The store of
the job counts the compilations that have begun, and those that have ended. One begins where torch begins to trace a
function, or begins with a backward graph, or where Ditron itself compiles.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch._dynamo.callback import CallbackArgs, CallbackTrigger, callback_handler

from ditron_inductor.device import groups

log = logging.getLogger(__name__)

TRIGGERS = (CallbackTrigger.DYNAMO, CallbackTrigger.LAZY_BACKWARD)
"""What of torch's compilations counts. What it records or times while a graph runs may wait for peers."""
BEGUN, ENDED = "begun", "ended"


class Compilations:
    """What this process tells the others about its compilations, and what it knows of theirs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_torch = False
        self._own = 0
        self._counted_in: dist.Store | None = None

    def watch(self) -> None:
        """Hears of torch's compilations from now on. `torch._dynamo.reset` ends that, until the next call."""
        if self._torch_begins not in callback_handler.start_callbacks:
            callback_handler.register_start_callback(self._torch_begins)
            callback_handler.register_end_callback(self._torch_ends)

    @contextmanager
    def announced(self) -> Iterator[None]:
        """This process compiles as long as the block lasts."""
        self._change(own=1)
        try:
            yield
        finally:
            self._change(own=-1)

    def counts(self) -> tuple[int, int]:
        """Returns how many compilations of all processes of the job run now, and how many have ended; a compilation
        within another one does not count. Raises DistError if the store of the job cannot be reached.
        """
        store = _store()
        if store is None:
            return 0, 0
        # What begins between the two is seen the next time.
        ended = store.add(ENDED, 0)
        return store.add(BEGUN, 0) - ended, ended

    def _torch_begins(self, args: CallbackArgs) -> None:
        if args.callback_trigger in TRIGGERS:
            self._change(by_torch=True)

    def _torch_ends(self, args: CallbackArgs) -> None:
        self._change(by_torch=False)

    def _change(self, own: int = 0, by_torch: bool | None = None) -> None:
        with self._lock:
            self._own += own
            self._by_torch = self._by_torch if by_torch is None else by_torch
            compiles, counted_in = self._by_torch or self._own > 0, self._counted_in
            if compiles == (counted_in is not None):
                return
            self._counted_in = None
            store = _store() if counted_in is None else counted_in
            try:
                if store is not None:
                    store.add(BEGUN if compiles else ENDED, 1)
                    self._counted_in = store if compiles else None
            except RuntimeError as exc:
                # Whatever is wrong with the store, what is compiled may not need it. If the ranks meet, they say so.
                log.debug("the store of the job cannot be told of a compilation: %s", exc)


def _store() -> dist.Store | None:
    return groups.store_of_job("compilations")


compilations = Compilations()
"""The compilations of this process."""
