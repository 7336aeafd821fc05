"""Gathered weights and scattered columns: fused as the transposed problem, by the passes of gathers and scatters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch

from ditron_inductor.options import Options
from ditron_inductor.passes.absorb.absorb_epilogues import absorb_epilogues
from ditron_inductor.passes.graph.collectives import ALL_GATHER, REDUCE_SCATTER, collectives
from ditron_inductor.passes.normalize.normalize_collectives import normalize_collectives
from ditron_inductor.task.verify import task_calls
from tests.passes.graphs import (
    all_gather,
    assert_no_new_guards,
    assert_same_on_all_ranks,
    fuse,
    gather_dim,
    only_task,
    reasons,
    reduce_scatter,
    scatter_dim,
    text,
    traced,
)

pytestmark = pytest.mark.usefixtures("group")

aten = torch.ops.aten
SHARD = torch.empty(8, 16)
COLUMNS = torch.empty(16, 8)
X = torch.empty(5, 16)
X3 = torch.empty(2, 5, 16)
B = torch.empty(16, 24)


def test_golden_gathered_weight() -> None:
    module = traced(lambda w, x: (x @ all_gather(w).t()).relu(), SHARD, X3)
    fuse(module)
    expecttest.assert_expected_inline(
        text(module.graph),
        """\
w_1 [8, 16]
x_1 [2, 5, 16]
view [10, 16] = aten.view(x_1, [10, 16])
transposed [16, 10] = aten.permute(view, [1, 0])
all_gather_matmul = ditron.all_gather_matmul([w_1, transposed], "gather_dim=0 world_size=4 group_name=0 site='' trials num_weights=1", None)
getitem [32, 10] = all_gather_matmul[0]
transposed_1 [10, 32] = aten.permute(getitem, [1, 0])
_unsafe_view [2, 5, 32] = aten.reshape(transposed_1, [2, 5, 32])
relu [2, 5, 32] = aten.relu(_unsafe_view)
return relu
""",
    )


def test_golden_weight_gathered_along_its_columns() -> None:
    module = traced(lambda w, x: x @ gather_dim(w, 1), COLUMNS, X)
    fuse(module)
    expecttest.assert_expected_inline(
        text(module.graph),
        """\
w_1 [16, 8]
x_1 [5, 16]
transposed [8, 16] = aten.permute(w_1, [1, 0])
transposed_1 [16, 5] = aten.permute(x_1, [1, 0])
all_gather_matmul = ditron.all_gather_matmul([transposed, transposed_1], "gather_dim=0 world_size=4 group_name=0 site='' trials num_weights=1", None)
getitem_4 [32, 5] = all_gather_matmul[0]
transposed_2 [5, 32] = aten.permute(getitem_4, [1, 0])
return transposed_2
""",
    )


def test_golden_scattered_columns() -> None:
    module = traced(lambda a, b: scatter_dim(a @ b.t(), 2, "avg").relu(), X3, torch.empty(24, 16))
    fuse(module)
    expecttest.assert_expected_inline(
        text(module.graph),
        """\
