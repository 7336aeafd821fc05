"""Trials in the running program: calls of a site are timed with each strategy, and the ranks decide together.

docs/tuning.md says what is tried, how it is timed and what follows. Sites with equal problems share a trial, and so do
sizes near each other (`trial.bucket`). All ranks make the same calls of the same sites in the same order, so each
counts which call comes next, and all try the same strategy in it. The host does not wait for the events of a timed
call. Only the decision waits for the last event, which has usually passed long before. Nothing is tried on the CPU
device.

A trial looks twice: at the first calls, and, if other strategies were nearly as fast, at these again many calls later,
when the GPU is as warm and as busy as the program keeps it. In between the site runs as decided.

A reset of the group drops its trials, and so does a growth of the workspace that changes which strategies can run.
"""

from __future__ import annotations

import logging
import statistics
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ditron_inductor.device import Workspace, streams
from ditron_inductor.device.workspace import SharedWorkspace
from ditron_inductor.lowering.host.chosen import Chosen, Runner
from ditron_inductor.lowering.host.recording import recording
from ditron_inductor.task import trial
from ditron_inductor.task.plan import Choice, PlanRequest, choose
from ditron_inductor.task.policy import shared_site
from ditron_inductor.task.trial import Times
from ditron_inductor.task.watch import watch

logger = logging.getLogger(__name__)
MOST_TRIALS = 128
"""The most trials of a workspace. Further problems run as planned."""
MOST_SKIPPED = 2
"""The timed calls by `tile` that a rank may record instead: where several graphs share a trial, the calls that it does
not time may be those of other graphs.
"""
UNKNOWN_NS = 1 << 60
"""The time that a rank reports of a strategy that it could not time. Such a strategy is never chosen for its time."""


class Sample:
    """The time of one call of a group's ranks on the host and, on a GPU, between two events. is_clean: whether the
    device began the call after the host had launched all of it, so that it did not wait for the host.
    """

    def __init__(self, workspace: Workspace) -> None:
        self.host_ns = 0
        self.is_clean = True
        self._workspace = workspace
        self._events = None
        if workspace.device.type == "cuda":
            self._events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def take(self, run: Runner, operands: Sequence[Any], before: Sample | None) -> Any:
        """Runs a call and times it. Collective on a GPU. before: the trial's last timed call. If the device has not
        ended that, the host is ahead enough, and the device goes on without a pause, as it does in the program.
        """
        if self._events is not None and (before is None or before.is_over()):
            streams.delay(trial.HEAD_START_US)
        meet(self._workspace)
        if self._events is not None:
            self._events[0].record()
        begun = time.perf_counter_ns()
        result = run(*operands)
        self.host_ns = time.perf_counter_ns() - begun
        if self._events is not None:
            self._events[1].record()
            self.is_clean = not self._events[0].query()
        return result

    def is_over(self) -> bool:
        """Returns whether the device has ended the call."""
        return self._events is None or self._events[1].query()

    def device_ns(self) -> int:
        """Returns the nanoseconds that the call took on the device, after waiting for its end."""
        if self._events is None:
            return self.host_ns
        begin, end = self._events
        end.synchronize()
        return int(begin.elapsed_time(end) * 1e6)


def meet(workspace: Workspace) -> None:
    """Makes the ranks' GPUs wait for each other in front of a timed call, so that they begin it together, whereas a
    delay takes longer on a device with a slower clock. Each rank does so in each timed call, also if it does not time
    it.
    """
    if workspace.device.type == "cuda":
        dist.all_reduce(torch.zeros(1, device=workspace.device), group=workspace.group.process_group())


