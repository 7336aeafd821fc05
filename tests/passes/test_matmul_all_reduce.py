"""matmul_all_reduce: what it fuses, into which graph, and every guard that keeps it from fusing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch

from ditron_inductor.options import Options
from ditron_inductor.passes.fuse.matmul_all_reduce import Match, find_matmul_all_reduce, matmul_all_reduce
from ditron_inductor.passes.graph.collectives import ALL_REDUCE, collectives
from tests.passes.graphs import (
    all_reduce,
    assert_no_new_guards,
    assert_same_on_all_ranks,
    fuse,
    reasons,
    text,
    traced,
)

pytestmark = pytest.mark.usefixtures("group")

A = torch.empty(32, 16)
A3 = torch.empty(2, 32, 16)
B = torch.empty(16, 24)
BIAS = torch.empty(24)


def plain(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return all_reduce(a @ b)


def test_finder_reads_the_product() -> None:
    module = traced(lambda a, b: all_reduce((a @ b).view(2, 16, 24), "avg"), A, B)
    (node,) = collectives(module.graph, ALL_REDUCE)
    match = find_matmul_all_reduce(node)
    assert isinstance(match, Match)
    assert (len(match.product.views), match.collective.reduce_op, match.collective.world_size) == (1, "avg", 4)


def test_golden_two_dimensions() -> None:
    module = traced(plain, A, B)
    fuse(module)
    expecttest.assert_expected_inline(
        text(module.graph),
        """\
a_1 [32, 16]
b_1 [16, 24]
matmul_all_reduce = ditron.matmul_all_reduce([a_1, b_1], "reduce_op=sum world_size=4 group_name=0 site='' trials", None)
getitem [32, 24] = matmul_all_reduce[0]
return getitem
""",
    )


def test_golden_views_are_kept_behind_the_call() -> None:
    def fn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return all_reduce((a @ b).view(2, 32, 4, 6).unsqueeze(0), "avg").squeeze(0).transpose(1, 2) + 1

    module = traced(fn, A3, B)
    fuse(module)
    expecttest.assert_expected_inline(
        text(module.graph),
        """\
a_1 [2, 32, 16]
b_1 [16, 24]
view [64, 16] = aten.view(a_1, [64, 16])
matmul_all_reduce = ditron.matmul_all_reduce([view, b_1], "reduce_op=avg world_size=4 group_name=0 site='' trials", None)
getitem [64, 24] = matmul_all_reduce[0]
_unsafe_view [2, 32, 24] = aten.reshape(getitem, [2, 32, 24])
view_1 [2, 32, 4, 6] = aten.reshape(_unsafe_view, [2, 32, 4, 6])
unsqueeze [1, 2, 32, 4, 6] = aten.unsqueeze(view_1, 0)
squeeze [2, 32, 4, 6] = aten.squeeze.dim(unsqueeze, 0)
transpose [2, 4, 32, 6] = aten.transpose.int(squeeze, 1, 2)
add [2, 4, 32, 6] = aten.add.Tensor(transpose, 1)
return add
""",
    )


@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("shape", [(32, 16), (1, 16), (2, 32, 16), (1, 5, 3, 16)])
def test_fuses_every_number_of_dimensions(op: str, shape: tuple[int, ...]) -> None:
    after = assert_same_on_all_ranks(lambda a, b: all_reduce(a @ b, op), torch.empty(shape), B, fused=1)
    assert not list(collectives(after.graph, ALL_REDUCE))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fuses_half_precision(dtype: torch.dtype) -> None:
    module = traced(plain, A3.to(dtype), B.to(dtype))
    assert fuse(module) == 1


def test_the_bias_after_the_reduction_stays() -> None:
    assert_same_on_all_ranks(lambda a, b, c: all_reduce(a @ b) + c, A3, B, BIAS, fused=1)


def test_result_used_several_times() -> None:
    assert_same_on_all_ranks(lambda a, b: ((y := all_reduce(a @ b)).sin(), y, y.view(-1)), A3, B, fused=1)


def test_the_call_stands_where_the_collective_stood() -> None:
    def fn(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        product = (a @ b).view(2, 32, 24)
        other = all_reduce(a.sin())
        return all_reduce(product), other

    module = traced(fn, A3, B)
    assert fuse(module) == 1
    lines = text(module.graph)
    assert lines.index("c10d_functional.all_reduce") < lines.index("ditron.matmul_all_reduce")


def test_dynamic_shapes_are_fused_without_a_guard() -> None:
    module = traced(lambda a, b: all_reduce((a @ b).reshape(-1, b.shape[1])), A3, B, dynamic=True)
    with assert_no_new_guards(module):
        assert fuse(module) == 1


def test_is_idempotent() -> None:
    module = traced(plain, A3, B)
    fuse(module)
    before = text(module.graph)
    assert matmul_all_reduce(module.graph, options=Options()) == 0
    assert text(module.graph) == before


def product_used(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return all_reduce(product := a @ b), product.sin()


def view_used(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return all_reduce(view := (a @ b).view(-1, 12)), view.sin()


GUARDS: list[Any] = [
    pytest.param("intermediate_used", product_used, (A, B), id="product_used"),
    pytest.param("intermediate_used", view_used, (A, B), id="view_used"),
    pytest.param("cast_between", lambda a, b: all_reduce((a @ b).bfloat16()), (A, B), id="cast"),
    pytest.param("cast_between", lambda a, b: all_reduce((a @ b).view(torch.int32)), (A, B), id="dtype_view"),
    pytest.param("batched_matmul", lambda a, b: all_reduce(torch.bmm(a, b)), (A3, torch.empty(2, 16, 5)), id="bmm"),
    pytest.param("layout", lambda a, b: all_reduce((a @ b).t()), (A, B), id="transposed"),
    pytest.param("pointwise_between", lambda a, b: all_reduce((a @ b).relu()), (A, B), id="pointwise"),
    pytest.param("reduce_op", lambda a, b: all_reduce(a @ b, "max"), (A, B), id="max"),
    pytest.param("reduce_op", lambda a, b: all_reduce(a @ b, "product"), (A, B), id="product"),
    pytest.param("dtype", lambda a, b: all_reduce(a @ b), (A.double(), B.double()), id="dtype"),
    pytest.param("no_matmul", lambda a: all_reduce(a.relu()), (A,), id="no_matmul"),
]


@pytest.mark.parametrize(("code", "fn", "args"), GUARDS)
def test_guard(code: str, fn: Callable[..., Any], args: tuple[torch.Tensor, ...]) -> None:
    module = traced(fn, *args)
    before = text(module.graph)
    assert matmul_all_reduce(module.graph, options=Options()) == 0
    assert text(module.graph) == before
    assert reasons(module) == [code]


def test_disabled_by_option() -> None:
    module = traced(plain, A3, B)
    assert fuse(module, Options(fusions=("all_gather_matmul",))) == 0
    assert reasons(module) == ["disabled"]
