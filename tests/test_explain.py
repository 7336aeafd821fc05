"""explain: one row per collective with what runs and why, and no trace left behind."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

import ditron_inductor
import ditron_inductor.backend  # the name, where the package is not installed
from ditron_inductor.errors import UnknownOption
from ditron_inductor.options import Options
from ditron_inductor.report.explain import Report
from ditron_inductor.report.explained import ExplainedSite, bytes_text
from ditron_inductor.report.graph_picture import BOX_HEIGHT, BOX_WIDTH, layout
from ditron_inductor.report.measure import Timings
from ditron_inductor.task.policy import shared_site
from ditron_inductor.task.site_records import GraphRecord, NodeRecord, OutsideRecord, PictureRecord, SiteRecord
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


def test_the_last_line_counts_nodes_without_a_collective() -> None:
    one = ExplainedSite("forward", site(), "tile", 12.4, "the plan's sentence", "model", {"tile": 12.4})
    graph = replace(report(one).graphs[0], local=("projections", "cached_attention", "projections"))
    assert replace(report(one), graphs=(graph, graph)).conclusion() == (
        "1 of 1 collectives matched, in 2 graphs, beside 4 projections, 2 cached_attention; 1 ran fused (1 tile)"
    )


def test_the_table_has_a_row_for_different_collectives() -> None:
    predictions = {"library": 20.1, "tile": 12.4}
    fused = ExplainedSite("forward", site(), "tile", 12.4, "the plan's sentence", "model", predictions)
    alone = site(matched=False, kind="all_reduce", pattern="all_reduce", world_size=None, bytes_moved=None)
    alone = replace(alone, reason_code="no_matmul")
    result = report(fused, ExplainedSite("backward", alone, "-", None, "no matmul stands next to it"))
    assert result.matched == result.fused == (fused,) and result.left_alone == result.sites[1:]
    assert str(result) == (
        """\
sites     collective                 operands          moved    runs by       predicted    why
graph     pattern                    dtype             group    decided by
--------  -------------------------  ----------------  -------  ------------  -----------  -----
1         matmul_all_reduce          [16, 32] [32, 8]  1.5 KiB  tile          library 20   [1]
forward   matmul -> all_reduce(sum)  bfloat16          0 (x4)   model         tile 12 us
--------  -------------------------  ----------------  -------  ------------  -----------  -----
1         all_reduce                 [16, 32] [32, 8]  -        left alone    -            [2]
backward                             bfloat16          0        -
why:
[1] the plan's sentence
[2] no matmul stands next to it
left alone:
  n
    no_matmul