a_1 [2, 5, 16]
b_1 [24, 16]
view [10, 16] = aten.view(a_1, [10, 16])
transposed [16, 10] = aten.permute(view, [1, 0])
matmul_reduce_scatter = ditron.matmul_reduce_scatter([b_1, transposed], "scatter_dim=0 reduce_op=avg world_size=4 group_name=0 site='' trials", None)
getitem_4 [6, 10] = matmul_reduce_scatter[0]
transposed_1 [10, 6] = aten.permute(getitem_4, [1, 0])
rows [2, 5, 6] = aten.reshape(transposed_1, [2, 5, 6])
relu [2, 5, 6] = aten.relu(rows)
return relu
""",
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5, 16), (1, 16), (2, 5, 16), (2, 3, 5, 16)])
def test_gathered_weights(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.empty(shape, dtype=dtype)
    for fn, w in ((lambda w, x: x @ all_gather(w).t(), SHARD), (lambda w, x: x @ gather_dim(w, 1), COLUMNS)):
        after = assert_same_on_all_ranks(fn, w.to(dtype), x, fused=1)
        assert not list(collectives(after.graph, ALL_GATHER))


@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("shape", [(5, 16), (1, 16), (2, 5, 16), (2, 3, 5, 16)])
def test_scattered_columns(shape: tuple[int, ...], op: str) -> None:
    after = assert_same_on_all_ranks(lambda a, b: scatter_dim(a @ b, a.ndim - 1, op), torch.empty(shape), B, fused=1)
    assert not list(collectives(after.graph, REDUCE_SCATTER))


def test_a_transpose_is_not_transposed_back() -> None:
    after = assert_same_on_all_ranks(lambda a, b: scatter_dim(a.t() @ b.t(), 1), X.t(), torch.empty(24, 16), fused=1)
    task, given = only_task(after, "matmul_reduce_scatter")
    assert given == {"a": ["b_1"], "b": ["a_1"]} and task.scatter_dim == 0
    after = assert_same_on_all_ranks(lambda w, x: x.t() @ all_gather(w).t(), SHARD, X.t(), fused=1)
    task, given = only_task(after, "all_gather_matmul")
    assert given == {"shard": "w_1", "weights": ["x_1"]} and task.gather_dim == 0


def test_scattered_columns_of_a_sum() -> None:
    def fn(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return scatter_dim(a @ b + a.cos() @ c, 2)

    after = assert_same_on_all_ranks(fn, X3, B, B, fused=1)
    assert only_task(after)[1] == {"a": ["transposed", "transposed_1"], "b": ["transposed_2", "transposed_3"]}


def test_a_gather_of_columns_as_transposed_first_operand() -> None:
    after = assert_same_on_all_ranks(lambda w, x: gather_dim(w, 1).t() @ x, COLUMNS, X.t(), fused=1)
    task, given = only_task(after, "all_gather_matmul")
    assert given == {"shard": "transposed", "weights": ["x_1"]} and task.gather_dim == 0


def test_several_uses_of_one_gathered_weight() -> None:
    def fn(w: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        whole = all_gather(w)
        return x @ whole.t(), (y.relu() @ whole.t()).view(-1), whole @ y.t()

    after = assert_same_on_all_ranks(fn, SHARD, X, torch.empty(3, 16), fused=1)
    assert only_task(after)[1]["weights"] == ["transposed", "transposed_1", "t_2"]


def test_equal_gathers_as_first_and_as_second_operand_are_merged() -> None:
    fn = lambda w, x, y: (x @ all_gather(w).t(), all_gather(w) @ y)  # noqa: E731
    assert only_task(assert_same_on_all_ranks(fn, SHARD, X, B, fused=1))[1]["weights"] == ["transposed", "y_1"]


def test_the_gradient_of_the_input_uses_the_gathered_output() -> None:
    def fn(w: torch.Tensor, x: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        whole = all_gather(w)
        return x @ whole.t(), grad @ whole

    after = assert_same_on_all_ranks(fn, SHARD, X, torch.empty(5, 32), fused=1)
    task, _ = only_task(after)
    assert (task.gather_dim, task.return_gathered, task.world_size) == (0, True, 4)


def test_gathered_columns_used_elsewhere_come_from_the_node() -> None:
    def fn(w: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        whole = gather_dim(w, 1)
        return x @ whole, whole.view(-1), whole.t()

    after = assert_same_on_all_ranks(fn, COLUMNS, X, fused=1)
    assert not list(collectives(after.graph, ALL_GATHER))


def test_an_op_that_asks_for_strides_gets_a_copy() -> None:
    def bits(x: torch.Tensor) -> torch.Tensor:
        return x.view(torch.int16)

    for fn, args in (
        (lambda w, x: bits(x @ all_gather(w).t()), (SHARD, X)),
        (lambda a, b: bits(scatter_dim(a @ b, 1)), (X, B)),
    ):
        module = traced(fn, *args)
        assert fuse(module) == 1
        assert "aten.clone(transposed" in text(module.graph)


def test_a_view_of_the_weight_that_stands_early_does_not_make_the_operand_late() -> None:
    def fn(w: torch.Tensor, v: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first, second = all_gather(w).t(), all_gather(v)
        turned = second.t()
        hidden = x @ first
        return hidden @ turned, turned.sin()

    after = assert_same_on_all_ranks(fn, SHARD, torch.empty(8, 32), X, fused=2)
    tasks = [task for _, task in task_calls(after.graph) if task.kind == "all_gather_matmul"]
    assert (0, True, 4) in [(task.gather_dim, task.return_gathered, task.world_size) for task in tasks]


def test_a_narrowing_cast_of_a_gathered_weight_moves_in_front() -> None:
    fn = lambda w, x: x @ all_gather(w).bfloat16().t()  # noqa: E731
    assert_same_on_all_ranks(fn, SHARD, X.bfloat16(), fused=1)


def test_dynamic_shapes_are_fused_without_a_guard() -> None:
    def gathered(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x @ all_gather(w).t()

    def scattered(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return scatter_dim(a @ b, 2)

    for fn, args in ((gathered, (SHARD, X3)), (scattered, (X3, B))):
        module = traced(fn, *args, dynamic=True)
        with assert_no_new_guards(module):
            assert fuse(module) == 1


def columns_in(order: list[int]) -> Callable[..., torch.Tensor]:
    def fn(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        parts = torch.chunk(all_gather(w), 4)
        return x @ torch.cat([parts[index] for index in order], 1)

    return fn


def scattered_in(order: list[int]) -> Callable[..., torch.Tensor]:
    def fn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        parts = torch.chunk(a @ b, 4, 1)
        return reduce_scatter(torch.cat([parts[index] for index in order]))

    return fn


def scattered_bias(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    return scatter_dim(torch.addmm(c, a, b), 1)


def gathered_bias(w: torch.Tensor, x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.addmm(b, x, all_gather(w).t())


def test_golden_a_bias_of_a_gathered_weight_is_a_column() -> None:
    module = assert_same_on_all_ranks(gathered_bias, SHARD, X, torch.empty(32), fused=1)
    assert absorb_epilogues(module.graph, options=Options()) == 1
    expecttest.assert_expected_inline(
        text(module.graph),
        """\
