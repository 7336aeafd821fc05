"""Sums of matmuls and of biased matmuls in front of a reduction: what is fused, into which graph, and what is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.nn import functional as nn

from ditron_inductor.task.nodes import MAX_PRODUCTS
from tests.passes.graphs import (
    all_gather,
    all_reduce,
    assert_no_new_guards,
    assert_same_on_all_ranks,
    compiled_graphs,
    fuse,
    only_task,
    reasons,
    reduce_scatter,
    scatter_dim,
    text,
    traced,
)

pytestmark = pytest.mark.usefixtures("group")

aten = torch.ops.aten
A, C = torch.empty(32, 16), torch.empty(32, 5)
A3, C3 = torch.empty(2, 32, 16), torch.empty(2, 32, 5)
B, D = torch.empty(16, 24), torch.empty(5, 24)
ROW, COLUMN = torch.empty(24), torch.empty(32, 1)
REDUCTIONS: dict[str, Callable[..., torch.Tensor]] = {"scatter": reduce_scatter, "reduce": all_reduce}
either = pytest.mark.parametrize("reduced", REDUCTIONS.values(), ids=REDUCTIONS)


def test_golden_backward_of_queries_keys_and_values() -> None:
    """One gather for all three, keys and values narrower, as autograd writes the backward of it."""

    def attention(x: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        assert dist.group.WORLD is not None
        whole = funcol.all_gather_tensor_autograd(x, 1, dist.group.WORLD)
        queries, keys, values = nn.linear(whole, q), nn.linear(whole, k), nn.linear(whole, v)
        scores = torch.softmax(queries.view(2, 16, 2, 8).sum(2) @ keys.transpose(1, 2), -1)
        return (scores @ values).tanh()

    weights = [torch.randn(rows, 12).requires_grad_() for rows in (16, 8, 8)]
    _, backward = compiled_graphs(attention, torch.randn(2, 4, 12).requires_grad_(), *weights)
    before = [node.name for node in backward.graph.nodes if node.target is aten.mm.default]
    assert fuse(backward) == 1
    lines = text(backward.graph).splitlines()
    left = [node.name for node in backward.graph.nodes if node.target is aten.mm.default]
    assert len(before) == 6 and len(left) == 3
    (call,) = [line for line in lines if "ditron." in line]
    expecttest.assert_expected_inline(
        call,
        """matmul_reduce_scatter = ditron.matmul_reduce_scatter([bmm_2, clone_1, view_19, permute_11, permute_15, permute_19], "scatter_dim=1 reduce_op=sum world_size=4 group_name=0 site='' trials num_products=3", None)""",
    )


def test_golden_sum_and_bias_of_a_scatter() -> None:
    def fn(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        first = torch.addmm(row, a.view(64, 16), b).view(2, 32, 24)
        return scatter_dim(first + (c.view(64, 5) @ d).view(2, 32, 24), 1)

    module = traced(fn, A3, B, C3, D, ROW)
    fuse(module)
    expecttest.assert_expected_inline(
        text(module.graph),
        """\
a_1 [2, 32, 16]
b_1 [16, 24]
c_1 [2, 32, 5]
d_1 [5, 24]
row_1 [24]
matmul_reduce_scatter = ditron.matmul_reduce_scatter([a_1, c_1, b_1, d_1, row_1], "scatter_dim=1 reduce_op=sum world_size=4 group_name=0 site='' trials num_products=2 has_bias", None)
getitem_4 [2, 8, 24] = matmul_reduce_scatter[0]
return getitem_4
""",
    )


def test_golden_sum_of_a_reduce() -> None:
    def fn(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        total = row.view(1, 24) + (c @ d).view(2, 32, 24) + (a @ b).view(2, 32, 24)
        return all_reduce(total.view(2, 32, 4, 6), "avg").transpose(1, 2)

    module = traced(fn, A3.view(64, 16), B, C3.view(64, 5), D, ROW)
    fuse(module)
    expecttest.assert_expected_inline(
        text(module.graph),
        """\
