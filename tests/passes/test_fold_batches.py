"""Batched matmuls that are one matmul: which are folded beside a collective, and which stay as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import fx

from ditron_inductor.options import Options
from ditron_inductor.passes.normalize.normalize_collectives import normalize_collectives
from tests.passes.graphs import (
    all_reduce,
    assert_no_new_guards,
    assert_same_on_all_ranks,
    compiled_graphs,
    fuse,
    gather_dim,
    reasons,
    scatter_dim,
    text,
    traced,
)

pytestmark = pytest.mark.usefixtures("group")

aten = torch.ops.aten
X1 = torch.empty(1, 8, 16)
X = torch.empty(2, 8, 16)
W = torch.empty(16, 24)
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def expanded(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.bmm(x, w.expand(x.shape[0], *w.shape))


def test_golden_expanded_weight() -> None:
    module = traced(lambda x, w: expanded(gather_dim(x, 1), w), X, W)
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
expand [2, 16, 24] = aten.expand(w_1, [2, 16, 24])
bmm [2, 32, 24] = aten.bmm(cat, expand)
return bmm
""",
    )
    fuse(module)
    expecttest.assert_expected_inline(
        text(module.graph),
        """\
x_1 [2, 8, 16]
w_1 [16, 24]
all_gather_matmul = ditron.all_gather_matmul([x_1, w_1], "gather_dim=1 world_size=4 group_name=0 site='' trials num_weights=1", None)
getitem_4 [64, 24] = all_gather_matmul[0]
reshape_default_1 [2, 32, 24] = aten.reshape(getitem_4, [2, 32, 24])
return reshape_default_1
""",
    )


def test_golden_einsum() -> None:
    module = traced(lambda x, w: scatter_dim(torch.einsum("bsk,kn->bsn", x, w), 1), X, W)
    normalize_collectives(module.graph, options=Options())
    expecttest.assert_expected_inline(
        text(module.graph),
        """\
x_1 [2, 8, 16]
w_1 [16, 24]
unsqueeze [2, 8, 16, 1] = aten.unsqueeze(x_1, 3)
permute [2, 8, 1, 16] = aten.permute(unsqueeze, [0, 1, 3, 2])
unsqueeze_1 [16, 24, 1] = aten.unsqueeze(w_1, 2)
unsqueeze_2 [16, 24, 1, 1] = aten.unsqueeze(unsqueeze_1, 3)
permute_1 [1, 1, 24, 16] = aten.permute(unsqueeze_2, [2, 3, 1, 0])
permute_2 [2, 8, 16, 1] = aten.permute(permute, [0, 1, 3, 2])
view [1, 16, 16] = aten.view(permute_2, [1, 16, 16])
permute_3 [16, 24, 1, 1] = aten.permute(permute_1, [3, 2, 0, 1])
view_1 [1, 16, 24] = aten.view(permute_3, [1, 16, 24])
bmm [1, 16, 24] = aten.bmm(view, view_1)
view_2 [2, 8, 1, 24] = aten.reshape(bmm, [2, 8, 1, 24])
permute_4 [2, 8, 24, 1] = aten.permute(view_2, [0, 1, 3, 2])
view_3 [2, 8, 24] = aten.reshape(permute_4, [2, 8, 24])
split = aten.split.Tensor(view_3, 2, 1)
getitem [2, 2, 24] = split[0]
getitem_1 [2, 2, 24] = split[1]
getitem_2 [2, 2, 24] = split[2]
getitem_3 [2, 2, 24] = split[3]
cat [8, 2, 24] = aten.cat([getitem, getitem_1, getitem_2, getitem_3])
reduce_scatter_tensor [2, 2, 24] = _c10d_functional.reduce_scatter_tensor(cat, 'sum', 4, '0')
wait_tensor [2, 2, 24] = _c10d_functional.wait_tensor(reduce_scatter_tensor)
return wait_tensor
""",
    )
    fuse(module)
    expecttest.assert_expected_inline(
        text(module.graph),
        """\
x_1 [2, 8, 16]
w_1 [16, 24]
unsqueeze_1 [16, 24, 1] = aten.unsqueeze(w_1, 2)
unsqueeze_2 [16, 24, 1, 1] = aten.unsqueeze(unsqueeze_1, 3)
permute_1 [1, 1, 24, 16] = aten.permute(unsqueeze_2, [2, 3, 1, 0])
permute_3 [16, 24, 1, 1] = aten.permute(permute_1, [3, 2, 0, 1])
view_1 [1, 16, 24] = aten.view(permute_3, [1, 16, 24])
squeeze_dim [16, 24] = aten.squeeze.dim(view_1, 0)
matmul_reduce_scatter = ditron.matmul_reduce_scatter([x_1, squeeze_dim], "scatter_dim=1 reduce_op=sum world_size=4 group_name=0 site='' trials", None)
getitem_4 [2, 2, 24] = matmul_reduce_scatter[0]
return getitem_4
""",
    )


