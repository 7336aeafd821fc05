"""Streams beside the current one: a side stream for transfers that run at the same time as matrix products, and a
second main stream.

    with call.fork() as lane:          # what follows on the side waits for the main stream
        wait(lane.side)                # a launch on the side, by its handle
        lane.copy(transfers, target)   # and copies behind it
        here = lane.mark()
        lane.wait(here)                # the main stream waits for the side, up to the mark
        with lane.beside():
            lane.wait(here)            # so does the second one
            ...                        # a product whose first tiles fill the SMs that the main stream's last ones leave
                                       # at the end the main stream waits for all of both

Nothing may be queued on the side stream that depends on something queued later on the main stream. On the CPU device,
and if two streams share one queue of the hardware, everything runs in the order of the calls. Memory that the side
stream uses may be freed only after the end of the block, because then the main stream has waited for the side.

The side stream never becomes torch's current stream, because its launches and copies get it by handle. Products of the
library go to the current stream, so the current stream is switched for each use of the second main stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch

from ditron_inductor.device import driver
from ditron_inductor.device.streams import NO_STREAM, CallOrder, switch_to

HIGH_PRIORITY = -1
"""The priority of the side stream: its waiting kernels get the next free SM, before blocks of a large product."""


class Transfer(NamedTuple):
    """A copy on the side stream, from a peer's slot into a tensor. All numbers but `source` and `runs` are bytes.
    offset: of the target in its tensor. source: an address in a peer's slot. nbytes: of one run. runs: how many runs of
    `nbytes` follow each other at the source; in the target they begin `pitch` apart, as the rows of one rank do in each
    sequence of a batch.
    """

    offset: int
    source: int
    nbytes: int
    runs: int = 1
    pitch: int = 0


HERE: AbstractContextManager[object] = nullcontext()
"""The context to use if there is nothing to switch."""


class Lane:
    """One use of the side stream: a context that forks it off the main stream, and joins it again, also on errors. This
    is the lane of the CPU device: everything runs immediately, in the order of the calls.
    """

    main: int = 0
    """The handle of the main stream, which is the current one; inside `beside`, that of the second main stream."""
    side: int = 0
    """The handle of the side stream."""

    def __enter__(self) -> Lane:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def beside(self) -> AbstractContextManager[object]:
        """Returns a context in which launches go to the second main stream, and `here` and `wait` refer to it."""
        return HERE

    def copy(self, transfers: Iterable[Transfer], tensor: int) -> None:
        """Queues copies to the tensor at this address on the side stream."""
        for offset, source, nbytes, runs, pitch in transfers:
            driver.host_copy(tensor + offset, source, nbytes, 0, runs, pitch)

    def here(self) -> torch.cuda.Event | None:
        """Returns a mark at the present end of the main stream."""
        return None

    def follow(self, mark: torch.cuda.Event | None) -> None:
        """Makes the side stream wait for a mark of the main stream."""

    def mark(self) -> torch.cuda.Event | None:
        """Returns a mark at the present end of the side stream."""
        return None

    def wait(self, mark: torch.cuda.Event | None) -> None:
        """Makes the main stream wait for a mark of the side stream."""


class StreamLane(Lane):
    """The lane of a CUDA device. There is one object for each workspace, which one call after another uses. order:
    knows the stream of the present call. The side stream and the second main stream are made when they are first used.
    Marks are events, which are kept for the next call. Inside a capture they are new, because an event that a finished
    capture recorded must not be used again.
    """

    def __init__(self, device: torch.device, order: CallOrder) -> None:
        self.main = self.side = NO_STREAM
        self._device = device
        self._order = order
        # The stream of the present call, and the stream of the main work now, which is the same or the second one.
        self._caller: torch.cuda.Stream | None = None
        self._caller_handle = NO_STREAM
        self._current: torch.cuda.Stream | None = None
        self._side: torch.cuda.Stream | None = None
        self._beside: _Beside | None = None
        self._start: torch.cuda.Event | None = None
        self._second_used = False
        self._events: list[torch.cuda.Event] = []
        self._used = 0
        self._capturing = False
        self._copy: driver.Copy | None = None

    def __enter__(self) -> Lane:
        if self._side is None:
            self._copy = driver.device_copy()
            self._side = torch.cuda.Stream(self._device, priority=HIGH_PRIORITY)
            self.side = self._side.cuda_stream
        handle = self._order.stream
        if handle != self._caller_handle:
            self._caller = torch.cuda.current_stream(self._device)
            self._caller_handle = handle
            if self._beside is not None:
                self._beside.leave = switch_to(self._caller)
        self.main = handle
        self._current = self._caller
        self._capturing = self._order.capturing
        self._used = 0
        self._second_used = False
        self._start = self.here()
        self.follow(self._start)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._second_used:
            assert self._beside is not None
            self.wait(self._record(self._beside.stream))
        self.wait(self.mark())

    def beside(self) -> AbstractContextManager[object]:
        beside = self._beside
        if beside is None:
            assert self._caller is not None
            beside = self._beside = _Beside(self, torch.cuda.Stream(self._device), self._caller)
        if not self._second_used:
            assert self._start is not None
            self._start.wait(beside.stream)
            self._second_used = True
        return beside

    def copy(self, transfers: Iterable[Transfer], tensor: int) -> None:
        copy, side = self._copy, self.side
        assert copy is not None
        for offset, source, nbytes, runs, pitch in transfers:
            copy(tensor + offset, source, nbytes, side, runs, pitch)

    def here(self) -> torch.cuda.Event | None:
        return self._record(self._current)

    def follow(self, mark: torch.cuda.Event | None) -> None:
        assert mark is not None
        mark.wait(self._side)

    def mark(self) -> torch.cuda.Event | None:
        return self._record(self._side)

    def wait(self, mark: torch.cuda.Event | None) -> None:
        assert mark is not None
        mark.wait(self._current)

    def _record(self, stream: torch.cuda.Stream | None) -> torch.cuda.Event:
        # Pass the stream, because otherwise the event would be recorded on the current one.
        assert stream is not None
        if self._capturing:
            event = torch.cuda.Event()
        else:
            if self._used == len(self._events):
                self._events.append(torch.cuda.Event())
            event = self._events[self._used]
            self._used += 1
        event.record(stream)
        return event


class _Beside:
    """Makes the second stream of a lane its main stream and torch's current one, for one block after another."""

    def __init__(self, lane: StreamLane, stream: torch.cuda.Stream, caller: torch.cuda.Stream) -> None:
        self.stream = stream
        self.leave = switch_to(caller)
        self._lane = lane
        self._handle: int = stream.cuda_stream
        self._enter: Callable[[], object] = switch_to(stream)

    def __enter__(self) -> None:
        self._lane.main = self._handle
        self._lane._current = self.stream
        self._enter()

    def __exit__(self, *exc: object) -> None:
        lane = self._lane
        lane.main = lane._caller_handle
        lane._current = lane._caller
        self.leave()


def make_lane(device: torch.device, order: CallOrder) -> Lane:
    """Returns the lane of a workspace on `device`. Its streams are made when they are first used."""
    return StreamLane(device, order) if device.type == "cuda" else Lane()