1 of 2 collectives matched, in 1 graph; 1 ran fused (1 tile)"""
    )


def layers(count: int) -> list[ExplainedSite]:
    """Equal sites as the layers of a model have them, which nothing but their names tells apart."""
    why = "no GPU: on the CPU our kernels run in an interpreter, for tests only"
    records = [site(site=f"ab12/{number}:matmul_all_reduce", node=f"n_{number}") for number in range(count)]
    return [ExplainedSite("forward", record, "library", None, why, "obstacle") for record in records]


def test_equal_sites_have_one_row_and_a_reason_is_printed_once() -> None:
    (first,) = layers(1)
    other = replace(first, record=site(shapes=("[8, 32]", "[32, 8]")))
    text = str(report(*layers(16), other, *layers(16)))
    assert text.count("obstacle") == 2 and text.count("[16, 32] [32, 8]") == 1
    assert [line.split()[0] for line in text.splitlines() if "matmul_all_reduce" in line] == ["32", "1"]
    assert text.count("[1] no GPU") == 1 and text.count("for tests only") == 2
    assert " ".join(text.splitlines()[-2:]) == (
        "33 of 33 collectives matched, in 1 graph; 0 ran fused, 33 by library (no GPU: on the CPU our kernels run "
        "in an   interpreter, for tests only)"
    )


def test_a_site_that_ran_by_the_library_because_that_is_faster_is_not_called_fused() -> None:
    faster = ExplainedSite("forward", site(), "library", 9.0, "measured (your table): library 9 us", "table")
    idle = ExplainedSite("forward", site(), "-", None, "it has not run")
    result = report(faster, idle, layers(1)[0])
    assert result.fused == () and len(result.matched) == 3
    assert result.conclusion() == (
        "3 of 3 collectives matched, in 1 graph; 0 ran fused, 2 by library (1: measured or predicted to be no slower; "
        "1: no GPU: on the CPU our kernels run in an interpreter, for tests only), 1 not at all"
    )


LONG = "/a/very/long/folder/of/site-packages" * 5
NODE = NodeRecord("a_node", "aten.add.Tensor", "[1, 2, 3] bfloat16", f"{LONG}/model.py:12 in forward: return x + y")


def large_report(*, timed: bool) -> Report:
    """Everything that a report may show, all of it long."""
    record = site(
        kind="matmul_all_reduce_rms_norm_of_some_kind",
        pattern="a matmul with an epilogue of many operations " * 4,
        shapes=("[1024, 8192, 131072]",) * 9,
        group_name="a_group_of_a_mesh_with_a_long_name",
        line=f"{LONG}/model.py:13 in forward: return self.down(self.up(x))",
        culprit=NODE,
        outside=(OutsideRecord("norm behind", "norm_form", "a long reason " * 20, NODE),),
        near=(PictureRecord(NODE, ()), PictureRecord(NodeRecord("n", "op", "<&>", ""), ("a_node",))),
    )
    times = dict.fromkeys(("library", "chunked", "tile"), 1234567.0)
    measured = Timings(times, ("chunked: " + "it cannot run here " * 20,)) if timed else None
    fused = ExplainedSite("backward", record, "chunked", 1.0, "a reason " * 40, "obstacle", times, measured)
    alone = replace(record, matched=False, reason_code="bias")
    sites = fused, ExplainedSite("forward", alone, "-", None, "another reason " * 40)
    return report(*sites, options=Options(strategy="tile", table="t" * 300))


@pytest.mark.parametrize("timed", [False, True])
def test_no_line_is_too_long_for_a_terminal(timed: bool) -> None:
    lines = large_report(timed=timed).text().splitlines()
    assert max(map(len, lines)) <= 120
    assert "stayed outside of a node:" in lines and ("no time:" in lines) is timed


def test_what_stayed_outside_of_a_node_has_a_note() -> None:
    why = OutsideRecord("norm behind", "norm_form", "it is of no form that is known", replace(NODE, line="m.py:3"))
    text = str(report(*(replace(one, record=replace(one.record, outside=(why,))) for one in layers(2))))
    assert text.splitlines()[-5:-2] == [
        "stayed outside of a node:",
        "  2 matmul_all_reduce, norm behind (norm_form): it is of no form that is known",
        "    a_node (aten.add.Tensor, [1, 2, 3] bfloat16), m.py:3",
    ]


def test_what_stopped_a_site_is_below_the_table() -> None:
    culprit = NodeRecord("addmm", "aten.addmm.default", "[8, 16] bfloat16", "model.py:12 in forward: x = self.down(x)")
    own = NodeRecord("all_reduce", "_c10d_functional.all_reduce.default", "[8] float32", "")
    line = "model.py:13 in forward: f(x)"
    one = site(matched=False, node="all_reduce", reason_code="bias", line=line, culprit=culprit)
    other = site(matched=False, node="all_reduce", reason_code="reduce_op", culprit=own)
    result = report(*(ExplainedSite("forward", record, "-", None, "") for record in (one, other)))
    assert result.text().splitlines()[-6:-1] == [
        "left alone:",
        "  all_reduce, model.py:13 in forward: f(x)",
        "    bias: addmm (aten.addmm.default, [8, 16] bfloat16), model.py:12 in forward: x = self.down(x)",
        "  all_reduce",
        "    reduce_op",
    ]


class _Page(HTMLParser):
    """The texts of a page, the elements that it has, and their attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_the_page_stands_alone_and_escapes_what_it_shows() -> None:
    page = _Page(large_report(timed=True).html())
    assert page.open == [], "every element is closed"
    names = [name for name, _ in page.elements]
    assert not {"script", "link", "img", "iframe"} & set(names)
    links = {value for _, found in page.elements for name, value in found.items() if name in ("href", "src")}
    targets = {f"#{found['id']}" for _, found in page.elements if "id" in found}
    assert links == targets, "each link is to a place in the page, and each place has one"
    assert "<&>" in page.texts and any("return self.down(self.up(x))" in text for text in page.texts)
    assert names.count("svg") == 2 and names.count("rect") == 4 and names.count("path") == 4
    classes = [found["class"] for name, found in page.elements if name == "rect"]
    assert classes == ["cause", "matched", "cause", "alone"]


