"""Trials in place: the first calls of a site are timed by each strategy, and the ranks decide together.

A trial belongs to a problem: sites with equal problems share it, and sizes near each other do (`trial.bucket`). All
ranks make the same calls of the same sites in the same order, so they count alike which call comes next, and try the
same strategy in it. When the first site has made its calls, the ranks compare their times, once. A call inside a CUDA
graph is not part of a trial: it runs by what was decided before, or by the plan.

Times are taken as the calls pass by: two events around a call on its stream, and the host's clock. Only the decision
waits for the last event, which has long passed. On the CPU device, where there is no plan to doubt, nothing is tried.

A reset of the group drops its trials, and so does a growth of its workspace that changes what can run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ditron_inductor.device import Workspace
from ditron_inductor.device.workspace import SharedWorkspace
from ditron_inductor.lowering.host.chosen import Chosen, Runner
from ditron_inductor.task import trial
from ditron_inductor.task.plan import Choice, PlanRequest, choose
from ditron_inductor.task.policy import shared_site
from ditron_inductor.task.trial import Times
from ditron_inductor.task.watch import watch

MOST_TRIALS = 128
"""Of a workspace: later problems run as planned."""
UNKNOWN_NS = 1 << 60
"""What a rank reports of a strategy that it could not time. Such a strategy is never chosen for its time."""


class Sample:
    """The time of one call, on the host and, on a GPU, between two events."""

    def __init__(self, device: torch.device) -> None:
        self.host_ns = 0
        self._events = None
        if device.type == "cuda":
            self._events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def take(self, run: Runner, operands: Sequence[Any]) -> Any:
        """Run a call and time it."""
        if self._events is not None:
            self._events[0].record()
        begun = time.perf_counter_ns()
        result = run(*operands)
        self.host_ns = time.perf_counter_ns() - begun
        if self._events is not None:
            self._events[1].record()
        return result

    def device_ns(self) -> int:
        """Waits for the end of the call."""
        if self._events is None:
            return self.host_ns
        begin, end = self._events
        end.synchronize()
        return int(begin.elapsed_time(end) * 1e6)


class Trial:
    """One trial.

    name: a text equal on all ranks. request: of the site that began the trial. tried: the strategies, the planned one
    first. refused: whether some rank asks for determinism, so that nothing is tried. begun: what the ranks agreed on
    when it began; see Workspace.agreed. times: those that the ranks decided by, None until then.
    """

    def __init__(
        self, name: str, workspace: Workspace, request: PlanRequest, tried: tuple[str, ...], *, refused: bool
    ) -> None:
        self.name = name
        self.request = request
        self.tried = tried
        self.refused = refused
        self.begun = workspace.agreed(name)
        self.times: Mapping[str, Times] | None = None
        self._calls: dict[str, int] = {}
        self._samples: dict[str, list[tuple[Sample, float]]] = {strategy: [] for strategy in tried}

    def next(self, site: str) -> tuple[str, bool] | None:
        """What runs this call of a site, and whether it is timed; None for the call in which the ranks decide."""
        calls = self._calls.get(site, 0)
        self._calls[site] = calls + 1
        return trial.strategy_of_call(self.tried, calls)

    def timed(self, strategy: str, run: Runner, device: torch.device, scale: float) -> Runner:
        """The same call, timed. scale: the work of the trial's problem in that of this call."""

        def call(*operands: Any) -> Any:
            sample = Sample(device)
            result = sample.take(run, operands)
            self._samples[strategy].append((sample, scale))
            return result

        return call

    def decide(self, workspace: Workspace) -> None:
        """Compare the times of all ranks. Collective."""
        times = {}
        for strategy, samples in self._samples.items():
            own = [
                _median([int(sample.device_ns() * scale) for sample, scale in samples]),
                _median([int(sample.host_ns * scale) for sample, scale in samples]),
            ]
            what = ("on the device", "on the host")
            largest = [
                workspace.largest(f"{self.name}: ns by {strategy} {where}", ns)
                for where, ns in zip(what, own, strict=True)
            ]
            if max(largest) < UNKNOWN_NS:
                times[strategy] = Times(largest[0] / 1e3, largest[1] / 1e3)
        self.times = times
        self._samples.clear()