PRODUCTS: dict[str, Product] = {
    "expand": expanded,
    "expand_of_3d": lambda x, w: torch.bmm(x, w.unsqueeze(0).expand(x.shape[0], -1, -1)),
    "expand_4d": lambda x, w: torch.matmul(x.unsqueeze(1), w.expand(x.shape[0], 1, *w.shape)).squeeze(1),
    "expand_then_transpose": lambda x, w: torch.bmm(x, w.t().expand(x.shape[0], 24, 16).transpose(1, 2)),
    "transpose_then_expand": lambda x, w: expanded(x, w.t().contiguous().t()),
    "repeat": lambda x, w: torch.bmm(x, w.repeat(x.shape[0], 1, 1)),
    "matmul_3d": lambda x, w: x @ w.unsqueeze(0),
    "einsum": lambda x, w: torch.einsum("bsk,kn->bsn", x, w),
    "einsum_transposed": lambda x, w: torch.einsum("bsk,nk->bsn", x, w.t()),
    "einsum_swapped": lambda x, w: torch.einsum("kn,bsk->bsn", w, x),
    "matmul": lambda x, w: x @ w,
    "linear": lambda x, w: torch.nn.functional.linear(x, w.t()),
}
COLLECTIVES: dict[str, Callable[[Product], Callable[..., Any]]] = {
    "all_gather_0": lambda product: lambda x, w: product(gather_dim(x, 0), w),
    "all_gather_1": lambda product: lambda x, w: product(gather_dim(x, 1), w),
    "all_gather_used": lambda product: lambda x, w: (product(g := gather_dim(x, 1), w), g.sin()),
    "reduce_scatter_1": lambda product: lambda x, w: scatter_dim(product(x, w), 1),
    "all_reduce": lambda product: lambda x, w: all_reduce(product(x, w)),
}


@pytest.mark.parametrize("collective", COLLECTIVES.values(), ids=COLLECTIVES)
@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)
@pytest.mark.parametrize("x", [X1, X], ids=["batch_1", "batch_2"])
def test_fused(x: torch.Tensor, product: Product, collective: Callable[..., Any]) -> None:
    after = assert_same_on_all_ranks(collective(product), x, W, fused=1)
    assert "bmm" not in text(after.graph)


def test_heads_beside_the_collective() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        heads = torch.einsum("bsk,khd->bshd", gather_dim(x, 1), w.view(16, 6, 4))
        return scatter_dim(torch.einsum("bshd,hdk->bsk", heads.relu(), w.t().reshape(6, 4, 16)), 1)

    assert_same_on_all_ranks(fn, X, W, fused=2)


def test_rows_that_move_before_the_product_move_with_its_operand() -> None:
    assert_same_on_all_ranks(lambda x, w: scatter_dim(torch.einsum("bsk,kn->sbn", x, w), 0), X, W, fused=1)


def test_only_what_a_fusion_takes_is_folded() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return expanded(all_reduce(expanded(x, w)), w.t())

    module = traced(fn, X, W)
    assert fuse(module) == 1
    assert text(module.graph).count("aten.bmm(") == 1


B3 = torch.empty(2, 16, 24)
GUARDS: list[Any] = [
    pytest.param("batched_matmul", lambda x, w: gather_dim(x, 1) @ w, B3, id="gather_true_batch"),
    pytest.param("batched_matmul", lambda x, w: scatter_dim(x @ w, 1), B3, id="scatter_true_batch"),
    pytest.param("batched_matmul", lambda x, w: all_reduce(torch.einsum("bsk,bkn->bsn", x, w)), B3, id="einsum"),
    pytest.param("batched_matmul", lambda x, w: all_reduce(x @ w[:1].repeat(1, 2, 1).view(2, 16, 24)), B3, id="rows"),
    pytest.param("batched_matmul", lambda x, w: all_reduce(x @ w[:, :1].expand(2, 16, 24)), B3, id="expanded_rows"),
    pytest.param(
        "batched_matmul",
        lambda x, w: all_reduce(torch.baddbmm(x[:, :, :1], x, w.expand(2, 16, 24))),
        W,
        id="baddbmm",
    ),
    # The reason that is left when the batches are folded.
    pytest.param("intermediate_used", lambda x, w: (all_reduce(p := expanded(x, w)), p), W, id="product_used"),
    pytest.param("operand_depends", lambda x, w: expanded(g := gather_dim(x, 1), g[0, 0].diag()), W, id="depends"),
]


@pytest.mark.parametrize(("code", "fn", "w"), GUARDS)
def test_left_alone(code: str, fn: Callable[..., Any], w: torch.Tensor) -> None:
    module = traced(fn, X, w)
    normalize_collectives(module.graph, options=Options())
    before = text(module.graph)
    assert fuse(module) == 0
    assert text(module.graph) == before
    assert reasons(module) == [code]


def test_idempotent() -> None:
    module = traced(lambda x, w: all_reduce(expanded(gather_dim(x, 1), w)), X, W)
    fuse(module)
    before = text(module.graph)
    assert fuse(module) == 0
    assert text(module.graph) == before


def program(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    hidden = torch.einsum("bsk,kn->bsn", gather_dim(x, 1), w).relu()
    return scatter_dim(expanded(hidden, v), 1)


def test_dynamic_shapes() -> None:
    module = traced(program, X, W, W.t().contiguous(), dynamic=True)
    with assert_no_new_guards(module):
        assert fuse(module) == 2


def trained(batch: int, dynamic: bool) -> list[fx.GraphModule]:
    def fn(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        group = dist.group.WORLD
        assert group is not None
        hidden = torch.einsum("bsk,kn->bsn", funcol.all_gather_tensor_autograd(x, 1, group), w).relu()
        return funcol.reduce_scatter_tensor_autograd(expanded(hidden, v), "sum", 1, group)

    args = [torch.randn(batch, 8, 16), torch.randn(16, 24), torch.randn(24, 16)]
    return compiled_graphs(fn, *(arg.requires_grad_() for arg in args), dynamic=dynamic)


@pytest.mark.parametrize(("batch", "dynamic"), [(1, False), (2, False), (3, True)])
def test_training(batch: int, dynamic: bool) -> None:
    assert [fuse(graph) for graph in trained(batch, dynamic)] == [2, 2]
