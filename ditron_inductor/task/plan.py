"""Which strategy runs a site: a pure function of facts that all ranks of the group share.

These decide, in this order: the strategy that the user forced; what cannot run here; the group's table of measured
choices (a user's own table, that of rank 0 on all ranks); the tables that ship with the package; the cost model.
Another strategy than `library` has to gain something: at least `MARGIN` by measured times, and as much as
`cost.least_gain` demands by predicted ones.

A site may run by one strategy in eager mode and by another inside CUDA graphs, where the host's time does not count.

Two ranks that choose differently wait for each other forever, so every field of a `PlanRequest` has to be equal on all
ranks. The sizes of the tensor that is communicated are (m and k of an all-gather, m and n of a reduction). The third
size, n or k, is a dimension of the rank's own weight, and differs if the weight is sharded unevenly. Whoever builds the
request makes all ranks use the same number.
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
"""The part of `library`'s time to save: MARGIN if the very shape was measured, NEAR_MARGIN if one close to it."""
SLOW_HOST = 3.0
"""In eager mode the time of a strategy is at least the time that its launches take on the host. That is `Node.host_us`,
measured with one op that is called again and again, times this factor: in the middle of a model, on hosts that share
their cores, launches took 3 to 4 times as long. What they take on the very host is found by a trial.

Over the 194 eager cells of `benchmarks/results`, the choices of the model take 1.014 times as long as the best ones in
the mean and 1.16 times at worst; without this factor it is 1.026 and 2.32. Choices by the measured tables take 1.003
and 1.16 times as long, and without it 1.000: in these cells the host had nothing else to do.
"""


@dataclass(frozen=True)
class PlanRequest:
    """Everything on which the choice for one call depends, except the table of measured choices. site: the site's name,
    for messages. strategy: the one that the user asked for, or `auto`. workspace_limit: the bytes of symmetric memory
    that the site may use. device_type, device_name: `cuda` or `cpu`, and the driver's name of the GPU. tile, chunked:
    what these strategies require; NOTHING for a strategy that the kind lacks. strict: whether an obstacle that leaves
    only the library is an error.
    """

    problem: Problem
    site: str
    strategy: str
    workspace_limit: int
    device_type: str
    device_name: str
    tile: Requirement = NOTHING
    chunked: Requirement = NOTHING
    strict: bool = False

    def wants(self, strategy: str) -> Requirement:
        """Returns what one of our strategies requires."""
        return self.tile if strategy == "tile" else self.chunked

    def inside_graphs(self) -> PlanRequest:
        """Returns the request of the same call inside a CUDA graph."""
        return replace(self, problem=replace(self.problem, captured=True))


@dataclass(frozen=True)
class Choice:
    """The strategy that runs, and a sentence that says why.

    predicted_us: the cost model's microseconds by strategy, None if it has none.
    source: what decided: `forced` by the option, a `table` of measurements, the cost `model`, a `trial` of the first
    calls, an `obstacle` that left only the library, the `meeting` of the ranks, which left only the library too, or
    `only`: the kind has no strategy but the library, or there is nothing to compute.
    tried_us: the microseconds by strategy with which a trial ended, empty without a trial.
    settled: whether the user's own table has this very problem, so that a trial would only measure it again.
    """

    strategy: str
    reason: str
    predicted_us: Mapping[str, float] | None
    source: str
    tried_us: Mapping[str, float] = field(default_factory=dict)
    settled: bool = False


