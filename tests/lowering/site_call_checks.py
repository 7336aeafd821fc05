"""What is done again from a record is what the op does, and only while it would be: checks for ranks on the CPU that
launch as GPUs do, with kernels that do nothing. What the launches get is compared. See test_site_call.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.host import stand_in_for_kernels
from ditron_inductor.core.signals import FIRST_SLOT, Pointers
from ditron_inductor.errors import DitronError
from ditron_inductor.lowering.host import trials
from ditron_inductor.lowering.host.recording import Recorder
from ditron_inductor.lowering.host.repeat import Repeated
from ditron_inductor.lowering.host.site_call import MOST_ATTEMPTS
from ditron_inductor.lowering.host.trials import Sample
from ditron_inductor.task import schema, trial
from ditron_inductor.task.nodes import NORM_KINDS, AllGatherMatmul, MatmulReduceScatter, ShardNorm
from ditron_inductor.task.plan import decisions
from ditron_inductor.task.watch import watch
from tests.lowering.calls import Site
from tests.lowering.decode_problems import Decode, DecodeProblem
from tests.lowering.problems import NORM, TILE_KINDS, Problem, Size
from tests.lowering.tried import ORDER, STEPS, TRIED, tried

KINDS = (*TILE_KINDS, *NORM_KINDS)
SIZE = Size(64, 64, 64)
SCRATCH = {"matmul_all_reduce_rms_norm": 1, "flash_decode": 1, "a norm in front": 1}
"""Tensors that a call allocates and does not return: what goes from one launch to the next, parts of the attention."""
EPILOGUE = "silu(mm0) * mm1"


class OpsSeen(TorchDispatchMode):
    """Calls of our ops inside the block: (op, arguments)."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "ditron":
            assert not kwargs
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


class Called:
    """A call of an op, by the op and by a site of a compiled graph."""

    def __init__(self, op: Any, arguments: Sequence[Any], static: bool = True) -> None:
        from ditron_inductor.runtime import site_call

        self.op, self.arguments = op, arguments
        self.tensors: list[torch.Tensor] = list(arguments[schema.OPERANDS])
        self.kind = op._schema.name.removeprefix("ditron::")
        self.site = site_call(self.kind, static, arguments[schema.NODE])

    @staticmethod
    def of(call: Callable[[], object], static: bool = True) -> Called:
        """The one call of an op that `call` makes."""
        with OpsSeen() as seen:
            call()
        ((op, arguments),) = seen.calls
        return Called(op, arguments, static)

    def by_op(self, tensors: Sequence[torch.Tensor] | None = None) -> Any:
        return self.op(*self.site.arguments(tensors or self.tensors))

    def by_site(self, tensors: Sequence[torch.Tensor] | None = None) -> Any:
        return self.site(*(tensors or self.tensors))

    def elsewhere(self, shift: int = 0) -> list[torch.Tensor]:
        """Operands of the same form, `shift` elements behind an aligned address."""
        others = []
        for x in self.tensors:
            extent = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
            whole = torch.randn(extent + 64).to(x.dtype)[shift:]
            others.append(whole.as_strided(x.shape, x.stride(), whole.storage_offset()))
        return others


