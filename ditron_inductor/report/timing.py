"""Interleaved timing of calls on all ranks of a group, for `tune` and `explain`.

A chip's clock changes by tens of per cent with its power state, so only calls that were timed in turns can be compared.
Before each sample the ranks leave a collective together, and one call that is not timed gives the host the head start
that it has in a running model. If a call takes the host longer than the device, the host's time is measured.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

Call = Callable[[int], object]
"""Makes one call on the i-th set of operands."""

ROUNDS = 15
WARMUP = 3
SAMPLE_US = 3000.0
MAX_CALLS = 50
GRAPH_CALLS = 10


@dataclass(frozen=True)
class Clock:
    """Times calls on `device`, together with the other ranks of `group`."""

    device: torch.device
    group: dist.ProcessGroup

    def sample(self, call: Call, calls: int) -> float:
        """Microseconds per call, of this rank."""
        dist.all_reduce(torch.zeros(1, device=self.device), group=self.group)
        if self.device.type != "cuda":
            begin = time.perf_counter()
            for index in range(calls):
                call(index)
            return (time.perf_counter() - begin) * 1e6 / calls
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        call(calls)
        start.record()
        for index in range(calls):
            call(index)
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / calls

    def largest(self, values: Sequence[float]) -> list[float]:
        """Returns for each value the largest on any rank. Collective."""
        packed = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(packed, op=dist.ReduceOp.MAX, group=self.group)
        return [float(value) for value in packed.tolist()]

    def agree(self, value: Any) -> list[Any]:
        """Every rank's value, by group rank; collective."""
        values: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(values, value, group=self.group)
        return values


@dataclass(frozen=True)
class Replay:
    """A call that replays a CUDA graph of calls of `call`. result: of the 0-th operands."""

    graph: torch.cuda.CUDAGraph
    result: object
    call: Call

    def __call__(self, index: int) -> object:
        self.graph.replay()
        return self.result


def captured(call: Call, calls: int = GRAPH_CALLS) -> Call:
    """Captures `calls` calls in one CUDA graph. Returns a call that replays it, with the 0-th operands' result. While
    that exists, `call` does too, because the graph reads the memory of tensors that perhaps nothing else holds.
    """
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
        # Count downwards, so that nothing later in the graph uses the memory of the 0-th result.
        for index in reversed(range(calls)):
            result = call(index)

    return Replay(graph, result, call)


def interleaved(clock: Clock, calls: Mapping[str, Call], rounds: int = ROUNDS) -> dict[str, float]:
    """Returns the microseconds of each call, taken in turns in a new order each round: the largest median of any rank.
    Collective: all ranks hold the same calls in the same order, and get the same times.
    """
    names = list(calls)
    if not names:
        return {}
    on_gpu = clock.device.type == "cuda"
    rough = clock.largest([clock.sample(calls[name], WARMUP if on_gpu else 1) for name in names])
    repeats = {
        name: max(1, min(MAX_CALLS, round(SAMPLE_US / us))) if on_gpu else 1
        for name, us in zip(names, rough, strict=True)
    }
    samples: dict[str, list[float]] = {name: [] for name in names}
    shuffle = random.Random(0)
    order = list(names)
    for _ in range(rounds):
        shuffle.shuffle(order)
        for name in order:
            samples[name].append(clock.sample(calls[name], repeats[name]))
    medians = clock.largest([statistics.median(samples[name]) for name in names])
    return dict(zip(names, medians, strict=True))
