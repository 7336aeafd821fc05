"""A dimension that is moved to the front, scattered and moved back is scattered where it stands, if that is fused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch

from ditron_inductor.options import Options
from ditron_inductor.passes.normalize.normalize_collectives import normalize_collectives
from tests.passes.graphs import (
    all_gather,
    assert_no_new_guards,
    assert_same_on_all_ranks,
    compiled_graphs,
    fuse,
    reasons,
    reduce_scatter,
    scatter_dim,
    text,
    traced,
)

pytestmark = pytest.mark.usefixtures("group")

X = torch.empty(2, 8, 16)
W = torch.empty(16, 24)
FLAT = torch.empty(16, 16)


def moved(y: torch.Tensor, dim: int = 1, op: str = "sum") -> torch.Tensor:
    """The scatter of `dim`, by one of dimension 0."""
    return reduce_scatter(y.movedim(dim, 0).contiguous(), op).movedim(0, dim)


def test_golden() -> None:
    module = traced(lambda x, w: moved(x @ w) + 1, X, W)
    assert fuse(module) == 1
    expecttest.assert_expected_inline(
        text(module.graph),
        """\
x_1 [2, 8, 16]
w_1 [16, 24]
matmul_reduce_scatter = ditron.matmul_reduce_scatter([x_1, w_1], "scatter_dim=1 reduce_op=sum world_size=4 group_name=0 site='' trials", None)
getitem_4 [2, 2, 24] = matmul_reduce_scatter[0]
add [2, 2, 24] = aten.add.Tensor(getitem_4, 1)
return add
""",
    )


def test_golden_result_used_as_it_was_scattered() -> None:
    """cumsum may ask for the strides that the collective's result had."""
    module = traced(lambda x, w: reduce_scatter((x @ w).transpose(0, 1)).cumsum(0), X, W)
    assert fuse(module) == 1
    expecttest.assert_expected_inline(
        text(module.graph),
        """\
x_1 [2, 8, 16]
w_1 [16, 24]
matmul_reduce_scatter = ditron.matmul_reduce_scatter([x_1, w_1], "scatter_dim=1 reduce_op=sum world_size=4 group_name=0 site='' trials", None)
getitem_4 [2, 2, 24] = matmul_reduce_scatter[0]
permute_default [2, 2, 24] = aten.permute(getitem_4, [1, 0, 2])
clone_default [2, 2, 24] = aten.clone(permute_default, memory_format=torch.contiguous_format)
cumsum [2, 2, 24] = aten.cumsum(clone_default, 0)
return cumsum
""",
    )


FUSED: dict[str, Callable[..., Any]] = {
    "moved": lambda x, w: moved(x @ w),
    "average": lambda x, w: moved(x @ w, op="avg") * 2,
    "last": lambda x, w: moved(x @ w, 2).sin(),
    "columns_of_four": lambda x, w: moved((x @ w).view(2, 4, 2, 24), 3).sin(),
    "inner_of_four": lambda x, w: moved((x @ w).view(2, 2, 4, 24), 2),
    "factor": lambda x, w: moved((x @ w) * 0.5),
    "sum": lambda x, w: moved(x @ w + x.sin() @ (w + 1)),
    "result_returned": lambda x, w: ((y := reduce_scatter((x @ w).transpose(0, 1))), y.transpose(0, 1).sin()),
    "result_flattened": lambda x, w: reduce_scatter((x @ w).transpose(0, 1)).reshape(4, 24).sin(),
    "result_gathered": lambda x, w: all_gather(reduce_scatter((x @ w).transpose(0, 1))),
    "result_multiplied": lambda x, w: reduce_scatter((x @ w).transpose(0, 1)).reshape(4, 24) @ w.t(),
    "moved_elsewhere": lambda x, w: reduce_scatter((x @ w).transpose(0, 1)).permute(2, 1, 0).sin(),
}


@pytest.mark.parametrize("fn", FUSED.values(), ids=FUSED)
def test_fused(fn: Callable[..., Any]) -> None:
    assert_same_on_all_ranks(fn, X, W, fused=1)


def test_matrices() -> None:
    assert_same_on_all_ranks(lambda x, w: moved(x @ w), FLAT, W, fused=1)


def test_two_scatters() -> None:
    """One in each form."""
    assert_same_on_all_ranks(lambda x, w: moved(x @ w) + scatter_dim(x.sin() @ (w + 2), 1), X, W, fused=2)


def test_one_batch_needs_no_copy() -> None:
    assert_same_on_all_ranks(lambda x, w: moved(x @ w), X[:1], W, fused=1)


GUARDS: list[Any] = [
    pytest.param("layout", lambda x, w: reduce_scatter((x @ w).permute(1, 2, 0).contiguous()), X, id="others_move"),
    pytest.param("layout", lambda x, w: reduce_scatter((x @ w).permute(2, 1, 0).contiguous()), X, id="reversed"),
    pytest.param("layout", lambda x, w: ((y := x @ w).sin(), moved(y)), X, id="product_used"),
    pytest.param("layout", lambda x, w: ((y := (x @ w).movedim(1, 0).contiguous()), reduce_scatter(y)), X, id="used"),
    pytest.param("reduce_op", lambda x, w: moved(x @ w, op="max"), X, id="max"),
    pytest.param("no_matmul", lambda x, w: moved(x.sin()), X, id="no_matmul"),
    pytest.param("no_matmul", lambda x, w: moved(x + 1), X, id="sum_without_matmul"),
]


@pytest.mark.parametrize(("code", "fn", "x"), GUARDS)
def test_left_alone(code: str, fn: Callable[..., Any], x: torch.Tensor) -> None:
    module = traced(fn, x, W)
    normalize_collectives(module.graph, options=Options())
    before = text(module.graph)
    assert fuse(module) == 0
    assert text(module.graph) == before
    assert reasons(module) == [code]


def test_dynamic_length_is_left_alone() -> None:
    module = traced(lambda x, w: moved(x @ w), X, W, dynamic=True)
    with assert_no_new_guards(module):
        assert fuse(module) == 0
    assert reasons(module) == ["layout"]


def test_dynamic_batch() -> None:
    x = torch.empty(3, 8, 16)
    torch._dynamo.mark_dynamic(x, 0)
    (module,) = compiled_graphs(lambda x, w: moved(x @ w), x, W)
    with assert_no_new_guards(module):
        assert fuse(module) == 1


def test_disabled() -> None:
    module = traced(lambda x, w: moved(x @ w), X, W)
    assert fuse(module, Options(fusions=())) == 0