class Launches:
    """Arguments of the launches of compiled kernels inside the block."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, Any, list[Any]]] = []

    @contextmanager
    def watched(self) -> Iterator[Launches]:
        from ditron_inductor.lowering.host.launcher import Launcher

        start = Launcher.start

        def noted(launcher: Launcher, ready: Any, stream: int, values: list[Any]) -> None:
            self.seen.append((launcher, ready, list(values)))
            start(launcher, ready, stream, values)

        Launcher.start = noted  # type: ignore[method-assign]
        try:
            yield self
        finally:
            Launcher.start = start  # type: ignore[method-assign]


@dataclass(frozen=True)
class Seen:
    """One call: what ran, its arguments with results in the place of their addresses, the slot, the results."""

    kernels: list[Any]
    arguments: list[list[Any]]
    slot: int
    results: list[torch.Tensor]


def launch_of(call: Callable[[], Any]) -> Seen:
    """What a call does."""
    with Launches().watched() as launches:
        results = list(call())
    names: dict[int, str] = {x.data_ptr(): f"result {index}" for index, x in enumerate(results)}
    slots = []
    for launcher, _, values in launches.seen:
        if "pointers" in launcher.positions:
            words = Pointers(*values[launcher.positions["pointers"]])
            slots.append(words.slot - FIRST_SLOT.value)
            values[launcher.positions["pointers"]] = words._replace(slot="slot")
            names |= dict(zip(words[:3], Pointers._fields, strict=False))
    (slot,) = slots

    def named(value: Any) -> Any:
        return tuple(map(named, value)) if isinstance(value, tuple) else names.get(value, value)

    kernels = [(launcher.kernel, ready) for launcher, ready, _ in launches.seen]
    return Seen(kernels, [[named(value) for value in values] for _, _, values in launches.seen], slot, results)


def flattened(arguments: Sequence[Any]) -> list[Any]:
    """With the members of tuples, and how many there are, in their place."""
    flat: list[Any] = []
    for argument in arguments:
        flat += [len(argument), *flattened(argument)] if isinstance(argument, tuple) else [argument]
    return flat


def assert_same(one: Seen, other: Seen, what: str, scratch: int = 0) -> None:
    """Both calls launch the same, but that the slot is the next one, and return tensors of the same form.

    scratch: tensors that a call allocates and does not return.
    """
    assert one.kernels == other.kernels, what
    between: dict[Any, Any] = {}
    for ours, theirs in zip(map(flattened, one.arguments), map(flattened, other.arguments), strict=True):
        for our, their in zip(ours, theirs, strict=True):
            # Scratch is allocated anew, and is the same place in all launches of a call.
            assert our == their or (scratch > 0 and between.setdefault(our, their) == their), what
    assert len(between) <= scratch, f"{what}: {between}"
    assert other.slot == (one.slot + 1) % 2, f"{what}: slots in turn"
    forms = [[(x.shape, x.stride(), x.dtype, x.device) for x in seen.results] for seen in (one, other)]
    assert forms[0] == forms[1], what
    assert len({x.data_ptr() for x in other.results}) == len(other.results), f"{what}: memory for every result"


@contextmanager
def noting(owner: type, name: str, calls: list[Any]) -> Iterator[None]:
    """Appends the arguments of each call of a method inside the block."""
    method = getattr(owner, name)

    def noted(*args: Any) -> Any:
        calls.append(args)
        return method(*args)

    with mock.patch.object(owner, name, noted):
        yield


def repeated(called: Called, times: int = 3) -> Called:
    """After calls that leave nothing to find out."""
    for _ in range(times):
        called.by_site()
    return called


def problems(ctx: Any) -> dict[str, Callable[[], Any]]:
    """A call of every kind that has a kernel for one launch, and of forms that its operands come in."""
    from ditron_inductor.task import schema

    found: dict[str, Callable[[], Any]] = {}
    for index, kind in enumerate(KINDS):
        site = Site(name=f"calls/{index}:{kind}", timeout_s=30.0)
        found[kind] = Problem(ctx, kind, SIZE, site=site)
    found["flash_decode"] = DecodeProblem(
        ctx, Decode(2, 8, 2, 64, 256), site=Site(name="calls/20:flash_decode", timeout_s=30.0)
    )
    site = Site(name="calls/21:parts", timeout_s=30.0)
    x = torch.randn(64, 64).bfloat16()
    # The weights are parts of one tensor, as those of a projection that was split.
    parts = torch.randn(192, 64).bfloat16().split(64)

    def gathered(weights: Sequence[torch.Tensor], **others: Any) -> Any:
        fields = {"gather_dim": 0, "return_gathered": False, "num_weights": len(weights)}
        extras = {name: others.pop(name) for name in ("residual", "weight") if name in others}
        node = site.node(ctx, AllGatherMatmul, **{**fields, **others})
        return schema.call(node, shard=x, weights=[weight.t() for weight in weights], **extras)

    def scattered(a: list[torch.Tensor], b: list[torch.Tensor], dim: int, bias: torch.Tensor | None = None) -> Any:
        fields = {"scatter_dim": dim, "reduce_op": "sum", "num_products": len(a), "has_bias": bias is not None}
        return schema.call(site.node(ctx, MatmulReduceScatter, **fields), a=a, b=b, bias=bias)

    found["parts of one weight"] = lambda: gathered(parts, return_gathered=True)
    found["an epilogue"] = lambda: gathered(parts[:2], epilogue=EPILOGUE)
    residual, norm_weight = torch.randn(64, 64).bfloat16(), torch.ones(64).bfloat16()
    prologue = ShardNorm(NORM, ("residual", "weight"))
    found["a norm in front"] = lambda: gathered(parts[:1], prologue=prologue, residual=residual, weight=norm_weight)
    found["a sum with a bias"] = lambda: scattered([x, x], [parts[0], parts[2]], 0, torch.ones(64).bfloat16())
    found["rows as a view"] = lambda: scattered([x.view(2, 32, 64)], [parts[0]], 1)
    return found


def every_kind(ctx: Any) -> None:
    for name, problem in problems(ctx).items():
        called = repeated(Called.of(problem))
        assert len(called.site.repeated) == 1, f"{name}: {called.site.problem}"
        scratch = SCRATCH.get(name, 0)
        assert_same(launch_of(called.by_op), launch_of(called.by_site), name, scratch)
        others = called.elsewhere()
        assert_same(launch_of(lambda: called.by_op(others)), launch_of(lambda: called.by_site(others)), name, scratch)  # noqa: B023
        assert len(called.site.repeated) == 1, f"{name}: the record does not depend on addresses"


def unaligned(ctx: Any, called: Called) -> None:
    records = len(called.site.repeated)
    for shift in (1, 8, 3):
        others = called.elsewhere(shift)
        called.by_op(others)
        for _ in range(3):
            assert_same(launch_of(lambda: called.by_op(others)), launch_of(lambda: called.by_site(others)), "unaligned")  # noqa: B023
    assert len(called.site.repeated) == records + 2, "8 elements of 2 bytes are aligned"


def somebody_watches(ctx: Any, called: Called) -> None:
    from triton import knobs

    with OpsSeen() as seen:
        called.by_site()
    assert len(seen.calls) == 1, "a mode sees the op"
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        called.by_site()
    name = called.op._schema.name
    assert [event.name for event in profile.events()].count(name) == 1, "a profiler sees the op"
    observed: list[str] = []

    def observe(run: Any, group_name: str, request: Any, choice: Any) -> Any:
        observed.append(request.site)
        return run

    with watch.by(SimpleNamespace(call=observe)):  # type: ignore[arg-type]
        called.by_site()
    assert len(observed) == 1, "the tax report is told of the call"
    before = launch_of(called.by_site)
    hook = lambda metadata: None  # noqa: E731
    knobs.runtime.launch_enter_hook.add(hook)
    with Launches().watched() as launches:
        called.by_site()
    knobs.runtime.launch_enter_hook.remove(hook)
    assert launches.seen == [], "the JIT launches while there are hooks"
    debug = knobs.runtime.debug
    knobs.runtime.debug = not debug
    try:
        for _ in range(2):
            called.by_op()
        launched = launch_of(called.by_site)
    finally:
        knobs.runtime.debug = debug
    assert launched.kernels != before.kernels, "another setting, another compiled kernel"
    with torch.enable_grad():
        seen_ops: list[Any] = []
        called.site.op, op = lambda *arguments: seen_ops.append(arguments) or op(*arguments), called.site.op  # type: ignore[func-returns-value]
        called.by_site()
        called.site.op = op
        assert len(seen_ops) == 1, "autograd sees the op"
    assert launch_of(called.by_site).kernels == before.kernels


def a_trace(ctx: Any, called: Called) -> None:
    """While one is taken no record serves, and none is made; before and afterwards kernels read no clock."""
    from ditron_inductor.lowering.host.tracing import PARAMETER, TraceBuffer, tracing

    def clocks(ready: Sequence[tuple[Any, Any]], arguments: Sequence[Sequence[Any]]) -> list[Any]:
        return [of[kernel.arg_names.index(PARAMETER)] for (kernel, _), of in zip(ready, arguments, strict=True)]

    records, before = list(called.site.repeated), launch_of(called.by_site)
    assert clocks(before.kernels, before.arguments) == [0]
    fresh = Called(called.op, called.arguments)
    with tracing.into(TraceBuffer(ctx.device, 4)):
        for one in (called, fresh):
            repeated(one)
            during = launch_of(one.by_site)
            assert clocks(during.kernels, during.arguments) != [0] and during.kernels != before.kernels
    assert called.site.repeated == records and not fresh.site.repeated
    assert_same(before, launch_of(called.by_site), "after a trace")
    repeated(fresh)
    assert fresh.site.repeated
    assert_same(launch_of(called.by_site), launch_of(fresh.by_site), "recorded after a trace")


def other_results(ctx: Any, called: Called) -> None:
    """What a record gives is the caller's own."""
    first = called.by_site()
    second = called.by_site()
    assert not {x.data_ptr() for x in first} & {x.data_ptr() for x in second}
    request = decisions.last(ctx.group_name, schema.parsed(called.kind, called.site.text).site)
    assert request is not None and request[1].strategy == "tile"


