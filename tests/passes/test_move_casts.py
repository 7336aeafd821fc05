"""Narrowing casts behind a gather: moved in front of it where a fusion follows, and only there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

from ditron_inductor.options import Options
from ditron_inductor.passes.normalize.normalize_collectives import normalize_collectives
from tests.passes.graphs import (
    all_gather,
    all_reduce,
    assert_no_new_guards,
    assert_same_on_all_ranks,
    compiled_graphs,
    fuse,
    gather_dim,
    reasons,
    text,
    traced,
)

pytestmark = pytest.mark.usefixtures("group")

X = torch.empty(2, 8, 16)
W = torch.empty(16, 24, dtype=torch.bfloat16)


def narrow(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.bfloat16)


def test_golden() -> None:
    module = traced(lambda x, w: narrow(gather_dim(x, 1)) @ w, X, W)
    normalize_collectives(module.graph, options=Options())
    expecttest.assert_expected_inline(
        text(module.graph),
        """\
x_1 [2, 8, 16]
w_1 [16, 24]
all_gather_into_tensor [8, 8, 16] = _c10d_functional.all_gather_into_tensor(x_1, 4, '0')
wait_tensor [8, 8, 16] = _c10d_functional.wait_tensor(all_gather_into_tensor)
split = aten.split.Tensor(wait_tensor, 2)
getitem [2, 8, 16] = split[0]
getitem_1 [2, 8, 16] = split[1]
getitem_2 [2, 8, 16] = split[2]
getitem_3 [2, 8, 16] = split[3]
cat [2, 32, 16] = aten.cat([getitem, getitem_1, getitem_2, getitem_3], 1)
_to_copy [2, 32, 16] = aten._to_copy(cat, dtype=torch.bfloat16)
view [64, 16] = aten.view(_to_copy, [64, 16])
mm [64, 24] = aten.mm(view, w_1)
_unsafe_view [2, 32, 24] = aten._unsafe_view(mm, [2, 32, 24])
return _unsafe_view
""",
    )
    fuse(module)
    expecttest.assert_expected_inline(
        text(module.graph),
        """\
x_1 [2, 8, 16]
w_1 [16, 24]
_to_copy_default [2, 8, 16] = aten._to_copy(x_1, dtype=torch.bfloat16)
all_gather_matmul = ditron.all_gather_matmul([_to_copy_default, w_1], "gather_dim=1 world_size=4 group_name=0 site='' trials num_weights=1", None)
getitem_4 [64, 24] = all_gather_matmul[0]
_unsafe_view [2, 32, 24] = aten._unsafe_view(getitem_4, [2, 32, 24])
return _unsafe_view
""",
    )


FUSED: dict[str, Callable[..., Any]] = {
    "dim_0": lambda x, w: narrow(all_gather(x)) @ w,
    "dim_1": lambda x, w: narrow(gather_dim(x, 1)) @ w,
    "view_before": lambda x, w: narrow(gather_dim(x, 1).view(64, 16)) @ w,
    "used_narrow": lambda x, w: ((g := narrow(gather_dim(x, 1))) @ w, g.sin()),
    "cast_twice": lambda x, w: narrow(g := gather_dim(x, 1)) @ w + narrow(g) @ w,
    "einsum": lambda x, w: torch.einsum("bsk,kn->bsn", narrow(gather_dim(x, 1)), w),
    "equal_gathers": lambda x, w: narrow(gather_dim(x, 1)) @ w + narrow(gather_dim(x, 1)) @ w,
}


@pytest.mark.parametrize("fn", FUSED.values(), ids=FUSED)
def test_fused(fn: Callable[..., Any]) -> None:
    after = assert_same_on_all_ranks(fn, X, W, fused=1)
    assert text(after.graph).count("aten._to_copy(") == 1


GUARDS: list[Any] = [
    pytest.param("cast_between", lambda x, w: (narrow(g := gather_dim(x, 1)) @ w, g + 1), X, W, id="used_wide"),
    pytest.param("cast_between", lambda x, w: (narrow(g := all_gather(x)) @ w, g.half()), X, W, id="two_dtypes"),
    pytest.param("cast_between", lambda x, w: gather_dim(x, 1).float() @ w, narrow(X), W.float(), id="widens"),
    pytest.param("cast_between", lambda x, w: all_reduce(narrow(x @ w)), X, W.float(), id="reduction_narrow"),
    pytest.param("cast_between", lambda x, w: all_reduce((x @ w).float()), narrow(X), W, id="reduction_wide"),
    pytest.param("no_matmul", lambda x, w: narrow(gather_dim(x, 1)).sin(), X, W, id="no_matmul"),
]


@pytest.mark.parametrize(("code", "fn", "x", "w"), GUARDS)
def test_left_alone(code: str, fn: Callable[..., Any], x: torch.Tensor, w: torch.Tensor) -> None:
    module = traced(fn, x, w)
    normalize_collectives(module.graph, options=Options())
    before = text(module.graph)
    assert fuse(module) == 0
    assert text(module.graph) == before
    assert reasons(module) == [code]


def test_a_gathered_weight_whose_rows_are_contracted() -> None:
    module = traced(lambda x, w: narrow(x) @ narrow(all_gather(w)), torch.empty(8, 64), torch.empty(16, 24))
    assert fuse(module) == 0
    assert reasons(module) == ["cast_between"]


def test_dynamic_shapes() -> None:
    module = traced(lambda x, w: narrow(gather_dim(x, 1)) @ w, X, W, dynamic=True)
    with assert_no_new_guards(module):
        assert fuse(module) == 1


def test_training() -> None:
    """The gradient is widened before it is reduced: that sum stays in fp32."""

    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        group = dist.group.WORLD
        assert group is not None
        return narrow(funcol.all_gather_tensor_autograd(x, 1, group)) @ w

    x, w = torch.randn(2, 8, 16, requires_grad=True), torch.randn(16, 24, dtype=torch.bfloat16, requires_grad=True)
    forward, backward = compiled_graphs(fn, x, w)
    assert (fuse(forward), fuse(backward)) == (1, 0)
    assert reasons(backward) == ["cast_between"]
