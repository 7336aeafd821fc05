"""A second stream beside the current one, for transfers that run while matrix products do.

    with call.fork() as lane:          # what follows on the side waits for the main stream
        with lane.side():
            ...                        # launches and copies on the side
            here = lane.mark()
        lane.wait(here)                # the main stream waits for the side, up to the mark
        ...
                                       # at the end the main stream waits for all of the side

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

    stream, main: the side stream, made when it is used first, and the main one of the present call. Marks are events:
    kept for the next call, or of their own inside a capture, where one that a finished capture recorded must not be
    used again.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.stream: torch.cuda.Stream | None = None
        self._switch = _Switch(self)
        self.main: torch.cuda.Stream | None = None
        self._events: list[torch.cuda.Event] = []
        self._used = 0
        self._capturing = False

    def __enter__(self) -> Lane:
        if self.stream is None:
            self.stream = torch.cuda.Stream(self._device, priority=HIGH_PRIORITY)
        self.main = torch.cuda.current_stream(self._device)
        self._capturing = torch.cuda.is_current_stream_capturing()
        self._used = 0
        self.follow(self.here())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.wait(self.mark())
        self.main = None

    def side(self) -> AbstractContextManager[object]:
        return self._switch

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
    """Makes the side stream of a lane the current one; a fraction of what torch.cuda.stream costs, which also asks for
    the present stream and for devices.
    """

    def __init__(self, lane: StreamLane) -> None:
        self._lane = lane

    def __enter__(self) -> None:
        assert self._lane.stream is not None
        torch.cuda.set_stream(self._lane.stream)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._lane.main is not None
        torch.cuda.set_stream(self._lane.main)


def make_lane(device: torch.device) -> Lane:
    """The side stream of a workspace on `device`; made when it is used first."""
    return StreamLane(device) if device.type == "cuda" else HostLane()