def precision(ctx: Any) -> None:
    problem = Problem(ctx, "matmul_reduce_scatter", SIZE, site=Site(name="calls/30:fp32"), dtype=torch.float32)
    called = repeated(Called.of(problem))
    before = launch_of(called.by_site)
    matmul = torch.backends.cuda.matmul

    def set_otherwise(precision: str) -> None:
        matmul.fp32_precision = precision  # type: ignore[assignment]

    for setter, exact in ((torch.set_float32_matmul_precision, "highest"), (set_otherwise, "ieee")):
        setter("high" if exact == "highest" else "tf32")
        try:
            repeated(called)
            launched = launch_of(called.by_site)
            assert launched.kernels != before.kernels
            assert_same(launch_of(called.by_op), launched, "tf32")
        finally:
            setter(exact)
        assert launch_of(called.by_site).kernels == before.kernels


def other_classes(ctx: Any, called: Called) -> None:
    """Operands that have no memory themselves, in first calls and behind those that were recorded."""
    plain = called.elsewhere()
    mode = FakeTensorMode()
    fake = [mode.from_tensor(x) for x in plain]
    for site in (Called(called.op, called.arguments), called):
        for _ in range(3):
            with Launches().watched() as launches:
                results = site.by_site(fake)
            assert launches.seen == [] and all(isinstance(x, FakeTensor) for x in results)
            waiting = [AsyncCollectiveTensor(x) for x in plain]
            assert_same(launch_of(lambda: called.by_op(plain)), launch_of(lambda: site.by_site(waiting)), "wrapped")  # noqa: B023
    assert len(called.site.repeated) == 1


