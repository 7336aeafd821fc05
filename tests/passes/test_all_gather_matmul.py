"""all_gather_matmul: what it fuses, into which graph, and every guard that keeps it from fusing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch

from ditron_inductor.options import Options
from ditron_inductor.passes.fuse.all_gather_matmul import Match, all_gather_matmul, find_all_gather_matmul
from ditron_inductor.passes.graph.collectives import ALL_GATHER, collectives
from tests.passes import graphs
from tests.passes.graphs import (
    all_gather,
    assert_no_new_guards,
    assert_same_on_all_ranks,
    fuse,
    gather_dim,
    only_task,
    reasons,
    text,
    traced,
)

pytestmark = pytest.mark.usefixtures("group")

aten = torch.ops.aten
X = torch.empty(8, 16)
X3 = torch.empty(2, 8, 16)
W = torch.empty(16, 24)
V = torch.empty(16, 40)


def inner(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return gather_dim(x, 1) @ w


def test_finder_reads_the_gather_and_its_matmuls() -> None:
    module = traced(lambda x, w, v: ((g := gather_dim(x, 1)) @ w, g @ v, g * 2), X3, W, V)
    (node,) = collectives(module.graph, ALL_GATHER)
    match = find_all_gather_matmul(node)
    assert isinstance(match, Match)
    assert (match.feeds.gathered.dim, len(match.feeds.matmuls), match.feeds.return_gathered) == (1, 2, True)
    assert match.feeds.gathered.node.target is aten.cat.default
    assert (match.collective.world_size, match.collective.group_name) == (4, graphs.group_name())


def test_golden_dim_0() -> None:
    module = traced(lambda x, w: all_gather(x) @ w, X, W)
    fuse(module)
    expecttest.assert_expected_inline(
        text(module.graph),
        """\
x_1 [8, 16]
w_1 [16, 24]
all_gather_matmul = ditron.all_gather_matmul([x_1, w_1], "gather_dim=0 world_size=4 group_name=0 site='' trials num_weights=1", None)
getitem [32, 24] = all_gather_matmul[0]
return getitem
""",
    )


def test_golden_inner_dim_two_weights_and_gathered() -> None:
    module = traced(lambda x, w, v: ((g := gather_dim(x, 1)) @ w, torch.relu(g), g @ v.t()), X3, W, torch.empty(40, 16))
    fuse(module)
    expecttest.assert_expected_inline(
        text(module.graph),
        """\
