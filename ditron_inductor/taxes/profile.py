"""``profile_taxes``: runs a function without fusion and with it, and accounts for the difference.

Three contestants compile the function: Inductor, Ditron with every site by `library` (*unfused*: what Inductor would
run, but in the graph that Ditron makes), and Ditron with the given options (*fused*). Their steps are timed in turns,
eagerly and in CUDA graphs. Then steps of the last two run with marks around every site and every collective, and the
profiler of torch sees the kernels of all graphs.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ditron_inductor.errors import InvalidOptionValue, NoDefaultGroup
from ditron_inductor.options import Options
from ditron_inductor.report.explain import (
    build_report,
    cut_from_graph,
    fresh_backend,
    measured_report,
    random_state_kept,
    run_backward,
    without_caches,
)
from ditron_inductor.task import trial
from ditron_inductor.task.policy import shared_site
from ditron_inductor.task.site_records import collect_sites
from ditron_inductor.taxes.accounts import (
    FUSED,
    INDUCTOR,
    UNFUSED,
    SiteTaxes,
    StepTimes,
    fused_account,
    unfused_account,
)
from ditron_inductor.taxes.captured_step import captured_steps
from ditron_inductor.taxes.intermediates import intermediates
from ditron_inductor.taxes.pairs import distinct, paired
from ditron_inductor.taxes.report import TaxReport

if TYPE_CHECKING:
    import torch

    from ditron_inductor.report.explain import Report
    from ditron_inductor.report.explained import ExplainedSite
    from ditron_inductor.report.timing import Clock
    from ditron_inductor.task.site_records import SiteRecord
    from ditron_inductor.taxes.probe import Key, Spent
    from ditron_inductor.taxes.step_trace import Trace

GRAPHS = "triton.cudagraphs"
CPU_ROUNDS = 2
PROBED_ROUNDS = 7
COPIED_BYTES = {"cuda": 256 << 20, "cpu": 8 << 20}
LONGEST_DELAY_US = 200e3
FEWEST_STEPS, MOST_STEPS = 3, 8
"""The fewest and the most steps that run in front of a step that is looked at."""


def profile_taxes(
    fn: Callable[..., Any],
    *,
    options: Mapping[str, Any] | None = None,
    backward: bool = True,
    graphs: bool = True,
    rounds: int | None = None,
    trace: bool = False,
) -> Callable[..., TaxReport]:
    """``profile_taxes(fn)(*args, **kwargs)`` reports what the three taxes cost ``fn``, unfused and fused.

    It is collective: all ranks of the default group have to call it, with inputs of equal shapes. ``options`` are those
    of ``torch.compile`` for Ditron, including Inductor's, but not Inductor's CUDA graphs: the step is captured here, if
    ``graphs`` is true and the device has CUDA graphs. If the outputs need gradients and ``backward`` is true, a step is
    the forward and the backward pass; no ``.grad`` changes. ``rounds``: the number of samples of each time. ``trace``:
    run one more step with kernels that record what they do and when, for the report's ``trace``. The state of the
    random generators is restored; other side effects of ``fn`` are those of many runs. Raises InvalidOptionValue and
    NoDefaultGroup, and what a compilation or a call of ``fn`` raises.
    """
    parsed, inductor = Options.parse(options)
    if inductor.get(GRAPHS):
        raise InvalidOptionValue(key=GRAPHS, value=True, allowed="False: profile_taxes captures whole steps by itself")

    @functools.wraps(fn, assigned=("__doc__",), updated=())
    def run(*args: Any, **kwargs: Any) -> TaxReport:
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()):
            raise NoDefaultGroup(what="profile_taxes")
        args, kwargs = cut_from_graph((args, kwargs))
        with random_state_kept():
            inputs = args, kwargs
            return _Profile(fn, parsed, options or {}, inductor, backward, graphs, rounds, trace, inputs).report()

    return run


@dataclass
class _Profile:
    """One run of `profile_taxes`; inductor: Inductor's part of the options."""

    fn: Callable[..., Any]
    parsed: Options
    options: Mapping[str, Any]
    inductor: Mapping[str, Any]
    backward: bool
    graphs: bool
    rounds: int | None
    trace: bool
    inputs: tuple[tuple[Any, ...], dict[str, Any]]

    def report(self) -> TaxReport:
        import torch
        import torch.distributed as dist

        from ditron_inductor.report.timing import ROUNDS, Clock

        device = _device_of(self.fn, self.inputs)
        world = dist.group.WORLD
        assert world is not None
        clock = Clock(device, world)
        rounds = self.rounds or (ROUNDS if device.type == "cuda" else CPU_ROUNDS)
        notes: list[str] = []
        with without_caches():
            calls, unfused, compiled = self._compiled()
            replays = self._replays(clock, calls, compiled, notes)
            steps = _steps(clock, calls, replays, rounds)
            captured_ = captured_steps(clock, replays, notes)
        bytes_per_us = _bandwidth(clock, rounds)
        probed = _probed(clock, {name: calls[name] for name in (UNFUSED, FUSED)}, steps, min(rounds, PROBED_ROUNDS))
        pairs = paired(compiled.matched, distinct(unfused.matched))
        sites = [_site(site, other, probed, bytes_per_us) for site, other in pairs]
        alone = sum(site.unfused is None for site in sites)
        if alone:
            notes.append(
                f"{alone} sites have no certain counterpart in the unfused graph, and no part in what is saved"
            )
        if self.graphs and device.type == "cuda":
            sites = _with_launches(compiled, sites, rounds)
        taken = self._trace(clock, calls[FUSED], notes) if self.trace else None
        if taken is not None:
            waited = taken.waited_us()
            sites = [site.with_waits(waited.get(shared_site(site.record.site))) for site in sites]
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        return TaxReport(
            sites=tuple(sites),
            left_alone=tuple(site.record for site in compiled.left_alone),
            steps=steps,
            device=name,
            world_size=dist.get_world_size(),
            bytes_per_us=bytes_per_us,
            rounds=rounds,
            notes=tuple(notes),
            trace=taken,
            captured=captured_,
            parameter_bytes=_parameter_bytes(self.fn),
        )

    def _trace(self, clock: Clock, call: Callable[[int], None], notes: list[str]) -> Trace | None:
        from ditron_inductor.taxes.step_trace import take_trace

        taken, problem = take_trace(clock, call)
        if problem:
            notes.append(problem)
        if taken is not None and not any(rank.events for rank in taken.ranks):
            notes.append("the trace is empty: no kernel that ran notes what it does; see docs/taxes.md")
        if taken is not None and taken.dropped:
            notes.append(f"the trace lacks {taken.dropped} events that its buffer had no place for: trace fewer layers")
        return taken

    def _compiled(self) -> tuple[dict[str, Callable[[int], None]], Report, Report]:
        """Returns the contestants, compiled and warm, and the reports of the unfused and the fused one."""
        import torch
        from torch._inductor.compile_fx import compile_fx

        def by_inductor(gm: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Callable[..., Any]:
            compiled: Any = compile_fx(gm, example_inputs, config_patches=dict(self.inductor))
            return compiled

        unfused = {**self.options, "ditron.strategy": "library"}
        backends = {
            INDUCTOR: by_inductor,
            UNFUSED: fresh_backend(None, unfused),
            FUSED: fresh_backend(None, self.options),
        }
        calls: dict[str, Callable[[int], None]] = {}
        reports: dict[str, Report] = {}
        for name, backend in backends.items():
            call = self._step_of(torch.compile(self.fn, backend=backend))
            with collect_sites() as sink:
                call(0)
            # A trial that still runs would be timed.
            tries = name == FUSED and self.parsed.trials and torch.cuda.is_available()
            for _ in range(trial.ALL_CALLS if tries else 1):
                call(0)
            calls[name] = call
            # Read this now, because a site of the same name in another contestant is noted in the same place.
            reports[name] = build_report(sink.graphs, self.parsed)
        fused = reports[FUSED]
        return calls, reports[UNFUSED], replace(fused, sites=(*distinct(fused.matched), *fused.left_alone))

    def _step_of(self, compiled: Callable[..., Any]) -> Callable[[int], None]:
        args, kwargs = self.inputs

        def step(index: int) -> None:
            outputs = compiled(*args, **kwargs)
            if self.backward:
                run_backward(outputs)

        return step

    def _replays(
        self, clock: Clock, calls: Mapping[str, Callable[[int], None]], compiled: Report, notes: list[str]
    ) -> dict[str, Callable[[int], Any]]:
        """Returns the steps that can be captured, each as one CUDA graph."""
        if not self.graphs or clock.device.type != "cuda":
            return {}
        replays = {name: _captured(clock, name, call, compiled, notes) for name, call in calls.items()}
        return {name: replay for name, replay in replays.items() if replay is not None}


def _steps(
    clock: Clock,
    calls: Mapping[str, Callable[[int], None]],
    replays: Mapping[str, Callable[[int], Any]],
    rounds: int,
) -> dict[str, StepTimes]:
    """Returns the times of whole steps, eagerly and, where captured, in CUDA graphs; all are timed in turns."""
    from ditron_inductor.report.timing import interleaved

    ready = {**calls, **{f"{name} graph": replay for name, replay in replays.items()}}
    times = interleaved(clock, ready, rounds)
    return {name: StepTimes(times[name], times.get(f"{name} graph")) for name in calls}


def _captured(
    clock: Clock, name: str, call: Callable[[int], None], compiled: Report, notes: list[str]
) -> Callable[[int], Any] | None:
    """Returns the step as one CUDA graph, or None with a note if it cannot be captured on some rank."""
    from ditron_inductor.device.reset import reset
    from ditron_inductor.report.measure import attempt
    from ditron_inductor.report.timing import captured

    replay, problem = attempt(functools.partial(captured, call, 1), clock.device)
    problems = [text for text in clock.agree(problem) if text]
    if not problems:
        return replay
    notes.append(f"{name}: no CUDA graph: {problems[0]}")
    if name == FUSED:
        # A call that failed half way leaves its workspace unusable.
        for group_name in sorted({site.record.group_name for site in compiled.matched}):
            reset(group_name)
    return None


def _device_of(fn: Callable[..., Any], inputs: Any) -> torch.device:
    """Returns the device of the first tensor among the arguments, or of the first parameter."""
    import torch
    from torch.utils import _pytree

    tensors = [value for value in _pytree.tree_leaves(inputs) if isinstance(value, torch.Tensor)]
    if not tensors and isinstance(fn, torch.nn.Module):
        tensors = list(fn.parameters())
    if tensors:
        return torch.device("cuda", torch.cuda.current_device()) if tensors[0].is_cuda else tensors[0].device
    return torch.device("cpu")


def _parameter_bytes(fn: Callable[..., Any]) -> int:
    """Returns the bytes of this rank's parts of the parameters, 0 for a function."""
    import torch
    from torch.distributed.tensor import DTensor

    if not isinstance(fn, torch.nn.Module):
        return 0
    parts = [parameter.to_local() if isinstance(parameter, DTensor) else parameter for parameter in fn.parameters()]
    return sum(part.numel() * part.element_size() for part in parts)


def _bandwidth(clock: Clock, rounds: int) -> float:
    """Returns the bytes per microsecond that a copy within the device reads and writes, on the slowest rank."""
    import torch

    nbytes = COPIED_BYTES[clock.device.type]
    source = torch.ones(nbytes, dtype=torch.uint8, device=clock.device)
    target = torch.empty_like(source)
    samples = [clock.sample(lambda index: target.copy_(source), 5) for _ in range(rounds)]
    (slowest,) = clock.largest([statistics.median(samples)])
    return 2 * nbytes / slowest


def _probed(
    clock: Clock, calls: Mapping[str, Callable[[int], None]], steps: Mapping[str, StepTimes], rounds: int
) -> dict[str, tuple[dict[Key, Spent], dict[tuple[str, str], Spent]]]:
    """Returns for each contestant the times of the calls of every site: medians over the rounds, the largest of any
    rank. They are given by key, and also by group and site, for requests of other sizes than the compiler's hints. On a
    GPU they are scaled to the time of the step without marks, which may run at another clock rate.
    """
    import torch
    import torch.distributed as dist

    from ditron_inductor.device import streams
    from ditron_inductor.task.watch import watch
    from ditron_inductor.taxes.probe import Probe, largest, mark_us

    on_gpu = clock.device.type == "cuda"
    probe = Probe(clock.device, mark_us(clock.device))
    samples: dict[str, list[tuple[float, dict[Key, Spent]]]] = {name: [] for name in calls}
    leads = {name: _lead(clock, call) if on_gpu else Lead(0, 0.0) for name, call in calls.items()}
    for _ in range(rounds):
        for name, call in calls.items():
            dist.all_reduce(torch.zeros(1, device=clock.device), group=clock.group)
            if on_gpu:
                # The host issues the step in this time, so the device is timed, and not its waiting for the host.
                streams.delay(leads[name].delay_us)
            for _ in range(leads[name].steps):
                call(0)
            with watch.by(probe):
                probe.step(functools.partial(call, 0))
            if on_gpu:
                torch.cuda.synchronize(clock.device)
            samples[name].append(probe.take())
    found = {}
    for name, taken in samples.items():
        by_key = largest(clock.agree(_medians([by_key for _, by_key in taken])))
        (whole_us,) = clock.largest([statistics.median(us for us, _ in taken)])
        # Eagerly, a step that waits for its host says nothing of the device.
        known = leads[name].steps > 0 or steps[name].graph_us is not None
        if on_gpu and known and whole_us > 0:
            factor = steps[name].device_us / whole_us
            by_key = {key: spent.scaled(factor) for key, spent in by_key.items()}
        by_site = {(group, site): spent for (group, site, _), spent in by_key.items()}
        found[name] = by_key, by_site
    return found


@dataclass(frozen=True)
class Lead:
    """What keeps the GPU busy while the host issues a step: a delay, or `steps` in front that are not looked at."""

    steps: int
    delay_us: float


def _lead(clock: Clock, call: Callable[[int], None]) -> Lead:
    """Returns steps, which keep the GPU's clock rate up, if the slowest host can stay ahead, and else a delay."""
    import torch

    torch.cuda.synchronize(clock.device)
    begin = time.perf_counter()
    call(0)
    issued = (time.perf_counter() - begin) * 1e6
    torch.cuda.synchronize(clock.device)
    left = (time.perf_counter() - begin) * 1e6 - issued
    slowest, gained = clock.largest([issued, -left])
    # Marks and the first call of a launch hook take time too.
    needed = 1.5 * slowest + 500.0
    if needed <= MOST_STEPS * -gained:
        return Lead(max(FEWEST_STEPS, math.ceil(needed / -gained)), 0.0)
    return Lead(0, min(LONGEST_DELAY_US, needed))


def _medians(samples: Sequence[dict[Key, Spent]]) -> dict[Key, Spent]:
    from ditron_inductor.taxes.probe import Spent

    found = {}
    for key in dict.fromkeys(key for sample in samples for key in sample):
        taken = [sample[key] for sample in samples if key in sample]
        us, waited = (statistics.median(getattr(sample, name) for sample in taken) for name in ("us", "waited_us"))
        found[key] = Spent(taken[-1].strategy, taken[-1].calls, us, waited)
    return found


def _site(
    site: ExplainedSite,
    counterpart: ExplainedSite | None,
    probed: Mapping[str, tuple[dict[Key, Spent], dict[tuple[str, str], Spent]]],
    bytes_per_us: float,
) -> SiteTaxes:
    def spent(name: str, record: SiteRecord) -> Spent | None:
        by_key, by_site = probed[name]
        exact = by_key.get((record.group_name, record.site, -1 if record.m is None else record.m))
        return exact or by_site.get((record.group_name, record.site))

    unfused = None
    if counterpart is not None and (before := spent(UNFUSED, counterpart.record)) is not None:
        unfused = unfused_account(before, intermediates(counterpart.record), bytes_per_us)
    after, bytes_ = spent(FUSED, site.record), intermediates(site.record)
    fused = None if after is None else fused_account(after, bytes_, bytes_per_us, unfused)
    return SiteTaxes(site.direction, site.record, bytes_ is not None, unfused, fused)


def _with_launches(report: Report, sites: Sequence[SiteTaxes], rounds: int) -> list[SiteTaxes]:
    """Returns the sites with the launch tax: what a call costs more eagerly than in a CUDA graph, on random data."""
    eager, graph = (measured_report(report, graph=graph, rounds=rounds, chosen=True) for graph in (False, True))
    priced = []
    for site, slow, fast in zip(sites, eager.matched, graph.matched, strict=True):
        times = [{} if timed.measured is None else timed.measured.us for timed in (slow, fast)]

        def launch(strategy: str, times: Sequence[Mapping[str, float]] = times) -> float | None:
            us, replayed = (by_strategy.get(strategy, math.nan) for by_strategy in times)
            return None if math.isnan(us - replayed) else max(0.0, us - replayed)

        priced.append(site.with_launches(launch("library"), launch(slow.strategy)))
    return priced
