"""What a rank does with a program: its reference in float64, its calls, and the comparison of all values."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import ditron_inductor
from benchmarks.tolerances import TOLERANCES
from ditron_inductor.errors import StrategyUnavailable
from ditron_inductor.passes.attention import cached_attention
from ditron_inductor.report.explain import without_caches
from ditron_inductor.task.site_records import collect_sites
from tests.fuzz.program import CACHE, Call, Place, Program
from tests.fuzz.verdict import Settings, Verdict
from tests.fuzz.words import DTYPES, Group, load, vocabulary
from tests.models.interpreted import code_generated
from tests.rank_process import RankContext

WARM_UPS = 3
# An error that the program's own dtype makes in eager mode is no fault; compiled, it rounds at other places. Where much
# cancels, one run says little of that: others have inputs that differ in their last bit.
OF_EAGER = 6.0
EAGER_RUNS = 3
Values = list[torch.Tensor | None]


def process_groups(ctx: RankContext, place: Place) -> dict[str, Group]:
    """The groups of the place that this rank is in, made once in a process, in one order on all ranks."""
    if "fuzz_groups" not in ctx.shared:
        assert dist.group.WORLD is not None
        found = {"A": dist.group.WORLD}
        for name in list(place.groups)[1:]:
            sets = dict.fromkeys(tuple(place.members(name, rank)) for rank in range(place.world_size))
            made = {ranks: dist.new_group(list(ranks)) for ranks in sets}
            found[name] = made[tuple(place.members(name, ctx.rank))]
        ctx.shared["fuzz_groups"] = found
    groups: dict[str, Group] = ctx.shared["fuzz_groups"]
    return groups


def run_program(ctx: RankContext, program: Program, settings: Settings) -> Verdict:
    """Compiles and calls the program on this rank. All ranks call it with the same program."""
    start = time.monotonic()
    warnings.filterwarnings("ignore")
    groups = process_groups(ctx, program.place)
    torch._dynamo.reset()
    wrong: list[str] = []
    refused = ""
    # In a model on the CPU device torch attends.
    everywhere = mock.patch.object(cached_attention, "GPUS", ("cpu", "cuda"))
    with without_caches(), collect_sites() as sink, code_generated(settings.generated), everywhere:
        try:
            wrong = _Runner(ctx, program, groups, settings).run()
        except Exception as error:
            refused = _refusal(error)
            if not refused:
                raise
    if refused:
        for group in groups.values():
            ditron_inductor.reset(group)
    torch._dynamo.reset()
    sites = [site for graph in sink.graphs for site in graph.sites]
    counts = Counter(site.kind if site.matched else f"left alone: {site.reason_code}" for site in sites)
    counts.update(name for graph in sink.graphs for name in graph.local)
    return Verdict("\n".join(wrong), refused, tuple(sorted(counts.items())), time.monotonic() - start)


def _refusal(error: BaseException | None) -> str:
    """Why the strategy that was forced cannot run, where that is what the error says."""
    while error is not None:
        if isinstance(error, StrategyUnavailable):
            return str(error)
        error = error.__cause__ or error.__context__
    return ""


class _Runner:
    """One program on one rank."""

    def __init__(self, ctx: RankContext, program: Program, groups: dict[str, Group], settings: Settings) -> None:
        self.ctx = ctx
        self.program = program
        words = {
            exact: vocabulary(
                groups, ctx.rank, program.dtype, trained=program.trained, differs=bool(program.differs), exact=exact
            )
            for exact in (False, True)
        }
        name = f"program {program.index} of seed {program.seed}"
        self.exact = load(program.source, words[True], f"{name}, in float64")
        self.plain = load(program.source, words[False], name)
        self.wrong: list[str] = []
        self.given: dict[tuple[int, int], list[torch.Tensor]] = {}
        self.static: dict[int, list[list[torch.Tensor]]] = {}
        options = dict(program.options) | {"ditron.timeout_s": settings.timeout_s}
        if settings.backend != "ditron":
            options = {}
        if program.capture == "trees":
            options["triton.cudagraphs"] = True
        self.compiled: Any = torch.compile(
            self.plain, backend=settings.backend, options=options, dynamic=True if program.dynamic == "all" else None
        )

    def run(self) -> list[str]:
        """What is wrong, all calls together: a rank that stopped at its first wrong value would leave its peers."""
        with torch.set_grad_enabled(self.program.trained):
            kinds = dict.fromkeys((call.sizes, call.values) for call in self.program.calls)
            wanted = {kind: self._references(*kind) for kind in kinds}
            with self._captured() as replay:
                for number, call in enumerate(self.program.calls):
                    self._delay(call)
                    got = replay(call) if replay else self._call(self.compiled, self._placed(call), mark=True)
                    self._compare(number, got, *wanted[call.sizes, call.values])
        return self.wrong

    def _arguments(self, call: Call, exact: bool = False, turn: int = 0) -> list[torch.Tensor]:
        """New tensors for a call's inputs; in turns after the first they are off by a rounding."""
        kind, dtype = (call.sizes, call.values), DTYPES[self.program.dtype]
        if kind not in self.given:
            made = self.program.arguments(*kind, self.ctx.rank)
            self.given[kind] = [one.to(dtype).to(self.ctx.device) for one in made]
        given = self.given[kind]
        if not turn:
            return [one.double() if exact else one.clone() for one in given]
        generator = torch.Generator().manual_seed(turn)
        signs = [(torch.randint(0, 2, one.shape, generator=generator) * 2 - 1).to(one.device) for one in given]
        off = torch.finfo(dtype).eps
        return [(one.float() * (1 + off * sign)).to(dtype) for one, sign in zip(given, signs, strict=True)]

    def _placed(self, call: Call) -> list[torch.Tensor]:
        """The inputs of a call, in the static tensors of its sizes if the program has such."""
        given = self._arguments(call)
        if not self.program.keeps_inputs:
            return given
        held = self.static.setdefault(call.sizes, [])
        if not held or self.ctx.rank in call.renewed:
            # Those before keep their addresses.
            held.append(given)
            for one in given:
                torch._dynamo.mark_static_address(one, guard=False)
        for one, value in zip(held[-1], given, strict=True):
            one.copy_(value)
        return held[-1]

    def _call(self, fn: Callable[..., Any], given: Sequence[torch.Tensor], mark: bool = False) -> Values:
        """The outputs, and then the gradients of the inputs."""
        leaves = [one.requires_grad_(self.program.trained) for one in given]
        if mark and self.program.dynamic == "mark":
            for one, spec in zip(leaves, self.program.inputs, strict=True):
                for dim, size in enumerate(spec.shape):
                    if size.symbol:
                        torch._dynamo.mark_dynamic(one, dim)
        if mark and self.program.capture == "trees":
            torch.compiler.cudagraph_mark_step_begin()
        outputs = list(fn(*leaves))
        if not self.program.trained:
            return [one.clone() for one in (*outputs, *self._caches(leaves))]
        generator = torch.Generator().manual_seed(self.program.index)
        losses = []
        for one in outputs:
            weights = torch.randn(one.shape, generator=generator).to(self.ctx.device, one.dtype)
            if one.requires_grad:
                losses.append((one * weights).sum(dtype=torch.promote_types(one.dtype, torch.float32)))
        torch.stack([one.to(losses[-1].dtype) for one in losses]).sum().backward()
        grads = [None if one.grad is None else one.grad.clone() for one in leaves]
        return [*(one.detach().clone() for one in outputs), *grads]

    def _caches(self, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The inputs that a program writes into."""
        return [one for one, spec in zip(given, self.program.inputs, strict=True) if spec.name.startswith(CACHE)]

    def _references(self, sizes: int, values: int) -> tuple[Values, list[Values]]:
        """Of the inputs with these numbers: the values in float64, and some runs in the program's own dtype."""
        call = Call(sizes, values, (), ())
        exact = self._call(self.exact, self._arguments(call, exact=True))
        return exact, [self._call(self.plain, self._arguments(call, turn=turn)) for turn in range(EAGER_RUNS)]

    def _delay(self, call: Call) -> None:
        if call.sleeps[self.ctx.rank]:
            time.sleep(call.sleeps[self.ctx.rank])
        if call.spins[self.ctx.rank]:
            torch.cuda._sleep(call.spins[self.ctx.rank])

    @contextlib.contextmanager
    def _captured(self) -> Iterator[Callable[[Call], Values] | None]:
        """A call that replays a graph captured by hand, after some warm-ups, where the program wants that."""
        if self.program.capture != "hand":
            yield None
            return
        static = self._arguments(self.program.calls[0])
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                self.compiled(*static)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            outputs = list(self.compiled(*static))

        def replay(call: Call) -> Values:
            for one, value in zip(static, self._arguments(call), strict=True):
                one.copy_(value)
            graph.replay()
            return [one.clone() for one in (*outputs, *self._caches(static))]

        yield replay
        torch.cuda.synchronize()
        outputs.clear()
        graph.reset()

    def _compare(self, number: int, got: Values, wanted: Values, eager: list[Values]) -> None:
        if len(got) != len(wanted):
            self.wrong.append(f"call {number}: {len(got)} results, not {len(wanted)}")
            return
        first_grad = len(got) - len(self.program.inputs) * self.program.trained
        for at, (one, other, *rounded) in enumerate(zip(got, wanted, *eager, strict=True)):
            grad = at >= first_grad
            what = f"gradient of {self.program.inputs[at - first_grad].name}" if grad else f"result {at}"
            fault = difference(one, other, rounded, DTYPES[self.program.dtype], self.program.depth)
            if fault:
                self.wrong.append(f"call {number}, {what}: {fault}")


def difference(
    got: torch.Tensor | None,
    wanted: torch.Tensor | None,
    runs: Sequence[torch.Tensor | None],
    dtype: torch.dtype,
    depth: int,
) -> str:
    """What is wrong with a value of a program in this dtype, empty where it is as near to the one in float64 as it has
    to be: by the table of tolerances for as many roundings, or by what `runs` in that dtype are off themselves.
    """
    eager = runs[0]
    if got is None or wanted is None or eager is None:
        return "" if got is wanted else f"{'none' if got is None else 'one'} where there should be the opposite"
    if got.shape != wanted.shape or got.dtype != eager.dtype:
        return f"{list(got.shape)} {got.dtype}, not {list(wanted.shape)} {eager.dtype}"
    if not got.numel():
        return ""
    rtol, atol = TOLERANCES[dtype]
    scale = wanted.square().mean().sqrt()
    error = (got.double() - wanted).abs()
    errors = [(one.double() - wanted).abs().nan_to_num(0.0).max() for one in runs if one is not None]
    own_error = torch.stack(errors).max()
    bound = torch.maximum(depth * atol * scale, OF_EAGER * own_error) + depth * rtol * wanted.abs()
    # Not `error > bound`: a NaN is wrong too.
    bad = ~(error <= bound) & ~(got.double() == wanted) & ~(got.isnan() & eager.isnan())
    # What a dtype cannot hold is infinite in eager mode too.
    bad &= ~(eager.isinf() & (got.double() == eager.double()))
    count = int(bad.sum())
    if not count:
        return ""
    worst = int(torch.where(bad, error.nan_to_num(float("inf")), -1.0).argmax())
    place = [int(one) for one in torch.unravel_index(torch.tensor(worst), got.shape)]
    value, right = float(got.flatten()[worst]), float(wanted.flatten()[worst])
    return (f"{count} of {got.numel()} entries of {list(got.shape)} are wrong, the worst at {place}: {value:.5g}, "
            f"not {right:.5g} (root mean square {float(scale):.3g})")  # fmt: skip
