"""The order of a workspace's calls across CUDA streams (protocol rule 7: the host's call order is the order of
execution).

If a call is on another stream than the last call, it waits for an event recorded behind that call. Inside a CUDA graph
only events of the same capture may be waited for, and outside, only events recorded outside. The rest is fixed by where
the user replays the graph, which has to be ordered after eager calls on other streams like any use of shared memory.

Outside captures the event is recorded when the stream changes, but behind every call on a stream that torch did not
make (docs/host_path.md). If the old stream is part of a capture by then, an event recorded there would draw the new
stream into the graph, silently. That is an error. (The last call was made before the capture began. The user avoids the
error by a call on that stream in between, or by no call on the other stream.)

A stream is the last stream as soon as a call has entered on it, even if the call fails, because it has waited for all
calls before.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from ditron_inductor.device import driver
from ditron_inductor.errors import DitronCaptureError

NO_STREAM = -1
CYCLES_PER_US = 2500
"""No GPU that we know of has a faster clock, so a delay of this many cycles per microsecond is never too short."""


def delay(us: float) -> None:
    """Lets the current CUDA stream wait so many microseconds or longer, while the host goes on."""
    torch.cuda._sleep(int(us * CYCLES_PER_US))


class CallOrder:
    """Puts the calls of one workspace in order. On the CPU device there is nothing to do: a call has ended when it
    returns.
    """

    stream: int = 0
    """Handle of the stream that the present call runs on, as the driver takes it; 0 on the CPU."""
    capturing: bool = False
    """Whether the stream is being captured."""
    capture: int = 0
    """The driver's number of the capture that the last captured call is in."""

    def enter(self) -> bool:
        """Orders what follows on the current stream after the last call. Returns whether it is being captured."""
        return False

    def leave(self) -> None:
        """Ends a call, whose work is on the stream that was current in `enter`."""

    def is_capturing(self) -> bool:
        return False


@dataclass
class _Mark:
    """The end of a captured call: its stream, the event there, and the capture that both belong to."""

    stream: torch.cuda.Stream
    event: torch.cuda.Event
    capture: int


class StreamOrder(CallOrder):
    """The order on a CUDA device. `device` is the current device in all calls."""

    def __init__(self, device: torch.device) -> None:
        self.stream = NO_STREAM
        self._device = device
        self._index: int = device.index
        # The stream of the last call outside captures, by handle and as an object, and the event behind that call.
        self._last_handle = NO_STREAM
        self._last: torch.cuda.Stream | None = None
        self._last_is_foreign = False
        self._event: torch.cuda.Event | None = None
        self.capturing = False
        self._last_captured: _Mark | None = None

    def enter(self) -> bool:
        self.stream = current_handle(self._index)
        self.capturing = self.is_capturing()
        if self.capturing:
            stream, last = torch.cuda.current_stream(self._device), self._last_captured
            self.capture = capture_id(stream)
            if last is not None and last.stream != stream and last.capture == self.capture:
                stream.wait_event(last.event)
        elif self.stream != self._last_handle:
            self._change_stream()
        return self.capturing

    def leave(self) -> None:
        if self.capturing:
            stream = torch.cuda.current_stream(self._device)
            # Use a new event: one that a finished capture recorded must not be waited for again.
            mark = _Mark(stream, torch.cuda.Event(), self.capture)
            mark.event.record(stream)
            self._last_captured = mark
        elif self._last_is_foreign:
            assert self._event is not None and self._last is not None
            self._event.record(self._last)

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def _change_stream(self) -> None:
        stream = torch.cuda.current_stream(self._device)
        if self._event is None:
            self._event = torch.cuda.Event()
        if self._last is not None:
            if not self._last_is_foreign:
                if capture_id(self._last) != 0:
                    raise DitronCaptureError(
                        site="the stream of the last call",
                        problem="a call on another stream has to be ordered after what ran there before",
                    )
                self._event.record(self._last)
            stream.wait_event(self._event)
        self._last_handle = self.stream
        self._last = stream
        self._last_is_foreign = is_foreign(stream)


def current_handle(device_index: int) -> int:
    """Returns the driver's handle of torch's current stream on a device, at a tenth of the stream object's cost."""
    handle: int = torch._C._cuda_getCurrentRawStream(device_index)
    return handle


def handle_for(x: torch.Tensor) -> int:
    """`current_handle` of the device of x; 0 on the CPU."""
    return current_handle(x.get_device()) if x.is_cuda else 0


def is_foreign(stream: torch.cuda.Stream) -> bool:
    """Returns whether torch only borrows `stream`: it numbers its own ones, and knows others by their handle."""
    return stream.cuda_stream != 0 and stream.stream_id == stream.cuda_stream


def capture_id(stream: torch.cuda.Stream) -> int:
    """The driver's number of the capture that `stream` takes part in, unique in the process; 0 when there is none.
    torch says whether a stream is captured but not into which graph, and one stream serves one graph after another.
    """
    status = ctypes.c_int(0)
    number = ctypes.c_ulonglong(0)
    error = driver.capture_info()(ctypes.c_void_p(stream.cuda_stream), ctypes.byref(status), ctypes.byref(number))
    if error != 0:
        raise RuntimeError(f"the GPU driver did not describe the capture of {stream}: error {error}")
    return number.value if status.value == 1 else 0


def on_stream(handle: int, device: torch.device) -> AbstractContextManager[object]:
    """Returns a context that makes the stream of a handle current on `device`, for calls that take no stream."""
    if device.type != "cuda" or handle == current_handle(device.index):
        return nullcontext()
    return torch.cuda.stream(torch.cuda.ExternalStream(handle, device))


def switch_to(stream: torch.cuda.Stream) -> Callable[[], object]:
    """Returns what makes `stream` the current device's current stream, as torch.cuda.set_stream does in the end."""
    return functools.partial(
        torch._C._cuda_setStream,
        stream_id=stream.stream_id,
        device_index=stream.device_index,
        device_type=stream.device_type,
    )
