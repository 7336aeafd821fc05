"""The pipeline: order and reports of the passes, what its uuid depends on, what it records for explain."""

from __future__ import annotations

import logging
import pickle
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx
from torch._dynamo.utils import counters
from torch._inductor import lowering
from torch._inductor.custom_graph_pass import CustomGraphPass

from ditron_inductor import passes_for_inductor, pipeline, user_table
from ditron_inductor.options import Options
from ditron_inductor.pipeline import PACKAGE, PASSES, DitronPipeline, UserPassThen, with_user_passes
from ditron_inductor.task.nodes import KINDS
from ditron_inductor.task.schema import SCHEMAS, overload
from ditron_inductor.task.site_records import collect_sites
from ditron_inductor.task.table import Table
from tests.passes import graphs


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    with graphs.fake_group():
        yield


def layer(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    gathered = graphs.all_gather(x)
    return graphs.all_reduce(x @ w), gathered @ w, graphs.all_reduce(x.relu())


def module() -> fx.GraphModule:
    return graphs.traced(layer, torch.randn(8, 16), torch.randn(16, 32))


def relu_to_neg(graph: fx.Graph, *, options: Options) -> int:
    """A tiny pass: relu(x) -> neg(x)."""
    nodes = graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default)
    for node in nodes:
        node.target = torch.ops.aten.neg.default
    return len(nodes)


def neg_to_abs(graph: fx.Graph, *, options: Options) -> int:
    """Another, which sees what the first one left."""
    nodes = graph.find_nodes(op="call_function", target=torch.ops.aten.neg.default)
    for node in nodes:
        node.target = torch.ops.aten.abs.default
    return len(nodes)


def test_the_order_of_the_passes() -> None:
    assert [one.__name__ for one in PASSES] == [
        "normalize_collectives",
        "share_gathers",
        "all_gather_attention",
        "attention_reduce_scatter",
        "move_across",
        "merge_reductions",
        "sequence_parallel",
        "rows_by_rank",
        "try_forms",
        "all_gather_matmul",
        "matmul_reduce_scatter",
        "matmul_all_reduce",
        "matmul_all_gather",
        "matmul_all_to_all",
        "all_to_all_matmul",
        "grouped_matmul_all_reduce",
        "grouped_matmul_reduce_scatter",
        "prepare_products",
        "all_reduce_rms_norm",
        "flash_decode",
        "review_left_alone",
        "require_fusions",
        "expert_projections",
        "grouped_projections",
        "absorb_sums",
        "combine_experts",
        "cached_attention",
        "split_weights",
        "projections",
        "absorb_epilogues",
        "absorb_norms",
        "pad_products",
        "choose_experts",
        "unroll_topk",
        "order_collectives",
        "overlap_launches",
        "name_sites",
        "verify_tasks",
    ]


def test_runner_counts_and_logs(caplog: pytest.LogCaptureFixture) -> None:
    counters.clear()
    graph = module().graph
    with caplog.at_level(logging.DEBUG, logger="ditron_inductor.pipeline"):
        assert pipeline.run(graph, Options(), (relu_to_neg, neg_to_abs)) == {"relu_to_neg": 1, "neg_to_abs": 1}
    assert counters["ditron"] == Counter(relu_to_neg=1, neg_to_abs=1)
    messages = [record.getMessage() for record in caplog.records if record.name == "ditron_inductor.pipeline"]
    assert messages == [
        "relu_to_neg: 1 rewritten, ops: aten.neg.default +1, aten.relu.default -1",
        "neg_to_abs: 1 rewritten, ops: aten.abs.default +1, aten.neg.default -1",
    ]


def test_counters_have_one_entry_a_site() -> None:
    counters.clear()
    pipeline.run(module().graph, Options())
    fused = {kind: counters["ditron"][kind] for kind in KINDS}
    assert fused == dict.fromkeys(KINDS, 0) | {"all_gather_matmul": 1, "matmul_all_reduce": 1}


def test_inductor_knows_all_ops_before_it_meets_them() -> None:
    DitronPipeline(Options())(module().graph)
    for op in map(overload, SCHEMAS):
        assert op in lowering.lowerings
        assert lowering.maybe_layout_constraints(op) is lowering.constrain_to_fx_strides


