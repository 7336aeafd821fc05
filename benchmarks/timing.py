"""Interleaved timing of distributed calls: every contestant once per round, ranks aligned before each sample.

The clock of a chip moves by tens of per cent with its power state, so only samples of one run, taken in turns, compare.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

ROUNDS = 20
WARMUP = 3
SAMPLE_MS = 4.0
MAX_CALLS = 40
# Kept busy for this long before a sample, the GPU does not wait for the host's first launches.
HEAD_START_CYCLES = 300_000


@dataclass(frozen=True)
class Times:
    """Microseconds per call, see `records.Row`."""

    p20_us: float
    p50_us: float
    p80_us: float
    skew_pct: float


def capture(call: Callable[[int], object], calls: int) -> Callable[[int], object]:
    """`calls` calls in one CUDA graph, as a function of one argument that replays it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for index in range(WARMUP):
            call(index)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # The threads of NCCL query events meanwhile; only this thread's calls must be legal in a capture.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for index in range(calls):
            call(index)

    def replay(index: int) -> object:
        return graph.replay()

    return replay


class Clock:
    """Times of a number of calls, by CUDA events, or by the wall clock without a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._tiny = torch.zeros(1, device=device)

    def align(self) -> None:
        """All ranks leave together."""
        dist.all_reduce(self._tiny)
        if self.device.type == "cuda":
            torch.cuda._sleep(HEAD_START_CYCLES)

    def sample(self, call: Callable[[int], object], calls: int) -> Callable[[], float]:
        """Make the calls; the function returned gives microseconds per call once the device is synchronized."""
        self.align()
        if self.device.type != "cuda":
            begin = time.perf_counter()
            for index in range(calls):
                call(index)
            elapsed = (time.perf_counter() - begin) * 1e6 / calls
            return lambda: elapsed
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for index in range(calls):
            call(index)
        end.record()
        return lambda: start.elapsed_time(end) * 1e3 / calls

    def synchronize(self) -> None:
        """Wait until all samples are taken."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def calls_per_sample(clock: Clock, call: Callable[[int], object]) -> int:
    """How many calls make a sample of SAMPLE_MS; equal on all ranks."""
    clock.synchronize()
    rough = clock.sample(call, WARMUP)
    clock.synchronize()
    slowest = torch.tensor([rough()], device=clock.device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return max(1, min(MAX_CALLS, round(SAMPLE_MS * 1e3 / float(slowest.item()))))


def interleaved(
    clock: Clock, contestants: Mapping[str, Callable[[int], object]], per_call: int, rounds: int = ROUNDS
) -> dict[str, Times]:
    """Times of all contestants, in turns in a new order each round. A contestant's call does `per_call` operations.

    Collective: all ranks hold the same contestants in the same order and get the same result.
    """
    order = list(contestants)
    shuffle = random.Random(0)
    pending: dict[str, list[Callable[[], float]]] = {name: [] for name in order}
    calls = {name: calls_per_sample(clock, contestants[name]) for name in order}
    for _ in range(rounds):
        shuffle.shuffle(order)
        for name in order:
            pending[name].append(clock.sample(contestants[name], calls[name]))
    clock.synchronize()
    return {name: _over_ranks(clock, [read() / per_call for read in samples]) for name, samples in pending.items()}


def _over_ranks(clock: Clock, samples: list[float]) -> Times:
    deciles = statistics.quantiles(samples, n=10)
    mine = torch.tensor([deciles[1], statistics.median(samples), deciles[7]], dtype=torch.float64, device=clock.device)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    by_median = sorted((rank.tolist() for rank in everyone), key=lambda rank: rank[1])
    slowest, fastest = by_median[-1], by_median[0]
    return Times(slowest[0], slowest[1], slowest[2], 100.0 * (slowest[1] - fastest[1]) / slowest[1])
