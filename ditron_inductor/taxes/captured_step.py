"""The account of a step that is one CUDA graph: its kernels, as torch's profiler sees them, and what is between them.

Inside a graph no events can be recorded around a site. The profiler sees every kernel of a replay with its start and
its duration. All times between the start of one replay and the start of the next belong either to a kernel or to no
kernel, so the parts of a step add up to it.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ditron_inductor.report.timing import Clock

REPLAYS = 12
"""The replays that the profiler sees. The first half only keeps the GPU's clock rate up."""

COLLECTIVES = "collectives of the library"
EXCHANGING = "Ditron, kernels that exchange"
LOCAL = "Ditron, other kernels"
INDUCTORS = "Inductor's kernels"
OTHERS = "matmuls, attention and copies of libraries"
IDLE = "between kernels"
PARTS = (COLLECTIVES, EXCHANGING, LOCAL, INDUCTORS, OTHERS, IDLE)
"""The parts of a step. The time that several kernels run at once is divided equally among them. So a launch that begins
early takes a part of the time of the one in front of it, for which it waits.
"""


@dataclass(frozen=True)
class TimedKernel:
    """A kernel or a copy. begin_us: from the start of the replay. stream: the number of the stream that it ran on."""

    name: str
    begin_us: float
    us: float
    stream: int


@dataclass(frozen=True)
class CapturedStep:
    """One replay of a step, on rank 0, in microseconds. us: from its first kernel to the first of the next replay.
    kernels: by their starts. exchanging, local: the names of Ditron's kernels, with and without a workspace.
    """

    us: float
    kernels: tuple[TimedKernel, ...]
    exchanging: frozenset[str]
    local: frozenset[str]

    def part_of(self, name: str) -> str:
        """Returns the part that a kernel of this name belongs to."""
        if name in self.exchanging:
            return EXCHANGING
        if name in self.local:
            return LOCAL
        if "nccl" in name.lower():
            return COLLECTIVES
        return INDUCTORS if name.startswith("triton_") else OTHERS

    def parts(self) -> dict[str, float]:
        """Returns the microseconds of each of the `PARTS`, which add up to `us`."""
        found = dict.fromkeys(PARTS, 0.0)
        for name, us in shares(self.kernels).items():
            found[self.part_of(name)] += us
        found[IDLE] = self.us - sum(found.values())
        return found

    def by_name(self) -> dict[str, tuple[int, float]]:
        """Returns for each kernel its launches and its microseconds, the longest first."""
        launches = Counter(kernel.name for kernel in self.kernels)
        times = sorted(shares(self.kernels).items(), key=lambda item: -item[1])
        return {name: (launches[name], us) for name, us in times}


def shares(kernels: Iterable[TimedKernel]) -> dict[str, float]:
    """Returns the microseconds of each kernel's name. What several kernels run at once is divided among them."""
    edges = sorted(
        (time, number, kernel.name)
        for kernel in kernels
        if kernel.us > 0
        for time, number in ((kernel.begin_us, 1), (kernel.begin_us + kernel.us, -1))
    )
    running: Counter[str] = Counter()
    found: dict[str, float] = {}
    for (begin, number, name), (end, *_) in itertools.pairwise(edges):
        running[name] += number
        together = running.total()
        for other, count in running.items():
            if count:
                found[other] = found.get(other, 0.0) + (end - begin) * count / together
    return found


def divided(kernels: Sequence[TimedKernel], replays: int) -> list[list[TimedKernel]]:
    """Returns the kernels of each replay, the earliest first. Raises ValueError if the replays differ."""
    ordered = sorted(kernels, key=lambda kernel: kernel.begin_us)
    length = len(ordered) // replays
    parts = [ordered[i * length : (i + 1) * length] for i in range(replays)]
    names = [sorted(kernel.name for kernel in part) for part in parts]
    if not ordered or length * replays != len(ordered) or any(other != names[0] for other in names):
        raise ValueError(f"the profiler saw {len(ordered)} kernels in {replays} replays, not the same in each of them")
    return parts