class Trial:
    """A trial of one problem. name: a text that is equal on all ranks. number: how many trials the workspace's ranks
    began before it. request: that of the site that began the trial. tried: the strategies of the look that is running,
    the one that runs in eager mode first; empty after the last look. refused: whether some rank asks for determinism,
    so that nothing is tried. `begun` is the result of `Workspace.agreed` when the trial began. `looks` is the number of
    looks that have ended. `times` are the times by which the ranks decided last, None until then.
    """

    def __init__(
        self,
        name: str,
        workspace: Workspace,
        request: PlanRequest,
        tried: tuple[str, ...],
        *,
        refused: bool,
        number: int,
    ) -> None:
        self.name = name
        self.number = number
        self.request = request
        self.tried = tried
        self.refused = refused
        self.begun = workspace.agreed(name)
        self.looks = 0
        self.times: Mapping[str, Times] | None = None
        self._planned = tried[0]
        self._calls: Counter[str] = Counter()
        self._counting = threading.Lock()
        self._skipped = 0
        self._samples: dict[str, list[tuple[Sample, float]]] = {strategy: [] for strategy in tried}
        self._last: Sample | None = None
        self._is_confirmed = False

    def upcoming(self, site: str) -> tuple[str, bool] | None:
        """Returns (the next call's strategy, whether it is timed); None for the call in which the ranks decide."""
        return trial.strategy_of_call(self.tried, self._calls[site] - trial.CALLS_BETWEEN * self.looks)

    def next(self, site: str) -> tuple[str, bool] | None:
        """Returns what `upcoming` does, and counts the call."""
        with self._counting:
            upcoming = self.upcoming(site)
            self._calls[site] += 1
        return upcoming

    def next_by(self, site: str, strategy: str) -> tuple[str, bool] | None:
        """Does what `next` does if the next call is by the strategy, and otherwise returns None, counting nothing."""
        with self._counting:
            upcoming = self.upcoming(site)
            found = upcoming if upcoming is not None and upcoming[0] == strategy else None
            self._calls[site] += found is not None
        return found

    def may_skip(self) -> bool:
        """Returns whether a timed call may be recorded instead, which gives it no time; each True counts."""
        with self._counting:
            found = self._skipped < MOST_SKIPPED
            self._skipped += found
        return found

    def timed(self, strategy: str, run: Runner, workspace: Workspace, scale: float) -> Runner:
        """Returns `run` with time measurement. scale: the work of the trial's problem relative to that of this call."""
        samples = self._samples[strategy]

        def call(*operands: Any) -> Any:
            sample = Sample(workspace)
            before, self._last = self._last, sample
            result = sample.take(run, operands, before)
            samples.append((sample, scale))
            return result

        return call

    def decide(self, workspace: Workspace) -> None:
        """Compares the times of all ranks, and ends a look. Collective."""
        own: list[int] = []
        for samples in self._samples.values():
            clean = [sample for sample in samples if sample[0].is_clean]
            own += (
                _median([int(sample.device_ns() * scale) for sample, scale in clean or samples]),
                # What else the host had to do made some of these calls longer, and none shorter.
                min((int(sample.host_ns * scale) for sample, scale in samples), default=UNKNOWN_NS),
            )
        # The ranks have agreed on the times of an earlier trial of this name.
        found = workspace.largest_of(f"{self.name}, number {self.number}.{self.looks}: ns by strategy", own)
        both = zip(self._samples, found[::2], found[1::2], strict=True)
        times = {
            strategy: Times(device / 1e3, host / 1e3)
            for strategy, device, host in both
            if max(device, host) < UNKNOWN_NS
        }
        self.times = times if self.times is None else trial.later(self.times, times)
        logger.info("%s: us on the device / on the host: %s", self.name, trial.times_text(self.times))
        self._go_on(trial.second_look(self._planned, self.times) if self.looks == 0 else ())

    def confirm(self, workspace: Workspace, site: str) -> None:
        """Ends the trial where a second look would begin with the next call of the site, and some rank has come to ask
        for determinism. Collective at the last call before a look, which is the same on all ranks.
        """
        with self._counting:
            begins = self.looks > 0 and self._calls[site] == trial.CALLS_BETWEEN * self.looks
            asks = begins and not self._is_confirmed
            self._is_confirmed |= begins
        if asks and workspace.largest(f"{self.name}, number {self.number}: same bits", _wants_same_bits()):
            self._go_on(())

    def _go_on(self, tried: tuple[str, ...]) -> None:
        """Ends a look. tried: the strategies of the next one, if there is one."""
        self.looks += 1
        self.tried = tried
        with self._counting:
            self._calls.clear()
        self._skipped, self._last, self._is_confirmed = 0, None, False
        self._samples = {strategy: [] for strategy in tried}


def _wants_same_bits() -> int:
    return int(torch.are_deterministic_algorithms_enabled())


def _median(values: Sequence[int]) -> int:
    return int(statistics.median(values)) if values else UNKNOWN_NS


class SiteTrial:
    """The part of a site in a trial. runners: what runs a call, by strategy."""

    def __init__(
        self, own: Trial, workspace: Workspace, site: str, planned: Chosen, runners: Mapping[str, Runner], scale: float
    ) -> None:
        self._trial = own
        self._look = own.looks
        self._workspace = workspace
        self._site = site
        self._planned = planned
        self._runners = runners
        self._scale = scale

    def is_running(self) -> bool:
        """Returns whether this look of the trial has not ended and the trial has not been dropped."""
        return self._trial.looks == self._look and self._workspace.agreed(self._trial.name) is self._trial.begun

    def upcoming(self) -> tuple[str, bool] | None:
        """Returns (the strategy of the next call, whether it is timed); None for the call in which the ranks decide."""
        return self._trial.upcoming(self._site)

    def next(self) -> Chosen:
        """Returns what runs this call, and counts it, so ask once for a call. Collective when a look begins or ends."""
        step = self._trial.next(self._site)
        if step is None:
            self._trial.decide(self._workspace)
            return self._planned
        self._trial.confirm(self._workspace, self._site)
        strategy, is_timed = step
        if recording.records():
            # The ranks have met before the Recorder began.
            is_timed = False
        elif is_timed and watch.observer is not None:
            meet(self._workspace)
            is_timed = False
        return self._chosen(strategy, self._runners[strategy], is_timed=is_timed)

    def skips(self) -> bool:
        """Returns whether the next call may be recorded although it is timed. If so, this counts it as recorded, and
        the ranks have met for it.
        """
        if not self._trial.may_skip():
            return False
        meet(self._workspace)
        return True

    def repeating(self, strategy: str, run: Runner) -> Chosen | None:
        """Returns what runs the next call by `run`, which does what the strategy's runner does, and counts the call;
        returns None if the next call is by another strategy.
        """
        step = self._trial.next_by(self._site, strategy)
        if step is None:
            return None
        self._trial.confirm(self._workspace, self._site)
        return self._chosen(strategy, run, is_timed=step[1])

    def _chosen(self, strategy: str, run: Runner, *, is_timed: bool) -> Chosen:
        assert self._planned.choice is not None
        group_name, request, planned = self._planned.choice
        if is_timed:
            run = self._trial.timed(strategy, run, self._workspace, self._scale)
        elif self._look > 0 and strategy == planned.strategy:
            return Chosen(run, self._planned.choice)
        return Chosen(run, (group_name, request, trial.running(planned, strategy, self._trial.tried)))