x_1 [2, 8, 16]
w_1 [16, 24]
v_1 [40, 16]
t [16, 40] = aten.t(v_1)
all_gather_matmul = ditron.all_gather_matmul([x_1, w_1, t], "gather_dim=1 world_size=4 group_name=0 return_gathered site='' trials num_weights=2", None)
getitem_4 [64, 24] = all_gather_matmul[0]
getitem_5 [64, 40] = all_gather_matmul[1]
getitem_6 [2, 32, 16] = all_gather_matmul[2]
_unsafe_view [2, 32, 24] = aten._unsafe_view(getitem_4, [2, 32, 24])
relu [2, 32, 16] = aten.relu(getitem_6)
_unsafe_view_1 [2, 32, 40] = aten._unsafe_view(getitem_5, [2, 32, 40])
return (_unsafe_view, relu, _unsafe_view_1)
""",
    )


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fuses_every_gather_dim_but_the_last(dim: int, batch: int, dtype: torch.dtype) -> None:
    x, w = torch.empty(batch, 8, 16, dtype=dtype), W.to(dtype)
    after = assert_same_on_all_ranks(lambda x, w: gather_dim(x, dim) @ w, x, w, fused=1)
    assert not list(collectives(after.graph, ALL_GATHER))


def test_fuses_an_inner_dim_of_four_dimensions() -> None:
    assert_same_on_all_ranks(lambda x, w: gather_dim(x, 2) @ w, torch.empty(2, 3, 4, 16), W, fused=1)


def test_fuses_batch_1_where_a_view_replaces_split_and_cat() -> None:
    x = torch.empty(1, 8, 16)
    after = assert_same_on_all_ranks(lambda x, w: all_gather(x).view(1, 32, 16) @ w, x, W, fused=1)
    task, given = only_task(after, all_gather_matmul.__name__)
    assert given == {"shard": "x_1", "weights": ["w_1"]} and (task.gather_dim, task.return_gathered) == (0, False)


@pytest.mark.parametrize("form", ["split_with_sizes", "slice"])
def test_reads_every_form_of_chunks(form: str) -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        gathered = all_gather(x)
        if form == "split_with_sizes":
            parts = list(aten.split_with_sizes(gathered, [2, 2, 2, 2]))
        else:
            parts = [gathered[0:2], gathered[2:4], gathered[4:6], aten.slice(gathered, 0, 6)]
        return torch.cat(parts, 1) @ w

    assert_same_on_all_ranks(fn, X3, W, fused=1)


def test_one_reshape_per_consumer_is_one_gather() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gathered = gather_dim(x, 1)
        return gathered.reshape(64, 16) @ w, gathered.reshape(64, 16) @ v, gathered.reshape(64, 16) @ v

    after = assert_same_on_all_ranks(fn, X3, W, V, fused=1)
    assert only_task(after)[1]["weights"] == ["w_1", "v_1", "v_1"]


def test_equal_gathers_are_merged() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return gather_dim(x, 1) @ w, gather_dim(x, 1) @ v

    after = assert_same_on_all_ranks(fn, X3, W, V, fused=1)
    task, given = only_task(after)
    assert given["weights"] == ["w_1", "v_1"] and (task.gather_dim, task.return_gathered) == (1, False)


def test_equal_gathers_that_do_not_match_are_not_merged() -> None:
    """On the last rank they might gather two padded copies."""
    module = traced(lambda x, w: (gather_dim(x, 1)[:, :30].reshape(60, 16) @ w, all_gather(x).sin()), X3, W)
    assert fuse(module) == 0
    assert reasons(module) == ["uneven_shards", "no_matmul"]


def test_gathered_tensor_used_elsewhere_comes_from_the_node() -> None:
    after = assert_same_on_all_ranks(lambda x, w: ((g := gather_dim(x, 1)) @ w, g.sin(), g), X3, W, fused=1)
    assert not list(collectives(after.graph, ALL_GATHER))


def test_weight_gradient_uses_the_gathered_output() -> None:
    def backward(grad: torch.Tensor, w: torch.Tensor, act: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = gather_dim(grad, 1).reshape(64, 16)
        return rows.t() @ act, rows @ w

    after = assert_same_on_all_ranks(backward, X3, W, torch.empty(64, 8), fused=1)
    task, _ = only_task(after)
    assert (task.gather_dim, task.return_gathered, task.world_size) == (1, True, 4)


def test_a_late_weight_is_moved_up() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        gathered = all_gather(x)
        first = torch.relu(gathered @ w)
        return first @ (gathered @ (v * 2).t()).t()

    after = assert_same_on_all_ranks(fn, X, W, torch.empty(24, 16), fused=1)
    assert only_task(after)[1]["weights"] == ["w_1", "t"]


def test_a_weight_from_a_fused_product_uses_the_gathered_output() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        gathered = all_gather(x)
        return gathered @ (gathered @ w)[:16]

    task, given = only_task(assert_same_on_all_ranks(fn, X, W, fused=1))
    assert given["weights"] == ["w_1"] and (task.gather_dim, task.return_gathered) == (0, True)


def test_a_weight_behind_another_collective_is_left_out() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gathered = all_gather(x)
        return gathered @ w, gathered @ all_gather(v)

    after = assert_same_on_all_ranks(fn, X, W, torch.empty(4, 24), fused=1)
    task, given = only_task(after, "all_gather_matmul")
    assert given["weights"] == ["w_1"] and (task.gather_dim, task.return_gathered) == (0, True)
    assert reasons(after) == ["no_gain"]


def test_dynamic_shapes_are_fused_without_a_guard() -> None:
    module = traced(inner, X3, W, dynamic=True)
    with assert_no_new_guards(module):
        assert fuse(module) == 1
    task, _ = only_task(module)
    assert (task.gather_dim, task.return_gathered, task.world_size) == (1, False, 4)


def test_is_idempotent() -> None:
    module = traced(lambda x, w: ((g := gather_dim(x, 1)) @ w, g), X3, W)
    fuse(module)
    before = text(module.graph)
    assert all_gather_matmul(module.graph, options=Options()) == 0
    assert text(module.graph) == before


def test_meta_is_copied_except_eager_input_vals() -> None:
    module = traced(inner, X3, W)
    for node in module.graph.nodes:
        node.meta |= {"eager_input_vals": ((), {}), "recompute": "kept", "stack_trace": node.name}
    fuse(module)
    call = next(node for node in module.graph.nodes if "ditron" in str(node.target))
    assert "eager_input_vals" not in call.meta
    assert (call.meta["recompute"], call.meta["stack_trace"]) == ("kept", "mm")


def chunks(order: list[int], dim: int = 1) -> Callable[..., torch.Tensor]:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        parts = torch.chunk(all_gather(x), 4)
        return torch.cat([parts[index] for index in order], dim) @ w

    return fn


def unequal(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    a, b, c, d = aten.split_with_sizes(all_gather(x), [2, 2, 2, 2])
    return torch.cat([a, b, c, d[:1], d[1:]], 0) @ w


def chunk_used(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    parts = torch.chunk(all_gather(x), 4)
    return torch.cat(parts, 1) @ w, parts[0] * 2


def raw_used(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    gathered = all_gather(x)
    return torch.cat(torch.chunk(gathered, 4), 1) @ w, gathered * 2


GUARDS: list[Any] = [
    pytest.param("chunks_permuted", chunks([1, 0, 2, 3]), (X3, W), id="permuted"),
    pytest.param("chunks_permuted", chunks([0, 0, 1, 2]), (X3, W), id="repeated"),
    pytest.param("chunks_partial", chunks([0, 1, 2]), (X3, W), id="partial"),
    pytest.param("chunks_partial", lambda x, w: torch.chunk(all_gather(x), 4)[0] @ w, (X3, W), id="one_chunk"),
    pytest.param("chunks_partial", unequal, (X3, W), id="unequal"),
    pytest.param("intermediate_used", chunk_used, (X3, W), id="chunk_used"),
    pytest.param("intermediate_used", raw_used, (X3, W), id="raw_gather_used"),
    pytest.param("no_gain", lambda x, w: gather_dim(x, 1) @ w, (torch.empty(8, 4), W), id="last_dim"),
    pytest.param("no_gain", lambda x, w: gather_dim(x, 2) @ w, (torch.empty(2, 8, 4), W), id="last_dim_of_three"),
    pytest.param("layout", lambda x, w: all_gather(x).reshape(64, 8) @ w, (X, torch.empty(8, 4)), id="layout"),
    pytest.param("layout", lambda x, w: all_gather(x).transpose(0, 1).reshape(-1, 16) @ w, (X3, W), id="rows_moved"),
    pytest.param("no_gain", lambda x, w: w.t() @ all_gather(x), (X, torch.empty(32, 8)), id="second_operand"),
    pytest.param(
        "no_gain",
        lambda x, w, b: torch.addmm(b, w, all_gather(x)),
        (X, torch.empty(5, 32), torch.empty(16)),
        id="second_operand_and_bias",
    ),
    pytest.param(
        "no_gain",
        lambda x, w, b: torch.addmm(b, all_gather(x).t(), w),
        (X, torch.empty(32, 4), torch.empty(4)),
        id="gradient_added",
    ),
    pytest.param(
        "no_matmul",
        lambda x, w, v: torch.addmm(all_gather(x), w, v),
        (X, torch.empty(32, 4), torch.empty(4, 16)),
        id="added",
    ),
    pytest.param("no_gain", lambda x, w: all_gather(x).t() @ w, (X, torch.empty(32, 4)), id="gradient"),
    pytest.param("operand_depends", lambda x: (g := all_gather(x)) @ (g.t() * 2), (X,), id="depends"),
    pytest.param("bias", lambda x, w, b: torch.addmm(b, all_gather(x), w), (X, W, torch.empty(32, 24)), id="bias"),
    pytest.param("cast_between", lambda x, w: all_gather(x).bfloat16() @ w, (X, W.bfloat16()), id="cast"),
    pytest.param("batched_matmul", lambda x, w: torch.bmm(gather_dim(x, 1), w), (X3, torch.empty(2, 16, 3)), id="bmm"),
    pytest.param("dtype", lambda x, w: all_gather(x) @ w, (X.double(), W.double()), id="dtype"),
    pytest.param(
        "uneven_shards", lambda x, w: gather_dim(x, 1)[:, :30].reshape(60, 16) @ w, (X3, W), id="uneven_inner"
    ),
    pytest.param("uneven_shards", lambda x, w: all_gather(x)[:30] @ w, (X, W), id="uneven"),
    pytest.param("no_matmul", lambda x: all_gather(x).relu(), (X,), id="no_matmul"),
    pytest.param("no_matmul", lambda x: all_gather(x), (X,), id="output"),
]


@pytest.mark.parametrize(("code", "fn", "args"), GUARDS)
def test_guard(code: str, fn: Callable[..., Any], args: tuple[torch.Tensor, ...]) -> None:
    module = traced(fn, *args)
    before = text(module.graph)
    assert all_gather_matmul(module.graph, options=Options()) == 0
    assert text(module.graph) == before
    assert reasons(module) == [code]


def test_a_random_op_is_not_moved() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gathered = all_gather(x)
        return gathered.sin(), gathered @ torch.rand_like(w)

    module = traced(fn, X, W)
    assert fuse(module) == 0
    assert reasons(module) == ["operand_late"]


def test_disabled_by_option() -> None:
    module = traced(inner, X3, W)
    assert fuse(module, Options(fusions=("matmul_all_reduce",))) == 0
    assert reasons(module) == ["disabled"]


def test_world_size_of_the_graph_must_be_that_of_the_group() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> Any:
        return graphs.c10d.wait_tensor(graphs.c10d.all_gather_into_tensor(x, 2, graphs.group_name())) @ w

    module = traced(fn, X, W)
    assert fuse(module) == 0
    assert reasons(module) == ["world_size"]


def test_unknown_group() -> None:
    module = traced(inner, X3, W)
    for node in collectives(module.graph, ALL_GATHER):
        node.args = (*node.args[:2], "no such group")
    assert fuse(module) == 0
    assert reasons(module) == ["group_unknown"]
