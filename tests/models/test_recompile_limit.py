"""A rank that reaches torch's limit of recompilations alone, or runs a function eagerly after its ranks have agreed on
the compiled one: what docs/rank_decisions.md says about it.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from ditron_inductor import recompilations, reset
from ditron_inductor.errors import DitronTimeout
from tests.cases import rare
from tests.models import divergent
from tests.ranks import RankContext, RankPools

LIMIT_S = 2.0
# A rank that compiles once more is waited for, on a busy machine too.
PATIENT: dict[str, Any] = {"ditron.strategy": "tile"}
TILE = PATIENT | {"ditron.timeout_s": LIMIT_S}
SAME, OTHER, BOTH_OTHER = (8, 8), (8, 12), (12, 12)
"""The number of rows on rank 0 and rank 1. They are contracted, so the ranks need not have equally many."""


def correlate(x: torch.Tensor) -> torch.Tensor:
    return divergent.all_reduce(x.t() @ x)


def correlate_twice(x: torch.Tensor) -> torch.Tensor:
    """A pass merges the two reductions into one."""
    return divergent.all_reduce(x.t() @ x) + divergent.all_reduce((x + 1).t() @ x)


PROGRAMS = {"once": correlate, "twice": correlate_twice}


class Calls:
    """Calls of the compiled function, each compared with its result in eager mode. One recompilation is too many."""

    def __init__(self, ctx: RankContext, options: dict[str, Any], name: str = "once") -> None:
        torch._dynamo.reset()
        torch._dynamo.config.recompile_limit = 1
        self._rank = ctx.rank
        self._generator = torch.Generator().manual_seed(ctx.rank)
        self._program = PROGRAMS[name]
        self._compiled = torch.compile(self._program, backend="ditron", options=options, dynamic=False)

    def __call__(self, rows: tuple[int, int]) -> int:
        """Returns how many graphs were compiled."""
        x = torch.randn(rows[self._rank], 16, generator=self._generator)
        expected = self._program(x)
        before = counters["stats"]["unique_graphs"]
        found = self._compiled(x)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        return counters["stats"]["unique_graphs"] - before


def graphs_of_calls(ctx: RankContext, options: dict[str, Any], name: str) -> list[int]:
    """How many graphs each call compiles, if rank 1 alone gets other sizes."""
    with torch._dynamo.config.patch(recompile_limit=1):
        call = Calls(ctx, options, name)
        return [call(rows) for rows in (SAME, SAME, OTHER, OTHER, SAME)]


def all_ranks_recompile_or_none(ctx: RankContext, options: dict[str, Any], name: str) -> None:
    torch.compiler.set_enable_guard_collectives(True)
    try:
        with torch._dynamo.config.patch(recompile_limit=1):
            call = Calls(ctx, options, name)
            for rows in (SAME, SAME, OTHER, OTHER, SAME, (12, 8), (16, 20)):
                call(rows)
    finally:
        torch.compiler.set_enable_guard_collectives(False)


def one_rank_is_eager(ctx: RankContext, options: dict[str, Any], rows: tuple[int, int]) -> tuple[str, float]:
    """The error of the rank that runs a compiled graph, and the seconds until then. Rank 1 is in the library's
    collective, until this one takes part. After a reset both go on.
    """
    with torch._dynamo.config.patch(recompile_limit=1):
        call = Calls(ctx, options)
        call(SAME)
        began, text = time.monotonic(), ""
        x = torch.ones(rows[ctx.rank], 16)
        with torch.compiler.set_stance("force_eager" if ctx.rank == 1 else "default"):
            try:
                found = call._compiled(x)
            except DitronTimeout as error:
                text = str(error)
                found = correlate(x)
        assert found.tolist() == [[float(sum(rows))] * 16] * 16
        waited_s = time.monotonic() - began
        reset()
        call(SAME)
        return text, waited_s


def fails_at_the_limit(ctx: RankContext) -> tuple[str, float]:
    """The error of the rank that reaches the limit, and the seconds until then. Its peer waits for it, and gives up."""
    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
        call = Calls(ctx, TILE)
        call(SAME)
        began, text = time.monotonic(), ""
        try:
            call(OTHER)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
        passed_s = time.monotonic() - began
        reset()
        return text, passed_s


def run_late(rank_pools: RankPools, job: Any, *args: Any) -> list[tuple[str, float]]:
    """The wait is bounded: the ranks answer in time."""
    return rank_pools.get("cpu", 2, label="recompile limit").run(job, *args, timeout=60.0)


@pytest.mark.parametrize("options", [PATIENT, {}], ids=["tile", "library"])
@pytest.mark.parametrize("name", list(PROGRAMS))
def test_a_rank_at_the_limit_stays_compiled(rank_pools: RankPools, options: dict[str, Any], name: str) -> None:
    graphs = rank_pools.get("cpu", 2).run(graphs_of_calls, options, name)
    assert graphs == [[1, 0, 0, 0, 0], [1, 0, 1, 0, 0]]


@pytest.mark.parametrize("name", list(PROGRAMS))
def test_without_fusions_an_eager_rank_does_no_harm(rank_pools: RankPools, name: str) -> None:
    graphs = rank_pools.get("cpu", 2).run(graphs_of_calls, {"ditron.fusions": ()}, name)
    assert graphs == [[1, 0, 0, 0, 0]] * 2


@pytest.mark.parametrize(("options", "name"), [(PATIENT, "twice"), *rare((PATIENT, "once"), ({}, "twice"))])
def test_with_collective_guards_no_rank_is_eager_alone(
    rank_pools: RankPools, options: dict[str, Any], name: str
) -> None:
    rank_pools.get("cpu", 2).run(all_ranks_recompile_or_none, options, name)


@pytest.mark.parametrize("rows", [OTHER, *rare((BOTH_OTHER,))], ids=["its_graph", "a_new_graph"])
def test_an_eager_rank_is_a_timeout_that_names_it_and_a_reset_helps(
    rank_pools: RankPools, rows: tuple[int, int]
) -> None:
    """Whether rank 0 runs the graph that it has, or one that it compiles for other sizes: what was agreed holds for
    both, so it does not ask its peer again.
    """
    (text, waited_s), (other, _) = run_late(rank_pools, one_rank_is_eager, TILE, rows)
    assert "matmul_all_reduce" in text and "for rank 1" in text and "runs this part of it eagerly" in text
    # The limit is a number of polls, which may be a little quicker than when they were timed.
    assert waited_s > LIMIT_S / 2
    assert other == ""


def test_the_library_takes_an_eager_rank_as_it_comes(rank_pools: RankPools) -> None:
    """On the CPU the plan runs sites by the library."""
    errors = run_late(rank_pools, one_rank_is_eager, {}, OTHER)
    assert [text for text, _ in errors] == ["", ""]


def test_a_rank_can_be_made_to_fail_at_once(rank_pools: RankPools) -> None:
    (timeout, waited_s), (text, passed_s) = run_late(rank_pools, fails_at_the_limit)
    assert timeout.startswith("DitronTimeout") and "for rank 1" in timeout
    assert "fail_on_recompile_limit_hit" in text and passed_s < waited_s


def test_a_function_beyond_the_limit_is_warned_about_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(recompilations, "_limit_of_torch", 2)
    compiled = torch.compile(lambda x: x + 1, backend="ditron", dynamic=False)
    told = []
    for size in (3, 4, 5, 6):
        compiled(torch.ones(size))
        told.append(sum("compiled 2 times" in record.getMessage() for record in caplog.records))
    assert told == [0, 0, 1, 1]