def test_graphs_before_and_after_each_pass_are_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    artifacts: dict[str, str] = {}

    def record(name: str, *, metadata_fn: Callable[[], dict[str, str]], payload_fn: Callable[[], str]) -> None:
        assert name == "artifact" and metadata_fn()["encoding"] == "string"
        artifacts[metadata_fn()["name"]] = payload_fn()

    monkeypatch.setattr(pipeline, "trace_structured", record)
    pipeline.run(module().graph, Options(), (relu_to_neg, neg_to_abs))
    assert list(artifacts) == ["ditron_input", "ditron_0_relu_to_neg", "ditron_1_neg_to_abs"]
    assert [op for text in artifacts.values() for op in ("relu", "neg", "abs") if f"aten.{op}." in text] == [
        "relu",
        "neg",
        "abs",
    ]


def test_a_stack_may_pickle_the_passes() -> None:
    """For its workers, as vLLM does: they run the same passes under the same id."""
    entries = passes_for_inductor({"ditron.strategy": "tile"})
    copies = pickle.loads(pickle.dumps(entries))
    pipelines = [(one, copies[name]) for name, one in entries.items() if isinstance(one, DitronPipeline)]
    assert [ours.passes for ours, _ in pipelines].count(PASSES) == 1 and len(pipelines) == 3
    for ours, copy in pipelines:
        assert copy.options == ours.options and copy.uuid() == ours.uuid()
        assert all(one is other for one, other in zip(copy.passes, ours.passes, strict=True))


