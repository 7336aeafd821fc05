"""The summary line: what it counts, that it comes once, on rank 0, and is seen where nobody has set up logging."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from ditron_inductor import graph_meeting, summary
from ditron_inductor.codegen.meeting_kernel import MEETING
from ditron_inductor.device.agreements import Decision
from ditron_inductor.device.facts import GraphFacts
from ditron_inductor.options import Options
from ditron_inductor.pipeline import DitronPipeline
from ditron_inductor.summary import FirstRun, Summary
from ditron_inductor.task.plan import Choice, Decisions, PlanRequest
from ditron_inductor.task.problem import Problem
from ditron_inductor.task.torch_dtypes import precision_of
from tests.passes import graphs

B = torch.empty(16, 16)
LOGGER = "ditron_inductor.summary"
NO_GPU = "no GPU: on the CPU our kernels run in an interpreter, for tests only"
LINE = (
    "ditron: 2 of 4 collectives of the first graph matched (2 matmul_all_reduce); 0 ran fused, 2 by library "
    f"({NO_GPU}), left alone: 1 already_fused, 1 intermediate_used; ditron_inductor.explain(model)(*inputs) says "
    "where and why"
)
UNABLE = Choice("library", NO_GPU, None, "obstacle")
TILE = Choice("tile", "measured (your table): library 100 us, tile 80 us", None, "table")
SLOWER = Choice("library", "measured (your table): library 80 us, tile 100 us", None, "table")
Given = tuple[GraphFacts, Mapping[str, int]]


def layer(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
    product = graphs.all_reduce(a @ b) @ b
    last = graphs.all_reduce(product.sin() @ b)
    return [graphs.all_reduce(last.sin()), graphs.all_reduce(product), product]


def compiled(fn: Callable[..., Any]) -> Given | None:
    """What the code of a graph has for the summary; None for a graph that is not counted."""
    with graphs.fake_group():
        graph = graphs.traced(fn, B, B).graph
        DitronPipeline(Options())(graph)
    found = [node.meta[MEETING] for node in graph.nodes if MEETING in node.meta]
    if not found:
        return None
    facts, _, _, left_alone = found[0]
    return GraphFacts.parse(facts), left_alone


@pytest.fixture(autouse=True)
def decisions(monkeypatch: pytest.MonkeyPatch) -> Decisions:
    """The decisions of a process in which nothing has run yet."""
    fresh = Decisions()
    monkeypatch.setattr(summary, "decisions", fresh)
    monkeypatch.setattr(graph_meeting, "summary", Summary())
    return fresh


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    return [(record.levelno, record.getMessage()) for record in caplog.records if record.name == LOGGER]


def sites_of(given: Given) -> list[tuple[str, str]]:
    return [(group.name, launch.site) for group in given[0].groups for launch in group.after if launch.site]


def note(decisions: Decisions, site: tuple[str, str], choice: Choice) -> None:
    problem = Problem("matmul_all_reduce", 16, 16, 16, precision_of(torch.float32), 4, captured=False)
    decisions.note(site[0], PlanRequest(problem, site[1], "auto", 0, "cpu", ""), choice)


def test_the_line_comes_when_all_sites_have_run_and_says_by_what(
    caplog: pytest.LogCaptureFixture, decisions: Decisions
) -> None:
    counted, given = Summary(), compiled(layer)
    assert given is not None
    first, second = sites_of(given)
    run = counted.begin(*given, "")
    assert isinstance(run, FirstRun)
    note(decisions, first, UNABLE)
    note(decisions, first, UNABLE)
    assert lines(caplog) == []
    note(decisions, second, UNABLE)
    note(decisions, second, TILE)
    run.end()
    assert lines(caplog) == [(logging.WARNING, LINE)]


def test_later_graphs_are_added_up_for_debugging(caplog: pytest.LogCaptureFixture, decisions: Decisions) -> None:
    counted, given = Summary(), compiled(layer)
    other = compiled(lambda a, b: graphs.all_reduce(a @ b))
    assert given is not None and other is not None and compiled(torch.add) is None
    with caplog.at_level(logging.DEBUG, logger=LOGGER):
        for graph, choice in ((given, UNABLE), (other, TILE), (other, SLOWER)):
            counted.begin(*graph, "")
            # The same call again is another graph's first one.
            for site in sites_of(graph):
                note(decisions, site, choice)
    assert [level for level, _ in lines(caplog)] == [logging.WARNING, logging.DEBUG, logging.DEBUG]
    text = lines(caplog)[-1][1]
    assert text.startswith("ditron: 4 of 6 collectives of 3 graphs matched (4 matmul_all_reduce); 1 ran fused (1 tile)")
    assert f", 3 by library (2: {NO_GPU}; 1: {summary.CHOSEN}), left alone: " in text


def test_a_graph_that_repeats_the_choices_of_another_one_is_counted(
    caplog: pytest.LogCaptureFixture, decisions: Decisions
) -> None:
    counted, given = Summary(), compiled(lambda a, b: graphs.all_reduce(a @ b))
    assert given is not None
    (site,) = sites_of(given)
    problem = Problem("matmul_all_reduce", 16, 16, 16, precision_of(torch.float32), 4, captured=False)
    request = PlanRequest(problem, site[1], "auto", 0, "cpu", "")
    with caplog.at_level(logging.DEBUG, logger=LOGGER):
        for _ in range(2):
            counted.begin(*given, "")
            decisions.note(site[0], request, TILE)
    assert [text.partition(" matched")[0] for _, text in lines(caplog)] == [
        "ditron: 1 of 1 collectives of the first graph", "ditron: 2 of 2 collectives of 2 graphs"
    ]  # fmt: skip


def test_all_fused_and_nothing_left_alone_needs_no_pointer(
    caplog: pytest.LogCaptureFixture, decisions: Decisions
) -> None:
    counted, given = Summary(), compiled(lambda a, b: graphs.all_reduce(a @ b))
    assert given is not None
    counted.begin(*given, "")
    note(decisions, sites_of(given)[0], TILE)
    assert [text for _, text in lines(caplog)] == [
        "ditron: 1 of 1 collectives of the first graph matched (1 matmul_all_reduce); 1 ran fused (1 tile)"
    ]


def test_a_site_that_never_runs_is_counted_at_the_next_execution(
    caplog: pytest.LogCaptureFixture, decisions: Decisions
) -> None:
    counted, given = Summary(), compiled(layer)
    assert given is not None
    run = counted.begin(*given, "")
    note(decisions, sites_of(given)[0], TILE)
    assert lines(caplog) == [] and run is not None
    run.end()
    assert "; 1 ran fused (1 tile), 1 not at all, left alone" in lines(caplog)[0][1]


def test_a_graph_that_runs_as_inductor_would_run_it_has_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    counted, given = Summary(), compiled(layer)
    assert given is not None
    assert counted.begin(*given, "rank 1 did not come") is None
    assert "; 0 ran fused, 2 by library (rank 1 did not come), left alone" in lines(caplog)[0][1]


def test_ranks_that_meet_late_say_so(
    caplog: pytest.LogCaptureFixture, decisions: Decisions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that compiled for long may come to the second meeting."""
    with graphs.fake_group():
        graph = graphs.traced(layer, B, B).graph
        DitronPipeline(Options())(graph)
        (given,) = [node.meta[MEETING] for node in graph.nodes if MEETING in node.meta]
        found = [Decision(plain="rank 1 did not come", final=False), Decision()]
        monkeypatch.setattr(graph_meeting.meetings, "meet", lambda *_: found.pop(0))
        meeting = graph_meeting.graph_meeting(*given)
        assert meeting() is not None and meeting() is None and meeting() is None and not found
    assert "0 ran fused, 2 by library (rank 1 did not come)" in lines(caplog)[0][1]
    said = [record.getMessage() for record in caplog.records if record.name == graph_meeting.logger.name]
    assert said == [
        "a graph runs without fusion: rank 1 did not come",
        "a graph runs with fusion from now on: its ranks have met",
    ]


