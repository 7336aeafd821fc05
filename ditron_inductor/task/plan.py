"""Which strategy runs a site: a pure function of facts that all ranks of the group share.

The order: what the user forced; what cannot run here; the group's table of measured choices (a user's own, rank 0's
on all ranks); the tables that ship with the package; the cost model. Whatever decides, `library` is left only for a
gain: measured, of at least `MARGIN`; predicted, by `cost.least_gain`. Ties go to `library`.

A site may run by one strategy in eager mode and by another inside CUDA graphs, where the host's time does not count.

Two ranks that choose differently wait for each other forever, so every field of a `PlanRequest` has to be equal
on all ranks. Of the sizes, those of the tensor that is communicated are (m and k of an all-gather, m and n of
the reductions). The third one, n or k, is a dimension of this rank's weight alone: equal where the weight is
sharded evenly, and otherwise not. Whoever builds the request sees to it that all ranks put in the same number.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from ditron_inductor.errors import DitronRunsUnfused, StrategyUnavailable
from ditron_inductor.task import cost
from ditron_inductor.task import table as tables
from ditron_inductor.task.dtypes import PRECISIONS
from ditron_inductor.task.nodes import NODES
from ditron_inductor.task.policy import shared_site
from ditron_inductor.task.problem import NOTHING, Problem, Requirement

MARGIN = 0.01
NEAR_MARGIN = 0.03
"""What a strategy has to gain over `library` where its shape was measured, and where only one close to it was."""
SLOW_HOST = 3.0
"""In eager mode a strategy counts with at least what its launches take on a host so many times slower than the one that
`Node.host_us` is from, where one op is called again and again. In the middle of a model, on hosts that share their
cores, they were seen to take 3 to 4 times as long.
"""
SLOWEST_HOST = 12.0
"""And at most so many times, where the group's slowest host was measured."""
HOST_SPREAD = 1.5
"""So much longer than back to back launches take in the middle of a model."""
LAUNCH_US = 11.0
"""Of an eager torch.mm on the hosts that `Node.host_us` is from."""


@dataclass(frozen=True)
class PlanRequest:
    """Everything that the choice for one call depends on, the table of measured choices aside.

    Attributes:
        problem: what is computed and moved.
        site: the site's name, for messages.
        strategy: what the user asked for, `auto` to leave it to the plan.
        workspace_limit: bytes of symmetric memory that the site may use.
        device_type, device_name: `cuda` or `cpu`, and the name that the driver gives the GPU.
        tile, chunked: what these strategies want, nothing of a strategy that the kind lacks.
        launch_us: microseconds of a launch on the slowest host of the group, 0 if unknown.
        strict: whether an obstacle that leaves the library only is an error.
    """

    problem: Problem
    site: str
    strategy: str
    workspace_limit: int
    device_type: str
    device_name: str
    tile: Requirement = NOTHING
    chunked: Requirement = NOTHING
    launch_us: float = 0.0
    strict: bool = False

    def wants(self, strategy: str) -> Requirement:
        """What one of our strategies wants."""
        return self.tile if strategy == "tile" else self.chunked

    def inside_graphs(self) -> PlanRequest:
        """The same call inside a CUDA graph."""
        return replace(self, problem=replace(self.problem, captured=True))


@dataclass(frozen=True)
class Choice:
    """The strategy that runs, and a sentence saying why.

    predicted_us: the cost model's microseconds by strategy, None where it has none; in eager mode at least the host's.
    source: what decided: `forced` by the option, a `table` of measurements, the cost `model`, a `trial` of the first
    calls, an `obstacle` that left the library only, the `meeting` of the ranks, which left it too, or that the library
    is the `only` one: the kind has no other strategy, or there is nothing to compute.
    tried_us: the microseconds by strategy that a trial ended with, empty without one.
    settled: whether the user's own table has this very problem, so that a trial would measure it again.
    """

    strategy: str
    reason: str
    predicted_us: Mapping[str, float] | None
    source: str
    tried_us: Mapping[str, float] = field(default_factory=dict)
    settled: bool = False


