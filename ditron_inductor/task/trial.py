"""Trials in place: which strategies a call tries where it runs, and what follows from their times.

The plan predicts; what it predicts is wrong where nobody measured. With the option `ditron.trials` the first calls of a
site run by each strategy that is not hopeless, some calls each, and are timed (lowering/host/trials.py). Then the ranks
compare their times, and the site runs by the fastest strategy. Everything here is a pure function of facts that all
ranks share, so that all ranks try and decide alike.

The first calls of a program are not like its later ones: the GPU is cool, and waits for the host. So what is nearly as
fast as the best strategy is timed a second time, many calls later, and decided once more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ditron_inductor.task import cost
from ditron_inductor.task.plan import Choice, PlanRequest, possible
from ditron_inductor.task.table import LEAST_US

CALLS = 7
"""Calls of a site by each strategy."""
UNTIMED = 2
"""The first of these calls, which compile kernels and make memory, and are not timed. The others are made in turns, as
the GPU's clock drifts by some per cent within the time of a trial."""
CALLS_BETWEEN = 200
"""Calls of a site, as decided, between the first look of a trial and the second one."""
NEAR = 1.10
"""A strategy that took at most so many times as long as the best one at the first look is timed at the second one."""
FIRST_CALLS = 1 + 3 * CALLS + 1
"""After so many calls of a site the first look has ended: the call that makes what a capture needs, those by each of
three strategies, and the one that decides."""
ALL_CALLS = FIRST_CALLS + 1 + CALLS_BETWEEN + 3 * CALLS + 1
"""After so many calls of a site its trial has ended: those of the first look, another one for captures, those between
the looks, and those of the second one."""
HOPELESS = 2.0
"""A strategy that is predicted to take so many times as long as the best one is not tried."""
GAIN, LEAST_GAIN_US = 0.02, 2.0
"""The part of the time, and the microseconds, that a strategy has to save to replace the one that was planned. Two
events around the same kernel differ by nearly a microsecond, and a saving is the difference of two such times."""
HOST_SHARE = 2.0
"""In eager mode a call counts with at least so many times what it takes on the host. The host has the rest of the step
to launch as well, and a strategy whose launches take as long as its kernels leaves no time for that."""
HEAD_START_US = 800.0
"""What a timed call waits for on the device before it begins, so that the host is ahead of the device, unless it is
anyway."""
HOST_BOUND = 0.8
"""Where the host takes more than its head start and this part of the device's time, the device may have waited for it,
and the device's time says nothing about a CUDA graph, in which the host does not count."""


@dataclass(frozen=True)
class Times:
    """Microseconds of one call: on the device the largest median of any rank, and on the host the largest of the
    ranks' shortest times.
    """

    device_us: float
    host_us: float

    @property
    def us(self) -> float:
        """What the call takes in eager mode, where the host works ahead of the device."""
        return max(self.device_us, self.host_us)

    @property
    def eager_us(self) -> float:
        """What strategies are compared by in eager mode: `us`, where the host has `HOST_SHARE` times as much to do."""
        return max(self.device_us, HOST_SHARE * self.host_us)

    @property
    def is_of_device(self) -> bool:
        """Whether the device's time is its own, and holds inside a CUDA graph too."""
        return self.host_us < HEAD_START_US + HOST_BOUND * self.device_us


def candidates(request: PlanRequest, eager: Choice, captured: Choice) -> tuple[str, ...]:
    """The strategies that are worth a trial, the one that is planned for eager mode first; empty where there is nothing
    to try. A strategy whose launches take the host too long may still be the fastest one inside CUDA graphs.
    """
    if eager.settled or eager.source not in ("table", "model"):
        return ()
    able, hopeful = ("library", *possible(request)), {eager.strategy}
    for choice in (eager, captured):
        predicted = {name: us for name, us in (choice.predicted_us or {}).items() if name in able}
        limit = HOPELESS * min(predicted.values(), default=0.0)
        hopeful |= {name for name, us in predicted.items() if us <= limit}
    others = [strategy for strategy in able if strategy in hopeful and strategy != eager.strategy]
    return (eager.strategy, *others) if others else ()