def test_the_page_has_a_row_and_a_picture_for_equal_sites() -> None:
    near = (PictureRecord(replace(NODE, name="n_0"), ()),)
    page = _Page(report(*(replace(one, record=replace(one.record, near=near)) for one in layers(32))).html())
    assert [name for name, _ in page.elements].count("svg") == 1
    assert "32" in page.texts and "32 × matmul_all_reduce, forward" in page.texts
    assert [text.startswith("no GPU") for text in page.texts].count(True) == 1


def test_a_page_of_nothing() -> None:
    assert "nothing to fuse" in "".join(_Page(report().html()).texts)


def test_nodes_of_a_picture_stand_below_what_they_read() -> None:
    reads = {"a": "", "b": "", "c": "a", "d": "ab", "e": "dc", "f": "", "g": "ef"}
    near = [PictureRecord(replace(NODE, name=name), tuple(inputs)) for name, inputs in reads.items()]
    picture = layout(near)
    places = {box.node.name: (box.x, box.y) for box in picture.boxes}
    assert set(places) == set(reads) and len(set(places.values())) == len(reads)
    assert all(places[name][1] < places[reader][1] for reader, inputs in reads.items() for name in inputs)
    assert places["f"][1] == places["e"][1], "just above its reader"
    assert abs(places["a"][0] - places["b"][0]) >= BOX_WIDTH
    for x, y in places.values():
        assert 0 <= x <= picture.width - BOX_WIDTH and 0 <= y <= picture.height - BOX_HEIGHT
    assert len(picture.edges) == sum(map(len, reads.values()))


def test_an_edge_of_a_picture_goes_around_the_boxes_between() -> None:
    reads = {"a": "", "b": "a", "c": "b", "d": "ac"}
    picture = layout([PictureRecord(replace(NODE, name=name), tuple(inputs)) for name, inputs in reads.items()])
    boxes = {box.node.name: box for box in picture.boxes}
    (around,) = [edge.path for edge in picture.edges if "V" in edge.path]
    passed = {float(x) for x in re.findall(r"(\d+),\d+ V", around)}
    assert len(passed) == 1
    for name in "bc":
        assert all(not boxes[name].x <= x <= boxes[name].x + BOX_WIDTH for x in passed)


def _example(ctx: RankContext, folder: str) -> str:
    printed = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(printed):
        runpy.run_path("model.py")
    return printed.getvalue()


def test_the_example_of_the_documentation(rank_pools: RankPools, tmp_path: Path) -> None:
    page = (Path(__file__).parent.parent / "docs" / "explain.md").read_text()
    program, wanted = (re.search(rf"```{kind}\n(.*?)```", page, re.DOTALL) for kind in ("python", "text"))
    assert program is not None and wanted is not None
    (tmp_path / "model.py").write_text(program[1])
    for printed in rank_pools.get("cpu", 2).run(_example, str(tmp_path), timeout=LIMIT_S):
        printed = printed.replace("; ditron.table = shipped", "")
        table, mark, rest = printed.partition("left alone:\n")
        assert "all_gather_matmul" in table and mark + rest == wanted[1]


def test_measured_times_have_a_column_and_what_has_none_a_note() -> None:
    timings = Timings({"library": 20.4, "tile": 15.5}, ("chunked: it cannot run here",))
    fused = ExplainedSite("forward", site(), "tile", 12.4, "", "table", {}, timings)
    text = str(report(fused, fused))
    assert "measured" in text.splitlines()[0] and "library 20" in text and "tile 16 us" in text
    assert text.splitlines()[-3:-1] == ["no time:", "chunked: it cannot run here"]


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
            assert one.source in ("table", "model", "trial") and set(one.predictions) == {"library", "chunked", "tile"}
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