@functools.lru_cache(maxsize=4096)
def choose(request: PlanRequest, table: str = "") -> Choice:
    """Returns the strategy for one call. table: the text of the group's table of measured choices, equal on all ranks.
    Raises `StrategyUnavailable` if a strategy is forced and cannot run here; `DitronRunsUnfused` if an obstacle leaves
    only the library and the request is strict.
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
            settled = exact and source == "your table"
            return Choice(best, f"measured ({source}): {reason}", predicted, "table", settled=settled)
    if predicted is None:
        reason = "no GPU: on the CPU our kernels run in an interpreter, for tests only"
        return _hindered(request, reason, predicted)
    best = _best(request, predicted, {strategy: cost.least_gain(problem, strategy) for strategy in able})
    times = ", ".join(f"{strategy} {predicted[strategy]:.0f} us" for strategy in ("library", *able))
    return Choice(best, f"predicted: {times}", predicted, "model")


def _hindered(request: PlanRequest, reason: str, predicted: Mapping[str, float] | None) -> Choice:
    """Returns the library as the only choice. Raises `DitronRunsUnfused` if the request is strict."""
    if request.strict:
        raise DitronRunsUnfused(site=shared_site(request.site), reason=reason)
    return Choice("library", reason, predicted, "obstacle")


def possible(request: PlanRequest) -> tuple[str, ...]:
    """Returns the strategies, without `library`, that can run a call."""
    strategies = NODES[request.problem.kind].strategies
    return tuple(name for name in strategies if name != "library" and _obstacle(request, name) is None)


def _best_measured(request: PlanRequest, known: tables.Table, able: tuple[str, ...]) -> tuple[str, str, bool]:
    """Returns (the best strategy by a table; what it says; whether it has this very problem); empty texts if none."""
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
    # The tables have the times of products without an epilogue, and perhaps only those of one slice.
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
    """Returns the fastest strategy by `us` of those within the fraction `gains` of `library`, or `library`."""
    problem = request.problem
    if request.device_type != "cpu" and not problem.captured:
        us = {strategy: max(time, SLOW_HOST * cost.host_us(problem, strategy)) for strategy, time in us.items()}
    better = [strategy for strategy, gain in gains.items() if strategy in us and us[strategy] <= gain * us["library"]]
    return min(better, key=lambda strategy: us[strategy], default="library")


def _predicted(request: PlanRequest, problem: Problem) -> Mapping[str, float] | None:
    if request.device_type == "cpu" or problem.is_empty or problem.precision not in PRECISIONS:
        return None
    return cost.predict(problem, cost.hardware(request.device_name))


def _obstacle(request: PlanRequest, strategy: str) -> tuple[str, str] | None:
    """Returns (why one of our strategies cannot run this call; what to do about it), or None if it can."""
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
"""The number of sizes for which a site's last choices are kept."""


class Decisions:
    """The last choice of every site in this process, with its request, for `explain`. Nothing else reads it. Two graphs
    with the same launches have sites of the same names, so the last choices for several sizes are kept.
    """

    def __init__(self) -> None:
        self._last: dict[tuple[str, str], tuple[PlanRequest, Choice]] = {}
        self._sized: dict[tuple[str, str], dict[Sizes, tuple[PlanRequest, Choice]]] = {}
        self._lock = threading.Lock()
        self._awaited: list[tuple[set[tuple[str, str]], Callable[[], None]]] = []

    def when_noted(self, sites: Collection[tuple[str, str]], then: Callable[[], None]) -> None:
        """Calls `then` as soon as each of these sites, given by group and name, has noted a choice from now on."""
        for site in sites:
            # Forget its last choice, so that its next call is noted even if it has the same choice.
            self._last.pop(site, None)
        with self._lock:
            self._awaited.append((set(sites), then))

    def note(self, group_name: str, request: PlanRequest, choice: Choice) -> None:
        """Remembers `choice` as the last choice of the request's site in a group."""
        key = (group_name, request.site)
        last = self._last.get(key)
        # Every call of a model comes here, nearly always with the same objects as the call before.
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
        """Returns the last request and choice of a site, for these (m, n, k) if it had them; None if it has not run."""
        key = (group_name, site)
        found = self._sized.get(key, {}).get(sizes) if sizes is not None else None
        return found or self._last.get(key)


decisions = Decisions()
"""The Decisions of this process."""
