"""Interleaved timing of distributed calls: every contestant once per round, ranks aligned before each sample.

The clock of a chip moves by tens of per cent with its power state, so only samples of one run, taken in turns, compare.

A sample begins on an idle device: a collective that all ranks leave together, one call that is not timed, then
`calls` calls between two events. The call that is not timed is all the head start that the host gets. Where calls take
the device longer, the host is ahead when the first event passes, as in a model that runs; where they take the host
longer, the event passes when the host has just issued that call, and the time between the events is what the host
takes. Whichever contestant had the turn before, nothing of its queue hides the host's time.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

ROUNDS = 20
MIN_ROUNDS = 7
WARMUP = 3
SAMPLE_MS = 4.0
MAX_CALLS = 100
SETTLED = 0.004
"""Rounds end when the standard error of every median is below this part of it, on every rank."""


@dataclass(frozen=True)
class Times:
    """Microseconds per call, see `records.Row`; host_us: what the host needs to issue one."""

    p20_us: float
    p50_us: float
    p80_us: float
    skew_pct: float
    host_us: float = 0.0


@dataclass(frozen=True)
class Sample:
    """One sample: microseconds per call, and what the host took to issue it."""

    us: float
    host_us: float


class Captured:
    """`calls` calls in one CUDA graph. To call this object replays it; it returns what the last call in it returns."""

    def __init__(self, call: Callable[[int], object], calls: int) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for index in range(WARMUP):
                call(index)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        # The threads of NCCL query events meanwhile; only this thread's calls must be legal in a capture.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            # Downwards, so that the result which stays is that of the operands number 0.
            for index in reversed(range(calls)):
                self._result = call(index)

    def __call__(self, index: int) -> object:
        self._graph.replay()
        return self._result


class Clock:
    """Times of a number of calls, by CUDA events, or by the wall clock without a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._word = torch.zeros(1, device=device)

    def align(self) -> None:
        """All ranks leave together."""
        dist.all_reduce(self._word)

    def sample(self, call: Callable[[int], object], calls: int) -> Sample:
        """Time `calls` calls; the device is idle afterwards."""
        self.align()
        if self.device.type != "cuda":
            begin = time.perf_counter()
            for index in range(calls):
                call(index)
            elapsed = (time.perf_counter() - begin) * 1e6 / calls
            return Sample(elapsed, elapsed)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        call(calls)
        start.record()
        begin = time.perf_counter()
        for index in range(calls):
            call(index)
        host_us = (time.perf_counter() - begin) * 1e6 / calls
        end.record()
        end.synchronize()
        return Sample(start.elapsed_time(end) * 1e3 / calls, host_us)

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def largest(self, value: float) -> float:
        """The largest value on any rank; collective."""
        word = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(word, op=dist.ReduceOp.MAX)
        return float(word.item())


def calls_per_sample(clock: Clock, call: Callable[[int], object]) -> int:
    """How many calls make a sample of SAMPLE_MS, equal on all ranks. Warms the contestant up."""
    clock.synchronize()
    slowest = clock.largest(clock.sample(call, WARMUP if clock.device.type == "cuda" else 1).us)
    return max(1, min(MAX_CALLS, round(SAMPLE_MS * 1e3 / slowest)))


def interleaved(
    clock: Clock, contestants: Mapping[str, Callable[[int], object]], per_call: Mapping[str, int], rounds: int = ROUNDS
) -> dict[str, Times]:
    """Times of all contestants, in turns in a new order each round, until they have settled or `rounds` are over.

    A contestant's call does `per_call` operations. Collective: all ranks hold the same contestants in the same order,
    and get the same result.
    """
    order = list(contestants)
    shuffle = random.Random(0)
    samples: dict[str, list[Sample]] = {name: [] for name in order}
    calls = {name: calls_per_sample(clock, contestants[name]) for name in order}
    for number in range(1, rounds + 1):
        shuffle.shuffle(order)
        for name in order:
            samples[name].append(clock.sample(contestants[name], calls[name]))
        if MIN_ROUNDS <= number < rounds:
            unsettled = max(standard_error([one.us for one in taken]) for taken in samples.values())
            if clock.largest(unsettled) < SETTLED:
                break
    return {name: _over_ranks(clock, taken, per_call[name]) for name, taken in samples.items()}


def standard_error(values: Sequence[float]) -> float:
    """Of the median, as a part of it, from the 20th and 80th percentile, 1.68 sigma apart in a normal distribution."""
    deciles = statistics.quantiles(values, n=10)
    sigma = (deciles[7] - deciles[1]) / 1.683
    return 1.253 * sigma / len(values) ** 0.5 / statistics.median(values)


def median_of_runs(runs: Sequence[Mapping[str, Times]]) -> dict[str, Times]:
    """Of runs with the same contestants: medians of their medians, the smallest p20 and the largest p80."""
    return {
        name: Times(
            p20_us=min(run[name].p20_us for run in runs),
            p50_us=statistics.median(run[name].p50_us for run in runs),
            p80_us=max(run[name].p80_us for run in runs),
            skew_pct=statistics.median(run[name].skew_pct for run in runs),
            host_us=statistics.median(run[name].host_us for run in runs),
        )
        for name in runs[0]
    }


def _over_ranks(clock: Clock, samples: Sequence[Sample], per_call: int) -> Times:
    values = [sample.us / per_call for sample in samples]
    deciles = statistics.quantiles(values, n=10)
    host_us = statistics.median(sample.host_us / per_call for sample in samples)
    mine = [deciles[1], statistics.median(values), deciles[7], host_us]
    packed = torch.tensor(mine, dtype=torch.float64, device=clock.device)
    everyone = [torch.empty_like(packed) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, packed)
    by_median = sorted((rank.tolist() for rank in everyone), key=lambda rank: rank[1])
    slowest, fastest = by_median[-1], by_median[0]
    skew_pct = 100.0 * (slowest[1] - fastest[1]) / slowest[1]
    return Times(slowest[0], slowest[1], slowest[2], skew_pct, max(rank[3] for rank in by_median))
