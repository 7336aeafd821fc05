"""absorb_epilogues behind reductions: which text they get, what it computes, and what keeps an op out of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch
import torch.nn.functional as F

from ditron_inductor.options import Options
from ditron_inductor.passes.absorb.absorb_epilogues import absorb_epilogues
from ditron_inductor.passes.finish.name_sites import name_sites
from ditron_inductor.passes.finish.order_collectives import order_collectives
from ditron_inductor.passes.finish.verify_tasks import verify_tasks
from ditron_inductor.passes.fuse.all_reduce_rms_norm import all_reduce_rms_norm
from ditron_inductor.task import schema
from ditron_inductor.task.verify import task_calls
from tests.passes.graphs import all_gather, all_reduce, assert_no_new_guards, fuse, reduce_scatter, text, traced
from tests.passes.graphs import scatter_dim as scatter
from tests.passes.test_absorb_epilogues import absorb, absorbed

pytestmark = pytest.mark.usefixtures("group")

X, W, B = torch.empty(2, 32, 16), torch.empty(16, 24), torch.empty(24)
R, S, COLUMN = torch.empty(2, 32, 24), torch.empty(2, 8, 24), torch.empty(2, 8, 1)
BF16 = torch.bfloat16


def test_golden_residual_behind_a_reduce_scatter() -> None:
    module = traced(lambda x, w, r: r + scatter(x @ w, 1), X, W, S)
    absorb(module)
    expecttest.assert_expected_inline(
        text(module.graph),
        """\
x_1 [2, 32, 16]
w_1 [16, 24]
r_1 [2, 8, 24]
matmul_reduce_scatter_1 = ditron.matmul_reduce_scatter([x_1, w_1, r_1], "scatter_dim=1 reduce_op=sum world_size=4 group_name=0 site='' trials num_extras=1 epilogue='full(x0) + mm0'", None)
getitem_5 [2, 8, 24] = matmul_reduce_scatter_1[0]
return getitem_5
""",
    )


def test_golden_activation_whose_operand_is_saved_behind_an_all_reduce() -> None:
    module = traced(lambda x, w, b: (F.silu(h := all_reduce(x @ w) + b), h), *(one.to(BF16) for one in (X, W, B)))
    absorb(module)
    expecttest.assert_expected_inline(
        text(module.graph),
        """\
x_1 [2, 32, 16]
w_1 [16, 24]
b_1 [24]
view [64, 16] = aten.view(x_1, [64, 16])
matmul_all_reduce_1 = ditron.matmul_all_reduce([view, w_1, b_1], "reduce_op=sum world_size=4 group_name=0 site='' trials num_extras=1 epilogue='mm0 + row(x0); silu(cast(mm0 + row(x0), bf16))'", None)
getitem_1 [64, 24] = matmul_all_reduce_1[0]
getitem_2 [64, 24] = matmul_all_reduce_1[1]
reshape_default [2, 32, 24] = aten.reshape(getitem_1, [2, 32, 24])
reshape_default_1 [2, 32, 24] = aten.reshape(getitem_2, [2, 32, 24])
return (reshape_default_1, reshape_default)
""",
    )


@pytest.mark.parametrize(
    ("fn", "args", "wanted"),
    [
        (lambda x, w, b: scatter(x @ w, 1) + b, (X, W, B), "mm0 + row(x0)"),
        (lambda x, w: F.gelu(scatter(x @ w, 1), approximate="tanh"), (X, W), "gelu_tanh(mm0)"),
        (lambda x, w, c: scatter(x @ w, 1) * c, (X, W, COLUMN), "mm0 * column(x0)"),
        (lambda x, w: scatter(x @ w, 1).float(), (X, W), "cast(mm0, fp32)"),
        (lambda x, w, r: (r + (p := scatter(x @ w, 1)), p), (X, W, S), "full(x0) + mm0; mm0"),
        (lambda x, w, r: all_reduce(x @ w) + r, (X, W, R), "mm0 + full(x0)"),
        (lambda x, w: F.relu(all_reduce(x @ w, "avg")) ** 2, (X, W), "square(relu(mm0))"),
        # With a bias before the reduction.
        (lambda x, w, b: F.silu(all_reduce(torch.addmm(b, x, w))), (X[0], W, B), "silu(mm0)"),
        # Behind views, and another matmul reads it.
        (lambda x, w, b, v: (all_reduce(x @ w) + b).view(64, 24) @ v, (X, W, B, W.t()), "mm0 + row(x0)"),
    ],
)
def test_absorbs(fn: Callable[..., Any], args: tuple[torch.Tensor, ...], wanted: str) -> None:
    assert absorbed(fn, *args) == [wanted]


GUARDS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "a reduction follows": (lambda x, w: F.silu(scatter(x @ w, 1)).sum(-1), (X, W)),
    "a norm follows": (lambda x, w, r: F.layer_norm(r + scatter(x @ w, 1), (24,)), (X, W, S)),
    "a norm reads the sum too": (lambda x, w, r: (h := r + scatter(x @ w, 1), F.layer_norm(h, (24,))), (X, W, S)),
    "an op without a text follows": (lambda x, w: torch.sin(F.relu(all_reduce(x @ w))), (X, W)),
    "an operand depends on the sum": (lambda x, w: (p := all_reduce(x @ w)) * p.amax(-1, keepdim=True), (X, W)),
    "an operand comes late": (lambda x, w, r: reduce_scatter(x[0] @ w) + all_gather(r), (X, W, torch.empty(2, 24))),
    "a matrix of other rows": (lambda x, w, r: all_reduce(x @ w) + r.transpose(0, 1), (X, W, R.transpose(0, 1))),
    # The transposed problem's sum lies column by column.
    "columns are scattered": (lambda x, w, b: scatter(x @ w, 2) + b, (X, W, torch.empty(6))),
}


@pytest.mark.parametrize("name", GUARDS)
def test_leaves_alone(name: str) -> None:
    fn, args = GUARDS[name]
    assert not any(absorbed(fn, *args))


def test_a_norm_behind_the_residual_is_the_norms_node() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        h = r + all_reduce(x @ w)
        return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)

    module = traced(fn, X, W, R)
    fuse(module)
    assert all_reduce_rms_norm(module.graph, options=Options()) == 1
    assert absorb_epilogues(module.graph, options=Options()) == 0


def test_the_graph_stays_legal_and_ordered() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        return all_reduce((r + all_reduce(x @ w)) @ w.t())

    module = traced(fn, X, W, R)
    fuse(module)
    for each in (absorb_epilogues, order_collectives, name_sites, verify_tasks):
        each(module.graph, options=Options())
    (first, task), (second, _) = task_calls(module.graph)
    token: Any = second.args[schema.TOKEN]
    assert task.epilogue == "full(x0) + mm0" and token.args == (first, 1)


def test_dynamic_shapes_stay_dynamic() -> None:
    module = traced(lambda x, w, r: r + scatter(x @ w, 1), X, W, S, dynamic=True)
    with assert_no_new_guards(module):
        assert absorb(module) == ["full(x0) + mm0"]
