"""What the ranks of a benchmark have in common: a clock, words between them, and failures that all of them see."""

from __future__ import annotations

import datetime
import functools
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import triton

from benchmarks.progress import Phases
from benchmarks.records import Row
from benchmarks.timing import Times, synchronize
from ditron_inductor.device.reset import reset
from ditron_inductor.errors import DitronError
from ditron_inductor.lowering.host import trials
from ditron_inductor.lowering.register import register
from ditron_inductor.report.timing import Call, Clock, captured
from ditron_inductor.task import trial
from ditron_inductor.task.plan import PlanRequest

T = TypeVar("T")


class Session:
    """One run on this rank of the default group. begun: when the process started, by the monotonic clock."""

    def __init__(self, device: torch.device, begun: float) -> None:
        assert dist.group.WORLD is not None
        register()
        self.begun = begun
        self.group_name = dist.group.WORLD.group_name
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.clock = Clock(device, dist.group.WORLD)
        self.phases = Phases(lambda: synchronize(self.clock))
        # Words between the ranks travel apart from what is measured.
        self.control = dist.new_group(backend="gloo")
        self._told: list[Mapping[str, trial.Times]] = []

    def say(self, text: str) -> None:
        """Progress, from one rank."""
        if self.rank == 0:
            print(text, file=sys.stderr, flush=True)

    def agree(self, value: Any) -> list[Any]:
        """Every rank's value."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def seconds(self) -> float:
        """Since the start of the slowest rank; equal on all of them."""
        return max(self.agree(time.monotonic() - self.begun))

    def first_problem(self, mine: str) -> str:
        """The first rank's problem that has one, empty if none has; equal on all ranks."""
        return next((f"rank {rank}: {text}" for rank, text in enumerate(self.agree(mine)) if text), "")

    def attempt(self, phase: str, act: Callable[[], Any]) -> tuple[Any, str]:
        """Returns (the result of `act`; the error of the first rank on which there was one)."""
        begun = time.monotonic()
        result, problem = None, ""
        try:
            result = act()
            synchronize(self.clock)
        except Exception as error:
            problem = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        self.phases.add(phase, time.monotonic() - begun)
        return result, self.first_problem(problem)

    def recover(self, name: str) -> None:
        """After a failure of one of our contestants: make the group's workspace usable for the next."""
        try:
            reset(dist.group.WORLD)
        except DitronError as error:
            self.say(f"    reset after {name} failed: {error}")

    def tried(self, phase: str, act: Callable[[], T]) -> T | None:
        """Returns the result of `act`. If it raises on any rank, prints a line on stderr and returns None."""
        result, problem = self.attempt(phase, act)
        if problem:
            self.say(f"    {phase}: {problem}")
        return None if problem else result

    def right(self, calls: Iterable[str], checked: Callable[[str], Call]) -> dict[str, Call]:
        """Returns the results of `checked`, by name, for the names for which it raises on no rank."""
        found = {name: self.tried(name, functools.partial(checked, name)) for name in calls}
        return {name: call for name, call in found.items() if call is not None}

    def after_trial(self, name: str, call: Callable[[int], T]) -> Callable[[int], T]:
        """Returns the call of a contestant. Before it is timed or captured, the trial of `ditron` has ended."""
        for index in range(trial.ALL_CALLS if name == "ditron" and self.clock.device.type == "cuda" else 0):
            call(index)
        self.tell_trials()
        return call

    def tell_trials(self) -> None:
        """Says what trials measured that have ended since this was asked last, so that a slow cell can be explained."""
        for request, times in trials.ended():
            if not any(times is told for told in self._told):
                self.say(f"    {tried_text(request, times)}")
                self._told.append(times)

    def replays(self, calls: Mapping[str, Call], per_call: int) -> dict[str, Call]:
        """Replays of `per_call` calls in a CUDA graph, of those that can be captured on all ranks."""
        return self.right(calls, lambda name: captured(calls[name], per_call))

    def rows_of(
        self,
        times: Mapping[str, Times | None],
        *,
        bench: str,
        op: str,
        shape: str,
        graph: bool,
        limit_us: float | None,
        commit: str,
        dtype: str = "bfloat16",
    ) -> list[Row]:
        """Returns a row for each contestant. times: None for a contestant that failed."""
        return [
            self.row(
                bench=bench,
                op=op,
                contestant=name,
                shape=shape,
                dtype=dtype,
                graph=graph,
                measured=each,
                limit_us=limit_us,
                commit=commit,
            )
            for name, each in times.items()
        ]

    def row(
        self,
        *,
        bench: str,
        op: str,
        contestant: str,
        shape: str,
        dtype: str,
        graph: bool,
        measured: Times | None,
        limit_us: float | None,
        commit: str,
    ) -> Row:
        """Returns the row of a measurement that was made here and today. It has no times if the contestant failed."""
        return Row(
            bench=bench,
            op=op,
            contestant=contestant,
            shape=shape,
            dtype=dtype,
            world=self.world_size,
            graph=int(graph),
            p20_us=measured.p20_us if measured else None,
            p50_us=measured.p50_us if measured else None,
            p80_us=measured.p80_us if measured else None,
            skew_pct=measured.skew_pct if measured else None,
            limit_us=limit_us,
            gpu=torch.cuda.get_device_name() if self.clock.device.type == "cuda" else "cpu",
            torch=torch.__version__,
            triton=triton.__version__,
            commit=commit,
            date=datetime.date.today().isoformat(),
        )


def tried_text(request: PlanRequest, times: Mapping[str, trial.Times]) -> str:
    """What a trial measured, the fastest strategy first."""
    problem = request.problem
    shown = trial.times_text(dict(sorted(times.items(), key=lambda item: item[1].us)))
    sizes = f"{problem.m} x {problem.n} x {problem.k}" + f" in {problem.slices} slices" * (problem.slices > 1)
    return f"tried: {problem.kind} {sizes}, us on the device / on the host: {shown}"
