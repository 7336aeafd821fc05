"""A trace of every kernel of the protocol, taken in the interpreter: events of the right kinds, and right results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ditron_inductor.core.layout import TRACE_BUFFER
from ditron_inductor.device import workspaces
from ditron_inductor.lowering.tracing import tracing
from ditron_inductor.taxes.trace import NAMES, Trace, take_trace
from ditron_inductor.timing import Clock
from tests.lowering.calls import Site
from tests.lowering.problems import CHUNKED_KINDS, SMALL, Problem, Size
from tests.rank_process import RankContext
from tests.ranks import RankPools

LIMIT_S = 200.0
FP16 = torch.float16

Make = Callable[[RankContext, Site], Any]


def _of_kind(kind: str, size: Size) -> Make:
    return lambda ctx, site: Problem(ctx, kind, size, site=site, dtype=FP16)


# By name: how to make the problem, and the events that its site has.
CHUNKED: dict[str, tuple[Make, set[str]]] = {
    **{kind: (_of_kind(kind, SMALL["cpu"]), {"wait for credits", "send", "wait"}) for kind in CHUNKED_KINDS},
}
for _kind in ("matmul_reduce_scatter", "matmul_all_reduce"):
    CHUNKED[_kind] = CHUNKED[_kind][0], CHUNKED[_kind][1] | {"sum"}
for _kind in CHUNKED_KINDS:
    if _kind != "matmul_reduce_scatter":
        CHUNKED[_kind] = CHUNKED[_kind][0], CHUNKED[_kind][1] | {"end"}

STEPS = {"chunked": ("chunked", CHUNKED)}


def _taken(ctx: RankContext, name: str) -> Trace:
    """A trace of a step that calls every problem once. Results are the same without it, and with it."""
    strategy, cases = STEPS[name]
    problems = {
        case: make(ctx, Site(f"{name}/{index}:{case}", strategy)) for index, (case, (make, _)) in enumerate(cases.items())
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
    assert not trace.dropped and [rank.rank for rank in trace.ranks] == [0, 1]
    waited = trace.waited_us()
    for index, (case, (_, expected)) in enumerate(STEPS[name][1].items()):
        site = f"{name}/{index}:{case}"
        assert waited[site] > 0
        for rank in trace.ranks:
            events = [event for event in rank.events if rank.site(event).split(" ")[0] == site]
            found = Counter(NAMES[event.kind] for event in events)
            assert set(found) == expected, (site, found)
            assert len({event.use for event in events}) == 1
            for event in events:
                assert 0 <= event.program < event.programs and 0 <= event.peer < 2 and event.detail >= 0
                assert event.begin_ns <= event.end_ns
            _check_nesting(events)
    spans = [row for row in trace.json()["traceEvents"] if row["ph"] == "X"]
    assert {row["pid"] for row in spans} == {0, 1}


def _check_nesting(events: list[Any]) -> None:
    """Events of one program lie inside each other, or apart."""
    for one in events:
        for other in events:
            if (one.program, one.programs) == (other.program, other.programs):
                across = one.begin_ns < other.begin_ns < one.end_ns < other.end_ns
                assert not across, (one, other)


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.timeout(240)
def test_every_site_has_its_events(rank_pools: RankPools, name: str) -> None:
    for trace in rank_pools.get("cpu", 2).run(_taken, name, timeout=LIMIT_S):
        _check(trace, name)