@functools.lru_cache(maxsize=4096)
def choose(request: PlanRequest, table: str = "") -> Choice:
    """The strategy for one call. table: the text of the group's table of measured choices, equal on all ranks.

    Raises `StrategyUnavailable` if a strategy is forced and cannot run here; `auto` takes another one then. Raises
    `DitronRunsUnfused` if that is the library and the request is strict.
    """
    problem = request.problem
    predicted = _predicted(request, problem)
    strategies = NODES[problem.kind].strategies
    obstacles = {strategy: _obstacle(request, strategy) for strategy in strategies if strategy != "library"}
    if request.strategy != "auto":
        forced = request.strategy
        reason = "forced by the option ditron.strategy"
        if forced not in strategies:
            forced = strategies[-1]
            reason = f"{problem.kind} has no strategy {request.strategy}: where that is forced {forced} runs"
        obstacle = obstacles.get(forced)
        if obstacle is not None:
            why, remedy = obstacle
            raise StrategyUnavailable(strategy=forced, site=request.site, reason=why, remedy=remedy)
        return Choice(forced, reason, predicted, "forced")
    if not obstacles:
        return Choice("library", f"{problem.kind} has no other strategy", predicted, "only")
    if problem.is_empty:
        return Choice("library", "there is nothing to compute", predicted, "only")
    able = possible(request)
    if not able and request.device_type != "cpu":
        reasons = dict.fromkeys(obstacle[0] for obstacle in obstacles.values() if obstacle is not None)
        return _hindered(request, "; ".join(reasons), predicted)
    for source, known in (("your table", tables.parsed(table)), ("the shipped table", tables.shipped())):
        best, reason, exact = _best_measured(request, known, able)
        if best:
            reason += _of_the_host(request)
            settled = exact and source == "your table"
            return Choice(best, f"measured ({source}): {reason}", predicted, "table", settled=settled)
    if predicted is None:
        reason = "no GPU: on the CPU our kernels run in an interpreter, for tests only"
        return _hindered(request, reason, predicted)
    best = _best(request, predicted, {strategy: cost.least_gain(problem, strategy) for strategy in able})
    times = ", ".join(f"{strategy} {predicted[strategy]:.0f} us" for strategy in ("library", *able))
    times += _of_the_host(request)
    return Choice(best, f"predicted: {times}", predicted, "model")


def _hindered(request: PlanRequest, reason: str, predicted: Mapping[str, float] | None) -> Choice:
    """The library, as nothing else can run. Raises `DitronRunsUnfused` if the request is strict."""
    if request.strict:
        raise DitronRunsUnfused(site=shared_site(request.site), reason=reason)
    return Choice("library", reason, predicted, "obstacle")


def possible(request: PlanRequest) -> tuple[str, ...]:
    """Those strategies but `library` that can run a call."""
    strategies = NODES[request.problem.kind].strategies
    return tuple(one for one in strategies if one != "library" and _obstacle(request, one) is None)


def _best_measured(request: PlanRequest, known: tables.Table, able: tuple[str, ...]) -> tuple[str, str, bool]:
    """The best strategy that `known` vouches for, what it says, and whether it says it of this very problem; empty
    texts where it says nothing.
    """
    problem = request.problem.as_expected()
    measured = known.lookup(
        gpu=request.device_name,
        world=problem.world_size,
        dtype=problem.precision.operand.name,
        op=problem.kind,
        m=problem.m,
        n=problem.n,
        k=problem.k,
        graph=problem.captured,
        slices=problem.slices,
    )
    if measured is None or not any(strategy in measured.ratio for strategy in able):
        return "", "", False
    # The tables are of products alone, and perhaps of one slice.
    alone = replace(problem, epilogue_bytes=0, pre_bytes=0, in_band=False, pair_bytes=0)
    plain = _predicted(request, replace(alone, slices=measured.slices))
    library_us = measured.library_us or (plain["library"] if plain else 1.0)
    us = {strategy: ratio * library_us for strategy, ratio in measured.ratio.items()}
    sliced = _predicted(request, alone)
    if plain and sliced:
        on = cost.hardware(request.device_name)
        us = {
            strategy: time * (sliced[strategy] / plain[strategy]) + cost.beside_us(problem, on, strategy)
            for strategy, time in us.items()
        }
    gain = 1.0 - (MARGIN if measured.exact else NEAR_MARGIN)
    settled = measured.exact and measured.slices == problem.slices
    return _best(request, us, dict.fromkeys(able, gain)), measured.text, settled


def _best(request: PlanRequest, us: Mapping[str, float], gains: Mapping[str, float]) -> str:
    """The fastest by these times of those that take at most their part in `gains` of the library's, or `library`."""
    problem = request.problem
    if request.device_type != "cpu" and not problem.captured:
        slow = slow_host(request.launch_us)
        us = {strategy: max(time, slow * cost.host_us(problem, strategy)) for strategy, time in us.items()}
    better = [strategy for strategy, gain in gains.items() if strategy in us and us[strategy] <= gain * us["library"]]
    return min(better, key=lambda strategy: us[strategy], default="library")


