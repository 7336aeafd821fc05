"""Launches with time stamps: while a trace is being taken, kernels that know how are compiled to take part.

A kernel takes part if it has the parameter `TRACE`, see core/trace.py. Its traced launches have launchers of their own,
so that what runs before and afterwards is what was compiled without.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from ditron_inductor.core import layout as words
from ditron_inductor.core import trace
from ditron_inductor.device.ring import Generation

PARAMETER = "TRACE"


def clock_of(arch: str) -> int | None:
    """The clock of a device whose `Capabilities.arch` this is; None where no kernel can read one."""
    if arch == "interpreter":
        return int(trace.INTERPRETED.value)
    if arch.startswith("sm_"):
        return int(trace.NVIDIA.value)
    return int(trace.AMD.value) if arch.startswith("gfx9") else None


class TraceBuffer:
    """Events of kernels on one device, at most `capacity` of them. sites: their texts by the numbers in the events."""

    def __init__(self, device: torch.device, capacity: int) -> None:
        self.capacity = capacity
        self.words = torch.zeros(
            words.EVENTS.value + capacity * words.EVENT_WORDS.value, dtype=torch.int64, device=device
        )
        self.sites: dict[int, str] = {}
        self._attached: dict[int, Generation] = {}
        self.clear()

    def clear(self) -> None:
        """No events; on the current stream."""
        self.words[: words.EVENTS.value].zero_()
        self.words[words.EVENTS_CAPACITY.value].fill_(self.capacity)

    def attach(self, generation: Generation, site: int, text: str) -> None:
        """Let launches that follow on the current stream and use this ring write here; the next one is of a site."""
        self.sites[site] = text
        if id(generation) not in self._attached:
            generation.ctl[words.TRACE_BUFFER.value].fill_(self.words.data_ptr())
            self._attached[id(generation)] = generation

    def detach(self) -> None:
        """Let no launch write here any more; none is running."""
        for generation in self._attached.values():
            generation.ctl[words.TRACE_BUFFER.value].fill_(0)
        self._attached = {}

    def take(self) -> tuple[torch.Tensor, int]:
        """(the events, int64 [N, EVENT_WORDS] on the CPU, how many found no place); none of its launches is running."""
        taken = self.words.cpu()
        count = int(taken[words.EVENTS_COUNT.value])
        events = taken[words.EVENTS.value :].view(-1, words.EVENT_WORDS.value)[: min(count, self.capacity)]
        return events, max(0, count - self.capacity)


class Tracing:
    """Where the launches of this process write their events, if anywhere."""

    def __init__(self) -> None:
        self.buffer: TraceBuffer | None = None

    @contextlib.contextmanager
    def into(self, buffer: TraceBuffer) -> Iterator[None]:
        """Trace the launches inside the block; not to be nested. No launch is captured meanwhile."""
        assert self.buffer is None, "a trace is being taken already"
        self.buffer = buffer
        try:
            yield
        finally:
            self.buffer = None
            if buffer.words.is_cuda:
                torch.cuda.synchronize(buffer.words.device)
            buffer.detach()


tracing = Tracing()
"""That of this process."""


def takes_part(kernel: Any) -> bool:
    """Whether a kernel can write events."""
    return PARAMETER in kernel.arg_names
