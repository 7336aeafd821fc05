"""Launches with time stamps, while a trace is taken.

A kernel takes part if it has the parameter `TRACE` (see core/trace.py). Its traced launches have launchers of their
own, so the kernels that run before and after the trace are those that were compiled without time stamps.
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
    """Returns the clock of devices with this `Capabilities.arch`; None if kernels cannot read a clock there."""
    if arch == "interpreter":
        return int(trace.INTERPRETED.value)
    if arch.startswith("sm_"):
        return int(trace.NVIDIA.value)
    return int(trace.AMD.value) if arch.startswith("gfx9") else None


class TraceBuffer:
    """At most `capacity` events of kernels on one device. sites: their texts by the numbers in the events."""

    def __init__(self, device: torch.device, capacity: int) -> None:
        self.capacity = capacity
        self.words = torch.zeros(
            words.EVENTS.value + capacity * words.EVENT_WORDS.value, dtype=torch.int64, device=device
        )
        self.sites: dict[int, str] = {}
        self._attached: dict[int, Generation] = {}
        self.clear()

    def clear(self) -> None:
        """Drops all events, on the current stream."""
        self.words[: words.EVENTS.value].zero_()
        self.words[words.EVENTS_CAPACITY.value].fill_(self.capacity)

    def attach(self, generation: Generation, site: int, text: str) -> None:
        """Lets launches on the current stream in this ring write here; the next one is of `site`, named `text`."""
        self.sites[site] = text
        if id(generation) not in self._attached:
            generation.ctl[words.TRACE_BUFFER.value].fill_(self.words.data_ptr())
            self._attached[id(generation)] = generation

    def detach(self) -> None:
        """Lets no launch write here any more. No launch may be running."""
        for generation in self._attached.values():
            generation.ctl[words.TRACE_BUFFER.value].fill_(0)
        self._attached = {}

    def take(self) -> tuple[torch.Tensor, int]:
        """Returns (the events, int64 [N, EVENT_WORDS] on the CPU; how many did not fit). No launch may be running."""
        taken = self.words.cpu()
        count = int(taken[words.EVENTS_COUNT.value])
        events = taken[words.EVENTS.value :].view(-1, words.EVENT_WORDS.value)[: min(count, self.capacity)]
        return events, max(0, count - self.capacity)


class Tracing:
    """The buffer to which the launches of this process write their events, None while no trace is taken."""

    def __init__(self) -> None:
        self.buffer: TraceBuffer | None = None

    @contextlib.contextmanager
    def into(self, buffer: TraceBuffer) -> Iterator[None]:
        """Traces the launches inside the block. Blocks must not be nested, and no launch may be captured in them."""
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
"""The Tracing of this process."""


def takes_part(kernel: Any) -> bool:
    """Returns whether a kernel can write events."""
    return PARAMETER in kernel.arg_names