w_1 [8, 16]
x_1 [5, 16]
b_1 [32]
transposed [16, 5] = aten.permute(x_1, [1, 0])
column [32, 1] = aten.unsqueeze(b_1, 1)
all_gather_matmul_1 = ditron.all_gather_matmul([w_1, transposed, column], "gather_dim=0 world_size=4 group_name=0 site='' trials num_weights=1 num_extras=1 epilogue='mm0 + column(x0)'", None)
getitem_1 [32, 5] = all_gather_matmul_1[0]
transposed_1 [5, 32] = aten.permute(getitem_1, [1, 0])
return transposed_1
""",
    )


@pytest.mark.parametrize("bias", [torch.empty(24), torch.empty(1, 24)], ids=["row", "matrix"])
def test_a_bias_of_scattered_columns_is_a_column(bias: torch.Tensor) -> None:
    assert_same_on_all_ranks(scattered_bias, X, B, bias, fused=1)


def test_golden_a_bias_of_scattered_columns() -> None:
    module = traced(scattered_bias, X, B, torch.empty(24))
    fuse(module)
    expecttest.assert_expected_inline(
        text(module.graph),
        """\
a_1 [5, 16]
b_1 [16, 24]
c_1 [24]
transposed [24, 16] = aten.permute(b_1, [1, 0])
transposed_1 [16, 5] = aten.permute(a_1, [1, 0])
column [24, 1] = aten.unsqueeze(c_1, 1)
matmul_reduce_scatter = ditron.matmul_reduce_scatter([transposed, transposed_1, column], "scatter_dim=0 reduce_op=sum world_size=4 group_name=0 site='' trials has_bias", None)
getitem_4 [6, 5] = matmul_reduce_scatter[0]
transposed_2 [5, 6] = aten.permute(getitem_4, [1, 0])
return transposed_2
""",
    )


GUARDS: list[Any] = [
    pytest.param("chunks_permuted", columns_in([1, 0, 2, 3]), (COLUMNS, X), id="columns_permuted"),
    pytest.param("chunks_permuted", columns_in([0, 0, 2, 3]), (COLUMNS, X), id="columns_repeated"),
    pytest.param("chunks_partial", columns_in([0, 1, 2]), (COLUMNS, X), id="columns_partial"),
    pytest.param(
        "layout", lambda w, x: x @ all_gather(w).reshape(16, 32).t(), (SHARD, torch.empty(3, 32)), id="other_rows"
    ),
    pytest.param("uneven_shards", lambda w, x: x @ all_gather(w)[:30].t(), (SHARD, X), id="uneven"),
    pytest.param("cast_between", lambda w, x: x @ all_gather(w).float().t(), (SHARD.bfloat16(), X), id="widening_cast"),
    pytest.param("operand_depends", lambda w: (g := all_gather(w)) @ g.t(), (SHARD,), id="depends"),
    pytest.param(
        "bias", lambda a, b, c: scatter_dim(torch.addmm(c, a, b), 1), (X, B, torch.empty(len(X), 24)), id="matrix_added"
    ),
    pytest.param("chunks_permuted", scattered_in([1, 0, 2, 3]), (X, B), id="scatter_permuted"),
    pytest.param("chunks_permuted", scattered_in([0, 0, 2, 3]), (X, B), id="scatter_repeated"),
    pytest.param("layout", lambda a, b: scatter_dim((a @ b).view(5, 3, 8), 2), (X, B), id="scatter_of_divided_columns"),
    pytest.param("layout", lambda a, b: scatter_dim((a @ b).t(), 1), (SHARD, B), id="scatter_of_transposed"),
]


@pytest.mark.parametrize(("code", "fn", "args"), GUARDS)
def test_guard(code: str, fn: Callable[..., Any], args: tuple[torch.Tensor, ...]) -> None:
    module = traced(fn, *args)
    normalize_collectives(module.graph, options=Options())
    before = text(module.graph)
    assert fuse(module) == 0
    assert text(module.graph) == before
    assert reasons(module) == [code]


def test_what_is_kept_with_dynamic_sizes_has_the_strides_it_had() -> None:
    """Inductor's backward would take the strides of the first call for those of all calls."""

    def fn(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        kept = scatter_dim(x @ w, 2)
        return kept, kept.relu()

    for dynamic in (False, True):
        module = traced(fn, torch.empty(2, 5, 16), B, dynamic=dynamic)
        assert fuse(module) == 1
        kept = module.graph.output_node().args[0][0]
        value: torch.Tensor = kept.meta["val"]
        assert value.is_contiguous() == dynamic, value.stride()