a_1 [64, 16]
b_1 [16, 24]
c_1 [64, 5]
d_1 [5, 24]
row_1 [24]
view [1, 24] = aten.view(row_1, [1, 24])
row [24] = aten.reshape(view, [-1])
matmul_all_reduce = ditron.matmul_all_reduce([c_1, a_1, d_1, b_1, row], "reduce_op=avg world_size=4 group_name=0 site='' trials num_products=2 has_bias", None)
getitem [64, 24] = matmul_all_reduce[0]
view_1 [2, 32, 24] = aten.view(getitem, [2, 32, 24])
view_3 [2, 32, 4, 6] = aten.reshape(view_1, [2, 32, 4, 6])
transpose [2, 4, 32, 6] = aten.transpose.int(view_3, 1, 2)
return transpose
""",
    )


def many(a: torch.Tensor, b: torch.Tensor, count: int) -> torch.Tensor:
    total = a @ b
    for factor in range(2, count + 1):
        total = total + (a * factor) @ b
    return total


SUMS: dict[str, Callable[..., torch.Tensor]] = {
    "row": lambda a, b, c, d, row: torch.addmm(row, a, b),
    "row_of_two_dimensions": lambda a, b, c, d, row: torch.addmm(row.view(1, 24), a, b),
    "row_behind": lambda a, b, c, d, row: a @ b + row,
    "row_before": lambda a, b, c, d, row: row + a @ b,
    "divided_row": lambda a, b, c, d, row: torch.addmm(row / 4, a, b),
    "two": lambda a, b, c, d, row: a @ b + c @ d,
    "two_with_one_weight": lambda a, b, c, d, row: a @ b + (a * 2) @ b,
    "two_of_one_operand": lambda a, b, c, d, row: a @ b + a @ (b * 2),
    "addmm_of_a_product": lambda a, b, c, d, row: torch.addmm(a @ b, c, d),
    "addmm_of_an_addmm": lambda a, b, c, d, row: torch.addmm(torch.addmm(row, a, b), c, d),
    "three": lambda a, b, c, d, row: (a @ b + c @ d) + (a * 2) @ b,
    "three_from_the_right": lambda a, b, c, d, row: a @ b + (c @ d + (a * 2) @ b + row),
    "behind_views": lambda a, b, c, d, row: (
        ((a @ b).view(2, 16, 24) + (c @ d).view(2, 16, 24)).view(1, 32, 24).squeeze(0)
    ),
    "as_many_as_there_may_be": lambda a, b, c, d, row: many(a, b, MAX_PRODUCTS - 1) + c @ d,
}


@either
@pytest.mark.parametrize("fn", SUMS.values(), ids=SUMS)
def test_fuses(reduced: Callable[..., torch.Tensor], fn: Callable[..., torch.Tensor]) -> None:
    after = assert_same_on_all_ranks(lambda *args: reduced(fn(*args)), A, B, C, D, ROW, fused=1)
    assert not after.graph.find_nodes(op="call_function", target=aten.mm.default)
    assert not after.graph.find_nodes(op="call_function", target=aten.add.Tensor)


@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("dim", [0, 1])
def test_fuses_sums_of_more_dimensions(dim: int, op: str) -> None:
    a, c = (torch.empty(8, 16, 16), torch.empty(8, 16, 5)) if dim == 0 else (A3, C3)
    assert_same_on_all_ranks(
        lambda a, b, c, d, row: scatter_dim(a @ b + c @ d + row, dim, op), a, B, c, D, ROW, fused=1
    )
    assert_same_on_all_ranks(lambda a, b, c, d, row: all_reduce(a @ b + c @ d + row, op), a, B, c, D, ROW, fused=1)


def test_views_of_several_shapes_before_a_scatter() -> None:
    def fn(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
        return scatter_dim((a @ b).view(2, 16, 24) + (c.view(2, 16, 5) @ d), 1)

    after = assert_same_on_all_ranks(fn, A, B, C, D, fused=1)
    assert "rows [2, 16, 16] = aten.reshape(a_1, [2, 16, 16])" in text(after.graph)


@either
@pytest.mark.parametrize("rows", [1, 3])
def test_few_rows(reduced: Callable[..., torch.Tensor], rows: int) -> None:
    """With one row in all a row of any origin is a bias."""
    count = rows * (4 if reduced is reduce_scatter else 1)
    shapes = [(count, 16), (16, 24), (1, 24)]
    args = [torch.empty(shape) for shape in shapes]
    assert_same_on_all_ranks(lambda a, b, row: reduced(a @ b + row.relu()), *args, fused=1)


@either
def test_dynamic_shapes(reduced: Callable[..., torch.Tensor]) -> None:
    def fn(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        return reduced(torch.addmm(row, torch.cat([a, a, a, a]), b) + torch.cat([c, c, c, c]) @ d)

    module = traced(fn, torch.empty(7, 16), B, torch.empty(7, 5), D, ROW, dynamic=True)
    with assert_no_new_guards(module):
        assert fuse(module) == 1


def test_dynamic_chunks_of_a_sum() -> None:
    def fn(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
        return scatter_dim(a @ b + c @ d, 1)

    module = traced(fn, A3, B, C3, D, dynamic=True)
    with assert_no_new_guards(module):
        assert fuse(module) == 1


@either
def test_a_row_of_any_origin(reduced: Callable[..., torch.Tensor]) -> None:
    assert_same_on_all_ranks(lambda a, b, c, d: reduced(a @ b + c[:1] @ d), A, B, C, D, fused=1)


def test_two_biases() -> None:
    """Of parallel blocks; their sum is added."""
    after = assert_same_on_all_ranks(
        lambda a, b, c, d, row, col: all_reduce(torch.addmm(row, a, b) + torch.addmm(row.sin(), c, d)),
        *(A, B, C, D, ROW, COLUMN),
        fused=1,
    )
    task, given = only_task(after, "matmul_all_reduce")
    assert given["b"] == ["b_1", "d_1"] and given["bias"] == "biases" and task.reduce_op == "sum"
    other = torch.empty(1, 24)
    assert_same_on_all_ranks(
        lambda a, b, row, other: reduce_scatter(torch.addmm(row, a, b) + other), A, B, ROW, other, fused=1
    )


def test_a_bias_may_be_used_elsewhere() -> None:
    after = assert_same_on_all_ranks(
        lambda a, b, row: (all_reduce(torch.addmm(r := row.relu(), a, b)), r + 1), A, B, ROW, fused=1
    )
    task, given = only_task(after, "matmul_all_reduce")
    assert given["bias"] == "relu" and task.reduce_op == "sum"


def test_metadata_is_copied_without_eager_inputs() -> None:
    module = traced(lambda a, b, row: reduce_scatter(a @ b + row.view(1, 24)), A, B, ROW)
    for node in module.graph.nodes:
        node.meta |= {"eager_input_vals": ((), {}), "recompute": "kept"}
    assert fuse(module) == 1
    for node in module.graph.nodes:
        new = "ditron" in str(node.target) or node.name.startswith(("getitem", "row_"))
        assert not new or node.op == "placeholder" or "eager_input_vals" not in node.meta


def used(x: torch.Tensor, kept: list[torch.Tensor]) -> torch.Tensor:
    kept.append(x.sin())
    return x


def with_used(fn: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """fn(reduced, keep, *tensors), and what it keeps."""

    def run(reduced: Callable[..., torch.Tensor], *args: torch.Tensor) -> Any:
        kept: list[torch.Tensor] = []
        return reduced(fn(lambda x: used(x, kept), *args)), kept

    return run


GUARDS: dict[str, tuple[str, Callable[..., Any]]] = {
    "alpha": ("pointwise_between", lambda r, a, b, c, d, row, col: r(torch.add(a @ b, c @ d, alpha=2))),
    "alpha_of_a_row": ("pointwise_between", lambda r, a, b, c, d, row, col: r(torch.add(a @ b, row, alpha=2))),
    "addmm_alpha": ("pointwise_between", lambda r, a, b, c, d, row, col: r(torch.addmm(row, a, b, alpha=2))),
    "addmm_beta": ("pointwise_between", lambda r, a, b, c, d, row, col: r(torch.addmm(a @ b, c, d, beta=0.5))),
    "column": ("bias", lambda r, a, b, c, d, row, col: r(a @ b + col)),
    "column_in_addmm": ("bias", lambda r, a, b, c, d, row, col: r(torch.addmm(col, a, b))),
    "number": ("bias", lambda r, a, b, c, d, row, col: r(a @ b + 1.5)),
    "scalar": ("bias", lambda r, a, b, c, d, row, col: r(a @ b + row[0])),
    "residual": ("bias", lambda r, a, b, c, d, row, col: r(a @ b + (col * row))),
    "residual_in_addmm": ("bias", lambda r, a, b, c, d, row, col: r(torch.addmm(col * row, a, b))),
    "residual_of_a_sum": ("bias", lambda r, a, b, c, d, row, col: r(a @ b + c @ d + (col * row))),
    "broadcast_product": ("sum_of_matmuls", lambda r, a, b, c, d, row, col: r(a @ b + c @ d[:, :1])),
    "too_many": (
        "sum_of_matmuls",
        lambda r, a, b, c, d, row, col: r(many(a, b, MAX_PRODUCTS) + c @ d),
    ),
    "product_used": ("intermediate_used", with_used(lambda keep, a, b, c, d, row, col: keep(a @ b) + c @ d)),
    "addmm_used": (
        "intermediate_used",
        with_used(lambda keep, a, b, c, d, row, col: keep(torch.addmm(row, a, b)) + c @ d),
    ),
    "sum_used": ("intermediate_used", with_used(lambda keep, a, b, c, d, row, col: keep(a @ b + c @ d))),
    "view_used": (
        "intermediate_used",
        with_used(lambda keep, a, b, c, d, row, col: keep((a @ b).view(2, 16, 24)).view(32, 24) + c @ d),
    ),
    "added_to_itself": ("intermediate_used", lambda r, a, b, c, d, row, col: r((p := a @ b) + p)),
    "cast": ("cast_between", lambda r, a, b, c, d, row, col: r(a @ b + (c.half() @ d.half()).float())),
    "mixed_row": ("mixed_dtypes", lambda r, a, b, c, d, row, col: r((a.half() @ b.half()) + row)),
    "mixed": ("mixed_dtypes", lambda r, a, b, c, d, row, col: r((a.half() @ b.half()) + c @ d)),
    "dtype": ("dtype", lambda r, a, b, c, d, row, col: r(torch.addmm(row.double(), a.double(), b.double()))),
    "relu": ("pointwise_between", lambda r, a, b, c, d, row, col: r(a @ b + (c @ d).relu())),
    "transposed": ("layout", lambda r, a, b, c, d, row, col: r((a @ b).view(24, 32) + (b.t() @ a.t()))),
    "heads": ("layout", lambda r, a, b, c, d, row, col: r((a @ b).view(32, 4, 6) + row[:6]).view(-1, 24)),
    "batched": (
        "batched_matmul",
        lambda r, a, b, c, d, row, col: r(a @ b + torch.bmm(c.view(4, 8, 5), d.expand(4, 5, 24) + 1).view(32, 24)),
    ),
    "no_matmul": ("no_matmul", lambda r, a, b, c, d, row, col: r(col * row + col)),
}


@either
@pytest.mark.parametrize(("code", "fn"), GUARDS.values(), ids=GUARDS)
def test_guard(reduced: Callable[..., torch.Tensor], code: str, fn: Callable[..., Any]) -> None:
    module = traced(lambda *args: fn(reduced, *args), A, B, C, D, ROW, COLUMN)
    assert fuse(module) == 0
    assert reasons(module) == [code]


def test_a_product_that_a_gather_has_taken() -> None:
    module = traced(lambda a, b, c, d: reduce_scatter(all_gather(a) @ b + c @ d), torch.empty(8, 16), B, C, D)
    assert fuse(module) == 1
    assert reasons(module) == ["already_fused"]
