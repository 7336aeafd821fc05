"""What runs right through Inductor runs right through Ditron, whatever differs between the ranks."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ditron_inductor import graph_meeting
from ditron_inductor.device import meetings
from tests.cases import rare, sampled
from tests.models import divergent
from tests.ranks import RankContext, RankPool, RankPools, RanksFailed

FUSED = {"tile": 1}
PLAIN: dict[str, int] = {}
LIBRARY = {"library": 1}
WITH_TILES: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "bias_before": (FUSED, FUSED),
    "residual_behind": (FUSED, FUSED),
    "epilogue_behind": (FUSED, FUSED),
    "another_weight": (FUSED, FUSED),
    "statistic_of_gathered": (FUSED, FUSED),
    "statistic_of_product": (PLAIN, LIBRARY),
    "statistic_of_sequences": ({"tile": 1, "library": 1}, {"tile": 1, "library": 1}),
    "nothing_to_multiply": (LIBRARY, PLAIN),
    "norm_on_one": (LIBRARY, LIBRARY),
    "graph_break": (PLAIN, PLAIN),
    "eager_region": (PLAIN, PLAIN),
    "reader_between_sums": (PLAIN, PLAIN),
    "reader_of_region": ({"tile": 1, "library": 1}, {"tile": 1, "library": 1}),
    "two_weights_contracted": (FUSED, FUSED),
    "tokens_of_one_rank": (FUSED, FUSED),
    "other_branch": (PLAIN, PLAIN),
    # Of two graphs.
    "logs_where_columns_differ": ({"tile": 1, "library": 1}, {"tile": 1, "library": 1}),
    # Each with two sites.
    "other_sequences": ({"tile": 4}, {"tile": 4}),
    "other_columns": (LIBRARY, LIBRARY),
    "gathered_in_other_columns": (LIBRARY, LIBRARY),
    "scattered_in_other_columns": (LIBRARY, LIBRARY),
}
"""How the sites of each rank run where `tile` is forced."""
COLUMNS = "logs_where_columns_differ"
"""The program to whose third call one rank does not come, as it has its graph."""
SLOW = {"eager_region": 1.0, COLUMNS: 5.0}
"""Seconds for which ranks wait in programs in which some do not come, because they are in the library's collective, or
have their graph.
"""


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def pair(request: pytest.FixtureRequest, rank_pools: RankPools) -> RankPool:
    return rank_pools.get(request.param, 2)


def options(name: str, **more: Any) -> dict[str, Any]:
    return {**more, **({"ditron.meeting_s": SLOW[name]} if name in SLOW else {})}


@pytest.mark.parametrize("name", sampled(divergent.PROGRAMS))
def test_ranks_that_differ_are_right_by_default(pair: RankPool, name: str) -> None:
    pair.run(divergent.check, name, options(name))


@pytest.mark.parametrize(
    ("name", "calls"), [*((name, 2 if name == COLUMNS else 3) for name in WITH_TILES), *rare((COLUMNS, 3))]
)
def test_local_facts_keep_the_fusion_and_others_give_it_up(pair: RankPool, name: str, calls: int) -> None:
    """Where the ranks compile other kernels in the first calls, they have to meet all the same, however far apart."""
    waits = {"ditron.meeting_s": 90.0 if calls == 2 else 30.0} if name == COLUMNS else options(name)
    found = pair.run(divergent.check, name, {"ditron.strategy": "tile", **waits}, calls)
    assert tuple(found) == WITH_TILES[name]


@pytest.mark.parametrize("name", [*sampled(divergent.LATE), *rare(*divergent.RESHAPED)])
def test_a_rank_that_differs_later_runs_what_was_agreed(pair: RankPool, name: str) -> None:
    """The other rank's kernel waits for tiles, and gets them."""
    found = pair.run(divergent.check, name, {"ditron.strategy": "tile", "ditron.meeting_s": 2.0})
    assert all(set(one) == {"tile"} for one in found)


@pytest.mark.parametrize("late_s", [1.5, *rare(0.0)])
def test_all_ranks_change_in_one_call_together_or_apart(pair: RankPool, late_s: float) -> None:
    """Ranks that come too late for each other run what was agreed before, in the shape that was agreed."""
    name = "all_have_other_columns_this_time"
    found = pair.run(divergent.check, name, {"ditron.strategy": "tile", "ditron.meeting_s": 1.0}, 3, late_s)
    assert all(set(one) == {"tile"} for one in found)


def without_standing_in(ctx: RankContext, options: dict[str, Any]) -> dict[str, int]:
    with mock.patch.object(graph_meeting, "ConformPipeline", side_effect=AssertionError("compiled again")):
        return divergent.check(ctx, "other_sequences", options)


def test_all_ranks_have_as_many_tokens_of_other_sequences(pair: RankPool) -> None:
    """They meet for the new graph. None of them takes its peers to run the old one."""
    found = pair.run(without_standing_in, {"ditron.strategy": "tile"})
    assert all(set(one) == {"tile"} for one in found)


def test_a_rank_that_differs_later_in_a_graph_that_torch_captures(pair: RankPool) -> None:
    """What stands in for its graph has the policy that the others have."""
    options = {"ditron.strategy": "tile", "ditron.meeting_s": 2.0, "triton.cudagraphs": True, "ditron.trials": True}
    found = pair.run(divergent.check, "nothing_this_time", options)
    assert all(set(one) == {"tile"} for one in found)