@dataclass
class Trials:
    """The trials of a workspace, by name, and how many its ranks have begun. They begin the same ones in the same
    order.
    """

    by_name: dict[str, Trial] = field(default_factory=dict)
    begun: int = 0


_trials: WeakKeyDictionary[SharedWorkspace, Trials] = WeakKeyDictionary()


def begin_again() -> None:
    """Makes the next site of every problem begin a new trial, also where one has ended. Sites that know the result of a
    trial that has ended keep it. Call it on all ranks alike, where no trial is running, to compare what two plans lead
    to.
    """
    for trials in _trials.values():
        trials.by_name.clear()


def ended() -> list[tuple[PlanRequest, Mapping[str, Times]]]:
    """Returns (the request that began it, the times that decided) of each ended trial that no reset has dropped."""
    return [
        (found.request, found.times)
        for shared, trials in _trials.items()
        for found in trials.by_name.values()
        if found.times is not None and shared.largest.get(found.name) is found.begun
    ]


def choose_both(
    workspace: Workspace, node: Any, wire: Sequence[int], request: PlanRequest, runners: Mapping[str, Runner]
) -> tuple[Chosen, Chosen, SiteTrial | None]:
    """Returns (what runs a site outside CUDA graphs; what runs it inside them, the same object if there is no
    difference; its part of a trial, or None). wire: the sizes that all ranks share. It is collective if a trial begins.
    """
    group_name = node.group_name
    if node.policy.replayed:
        request = request.inside_graphs()
    captured, eager = choose(request.inside_graphs(), workspace.table), choose(request, workspace.table)
    known = _trial_of(workspace, wire, request, eager, captured) if node.policy.trials else None
    if known is not None and known.times is not None:
        to_eager, to_captured = trial.decide(eager.strategy, captured.strategy, known.times)
        eager = trial.decided(eager, to_eager, known.times)
        captured = trial.decided(captured, to_captured, known.times)
    if eager.strategy == captured.strategy:
        both = Chosen(runners[eager.strategy], (group_name, request, eager))
        chosen = both, both
    else:
        eager = replace(eager, reason=f"{eager.reason}; inside CUDA graphs {captured.strategy}")
        captured = replace(captured, reason=f"inside CUDA graphs: {captured.reason}")
        chosen = (
            Chosen(runners[eager.strategy], (group_name, request, eager)),
            Chosen(runners[captured.strategy], (group_name, request.inside_graphs(), captured)),
        )
    if known is None or not known.tried:
        return *chosen, None
    m = request.problem.m
    site = shared_site(node.site) or node.kind
    part = SiteTrial(known, workspace, site, chosen[0], runners, trial.bucket(m) / m)
    return *chosen, part


def _trial_of(
    workspace: Workspace, wire: Sequence[int], request: PlanRequest, eager: Choice, captured: Choice
) -> Trial | None:
    """Returns the trial of a problem, after beginning it if there is none; None if nothing is tried. eager, captured:
    what the plan picks outside and inside CUDA graphs.
    """
    tried = trial.candidates(request, eager, captured)
    if not tried:
        return None
    problem = request.problem
    near = replace(problem, m=trial.bucket(problem.m), n=trial.bucket(problem.n), k=trial.bucket(problem.k))
    name = f"a trial of {', '.join(tried)} for {[trial.bucket(size) for size in wire]} {near}"
    trials = _trials.setdefault(workspace.shared, Trials())
    known = trials.by_name.get(name)
    if known is None or known.begun is not workspace.agreed(name):
        if known is None and len(trials.by_name) >= MOST_TRIALS:
            return None
        # If any rank has to give the same bits in every run, no rank tries anything.
        refused = workspace.largest(name, _wants_same_bits())
        known = Trial(name, workspace, request, tried, refused=bool(refused), number=trials.begun)
        trials.by_name[name] = known
        trials.begun += 1
    return None if known.refused else known