def nothing_kept(ctx: Any, called: Called) -> None:
    """Neither a call that is recorded nor one that is repeated keeps operands or results."""
    fresh = Called(called.op, called.arguments)
    for _ in range(4):
        operands = fresh.elsewhere()
        seen = [weakref.ref(x.untyped_storage()) for x in [*operands, *fresh.by_site(operands)]]
        del operands
        assert not any(one() for one in seen)
    assert len(fresh.site.repeated) == 1


def after_an_exception(ctx: Any, called: Called) -> None:
    """In the launch of a call that is recorded, and of one that is repeated."""
    import ditron_inductor
    from ditron_inductor.lowering.host.launcher import Launcher
    from ditron_inductor.lowering.host.recording import recording

    for calls in (1, 3):
        fresh = Called(called.op, called.arguments)
        repeated(fresh, calls)
        with mock.patch.object(Launcher, "start", side_effect=MemoryError("no launch")):
            for wanted in (MemoryError, DitronError):
                try:
                    fresh.by_site()
                except wanted:
                    continue
                raise AssertionError(f"{wanted} after {calls} calls")
        assert recording.active is None and not recording.lock.locked()
        ditron_inductor.reset(dist.group.WORLD)
        repeated(fresh)
        assert len(fresh.site.repeated) == 1
        assert_same(launch_of(fresh.by_op), launch_of(fresh.by_site), "after an exception")


def left_alone(ctx: Any) -> None:
    """Calls that do more than a launch, and calls of forms that may change."""
    for strategy in ("library", "chunked"):
        site = Site(name=f"calls/31:{strategy}", strategy=strategy, timeout_s=30.0)
        problem = Problem(ctx, "all_gather_matmul", SIZE, site=site)
        called = repeated(Called.of(problem), times=6)
        assert called.site.repeated == [] and called.site._attempts == 0, strategy
    called = Called.of(Problem(ctx, "matmul_all_gather", SIZE, site=Site(name="calls/32:any")), static=False)
    for rows in (64, 32, 64, 32, 128):
        called.tensors[0] = torch.randn(rows, 64).bfloat16()
        called.by_op()
        assert_same(launch_of(called.by_op), launch_of(called.by_site), f"{rows} rows")
    assert called.site.repeated == []
    # The rows are copied before the launch.
    site = Site(name="calls/33:copied", timeout_s=30.0)
    copied = Problem(ctx, "matmul_reduce_scatter", SIZE, site=site)
    copied.left = torch.randn(64, 2 * len(copied.left)).bfloat16().t()[::2]
    assert copied.left.stride(1) != 1
    called = repeated(Called.of(copied), times=6)
    assert called.site.repeated == [] and called.site._attempts > 0


