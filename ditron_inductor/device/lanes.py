"""Streams beside the current one: a side for transfers that run while matrix products do, and a second main one.

    with call.fork() as lane:          # what follows on the side waits for the main stream
        wait(lane.side)                # a launch on the side, by its handle
        lane.copy(transfers, target)   # and copies behind it
        here = lane.mark()
        lane.wait(here)                # the main stream waits for the side, up to the mark
        with lane.beside():
            lane.wait(here)            # so does the second one
            ...                        # a product whose first tiles fill the SMs that the main stream's last ones leave
                                       # at the end the main stream waits for all of both

Nothing may be queued on the side that needs something queued on the main stream later: on the CPU device, and where two
streams share one queue of the hardware, everything runs in the order of the calls here. Whoever frees memory that the
side uses does so after the end of the block; the main stream is behind the side by then.

The side never becomes torch's current stream, since its launches and copies are told theirs by handle. Products of the
library go to the current stream, so there is a switch for each turn of the second one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Protocol

import torch

from ditron_inductor.device import driver
from ditron_inductor.device.streams import NO_STREAM, CallOrder, switch_to

HIGH_PRIORITY = -1
"""A waiting kernel of the side gets the next free SM, before the blocks of a large product that are still to come."""

Transfer = tuple[int, int, int]
"""A copy on the side: how many bytes behind the start of a tensor it goes, the address in a peer's slot, bytes."""

HERE: AbstractContextManager[object] = nullcontext()
"""The context to use if there is nothing to switch."""


class Lane(Protocol):
    """One use of the side stream: a context that forks it off the main stream, and joins it again, also on errors."""

    main: int
    """Handle of the main stream, the current one; inside `beside` of the second one."""
    side: int
    """Handle of the side."""

    def __enter__(self) -> Lane: ...

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def beside(self) -> AbstractContextManager[object]:
        """Returns a context in which launches go to the second main stream, and `here` and `wait` refer to it."""
        ...

    def copy(self, transfers: Iterable[Transfer], tensor: int) -> None:
        """Queue copies to the tensor at this address on the side."""
        ...

    def here(self) -> torch.cuda.Event | None:
        """A mark of where the main stream is now."""
        ...

    def follow(self, mark: torch.cuda.Event | None) -> None:
        """The side waits for a mark of the main stream."""
        ...

    def mark(self) -> torch.cuda.Event | None:
        """A mark of where the side is now."""
        ...

    def wait(self, mark: torch.cuda.Event | None) -> None:
        """The main stream waits for a mark of the side."""
        ...


class HostLane:
    """The CPU device: everything runs at once, in the order of the calls."""

    main = 0
    side = 0

    def __enter__(self) -> Lane:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass

    def beside(self) -> AbstractContextManager[object]:
        return HERE

    def copy(self, transfers: Iterable[Transfer], tensor: int) -> None:
        for offset, source, nbytes in transfers:
            driver.host_copy(tensor + offset, source, nbytes, 0)

    def here(self) -> None:
        return None

    def follow(self, mark: torch.cuda.Event | None) -> None:
        pass

    def mark(self) -> None:
        return None

    def wait(self, mark: torch.cuda.Event | None) -> None:
        pass


class StreamLane:
    """The CUDA device. One object for each workspace, used by one call after another.

    order: knows the stream of the present call. The side stream and the second main one are made when they are used
    first. Marks are events: kept for the next call, or of their own inside a capture, where one that a finished capture
    recorded must not be used again.
    """

    def __init__(self, device: torch.device, order: CallOrder) -> None:
        self.main = self.side = NO_STREAM
        self._device = device
        self._order = order
        # The stream of the present call, and that of the main work now: it, or the second one.
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

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
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
        for offset, source, nbytes in transfers:
            copy(tensor + offset, source, nbytes, side)

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
        # Without a stream it would be recorded on the current one.
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
    """Makes the second stream of a lane its main one, and the current one; used by one block after another."""

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

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        lane = self._lane
        lane.main = lane._caller_handle
        lane._current = lane._caller
        self.leave()


def make_lane(device: torch.device, order: CallOrder) -> Lane:
    """The streams of a workspace on `device`; made when they are used first."""
    return StreamLane(device, order) if device.type == "cuda" else HostLane()
