"""A trace of every kernel of the protocol, taken in the interpreter: events of the right kinds, and right results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ditron_inductor.core.layout import TRACE_BUFFER
from ditron_inductor.device import workspaces
from ditron_inductor.lowering.host.tracing import tracing
from ditron_inductor.report.timing import Clock
from ditron_inductor.task.nodes import NORM_KINDS
from ditron_inductor.taxes.step_trace import NAMES, Trace, take_trace
from tests.lowering import test_all_gather_attention as attention
from tests.lowering.calls import Site
from tests.lowering.decode_problems import Decode, DecodeProblem
from tests.lowering.problems import FEW_ROWS, FEW_ROWS_GATHERED, SMALL, Problem, Size
from tests.rank_process import RankContext
from tests.ranks import RankPools

LIMIT_S = 200.0
FP16, FP32 = torch.float16, torch.float32

Make = Callable[[RankContext, Site], Any]


@dataclass(frozen=True)
class Step:
    """Sites of a step on `ranks` ranks. sites: by name, how to make the call, and events that it has at least."""

    ranks: int
    strategy: str
    sites: dict[str, tuple[Make, str]]


class AttentionProblem:
    """As `Problem`."""

    def __init__(self, ctx: RankContext, case: attention.Case, site: Site) -> None:
        self.ctx, self.case, self.site = ctx, case, site
        self.operands = case.operands(ctx)

    def __call__(self) -> list[torch.Tensor]:
        return attention.forward(self.ctx, self.site, self.case, self.operands, self.case.gathered)

    def check(self, outputs: list[torch.Tensor], what: str) -> None:
        wanted, _, *gathered = attention.expected(self.ctx, self.site, self.case, self.operands)
        attention.assert_close(outputs[0], wanted, 3, what)
        assert all(map(torch.equal, outputs[2:], gathered))


def _kind(kind: str, size: Size = SMALL["cpu"], dtype: torch.dtype = FP16) -> Make:
    return lambda ctx, site: Problem(ctx, kind, size, site=site, dtype=dtype)


def _decode(*sizes: int) -> Make:
    return lambda ctx, site: DecodeProblem(ctx, Decode(*sizes), site=site)


def _attention(ctx: RankContext, site: Site) -> AttentionProblem:
    return AttentionProblem(ctx, attention.Case("causal_offset", 35, 35, gathered=True), site)


ALL = "wait for credits, wait"
STEPS = {
    "chunked": Step(
        2,
        "chunked",
        {
            "all_gather_matmul": (_kind("all_gather_matmul"), f"{ALL}, send, end"),
            "matmul_reduce_scatter": (_kind("matmul_reduce_scatter"), f"{ALL}, send, sum"),
            "matmul_all_reduce": (_kind("matmul_all_reduce"), f"{ALL}, send, sum, end"),
            "matmul_all_to_all": (_kind("matmul_all_to_all"), f"{ALL}, send, end"),
            "all_to_all_matmul": (_kind("all_to_all_matmul"), f"{ALL}, send, end"),
            "all_gather_attention": (_attention, f"{ALL}, send, end"),
            "one_kernel": (_kind(FEW_ROWS), f"{ALL}, tile"),
        },
    ),
    "tile": Step(
        2,
        "tile",
        {
            "all_gather_matmul": (_kind("all_gather_matmul"), f"{ALL}, tile, copy"),
            "matmul_reduce_scatter": (_kind("matmul_reduce_scatter"), "wait, tile"),
            "matmul_all_reduce": (_kind("matmul_all_reduce"), "wait, tile"),
            "matmul_all_gather": (_kind("matmul_all_gather"), f"{ALL}, tile, send, copy"),
            "matmul_all_to_all": (_kind("matmul_all_to_all"), f"{ALL}, tile, copy"),
            "all_to_all_matmul": (_kind("all_to_all_matmul"), "wait, tile, send, copy"),
            "all_gather_attention": (_attention, "wait, tile, send, copy"),
        },
    ),
    "decode": Step(
        2,
        "tile",
        {
            "one_shot": (_kind(NORM_KINDS[0], Size(4, 1, 60)), f"{ALL}, tile"),
            "in_band": (_kind(NORM_KINDS[0], Size(0, 1, 34)), "wait, tile, send"),
            "with_a_matmul": (_kind(NORM_KINDS[1]), f"{ALL}, tile, sum"),
            "gathered": (_kind(FEW_ROWS_GATHERED), f"{ALL}, tile, copy"),
            "attention_in_band": (_decode(1, 4, 1, 32, 50), "wait, tile, send, sum"),
            "one_ticket_each": (_decode(1, 16, 1, 64, 40), f"{ALL}, tile, send, sum"),
            "a_loop_over_tickets": (_decode(3, 16, 1, 32, 50), f"{ALL}, tile, send, sum"),
            "two_launches": (_decode(5, 66, 1, 16, 20), f"{ALL}, tile, send, sum"),
        },
    ),
    "two_shots": Step(
        3,
        "tile",
        {
            "rows": (_kind(NORM_KINDS[0], Size(4, 1, 100)), f"{ALL}, tile"),
            "slices": (_kind(NORM_KINDS[0], Size(1, 1, 200), FP32), f"{ALL}, tile, send, sum"),
        },
    ),
}


def _taken(ctx: RankContext, name: str) -> Trace:
    """A trace of a step that calls every problem once. Results are the same without it, and with it."""
    chosen = STEPS[name]
    problems = {
        case: make(ctx, Site(f"{name}/{index}:{case}", chosen.strategy))
        for index, (case, (make, _)) in enumerate(chosen.sites.items())
    }
    before = {case: problem() for case, problem in problems.items()}
    steps: list[dict[str, list[torch.Tensor]]] = []

    def step(_: int) -> None:
        steps.append({case: problem() for case, problem in problems.items()})

    trace, problem = take_trace(Clock(ctx.device, dist.group.WORLD), step)
    assert trace is not None, problem
    (shared,) = workspaces.of_group(dist.distributed_c10d._resolve_process_group(ctx.group_name))
    assert tracing.buffer is None and all(int(ring.ctl[TRACE_BUFFER.value]) == 0 for ring in shared.generations)
    after = {case: problem() for case, problem in problems.items()}
    for outputs in (before, *steps, after):
        for case, problem in problems.items():
            problem.check(outputs[case], case)
            for got, want in zip(outputs[case], before[case], strict=True):
                assert torch.equal(got, want), f"{case}: other bits with time stamps"
    return trace


def _check(trace: Trace, name: str) -> None:
    ranks = STEPS[name].ranks
    assert not trace.dropped and [rank.rank for rank in trace.ranks] == list(range(ranks))
    waited = trace.waited_us()
    for index, (case, (_, expected)) in enumerate(STEPS[name].sites.items()):
        site = f"{name}/{index}:{case}"
        assert waited[site] > 0
        for rank in trace.ranks:
            events = [event for event in rank.events if rank.site(event).startswith(f"{site} ")]
            found = {NAMES[event.kind] for event in events}
            assert found >= set(expected.split(", ")), (site, found)
            assert len({event.use for event in events}) == 1
            for event in events:
                assert 0 <= event.program < event.programs and 0 <= event.peer < ranks and event.detail >= 0
                assert event.begin_ns <= event.end_ns
            _check_nesting(events)
    spans = [row for row in trace.json()["traceEvents"] if row["ph"] == "X"]
    assert {row["pid"] for row in spans} == set(range(ranks))


def _check_nesting(events: list[Any]) -> None:
    """Events of one program lie inside each other, or apart."""
    for one in events:
        for other in events:
            if (one.program, one.programs) == (other.program, other.programs):
                across = one.begin_ns < other.begin_ns < one.end_ns < other.end_ns
                assert not across, (one, other)


# Three ranks that poll on two cores take as long as all the others.
SLOW = {"two_shots"}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.all_cases] * (name in SLOW)) for name in STEPS])
@pytest.mark.timeout(240)
def test_every_site_has_its_events(rank_pools: RankPools, name: str) -> None:
    for trace in rank_pools.get("cpu", STEPS[name].ranks).run(_taken, name, timeout=LIMIT_S):
        _check(trace, name)
