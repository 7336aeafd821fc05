"""explain: one row per collective with what runs and why, and no trace left behind."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

import ditron_inductor
import ditron_inductor.backend  # the name, where the package is not installed
from ditron_inductor.errors import UnknownOption
from ditron_inductor.options import Options
from ditron_inductor.report.explain import ExplainedSite, Report, bytes_text
from ditron_inductor.report.measure import Timings
from ditron_inductor.task.policy import shared_site
from ditron_inductor.task.site_records import GraphRecord, NodeRecord, SiteRecord
from tests.ranks import RankContext, RankPools

# The first compilation on a fresh machine precompiles Inductor's C++ headers, once for all tests.
pytestmark = pytest.mark.timeout(300)
LIMIT_S = 250.0


def site(**changes: Any) -> SiteRecord:
    values: dict[str, Any] = dict(
        site="ab12/0:matmul_all_reduce",
        kind="matmul_all_reduce",
        matched=True,
        pattern="matmul -> all_reduce(sum)",
        group_name="0",
        world_size=4,
        dtype="bfloat16",
        device_type="cuda",
        shapes=("[16, 32]", "[32, 8]"),
        m=16,
        n=8,
        k=32,
        itemsize=2,
        bytes_moved=1536,
        strategy="auto",
        node="n",
        text="",
    )
    return SiteRecord(**(values | changes))


def report(*sites: ExplainedSite, options: Options | None = None) -> Report:
    graph = GraphRecord(0, False, "ab12", tuple(one.record for one in sites), "before", "after")
    return Report(sites, (graph,), options or Options())


def test_the_table_has_a_row_for_every_collective() -> None:
    predictions = {"library": 20.1, "tile": 12.4}
    fused = ExplainedSite("forward", site(), "tile", 12.4, "the plan's sentence", "model", predictions)
    alone = site(matched=False, kind="all_reduce", pattern="all_reduce", world_size=None, bytes_moved=None)
    text = str(report(fused, ExplainedSite("backward", alone, "-", None, "no matmul stands next to it")))
    header, _, first, _, second, *_, summary = text.splitlines()
    assert header.split() == "graph collective pattern shape dtype group strategy moved by predicted why".split()
    cells = ("forward", "matmul -> all_reduce(sum)", "[16, 32] [32, 8]", "0 (x4)", "tile", "1.5 KiB", "model")
    for cell in (*cells, "library 20, tile"):
        assert cell in first
    assert "no matmul stands next to it" in second
    assert summary == "1 of 2 collectives fused, in 1 graph"


def test_what_stopped_a_site_is_below_the_table() -> None:
    culprit = NodeRecord("addmm", "aten.addmm.default", "[8, 16] bfloat16", "model.py:12 in forward: x = self.down(x)")
    own = NodeRecord("all_reduce", "_c10d_functional.all_reduce.default", "[8] float32", "")
    one = site(matched=False, node="all_reduce", reason_code="bias", line="model.py:13 in forward: f(x)", culprit=culprit)
    other = site(matched=False, node="all_reduce", reason_code="reduce_op", culprit=own)
    result = report(*(ExplainedSite("forward", record, "-", None, "") for record in (one, other)))
    assert result.text() == str(result)
    assert result.text().splitlines()[-6:-1] == [
        "left alone:",
        "  all_reduce, model.py:13 in forward: f(x)",
        "    bias: addmm (aten.addmm.default, [8, 16] bfloat16), model.py:12 in forward: x = self.down(x)",
        "  all_reduce",
        "    reduce_op",
    ]


def _example(ctx: RankContext, path: str) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(path)
    return printed.getvalue()


def test_the_example_of_the_documentation(rank_pools: RankPools, tmp_path: Path) -> None:
    page = (Path(__file__).parent.parent / "docs" / "explain.md").read_text()
    program, wanted = (re.search(rf"```{kind}\n(.*?)```", page, re.DOTALL) for kind in ("python", "text"))
    assert program is not None and wanted is not None
    path = tmp_path / "model.py"
    path.write_text(program[1])
    for printed in rank_pools.get("cpu", 2).run(_example, str(path), timeout=LIMIT_S):
        printed = printed.replace(str(path), "model.py").replace("; ditron.table = shipped", "")
        table, mark, rest = printed.partition("left alone:\n")
        assert "all_gather_matmul" in table and mark + rest == wanted[1]


def test_measured_times_have_a_column_and_what_has_none_a_note() -> None:
    timings = Timings({"library": 20.4, "tile": 15.5}, ("chunked: it cannot run here",))
    fused = ExplainedSite("forward", site(), "tile", 12.4, "", "table", {}, timings)
    text = str(report(fused, fused))
    assert " measured " in text.splitlines()[0] and "library 20, tile" in text
    assert text.splitlines()[-2] == "no time: chunked: it cannot run here"


def test_options_that_differ_from_the_defaults_are_named() -> None:
    fused = ExplainedSite("forward", site(), "tile", None, "")
    assert str(report(fused, options=Options(strategy="tile"))).endswith("; ditron.strategy = tile")


def test_nothing_to_report_is_said() -> None:
    assert "without a collective" in str(report())
    assert "no graph" in str(Report((), (), Options()))


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (1 << 20, "1 MiB"), (5 << 40, "5120 GiB")]
)
def test_bytes_are_readable(count: int, text: str) -> None:
    assert bytes_text(count) == text


def test_options_are_checked_at_once() -> None:
    with pytest.raises(UnknownOption, match="ditron.fast"):
        ditron_inductor.explain(lambda x: x, options={"ditron.fast": True})


def test_a_function_without_collectives() -> None:
    result = ditron_inductor.explain(lambda x: x.sin() + 1)(torch.ones(3))
    assert result.sites == () and "nothing to fuse" in str(result)


def test_the_random_state_is_kept() -> None:
    torch.manual_seed(3)
    want = torch.rand(2)
    torch.manual_seed(3)
    ditron_inductor.explain(lambda x: torch.nn.functional.dropout(x))(torch.ones(64))
    assert torch.equal(torch.rand(2), want)


def _forward(ctx: RankContext, options: dict[str, Any]) -> Report:
    from torch.distributed import _functional_collectives as funcol

    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = funcol.all_gather_tensor(x, 0, ctx.group_name) @ w
        # No matmul stands next to this one.
        return funcol.all_reduce(y.sin(), "sum", ctx.group_name)

    torch.manual_seed(0)
    return ditron_inductor.explain(fn, options=options)(torch.randn(4, 8), torch.randn(8, 6))


def test_a_fused_site_and_one_left_alone(rank_pools: RankPools) -> None:
    for result in rank_pools.get("cpu", 2).run(_forward, {}, timeout=LIMIT_S):
        (fused,), (alone,) = result.matched, result.left_alone
        assert fused.record.kind == "all_gather_matmul" and fused.strategy == "library"
        assert fused.record.bytes_moved == 4 * 8 * 4 and fused.record.world_size == 2
        assert "interpreter" in fused.reason
        assert alone.strategy == "-" and alone.reason
        assert "ditron.all_gather_matmul" in result.graphs[0].graph_after
        assert "ditron.all_gather_matmul" not in result.graphs[0].graph_before


def _measured(ctx: RankContext, mode: str | None = None) -> Report:
    from torch.distributed import _functional_collectives as funcol

    def fn(x: torch.Tensor, v: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        gathered = funcol.all_gather_tensor(x, 0, ctx.group_name)
        y = gathered @ v + gathered @ v.sin()
        z = funcol.all_reduce(y @ w, "sum", ctx.group_name)
        return funcol.all_reduce(z.sin(), "sum", ctx.group_name)

    # Uneven weights: one rank's reduction is longer.
    x, v, w = torch.randn(4, 8), torch.randn(8, 6 + ctx.rank), torch.randn(6 + ctx.rank, 5)
    return ditron_inductor.explain(fn, mode=mode, measure=True)(*(value.to(ctx.device) for value in (x, v, w)))


def test_strategies_are_timed_on_request(rank_pools: RankPools) -> None:
    reports = rank_pools.get("cpu", 2).run(_measured, timeout=LIMIT_S)
    for report in reports:
        assert "measured" in str(report) and "library" in str(report)
        assert report.matched and report.left_alone[0].measured is None
    for first, second in zip(*(report.matched for report in reports), strict=True):
        assert first.measured is not None and first.measured == second.measured
        assert {"library", "tile"} <= set(first.measured.us), first.measured.notes
        assert all(us > 0 for us in first.measured.us.values())


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_strategies_are_timed_on_gpus(rank_pools: RankPools, mode: str | None) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs, one for each rank: shared ones cannot be timed")
    for report in rank_pools.get("cuda", 2).run(_measured, mode, timeout=LIMIT_S):
        for one in report.matched:
            assert one.source in ("table", "model") and set(one.predictions) == {"library", "chunked", "tile"}
            assert one.measured is not None and {"library", "tile"} <= set(one.measured.us), one.measured


def test_a_forced_strategy_is_shown(rank_pools: RankPools) -> None:
    result = rank_pools.get("cpu", 2).run(_forward, {"ditron.strategy": "library"}, timeout=LIMIT_S)[0]
    assert result.matched[0].strategy == "library" and "forced" in result.matched[0].reason


def test_a_fusion_that_is_switched_off_is_a_reason(rank_pools: RankPools) -> None:
    result = rank_pools.get("cpu", 2).run(_forward, {"ditron.fusions": ["matmul_all_reduce"]}, timeout=LIMIT_S)[0]
    assert not result.matched
    assert "ditron.fusions" in result.left_alone[0].reason


def _training(ctx: RankContext) -> tuple[Report, bool, bool, list[str]]:
    from torch.distributed import _functional_collectives as funcol

    class Rowwise(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return funcol.all_reduce(super().forward(x), "sum", ctx.group_name)

    torch.manual_seed(0)
    model = Rowwise(8, 6, bias=False)
    leaf = torch.randn(4, 8, requires_grad=True)
    upstream = leaf.exp()
    backend_result = torch.compile(model, backend="ditron")(upstream.detach())
    result = ditron_inductor.explain(model)(upstream)
    untouched = all(value.grad is None for value in (leaf, *model.parameters()))
    # The caller's own graph is still there to be used.
    upstream.sum().backward()
    assert leaf.grad is not None
    same = torch.equal(backend_result, torch.compile(model, backend="ditron")(upstream.detach()))
    return result, untouched, same, [one.direction for one in result.sites]


def test_training_leaves_no_gradients_and_the_callers_graph(rank_pools: RankPools) -> None:
    result, untouched, same, directions = rank_pools.get("cpu", 2).run(_training, timeout=LIMIT_S)[0]
    assert untouched and same
    assert len(result.graphs) == 2, "the backward graph is compiled too"
    assert directions[0] == "forward" and result.matched[0].record.kind == "matmul_all_reduce"


def _twice(ctx: RankContext) -> list[int]:
    from torch.distributed import _functional_collectives as funcol

    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return funcol.all_reduce(x @ w, "sum", ctx.group_name)

    x, w = torch.ones(4, 8), torch.ones(8, 6)
    torch.compile(fn, backend="ditron")(x, w)
    return [len(ditron_inductor.explain(fn)(x, w).matched) for _ in range(2)]


def test_a_function_that_was_compiled_before_is_explained_each_time(rank_pools: RankPools) -> None:
    assert rank_pools.get("cpu", 2).run(_twice, timeout=LIMIT_S) == [[1, 1], [1, 1]]


def _two_of_one_name(ctx: RankContext) -> Report:
    from torch.distributed import _functional_collectives as funcol

    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = funcol.all_reduce(x @ w, "sum", ctx.group_name)
        torch._dynamo.graph_break()
        return funcol.all_reduce(y[:2] @ w.t(), "sum", ctx.group_name)

    return ditron_inductor.explain(fn)(torch.ones(4, 8), torch.ones(8, 6))


def test_graphs_with_sites_of_one_name_are_told_apart(rank_pools: RankPools) -> None:
    first, second = rank_pools.get("cpu", 2).run(_two_of_one_name, timeout=LIMIT_S)[0].matched
    assert shared_site(first.record.site) == shared_site(second.record.site)
    assert first.request is not None and second.request is not None
    problems = [site.request.problem for site in (first, second) if site.request]
    assert [(problem.m, problem.n) for problem in problems] == [(4, 6), (2, 8)]
