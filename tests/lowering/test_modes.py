"""A site that runs by one strategy in eager mode and by another one inside CUDA graphs."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from ditron_inductor.device import streams
from ditron_inductor.lowering.host import trials
from ditron_inductor.task.plan import Choice, PlanRequest, decisions
from tests.lowering.calls import Site
from tests.lowering.problems import CUT_KINDS, SMALL, Problem
from tests.rank_process import RankContext
from tests.ranks import RankPool

BY_MODE = {False: "tile", True: "chunked"}


def _choose(request: PlanRequest, table: str) -> Choice:
    return Choice(BY_MODE[request.problem.captured], "for the test", None, "table")


def _changes_with_the_mode(ctx: RankContext, kind: str) -> list[str]:
    """The strategies of three eager calls, a captured one, and an eager one behind it; all results are checked."""
    ran = []
    with mock.patch.object(trials, "choose", _choose):
        site = Site(name=f"modes/0:{kind}", strategy="auto")
        problem = Problem(ctx, kind, SMALL[ctx.device.type], site=site)

        def call() -> list[torch.Tensor]:
            outputs = problem()
            last = decisions.last(ctx.group_name, site.name)
            assert last is not None
            ran.append(last[1].strategy)
            return outputs

        for _ in range(3):
            problem.check(call())
        if ctx.device.type == "cuda":
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                outputs = call()
            for _ in range(3):
                graph.replay()
        else:
            with mock.patch.object(streams.CallOrder, "is_capturing", lambda self: True):
                outputs = call()
        problem.check(outputs)
        problem.check(call())
    return ran


@pytest.mark.parametrize("kind", CUT_KINDS)
def test_the_first_call_runs_as_in_a_graph_and_the_next_ones_as_the_mode_wants(pool: RankPool, kind: str) -> None:
    for ran in pool.run(_changes_with_the_mode, kind):
        assert ran == ["chunked", "tile", "tile", "chunked", "tile"]
