"""Statistics of interleaved timing: every contestant once per round, until all of them have settled.

A sample (`ditron_inductor.report.timing.Clock.sample`) begins on an idle device: a collective that all ranks leave
together, one call that is not timed, then `calls` calls between two events. The call that is not timed is all the head
start that the host gets. Where calls take the device longer, the host is ahead when the first event passes, as in a
model that runs; where they take the host longer, the event passes when the host has just issued that call, and the time
between the events is what the host takes. Whichever contestant had the turn before, nothing of its queue hides the
host's time.
"""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ditron_inductor.report.timing import Call, Clock

ROUNDS = 20
MIN_ROUNDS = 7
WARMUP = 3
SAMPLE_US = 4000.0
MAX_CALLS = 100
SETTLED = 0.004
"""Rounds end when the standard error of every median is below this part of it, on every rank."""


@dataclass(frozen=True)
class Times:
    """Microseconds per call, see `records.Row`; host_us: what the slowest rank's host needs to issue one."""

    p20_us: float
    p50_us: float
    p80_us: float
    skew_pct: float
    host_us: float = 0.0


def synchronize(clock: Clock) -> None:
    """Wait until the device is idle."""
    if clock.device.type == "cuda":
        torch.cuda.synchronize(clock.device)


def calls_per_sample(clock: Clock, call: Call, least: int = 1) -> int:
    """Warms the contestant up. Returns how many calls make a sample of SAMPLE_US, equal on all ranks, and at least this
    many.
    """
    synchronize(clock)
    (slowest,) = clock.largest([clock.sample(call, WARMUP if clock.device.type == "cuda" else 1)])
    return max(least, min(MAX_CALLS, round(SAMPLE_US / slowest)))


def interleaved(
    clock: Clock,
    contestants: Mapping[str, Call],
    per_call: int = 1,
    rounds: int = ROUNDS,
    most_s: float = math.inf,
    least_calls: int = 1,
) -> dict[str, Times]:
    """Times of all contestants, in turns in a new order each round, until they have settled or `rounds` are over.

    After `most_s` seconds on any rank there is no further round, but for the first two.

    A contestant's call does `per_call` operations; a sample has at least `least_calls` calls. Collective: all ranks
    hold the same contestants in the same order, and get the same result.
    """
    order = list(contestants)
    shuffle = random.Random(0)
    samples: dict[str, list[float]] = {name: [] for name in order}
    calls = {name: calls_per_sample(clock, contestants[name], least_calls) for name in order}
    gc.collect()
    # A collection in a sample would count as that contestant's host time.
    gc.disable()
    try:
        begun = time.monotonic()
        for number in range(1, rounds + 1):
            shuffle.shuffle(order)
            for name in order:
                samples[name].append(clock.sample(contestants[name], calls[name]))
            if 2 <= number < rounds:
                error = max(standard_error(taken) for taken in samples.values())
                unsettled, elapsed = clock.largest([error, time.monotonic() - begun])
                if (number >= MIN_ROUNDS and unsettled < SETTLED) or elapsed > most_s:
                    break
        if clock.device.type == "cuda":
            host = {name: _host_us(clock, contestants[name], calls[name]) for name in contestants}
        else:
            # The host is the device.
            host = {name: statistics.median(taken) for name, taken in samples.items()}
    finally:
        gc.enable()
    return {name: _over_ranks(clock, taken, host[name], per_call) for name, taken in samples.items()}


def _host_us(clock: Clock, call: Call, calls: int) -> float:
    """Returns the time that the host of this rank takes to issue a call on an idle device."""
    synchronize(clock)
    begin = time.perf_counter()
    for index in range(calls):
        call(index)
    elapsed = time.perf_counter() - begin
    synchronize(clock)
    return elapsed * 1e6 / calls


def standard_error(values: Sequence[float]) -> float:
    """Returns the standard error of the median, as a part of it, from the 20th and the 80th percentile, which are 1.68
    sigma apart in a normal distribution.
    """
    deciles = statistics.quantiles(values, n=10)
    sigma = (deciles[7] - deciles[1]) / 1.683
    return 1.253 * sigma / len(values) ** 0.5 / statistics.median(values)


def median_of_runs(runs: Sequence[Mapping[str, Times]]) -> dict[str, Times]:
    """Returns, for runs with the same contestants, the medians of their medians, the smallest p20 and the largest p80.
    """
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


def _over_ranks(clock: Clock, samples: Sequence[float], host_us: float, per_call: int) -> Times:
    deciles = statistics.quantiles(samples, n=10)
    mine = [each / per_call for each in (deciles[1], statistics.median(samples), deciles[7], host_us)]
    packed = torch.tensor(mine, dtype=torch.float64, device=clock.device)
    everyone = [torch.empty_like(packed) for _ in range(dist.get_world_size(clock.group))]
    dist.all_gather(everyone, packed, group=clock.group)
    by_median = sorted((rank.tolist() for rank in everyone), key=lambda rank: rank[1])
    slowest, fastest = by_median[-1], by_median[0]
    skew_pct = 100.0 * (slowest[1] - fastest[1]) / slowest[1]
    return Times(slowest[0], slowest[1], slowest[2], skew_pct, max(rank[3] for rank in by_median))