def _median(values: Sequence[int]) -> int:
    return int(statistics.median(values)) if values else UNKNOWN_NS


class SiteTrial:
    """The part of a site in a trial. runners: by strategy."""

    def __init__(
        self,
        own: Trial,
        workspace: Workspace,
        site: str,
        planned: Chosen,
        runners: Mapping[str, Runner],
        scale: float,
    ) -> None:
        self._trial = own
        self._workspace = workspace
        self._site = site
        self._planned = planned
        self._runners = runners
        self._scale = scale

    def is_running(self) -> bool:
        """Whether the trial goes on, and is still the one that the ranks began."""
        return self._trial.times is None and self._workspace.agreed(self._trial.name) is self._trial.begun

    def next(self) -> Chosen:
        """What runs this call. It is counted: to be asked once for each call. Collective when the trial ends."""
        step = self._trial.next(self._site)
        assert self._planned.choice is not None
        group_name, request, planned = self._planned.choice
        if step is None:
            self._trial.decide(self._workspace)
            return self._planned
        strategy, is_timed = step
        run = self._runners[strategy]
        if is_timed and watch.observer is None:
            run = self._trial.timed(strategy, run, self._workspace.device, self._scale)
        return Chosen(run, (group_name, request, trial.running(planned, strategy, self._trial.tried)))


_trials: WeakKeyDictionary[SharedWorkspace, dict[str, Trial]] = WeakKeyDictionary()


def ended() -> list[tuple[PlanRequest, Mapping[str, Times]]]:
    """Returns, for each trial of this process that has ended, and that no reset has dropped, the request of the site
    that began it, and the times that the ranks decided by.
    """
    return [
        (found.request, found.times)
        for shared, trials in _trials.items()
        for found in trials.values()
        if found.times is not None and shared.largest.get(found.name) is found.begun
    ]


def choose_both(
    workspace: Workspace, node: Any, wire: Sequence[int], request: PlanRequest, runners: Mapping[str, Runner]
) -> tuple[Chosen, Chosen, SiteTrial | None]:
    """What runs a site outside and inside CUDA graphs, one object if that is the same; and its part of a trial.

    wire: the sizes that all ranks have alike. Collective where a trial begins.
    """
    group_name = node.group_name
    captured, eager = choose(request.inside_graphs(), workspace.table), choose(request, workspace.table)
    known = _trial_of(workspace, wire, request, eager) if node.policy.trials else None
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
    if known is None or known.times is not None:
        return *chosen, None
    m = request.problem.m
    site = shared_site(node.site) or node.kind
    part = SiteTrial(known, workspace, site, chosen[0], runners, trial.bucket(m) / m)
    return *chosen, part


def _trial_of(workspace: Workspace, wire: Sequence[int], request: PlanRequest, planned: Choice) -> Trial | None:
    """The trial of a problem, begun if there is none; None where nothing is tried."""
    tried = trial.candidates(request, planned)
    if not tried:
        return None
    problem = request.problem
    near = replace(problem, m=trial.bucket(problem.m), n=trial.bucket(problem.n), k=trial.bucket(problem.k))
    name = f"a trial of {', '.join(tried)} for {[trial.bucket(size) for size in wire]} {near}"
    trials = _trials.setdefault(workspace.shared, {})
    known = trials.get(name)
    if known is None or known.begun is not workspace.agreed(name):
        if known is None and len(trials) >= MOST_TRIALS:
            return None
        # Only where all ranks would: one of them may be asked for the same bits in every run.
        refused = workspace.largest(name, int(torch.are_deterministic_algorithms_enabled()))
        trials[name] = known = Trial(name, workspace, request, tried, refused=bool(refused))
    return None if known.refused else known
