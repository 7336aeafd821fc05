"""Times every call of a Task node in a step that runs, and every collective inside such a call.

A mark is an event on the current stream, so nothing waits for it. On the CPU device a mark is the time.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ditron_inductor.task.plan import Choice, PlanRequest

MARKS = 64
MARKS_DELAY_CYCLES = 4_000_000
"""A delay of two milliseconds, in which the host issues all marks before the first one passes."""

Key = tuple[str, str, int]
"""(group, site, m of its matmul). Graphs with the same launches have sites of the same names."""


@dataclass(frozen=True)
class Spent:
    """The times of one site's calls in one step. waited_us: from the rank's arrival at a collective to its exit."""

    strategy: str
    calls: int
    us: float
    waited_us: float

    def plus(self, other: Spent) -> Spent:
        """Returns the sum of both; the strategy is that of the later one."""
        calls, us = self.calls + other.calls, self.us + other.us
        return Spent(other.strategy, calls, us, self.waited_us + other.waited_us)

    def scaled(self, factor: float) -> Spent:
        """Returns the times at another clock rate."""
        return Spent(self.strategy, self.calls, self.us * factor, self.waited_us * factor)


@dataclass
class _Call:
    key: Key
    strategy: str
    begin: Any
    end: Any = None
    collectives: list[tuple[Any, Any]] = field(default_factory=list)


class Probe:
    """An observer (see task/watch.py) of the calls on one device. mark_us: the time that a mark takes on the stream."""

    def __init__(self, device: torch.device, mark_us: float = 0.0) -> None:
        self._device = device
        self._mark_us = mark_us
        self._calls: list[_Call] = []
        self._open: _Call | None = None
        self._step: tuple[Any, Any] | None = None

    def step(self, run: Callable[[], Any]) -> None:
        """Wraps `run`, a whole step, in two marks."""
        begin = self._mark()
        run()
        self._step = begin, self._mark()

    def call(
        self, run: Callable[..., Any], group_name: str, request: PlanRequest, choice: Choice
    ) -> Callable[..., Any]:
        """Wraps `run` in two marks."""
        key = group_name, request.site, request.problem.m

        def timed(*args: Any, **kwargs: Any) -> Any:
            call = self._open = _Call(key, choice.strategy, self._mark())
            try:
                result = run(*args, **kwargs)
            finally:
                self._open = None
            call.end = self._mark()
            self._calls.append(call)
            return result

        return timed

    def collective(self, launch: Callable[[], Any]) -> None:
        """Wraps `launch` in two marks, as a part of the open call."""
        begin = self._mark()
        launch()
        if self._open is not None:
            self._open.collectives.append((begin, self._mark()))

    def take(self) -> tuple[float, dict[Key, Spent]]:
        """Returns what was seen since the last call, on an idle device: the step's time, and the times by site."""
        found: dict[Key, Spent] = {}
        marks_inside = sum(2 + 2 * len(call.collectives) for call in self._calls)
        whole = 0.0 if self._step is None else self._us(*self._step) - marks_inside * self._mark_us
        for call in self._calls:
            waited = sum(self._us(*marks) for marks in call.collectives)
            # The marks around the collectives are inside the call. Without fusion a call has more of them.
            us = max(0.0, self._us(call.begin, call.end) - 2 * len(call.collectives) * self._mark_us)
            spent = Spent(call.strategy, 1, us, waited)
            found[call.key] = found[call.key].plus(spent) if call.key in found else spent
        self._calls, self._step = [], None
        return max(0.0, whole), found

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _us(self, begin: Any, end: Any) -> float:
        if self._device.type != "cuda":
            return float(end - begin) * 1e6
        return max(0.0, float(begin.elapsed_time(end)) * 1e3 - self._mark_us)


def mark_us(device: torch.device) -> float:
    """Returns the time that a mark takes on the stream: the median between marks with nothing between them."""
    if device.type != "cuda":
        return 0.0
    events = [torch.cuda.Event(enable_timing=True) for _ in range(MARKS)]
    torch.cuda._sleep(int(MARKS_DELAY_CYCLES))
    for event in events:
        event.record()
    torch.cuda.synchronize(device)
    return statistics.median(start.elapsed_time(next_) * 1e3 for start, next_ in itertools.pairwise(events))


def largest(ranks: Sequence[dict[Key, Spent]]) -> dict[Key, Spent]:
    """Returns for every site the largest times of any rank, and the other values of the first rank that has it."""
    found: dict[Key, Spent] = {}
    for spent in ranks:
        for key, site_spent in spent.items():
            other = found.get(key, site_spent)
            found[key] = Spent(
                other.strategy, other.calls, max(site_spent.us, other.us), max(site_spent.waited_us, other.waited_us)
            )
    return found