def test_collectives_of_one_rank_are_counted_too(caplog: pytest.LogCaptureFixture) -> None:
    with graphs.fake_group(world_size=1):
        graph = graphs.traced(lambda a, b: graphs.all_reduce(a @ b), B, B).graph
        DitronPipeline(Options())(graph)
        (given,) = [node.meta[MEETING] for node in graph.nodes if MEETING in node.meta]
        meeting = graph_meeting.graph_meeting(*given)
        assert meeting() is None and meeting() is None
    ((_, text),) = lines(caplog)
    assert text.startswith("ditron: 0 of 1 collectives of the first graph matched, left alone: 1 world_size_one")


def test_other_ranks_and_who_silences_it_see_nothing(
    caplog: pytest.LogCaptureFixture, decisions: Decisions, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent, given = Summary(), compiled(layer)
    assert given is not None
    silent.wanted = False
    assert silent.begin(*given, "") is None
    monkeypatch.setenv("DITRON_SUMMARY", "0")
    assert Summary().begin(*given, "") is None
    monkeypatch.delenv("DITRON_SUMMARY")
    with graphs.fake_group(rank=1):
        Summary().begin(*given, "a reason to log it at once")
    assert lines(caplog) == []


def test_it_is_seen_by_default() -> None:
    code = (
        "from tests.passes import graphs; from tests.test_summary import compiled, layer\n"
        "from ditron_inductor.summary import summary\n"
        f"for _ in range(2): summary.begin(*compiled(layer), {NO_GPU!r})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert [line for line in done.stderr.splitlines() if "ditron:" in line] == [LINE], done.stderr