@pytest.mark.parametrize("name", ["graph_break", *rare("bias_before", "nothing_to_multiply", "reader_between_sums")])
def test_three_ranks(rank_pools: RankPools, name: str) -> None:
    rank_pools.get("cpu", 3, label="three").run(divergent.check, name, options(name, **{"ditron.strategy": "chunked"}))


def test_with_work_divided_among_the_ranks(pair: RankPool) -> None:
    """One rank reads what the others would hold a part of only."""
    for name in ("reader_of_region", "reader_between_sums"):
        pair.run(divergent.check, name, {"ditron.sequence_parallel": "on"})


def error_of(ctx: RankContext, program: Any, options: dict[str, Any]) -> str:
    """The error that a program raises, by class and message."""
    torch._dynamo.reset()
    x, w, b = (torch.randn(*shape, device=ctx.device) for shape in ((8, 16), (16, 8), (8,)))
    try:
        torch.compile(program, backend="ditron", options=options)(ctx.rank, x, w, b)
    except Exception as exc:
        return f"{type(exc).__name__}: {exc}"
    return ""


def other_order(rank: int, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Any:
    if rank == 0:
        return divergent.all_reduce(x @ w), divergent.all_gather(b)
    return divergent.all_gather(b), divergent.all_reduce(x @ w)


def other_size(rank: int, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return divergent.all_reduce(x[: 8 - rank] @ w)


@pytest.mark.parametrize("program", [other_order, other_size])
def test_other_collectives_are_an_error_on_all_ranks(pair: RankPool, program: Any) -> None:
    errors = pair.run(error_of, program, {})
    assert all(error.startswith("DitronDiverged: rank 1 was at site 'collective 0 of a graph, ") for error in errors)


def error_of_rank(ctx: RankContext, options: list[dict[str, Any]]) -> str:
    return error_of(ctx, divergent.bias_before, options[ctx.rank])


@pytest.mark.parametrize(
    ("name", "value"),
    [("sequence_parallel", "off"), ("strategy", "library"), ("timeout_s", 7), ("workspace_limit", 9)],
)
def test_options_that_differ_are_named_on_all_ranks(pair: RankPool, name: str, value: Any) -> None:
    # Neither rank has met with these before, whatever ran in this process.
    first = {"ditron.workspace_limit": (1 << 28) + len(name)}
    errors = pair.run(error_of_rank, [first, {**first, f"ditron.{name}": value}], timeout=60.0)
    assert all(error.startswith("DitronOptionsMismatch") and f"ditron.{name} is " in error for error in errors), errors


def bare(x: torch.Tensor) -> torch.Tensor:
    return divergent.all_reduce(x) + 1.0


def miscounted(ctx: RankContext, idle: bool, graph: bool) -> dict[str, int]:
    """One rank has counted more collectives than its peers, as when it alone captures a graph once more. In front of
    the graph with a site is one without any, whose entry nobody takes for that of another one.
    """
    options = {"ditron.strategy": "tile", "ditron.meeting_s": 2.0}
    if graph:
        here = torch.ones(4, device=ctx.device)
        dist.all_reduce(here)
        if ctx.rank == 1:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                dist.all_reduce(here)
        return divergent.check(ctx, "bias_before", options)
    place = meetings.position_of
    with (
        mock.patch.object(meetings, "position_of", lambda *given: place(*given) + 3 * ctx.rank),
        mock.patch.object(meetings, "counts_on_gpu", lambda group: True),
        mock.patch.object(meetings, "is_idle", lambda wait_s: idle),
    ):
        torch.compile(bare, backend="ditron", options=options)(torch.ones(4))
        return divergent.check(ctx, "bias_before", options)


@pytest.mark.parametrize("idle", [True, False])
def test_ranks_that_count_differently_meet_when_they_are_idle(rank_pools: RankPools, idle: bool) -> None:
    # Ranks of their own: what they have counted stays with the group.
    found = rank_pools.get("cpu", 2, label=f"idle={idle}").run(miscounted, idle, False, timeout=60.0)
    assert found == ([FUSED, FUSED] if idle else [PLAIN, PLAIN])


@pytest.mark.gpu
def test_a_graph_that_one_rank_captures_again_keeps_nobody_from_meeting(rank_pools: RankPools) -> None:
    found = rank_pools.get("cuda", 2, label="captures").run(miscounted, True, True, timeout=100.0)
    assert found == [FUSED, FUSED]


def bias_with(ctx: RankContext, options: list[dict[str, Any]]) -> dict[str, int]:
    return divergent.check(ctx, "bias_before", options[ctx.rank])


def test_a_rank_that_is_told_to_fuse_nothing_has_its_peers_do_the_same(pair: RankPool) -> None:
    first = {"ditron.workspace_limit": 1 << 27, "ditron.strategy": "tile"}
    found = pair.run(bias_with, [first, {**first, "ditron.fusions": ()}], timeout=60.0)
    assert found == [PLAIN, PLAIN]


def stale(ctx: RankContext) -> None:
    from ditron_inductor.device.facts import GraphFacts, GroupFacts
    from ditron_inductor.device.meetings import check_world_sizes

    check_world_sizes(GraphFacts((GroupFacts(ctx.group_name, 5, (), ()),)))


def test_a_graph_for_another_number_of_ranks_is_an_error(pair: RankPool) -> None:
    with pytest.raises(RanksFailed, match="has 2 ranks, and a graph that is to run in it was compiled for 5"):
        pair.run(stale)