def _of_the_host(request: PlanRequest) -> str:
    """What a reason says of a host that counts as slower than usual."""
    if request.problem.captured or slow_host(request.launch_us) == SLOW_HOST:
        return ""
    return f"; a launch takes the slowest host {request.launch_us:.0f} us, so many launches count"


def slow_host(launch_us: float) -> float:
    """How much slower the host counts than that of `Node.host_us`: by doubling, so that a choice seldom changes from
    run to run.
    """
    slow = SLOW_HOST
    while slow < SLOWEST_HOST and HOST_SPREAD * launch_us > slow * LAUNCH_US:
        slow *= 2
    return slow


def _predicted(request: PlanRequest, problem: Problem) -> Mapping[str, float] | None:
    if request.device_type == "cpu" or problem.is_empty or problem.precision not in PRECISIONS:
        return None
    return cost.predict(problem, cost.hardware(request.device_name))


def _obstacle(request: PlanRequest, strategy: str) -> tuple[str, str] | None:
    """Why one of our strategies cannot run this call, and what to do about it; None if it can."""
    instead = "Use 'auto' or 'library'"
    precision = request.problem.precision
    if precision not in PRECISIONS:
        taken = ", ".join(dict.fromkeys(row.operand.name for row in PRECISIONS))
        return f"no kernel of ours takes {precision.operand.name}", f"{instead}, or compute in one of {taken}"
    wants = request.wants(strategy)
    if wants.reason:
        return wants.reason, instead
    if wants.nbytes > request.workspace_limit:
        return (
            f"the group would take {wants.nbytes} bytes of workspace, and the limit is {request.workspace_limit}",
            f"{instead}, or raise the option 'ditron.workspace_limit'",
        )
    return None


Sizes = tuple[int | None, int | None, int | None]
SIZES_KEPT = 16
"""Of how many sizes a site's last choices are kept."""


class Decisions:
    """The last choice of every site in this process, kept for `explain`: what ran, and from which request.

    Two graphs with the same launches have sites of the same names, so a site's last choices of several sizes are kept.
    The only writer is the binding of the ops; nothing reads it to decide anything.
    """

    def __init__(self) -> None:
        self._last: dict[tuple[str, str], tuple[PlanRequest, Choice]] = {}
        self._sized: dict[tuple[str, str], dict[Sizes, tuple[PlanRequest, Choice]]] = {}
        self._lock = threading.Lock()
        self._awaited: list[tuple[set[tuple[str, str]], Callable[[], None]]] = []

    def when_noted(self, sites: Collection[tuple[str, str]], then: Callable[[], None]) -> None:
        """Calls `then` as soon as a choice has been noted from now on for each of these, by group and name."""
        for site in sites:
            # Its next call is noted, even if that repeats what the call before it noted.
            self._last.pop(site, None)
        with self._lock:
            self._awaited.append((set(sites), then))

    def note(self, group_name: str, request: PlanRequest, choice: Choice) -> None:
        """Remember `choice` as the last one of the request's site in a group."""
        key = (group_name, request.site)
        last = self._last.get(key)
        # Every call of a model comes by: nearly always with what the call before it noted.
        if last is not None and last[0] is request and last[1] is choice:
            return
        self._last[key] = (request, choice)
        sized = self._sized.setdefault(key, {})
        sizes = (request.problem.m, request.problem.n, request.problem.k)
        sized.pop(sizes, None)
        sized[sizes] = (request, choice)
        if len(sized) > SIZES_KEPT:
            del sized[next(iter(sized))]
        if self._awaited:
            self._arrived(key)

    def _arrived(self, key: tuple[str, str]) -> None:
        with self._lock:
            for left, _ in self._awaited:
                left.discard(key)
            complete = [then for left, then in self._awaited if not left]
            self._awaited = [(left, then) for left, then in self._awaited if left]
        for then in complete:
            then()

    def last(self, group_name: str, site: str, sizes: Sizes | None = None) -> tuple[PlanRequest, Choice] | None:
        """The last request and choice of a site, those of (m, n, k) `sizes` if it ran so; None if it never ran here."""
        key = (group_name, site)
        found = self._sized.get(key, {}).get(sizes) if sizes is not None else None
        return found or self._last.get(key)


decisions = Decisions()
"""Those of this process."""
