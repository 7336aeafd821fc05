"""Trials on the CPU device, where nothing is tried otherwise, with times that a test gives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist

import ditron_inductor
from ditron_inductor.lowering.host import trials
from ditron_inductor.lowering.host.trials import Sample, Trial
from ditron_inductor.task import trial
from ditron_inductor.task.plan import Choice

TRIED = ("library", "tile", "chunked")
STEPS = trial.CALLS * len(TRIED)
ORDER = [step[0] for calls in range(STEPS) if (step := trial.strategy_of_call(TRIED, calls))]
"""What runs the calls of a trial."""
PLANNED = Choice("library", "planned", None, "model")


@contextmanager
def tried(us: Mapping[str, float], reset: bool = True) -> Iterator[None]:
    """Trials of the strategies, which seem to take so many microseconds on this rank; new ones after a `reset`.
    Collective.
    """
    if reset:
        # The ranks of a pool remember the trials of earlier tests.
        ditron_inductor.reset(dist.group.WORLD)
    timed = Trial.timed
    strategy_of: dict[Sample, str] = {}

    def named(self: Trial, strategy: str, *rest: Any) -> Any:
        call = timed(self, strategy, *rest)

        def run(*operands: Any) -> Any:
            result = call(*operands)
            strategy_of[self._samples[strategy][-1][0]] = strategy
            return result

        return run

    def device_ns(self: Sample) -> int:
        assert self.host_ns > 0, "a call that was not timed"
        self.host_ns = 0
        return int(us[strategy_of[self]] * 1e3)

    with (
        # The library is planned, in eager mode and in CUDA graphs, and a size stands for itself.
        mock.patch.object(trials, "choose", lambda request, table: PLANNED),
        mock.patch.object(trial, "bucket", lambda size: size),
        mock.patch.object(trial, "candidates", lambda request, eager, captured: TRIED),
        mock.patch.object(Trial, "timed", named),
        mock.patch.object(Sample, "device_ns", device_ns),
    ):
        yield