def strategy_of_call(tried: Sequence[str], calls: int) -> tuple[str, bool] | None:
    """What runs the next call of a site after so many calls of a look, and whether it is timed; None when all are made.
    Before a look, when `calls` is below 0, it is the first strategy.
    """
    untimed = UNTIMED * len(tried)
    if calls < untimed:
        return tried[max(calls, 0) // UNTIMED], False
    if calls >= CALLS * len(tried):
        return None
    turn, place = divmod(calls - untimed, len(tried))
    # Every second turn goes backwards, so that no strategy is always behind the same one.
    return tried[-1 - place if turn % 2 else place], True


def fastest(planned: str, us: Mapping[str, float]) -> str:
    """The fastest strategy, or the planned one if that is not timed, or none saves `GAIN` and `LEAST_GAIN_US`."""
    if planned not in us:
        return planned
    best = min(us, key=lambda strategy: us[strategy])
    return best if us[planned] - us[best] > max(GAIN * us[planned], LEAST_GAIN_US) else planned


def decide(eager: str, captured: str, times: Mapping[str, Times]) -> tuple[str, str]:
    """Returns (what runs in eager mode from now on, what inside CUDA graphs), given what was planned for each."""
    on_device = {strategy: time.device_us for strategy, time in times.items() if time.is_of_device}
    return fastest(eager, {strategy: time.eager_us for strategy, time in times.items()}), fastest(captured, on_device)


def second_look(planned: str, times: Mapping[str, Times]) -> tuple[str, ...]:
    """Returns the strategies that are timed a second time, that which runs in eager mode first; empty if no other one
    is near the fastest, in eager mode or on the device. planned: what was planned for eager mode.
    """
    eager = {strategy: time.eager_us for strategy, time in times.items()}
    on_device = {strategy: time.device_us for strategy, time in times.items() if time.is_of_device}
    kept, near = fastest(planned, eager), set[str]()
    for us in (eager, on_device):
        near |= {strategy for strategy, time in us.items() if time <= NEAR * min(us.values())}
    others = [strategy for strategy in times if strategy in near and strategy != kept]
    return (kept, *others) if others else ()


def later(first: Mapping[str, Times], second: Mapping[str, Times]) -> dict[str, Times]:
    """Returns the times of both looks as if all were of the second one. Where all that was timed twice took longer
    then, as on a device that is warm, so would the rest have.
    """
    both = [(first[strategy], time) for strategy, time in second.items() if strategy in first]
    device = min((new.device_us / old.device_us for old, new in both if old.device_us > 0.0), default=1.0)
    host = min((new.host_us / old.host_us for old, new in both if old.host_us > 0.0), default=1.0)
    scaled = {
        strategy: Times(time.device_us * max(device, 1.0), time.host_us * max(host, 1.0))
        for strategy, time in first.items()
    }
    return scaled | dict(second)


def times_text(times: Mapping[str, Times]) -> str:
    """Returns `library 261/140, tile 300/60`: microseconds on the device / on the host."""
    return ", ".join(f"{strategy} {time.device_us:.0f}/{time.host_us:.0f}" for strategy, time in times.items())


def decided(planned: Choice, strategy: str, times: Mapping[str, Times]) -> Choice:
    """The choice that a trial ended with, where `planned` was the plan's."""
    measured = {name: time.us for name, time in times.items()}
    shown = ", ".join(f"{name} {time.device_us:.0f} us (host {time.host_us:.0f})" for name, time in times.items())
    reason = f"tried here, {CALLS - UNTIMED} timed calls each: {shown}; before that {planned.reason}"
    return replace(planned, strategy=strategy, reason=reason, source="trial", tried_us=measured)


def running(planned: Choice, strategy: str, tried: Sequence[str]) -> Choice:
    """The choice for a call of a look. planned: what the site runs by before it."""
    reason = f"a trial is running, {CALLS} calls each by {', '.join(tried)}; it runs by {planned.strategy} otherwise"
    return replace(planned, strategy=strategy, reason=reason, source="trial")


def measured_alone(request: PlanRequest, times: Mapping[str, Times]) -> tuple[dict[str, float], dict[str, float]]:
    """The times of a trial as a table of measured choices holds them: microseconds by strategy in eager mode, and
    inside CUDA graphs, without what an epilogue or a norm is predicted to cost beside the products. request: of the
    site that began the trial. Each is empty where `library`, with which a table compares, has no time, or is alone.
    """
    problem, on = request.problem, cost.hardware(request.device_name)
    beside = {strategy: cost.beside_us(problem, on, strategy) for strategy in times}
    own = problem.m / bucket(problem.m)
    # Later runs are to choose what this trial has chosen.
    eager = {strategy: found.eager_us * own - beside[strategy] for strategy, found in times.items()}
    on_device = {name: found.device_us * own - beside[name] for name, found in times.items() if found.is_of_device}
    return _comparable(eager), _comparable(on_device)


def _comparable(us: Mapping[str, float]) -> dict[str, float]:
    found = {strategy: time for strategy, time in us.items() if time >= LEAST_US}
    return found if "library" in found and len(found) > 1 else {}


def bucket(size: int) -> int:
    """The size that stands for all sizes near this one: up to an eighth more, so that changing sizes share a trial."""
    step = 1 << max(size.bit_length() - 4, 0)
    return -(-size // step) * step