def median_step(
    parts: Sequence[Sequence[TimedKernel]], exchanging: frozenset[str], local: frozenset[str]
) -> CapturedStep:
    """Returns the replay with the median time, of all but the last one, whose end nothing marks."""
    lasted = [after[0].begin_us - part[0].begin_us for part, after in itertools.pairwise(parts)]
    median = statistics.median_low(lasted)
    part = parts[lasted.index(median)]
    begin = part[0].begin_us
    kernels = tuple(TimedKernel(kernel.name, kernel.begin_us - begin, kernel.us, kernel.stream) for kernel in part)
    return CapturedStep(median, kernels, exchanging, local)


def captured_steps(
    clock: Clock, replays: Mapping[str, Callable[[int], Any]], notes: list[str]
) -> dict[str, CapturedStep]:
    """Returns rank 0's account of each contestant's replays. A contestant that the profiler cannot see has a note.
    Collective: all ranks replay equally often.
    """
    import torch.distributed as dist

    exchanging, local = ditron_kernels()
    found: dict[str, Any] = {}
    for name, replay in replays.items():
        dist.barrier(clock.group)
        try:
            parts = divided(_profiled(replay, clock), REPLAYS)
            found[name] = median_step(parts[REPLAYS // 2 :], exchanging, local)
        except (RuntimeError, ValueError) as exc:
            found[name] = f"{name}: no account of the kernels in a CUDA graph: {exc}"
    found = clock.agree(found)[0]
    notes.extend(value for value in found.values() if isinstance(value, str))
    return {name: value for name, value in found.items() if isinstance(value, CapturedStep)}


def ditron_kernels() -> tuple[frozenset[str], frozenset[str]]:
    """Returns the names of Ditron's kernels that exchange data between ranks, and of the others. Only the former can be
    traced (see `core/trace.py`), because only they have a slot in the workspace.
    """
    import sys

    from triton.runtime.jit import JITFunction

    kernels = {
        value.fn.__name__: "TRACE" in value.arg_names
        for name, module in list(sys.modules.items())
        if name.startswith("ditron_inductor.lowering")
        for value in vars(module).values()
        if isinstance(value, JITFunction)
    }
    exchanging = frozenset(name for name, traced in kernels.items() if traced)
    return exchanging, frozenset(kernels) - exchanging


def _profiled(replay: Callable[[int], Any], clock: Clock) -> list[TimedKernel]:
    """Returns the kernels of `REPLAYS` replays, which all ranks make, whether or not the profiler starts."""
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    profiler: Any = None
    problem: RuntimeError | None = None
    try:
        profiler = profile(activities=[ProfilerActivity.CUDA], acc_events=True)
        profiler.start()
    except RuntimeError as exc:
        profiler, problem = None, exc
    try:
        for _ in range(REPLAYS):
            replay(0)
        torch.cuda.synchronize(clock.device)
    finally:
        if profiler is not None:
            profiler.stop()
    if problem is not None:
        raise problem
    return [
        TimedKernel(event.name, event.time_range.start, event.time_range.elapsed_us(), event.device_resource_id)
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA
    ]


def save_timeline(path: str | Path, steps: Mapping[str, CapturedStep]) -> None:
    """Writes the kernels as JSON for Perfetto: one process for each contestant, with a row for each of its streams."""
    rows: list[dict[str, Any]] = []
    for pid, (name, step) in enumerate(steps.items()):
        rows.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": f"{name}, rank 0"}})
        for kernel in step.kernels:
            times = {"ts": kernel.begin_us, "dur": kernel.us}
            where = {"pid": pid, "tid": kernel.stream, "cat": step.part_of(kernel.name)}
            rows.append({"ph": "X", "name": kernel.name, **times, **where})
    Path(path).write_text(json.dumps({"traceEvents": rows, "displayTimeUnit": "ns"}))