# What the uuid depends on.


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package, with a shipped table."""
    root = tmp_path / "package"
    shutil.copytree(PACKAGE, root, ignore=shutil.ignore_patterns("__pycache__"))
    (root / "task" / "tables").mkdir(exist_ok=True)
    (root / "task" / "tables" / "test_gpu.csv").write_text("m=1\n")
    pipeline.source_digest.cache_clear()
    return root


def uuid(root: Path, options: Options | None = None, passes: Any = PASSES) -> str:
    pipeline.source_digest.cache_clear()
    return DitronPipeline(options or Options(), root=root, passes=passes).uuid()


def test_uuid_is_stable(package: Path) -> None:
    assert uuid(package) == uuid(package)
    assert uuid(PACKAGE) == uuid(PACKAGE)


def test_uuid_changes_with_the_ranks_of_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, before = pipeline.group_sizes(), uuid(PACKAGE)
    name = graphs.group_name()
    monkeypatch.setattr(pipeline, "group_sizes", lambda: {**sizes, name: sizes[name] + 1})
    assert uuid(PACKAGE) != before


@pytest.mark.parametrize(
    "source",
    [
        "pipeline.py",
        "passes/finish/order_collectives.py",
        "lowering/register.py",
        "task/plan.py",
        "core/signals.py",
        "device/workspace.py",
    ],
)
def test_uuid_changes_with_a_source(package: Path, source: str) -> None:
    before = uuid(package)
    (package / source).write_text((package / source).read_text() + "\n# changed\n")
    assert uuid(package) != before


def test_uuid_follows_the_linked_folders() -> None:
    """In a checkout, passes and lowering are links: their sources count under their names in the package."""
    hashed = {str(path.relative_to(PACKAGE)) for path in pipeline._hashed_files(PACKAGE)}
    assert {"passes/finish/order_collectives.py", "lowering/register.py", "core/signals.py"} <= hashed


def test_uuid_changes_with_a_new_or_moved_source(package: Path) -> None:
    before = uuid(package)
    (package / "passes" / "extra.py").write_text("")
    added = uuid(package)
    (package / "passes" / "extra.py").rename(package / "passes" / "other.py")
    assert len({before, added, uuid(package)}) == 3


def test_uuid_changes_with_a_shipped_table(package: Path) -> None:
    before = uuid(package)
    (package / "task" / "tables" / "test_gpu.csv").write_text("m=2\n")
    assert uuid(package) != before


@pytest.mark.parametrize(
    "options",
    [
        Options(strategy="tile"),
        Options(workspace_limit=5),
        Options(timeout_s=2.0),
        Options(fusions=("matmul_all_reduce",)),
    ],
    ids=lambda options: options.text(),
)
def test_uuid_changes_with_an_option(package: Path, options: Options) -> None:
    assert uuid(package, options) != uuid(package)


def test_uuid_changes_with_the_order(package: Path) -> None:
    assert uuid(package, passes=tuple(reversed(PASSES))) != uuid(package)


def test_uuid_does_not_change_with_a_users_tuned_table(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tuned table lies outside the package, in the user's cache folder, and acts at run time only."""
    before = uuid(package)
    for variable in ("XDG_CACHE_HOME", "HOME", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(variable, str(tmp_path / "user"))
    user_table.default_path().parent.mkdir(parents=True)
    user_table.default_path().write_text(Table().text())
    assert uuid(package) == before


# A user's own pass.


class UserPass(CustomGraphPass):
    def __init__(self, identity: str | None) -> None:
        self.identity = identity
        self.seen: list[str] = []

    def __call__(self, graph: fx.Graph) -> None:
        self.seen.append(str(graph))

    def uuid(self) -> str | None:
        return self.identity


def test_user_pass_runs_before_ours() -> None:
    user = UserPass("mine")
    graph = module().graph
    UserPassThen(user, DitronPipeline(Options()))(graph)
    assert len(user.seen) == 1 and "ditron" not in user.seen[0]
    assert "ditron" in str(graph)


def test_uuid_has_that_of_the_users_pass() -> None:
    ours = DitronPipeline(Options())
    one, same, other = (UserPassThen(UserPass(name), ours).uuid() for name in ("one", "one", "other"))
    assert one == same != other
    assert UserPassThen(UserPass("one"), DitronPipeline(Options(strategy="tile"))).uuid() != one
    # No uuid: Inductor does not cache.
    assert UserPassThen(UserPass(None), ours).uuid() is None
    assert UserPassThen(lambda graph: None, ours).uuid() is None


@pytest.mark.parametrize("several", [False, True])
def test_user_passes_come_first_in_every_form(several: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "takes_several_passes", lambda: several)
    ours, user = DitronPipeline(Options()), UserPass("mine")
    assert with_user_passes(None, ours) is ours
    assert with_user_passes([], ours) is ours
    assert with_user_passes([user, user], ours) == [user, user, ours]
    joined = with_user_passes(user, ours)
    if several:
        assert joined == [user, ours]
    else:
        assert (joined.user_pass, joined.pipeline) == (user, ours)


# What explain reads.


def test_sites_are_recorded() -> None:
    with collect_sites() as sink:
        DitronPipeline(Options(strategy="library"))(module().graph)
    (graph,) = sink.graphs
    assert graph.is_backward is False and graph.index == 0
    assert "ditron" not in graph.graph_before and "ditron" in graph.graph_after
    reduce, gather, alone = graph.sites
    assert (reduce.kind, reduce.matched, reduce.strategy) == ("matmul_all_reduce", True, "library")
    assert (reduce.m, reduce.n, reduce.k, reduce.itemsize) == (8, 32, 16, 4)
    assert reduce.bytes_moved == 2 * 3 * 8 * 32 * 4 // 4
    assert reduce.site.partition("@")[0] == f"{graph.region}/0:matmul_all_reduce" and reduce.site in reduce.text
    assert (gather.kind, gather.m, gather.n, gather.k) == ("all_gather_matmul", 32, 32, 16)
    assert gather.bytes_moved == 3 * 8 * 16 * 4
    assert gather.shapes == ("[8, 16]", "[16, 32]") and gather.dtype == "float32" and gather.device_type == "cpu"
    assert (alone.kind, alone.matched, alone.site) == ("all_reduce", False, "")
    assert alone.reason and alone.reason_code and alone.world_size == graphs.WORLD_SIZE
    assert alone.bytes_moved == 2 * 3 * 8 * 16 * 4 // 4


def test_dynamic_sites_are_recorded_with_hints() -> None:
    with collect_sites() as sink:
        DitronPipeline(Options())(graphs.traced(layer, torch.randn(8, 16), torch.randn(16, 32), dynamic=True).graph)
    reduce = sink.graphs[0].sites[0]
    assert (reduce.m, reduce.n, reduce.k) == (8, 32, 16)
    assert reduce.shapes[0] != "[8, 16]"


def test_backward_graph_is_told_by_its_tangents() -> None:
    graph = module().graph
    first = next(iter(graph.nodes))
    first.name = "tangents_1"
    with collect_sites() as sink:
        DitronPipeline(Options())(graph)
    assert sink.graphs[0].is_backward is True


def test_late_graphs_of_other_threads_are_recorded() -> None:
    """Autograd compiles the backward graph in a thread of its own, possibly after the block has closed."""
    with collect_sites() as sink:
        ours = DitronPipeline(Options())
    thread = threading.Thread(target=ours, args=(module().graph,))
    thread.start()
    thread.join()
    assert [graph.index for graph in sink.graphs] == [0]


def test_nothing_is_recorded_without_a_block() -> None:
    with collect_sites() as sink:
        pass
    DitronPipeline(Options())(module().graph)
    assert sink.graphs == []
