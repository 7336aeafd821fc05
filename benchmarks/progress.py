"""How far a run is: a bar with the time that is left, and where the time went."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from tabulate import tabulate
from tqdm import tqdm


class Progress:
    """A bar over steps with estimated costs (any unit); what has passed so far tells how long the rest takes."""

    def __init__(self, estimates: Sequence[float], now: Callable[[], float] = time.monotonic) -> None:
        self._estimates = list(estimates)
        self._now = now
        self._begun = now()
        self._done = 0
        # Skipped steps cost nothing and teach nothing.
        self._run_estimate = 0.0
        self._run_seconds = 0.0

    @property
    def scale(self) -> float:
        """Seconds per estimated second: 1 until something was measured."""
        return self._run_seconds / self._run_estimate if self._run_estimate else 1.0

    def expected(self, number: int) -> float:
        """Seconds that a step will take."""
        return self._estimates[number] * self.scale

    def finish(self, number: int, seconds: float | None) -> None:
        """A step is over: it took `seconds`, or was skipped (None)."""
        self._done = number + 1
        if seconds is not None:
            self._run_estimate += self._estimates[number]
            self._run_seconds += seconds

    def text(self) -> str:
        """`[00:12] |#####     | 3/12, 00:40 left`, of the costs and not of the number of steps."""
        done, total = sum(self._estimates[: self._done]), sum(self._estimates) or 1.0
        steps = f"{self._done}/{len(self._estimates)}"
        return tqdm.format_meter(
            done,
            total,
            self._now() - self._begun,
            rate=1 / self.scale if self.scale else None,
            ascii=" #",
            bar_format=f"[{{elapsed}}] |{{bar:24}}| {steps}, {{remaining}} left",
        )


class Phases:
    """Wall time by phase. `synchronize` ends what a phase has started on the device."""

    def __init__(self, synchronize: Callable[[], None], now: Callable[[], float] = time.monotonic) -> None:
        self._synchronize = synchronize
        self._now = now
        self._seconds: dict[str, float] = {}
        self._times: dict[str, int] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Everything inside counts for `name`."""
        begun = self._now()
        yield
        self._synchronize()
        self.add(name, self._now() - begun)

    def add(self, name: str, seconds: float) -> None:
        """Time that was measured elsewhere."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds
        self._times[name] = self._times.get(name, 0) + 1

    def table(self) -> str:
        """Returns a table with a line for each phase, in the order of their first use."""
        total = sum(self._seconds.values()) or 1.0
        lines = [
            (name, self._times[name], seconds, seconds / self._times[name], 100 * seconds / total)
            for name, seconds in self._seconds.items()
        ]
        headers = ["phase", "times", "s", "s each", "%"]
        return tabulate(lines, headers=headers, floatfmt=("", "", ".1f", ".2f", ".0f"))