def during_a_trial(ctx: Any) -> None:
    """A trial times `tile` as later calls run, by a record; what is not timed makes it."""
    site = Site(name="calls/34:tried", strategy="auto", trials=True, timeout_s=30.0)
    for static in (True, False):
        started, timed = [], []
        with (
            tried({"library": 90.0, "tile": 50.0, "chunked": 95.0}),
            noting(Repeated, "start", started),
            noting(Sample, "take", timed),
        ):
            # This is the first call of the trial, by the op.
            called = Called.of(Problem(ctx, "matmul_reduce_scatter", SIZE, site=site), static)
            for strategy in ORDER[1:]:
                # An operand that is not aligned as the recorded one is timed too.
                called.by_site(called.elsewhere(1) if len(timed) == STEPS // 2 else None)
                assert decisions.last(ctx.group_name, site.name)[1].strategy == strategy  # type: ignore[index]
            assert len(timed) == len(ORDER) - len(TRIED) * trial.UNTIMED
            assert called.site.repeated == [] and len(started) in ((4, 5) if static else (0,)), called.site.problem
            repeated(called)
            assert decisions.last(ctx.group_name, site.name)[1].strategy == "tile"  # type: ignore[index]
            assert len(called.site.repeated) == static


def between_looks(ctx: Any) -> None:
    """Where a trial looks again later, calls repeat a record until then, and the record is kept for the rest."""
    started, timed = [], []
    site = Site(name="calls/36:looks", strategy="auto", trials=True, timeout_s=30.0)
    problem = Problem(ctx, "matmul_reduce_scatter", SIZE, site=site)
    with mock.patch.object(trial, "CALLS_BETWEEN", 9), tried({"library": 90.0, "tile": 85.0, "chunked": 95.0}):
        called = repeated(Called.of(problem), times=STEPS)
        with noting(Repeated, "start", started), noting(Sample, "take", timed):
            # The first one looks up anew, and the second one is recorded.
            repeated(called, times=9)
            assert (len(started), len(timed)) == (7, 0), called.site.problem
            assert decisions.last(ctx.group_name, site.name)[1].tried_us is not None  # type: ignore[index]
            repeated(called, times=2 * trial.CALLS + 1)
            assert len(timed) == 2 * (trial.CALLS - trial.UNTIMED), "only what is near is timed again"
            assert len(started) == 7 + trial.CALLS, "and the call in which the ranks decide has no record"
        repeated(called)
        assert len(called.site.repeated) == 1, called.site.problem


def ranks_that_differ(ctx: Any) -> None:
    """Whatever keeps one rank from timing a call, or from making a record, all ranks meet in the same calls."""
    observer = SimpleNamespace(call=lambda run, *given: run, collective=lambda run: run())
    calls = STEPS + 1 + 9 + 2 * trial.CALLS + 2
    # Between the looks the site runs by the first of these.
    for what, kept, other in (("watched", "library", "tile"), ("not recorded", "tile", "library")):
        met, recorded, ran = [], [], []
        site = Site(name=f"calls/37:{what}", strategy="auto", trials=True, timeout_s=30.0)
        problem = Problem(ctx, "matmul_reduce_scatter", SIZE, site=site)
        if ctx.rank == 0 and what == "not recorded":
            problem.left = torch.randn(64, 2 * len(problem.left)).bfloat16().t()[::2]
        us = {kept: 85.0, other: 90.0, "chunked": 200.0}
        with (
            mock.patch.object(trial, "CALLS_BETWEEN", 9),
            tried(us),
            mock.patch.object(trials, "meet", lambda _: met.append(len(ran))),  # noqa: B023
            noting(Recorder, "__enter__", recorded),
        ):
            called = Called.of(problem)
            for index in range(1, calls):
                watched = ctx.rank == 0 and what == "watched" and index % 5 > 1
                with watch.by(observer) if watched else nullcontext():  # type: ignore[arg-type]
                    called.by_site()
                ran.append(decisions.last(ctx.group_name, site.name)[1].strategy)  # type: ignore[index]
        assert len(met) == 5 * (trial.CALLS - trial.UNTIMED), "in every timed call, and in no other one"
        # A record is tried anew for each look and behind them.
        assert len(recorded) <= 3 * MOST_ATTEMPTS, called.site.problem
        of_all: list[Any] = [None] * ctx.world_size
        dist.all_gather_object(of_all, (met, ran))
        assert of_all[0] == of_all[1], what


def two_graphs_in_a_trial(ctx: Any) -> None:
    """Two graphs that share a site take turns, so each has one untimed call, its first one, which no record covers."""
    started, timed = [], []
    sites = [Site(name=f"calls/35:tried@{key}", strategy="auto", trials=True, timeout_s=30.0) for key in "ab"]
    problems = [Problem(ctx, "matmul_reduce_scatter", SIZE, site=site) for site in sites]
    with tried({"library": 90.0, "tile": 50.0, "chunked": 95.0}), noting(Sample, "take", timed):
        # These are the first two calls of the trial, by the op.
        graphs = [Called.of(problem) for problem in problems]
        with noting(Repeated, "start", started):
            for index in range(len(ORDER) - 2):
                graphs[index % 2].by_site()
        # Two timed calls are recorded instead, and the three others repeat the records.
        assert len(timed) == len(ORDER) - len(TRIED) * trial.UNTIMED - 2, len(timed)
        assert len(started) == 3, [graph.site.problem for graph in graphs]
        for graph, site in zip(graphs, sites, strict=True):
            # The call in which the ranks decide runs as planned.
            repeated(graph)
            assert decisions.last(ctx.group_name, site.name)[1].strategy == "tile"  # type: ignore[index]


def after_a_reset(ctx: Any, called: Called) -> None:
    import ditron_inductor

    old = called.site.repeated[0]
    shared = old._prepared.workspace.shared
    ditron_inductor.reset(dist.group.WORLD)
    assert not old._prepared.holds() and old(called.tensors) is None
    repeated(called)
    assert old not in called.site.repeated and len(called.site.repeated) == 1
    assert_same(launch_of(called.by_op), launch_of(called.by_site), "after a reset")
    # A ring that has grown: the same record, other addresses.
    ring = shared.generations[-1]
    shared.grow("a larger site", 4 * ring.slot_bytes, 1 << 30, 30.0)
    new = shared.generations[-1]
    assert new is not ring
    with Launches().watched() as launches:
        called.by_site()
    ((launcher, _, values),) = launches.seen
    assert values[launcher.positions["pointers"]][0] == new.table.data_ptr() != ring.table.data_ptr()


def a_group_made_again(ctx: Any, called: Called, folder: str) -> None:
    old = called.site.repeated[0]
    dist.destroy_process_group()
    store = dist.FileStore(f"{folder}/again", ctx.world_size)
    dist.init_process_group("gloo", store=store, rank=ctx.rank, world_size=ctx.world_size)
    stand_in_for_kernels(torch.device("cpu"))
    repeated(called)
    assert old not in called.site.repeated and len(called.site.repeated) == 1
    new, ended = (one._prepared.workspace.shared for one in (called.site.repeated[0], old))
    assert new is not ended and ended.released and not new.released
    assert_same(launch_of(called.by_op), launch_of(called.by_site), "in another group")


def check_all(rank: Any, device: torch.device, folder: str) -> None:
    """All of the above on one of two ranks; the order is the same on both."""
    from ditron_inductor.lowering.register import register

    register()
    stand_in_for_kernels(device)
    assert dist.group.WORLD is not None
    name = dist.group.WORLD.group_name
    ctx = SimpleNamespace(rank=rank.rank, world_size=rank.world_size, device=device, group_name=name)
    with torch.no_grad():
        every_kind(ctx)
        problem = Problem(ctx, "matmul_reduce_scatter", SIZE, site=Site(name="calls/40:kept", timeout_s=30.0))
        called = repeated(Called.of(problem))
        other_results(ctx, called)
        somebody_watches(ctx, called)
        a_trace(ctx, called)
        unaligned(ctx, called)
        precision(ctx)
        left_alone(ctx)
        during_a_trial(ctx)
        between_looks(ctx)
        ranks_that_differ(ctx)
        two_graphs_in_a_trial(ctx)
        other_classes(ctx, repeated(Called(called.op, called.arguments)))
        nothing_kept(ctx, called)
        after_an_exception(ctx, called)
        after_a_reset(ctx, called)
        a_group_made_again(ctx, called, folder)
