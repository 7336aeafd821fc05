"""Order of a workspace's calls across CUDA streams (protocol rule 7: the host's call order is the order of execution).

A call on another stream than the last one's waits for the event recorded after that call. Inside a CUDA graph only
events of the same capture may be waited for, and outside, only events recorded outside: the rest is fixed by where the
user replays the graph, which has to be ordered after eager calls on other streams like any use of shared memory.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch


class CallOrder(Protocol):
    """Puts the calls of one workspace in order."""

    def enter(self) -> bool:
        """Order what follows on the current stream after the last call; whether the stream is being captured."""
        ...

    def leave(self) -> None:
        """The call's work is on the current stream."""
        ...

    def is_capturing(self) -> bool: ...


class HostOrder:
    """The CPU device: a call has ended when it returns."""

    def enter(self) -> bool:
        return False

    def leave(self) -> None:
        pass

    def is_capturing(self) -> bool:
        return False


@dataclass
class _Mark:
    """The end of a call: its stream, the event there, and the capture that both belong to (0 outside)."""

    stream: torch.cuda.Stream
    event: torch.cuda.Event
    capture: int


class StreamOrder:
    """The CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: _Mark | None = None
        self._last_captured: _Mark | None = None

    def enter(self) -> bool:
        stream = torch.cuda.current_stream(self._device)
        if not self.is_capturing():
            if self._last is not None and self._last.stream != stream:
                stream.wait_event(self._last.event)
            return False
        last = self._last_captured
        if last is not None and last.stream != stream and last.capture == capture_id(stream):
            stream.wait_event(last.event)
        return True

    def leave(self) -> None:
        stream = torch.cuda.current_stream(self._device)
        if self.is_capturing():
            # An event of its own: one that a finished capture recorded must not be waited for again.
            mark = _Mark(stream, torch.cuda.Event(), capture_id(stream))
            mark.event.record(stream)
            self._last_captured = mark
            return
        if self._last is None:
            self._last = _Mark(stream, torch.cuda.Event(), 0)
        self._last.stream = stream
        self._last.event.record(stream)

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()


def capture_id(stream: torch.cuda.Stream) -> int:
    """The driver's number of the capture that `stream` takes part in, unique in the process; 0 when there is none.

    torch says whether a stream is captured but not into which graph, and one stream serves one graph after another.
    """
    status = ctypes.c_int(0)
    number = ctypes.c_ulonglong(0)
    error = _capture_info()(ctypes.c_void_p(stream.cuda_stream), ctypes.byref(status), ctypes.byref(number))
    if error != 0:
        raise RuntimeError(f"the GPU driver did not describe the capture of {stream}: error {error}")
    return number.value if status.value == 1 else 0


@functools.cache
def _capture_info() -> Callable[..., int]:
    # Both signatures are frozen: (stream, status*, id*), in the second version of CUDA's followed by outputs that may
    # be null.
    if torch.version.hip is not None:
        return ctypes.CDLL("libamdhip64.so").hipStreamGetCaptureInfo  # type: ignore[no-any-return]
    function = ctypes.CDLL("libcuda.so.1").cuStreamGetCaptureInfo_v2
    return lambda stream, status, number: int(function(stream, status, number, None, None, None))
