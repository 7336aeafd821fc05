"""The summary line: what it counts, that it comes once, on rank 0, and is seen where nobody has set up logging."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ditron_inductor import pipeline
from ditron_inductor.options import Options
from ditron_inductor.passes.finish.summary import Summary
from ditron_inductor.pipeline import DitronPipeline
from tests.passes import graphs

A, B = torch.empty(32, 16), torch.empty(16, 16)
LOGGER = "ditron_inductor.passes.finish.summary"
LINE = (
    "ditron: 2 of 4 collectives of the first graph fused (2 matmul_all_reduce), left alone: 1 already_fused, "
    "1 intermediate_used; ditron_inductor.explain(model)(*inputs) says where"
)


def layer(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
    product = graphs.all_reduce(a @ b) @ b
    last = graphs.all_reduce(product.sin() @ b)
    return [graphs.all_reduce(last.sin()), graphs.all_reduce(product), product]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "summary", Summary())


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    return [(record.levelno, record.getMessage()) for record in caplog.records if record.name == LOGGER]


def test_one_line_and_then_sums_for_debugging(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger=LOGGER), graphs.fake_group():
        for fn in (torch.add, layer, torch.add, lambda a, b: graphs.all_reduce(a @ b)):
            DitronPipeline(Options())(graphs.traced(fn, B, B).graph)
    (first_level, first), (level, text) = lines(caplog)
    assert (first_level, first) == (logging.WARNING, LINE)
    assert level == logging.DEBUG
    assert text.startswith("ditron: 3 of 5 collectives of 2 graphs fused (3 matmul_all_reduce)")


def test_nothing_left_alone_needs_no_pointer(caplog: pytest.LogCaptureFixture) -> None:
    with graphs.fake_group():
        DitronPipeline(Options())(graphs.traced(lambda a, b: graphs.all_reduce(a @ b), A, B).graph)
    assert lines(caplog) == [
        (logging.WARNING, "ditron: 1 of 1 collectives of the first graph fused (1 matmul_all_reduce)")
    ]


def test_other_ranks_and_who_silences_it_see_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with graphs.fake_group(rank=1):
        DitronPipeline(Options())(graphs.traced(layer, A, B).graph)
    with graphs.fake_group():
        DitronPipeline(Options(summary=False))(graphs.traced(layer, A, B).graph)
    assert lines(caplog) == []


def test_it_is_seen_by_default() -> None:
    code = (
        "from tests.passes import graphs; from tests.test_summary import A, B, layer\n"
        "from ditron_inductor.pipeline import DitronPipeline; from ditron_inductor.options import Options\n"
        "with graphs.fake_group():\n"
        "    for _ in range(2): DitronPipeline(Options())(graphs.traced(layer, A, B).graph)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert [line for line in done.stderr.splitlines() if "ditron:" in line] == [LINE], done.stderr
