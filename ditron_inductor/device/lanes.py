"""Streams beside the current one: a side for transfers that run while matrix products do, and a second main one.

    with call.fork() as lane:          # what follows on the side waits for the main stream
        with lane.side():
            ...                        # launches and copies on the side
            here = lane.mark()
        lane.wait(here)                # the main stream waits for the side, up to the mark
        with lane.beside():
            lane.wait(here)            # so does the second one
            ...                        # a product whose first tiles fill the SMs that the main stream's last ones leave
                                       # at the end the main stream waits for all of both

Nothing may be queued on the side that needs something queued on the main stream later: on the CPU device, and where two
streams share one queue of the hardware, everything runs in the order of the calls here. Whoever frees memory that the
side uses does so after the end of the block; the main stream is behind the side by then.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Protocol

import torch

HIGH_PRIORITY = -1
"""A waiting kernel of the side gets the next free SM, before the blocks of a large product that are still to come."""


class Lane(Protocol):
    """One use of the side stream: a context that forks it off the main stream, and joins it again, also on errors."""

    def __enter__(self) -> Lane: ...

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def side(self) -> AbstractContextManager[object]:
        """What is launched inside goes to the side."""
        ...

    def beside(self) -> AbstractContextManager[object]:
        """What is launched inside goes to the second main stream: `here` and `wait` are about it there."""
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

    def __enter__(self) -> Lane:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass

    def side(self) -> AbstractContextManager[object]:
        return nullcontext()

    def beside(self) -> AbstractContextManager[object]:
        return nullcontext()

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

    stream, second: the side stream and the second main one, made when they are used first; main: the current stream of
    the present call. Marks are events: kept for the next call, or of their own inside a capture, where one that a
    finished capture recorded must not be used again.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.stream: torch.cuda.Stream | None = None
        self.second: torch.cuda.Stream | None = None
        self.main: torch.cuda.Stream | None = None
        self._entered: torch.cuda.Stream | None = None
        self._start: torch.cuda.Event | None = None
        self._second_used = False
        self._events: list[torch.cuda.Event] = []
        self._used = 0
        self._capturing = False

    def __enter__(self) -> Lane:
        if self.stream is None:
            self.stream = torch.cuda.Stream(self._device, priority=HIGH_PRIORITY)
        self.main = self._entered = torch.cuda.current_stream(self._device)
        self._capturing = torch.cuda.is_current_stream_capturing()
        self._used = 0
        self._second_used = False
        self._start = self.here()
        self.follow(self._start)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._second_used:
            self.wait(self._record(self.second))
        self.wait(self.mark())
        self.main = self._entered = self._start = None

    def side(self) -> AbstractContextManager[object]:
        assert self.stream is not None and self.main is not None
        return _Switch(self.stream, self.main)

    def beside(self) -> AbstractContextManager[object]:
        if self.second is None:
            self.second = torch.cuda.Stream(self._device)
        if not self._second_used:
            assert self._start is not None
            self.second.wait_event(self._start)
            self._second_used = True
        return _Beside(self, self.second)

    def here(self) -> torch.cuda.Event | None:
        return self._record(self.main)

    def follow(self, mark: torch.cuda.Event | None) -> None:
        assert self.stream is not None and mark is not None
        self.stream.wait_event(mark)

    def mark(self) -> torch.cuda.Event | None:
        return self._record(self.stream)

    def wait(self, mark: torch.cuda.Event | None) -> None:
        assert self.main is not None and mark is not None
        self.main.wait_event(mark)

    def _record(self, stream: torch.cuda.Stream | None) -> torch.cuda.Event:
        assert stream is not None, "marks are made inside the lane's block"
        if self._capturing:
            event = torch.cuda.Event()
        else:
            if self._used == len(self._events):
                self._events.append(torch.cuda.Event())
            event = self._events[self._used]
            self._used += 1
        event.record(stream)
        return event


class _Switch:
    """Makes a stream the current one, and another one afterwards; a fraction of what torch.cuda.stream costs, which
    also asks for the present stream and for devices.
    """

    def __init__(self, stream: torch.cuda.Stream, back: torch.cuda.Stream) -> None:
        self._stream = stream
        self._back = back

    def __enter__(self) -> None:
        torch.cuda.set_stream(self._stream)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        torch.cuda.set_stream(self._back)


class _Beside:
    """Makes the second stream of a lane its main one, and the current one."""

    def __init__(self, lane: StreamLane, stream: torch.cuda.Stream) -> None:
        self._lane = lane
        self._stream = stream

    def __enter__(self) -> None:
        self._lane.main = self._stream
        torch.cuda.set_stream(self._stream)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._lane._entered is not None
        self._lane.main = self._lane._entered
        torch.cuda.set_stream(self._lane._entered)


def make_lane(device: torch.device) -> Lane:
    """The streams of a workspace on `device`; made when they are used first."""
    return StreamLane(device) if device.type == "cuda" else HostLane()
