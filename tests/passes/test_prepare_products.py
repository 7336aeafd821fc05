"""prepare_products: which text stands in front of a reduction, what keeps an op out of it, and what others add to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch
import torch.nn.functional as F

from ditron_inductor.options import Options
from ditron_inductor.passes.absorb.prepare_products import prepare_products
from ditron_inductor.passes.forms.merge_reductions import merge_reductions
from ditron_inductor.pipeline import run
from ditron_inductor.task.nodes import MatmulAllReduceRmsNorm, MatmulReduceScatter
from ditron_inductor.task.verify import task_calls
from tests.passes.graphs import all_reduce, assert_no_new_guards, fuse, reasons, reduce_scatter, text, traced
from tests.passes.graphs import scatter_dim as scatter

pytestmark = pytest.mark.usefixtures("group")

X, W, B = torch.empty(2, 32, 16), torch.empty(16, 24), torch.empty(24)
COLUMN, FULL, S = torch.empty(2, 32, 1), torch.empty(2, 32, 24), torch.empty(2, 8, 24)
BF16, FP16 = torch.bfloat16, torch.float16


def prepared(fn: Callable[..., Any], *args: torch.Tensor, dynamic: bool = False) -> list[str]:
    """The epilogues of the sites that all passes leave behind."""
    module = traced(fn, *args, dynamic=dynamic)
    with assert_no_new_guards(module):
        run(module.graph, Options())
    return [task.epilogue for _, task in task_calls(module.graph)]  # type: ignore[union-attr]


def test_golden_router_weights_in_front_of_a_reduce_scatter() -> None:
    module = traced(lambda x, w, p: scatter((x @ w) * p[..., None], 1), X, W, torch.empty(2, 32))
    assert fuse(module) == 0 and prepare_products(module.graph, options=Options()) == 1
    expecttest.assert_expected_inline(
        text(module.graph),
        """\
x_1 [2, 32, 16]
w_1 [16, 24]
p_1 [2, 32]
unsqueeze [2, 32, 1] = aten.unsqueeze(p_1, 2)
matmul_reduce_scatter = ditron.matmul_reduce_scatter([x_1, w_1, unsqueeze], "scatter_dim=1 reduce_op=sum world_size=4 group_name=0 site='' trials num_extras=1 epilogue='pre: mm0 * column(x0); mm0'", None)
getitem_4 [2, 8, 24] = matmul_reduce_scatter[0]
return getitem_4
""",
    )


def test_golden_mask_in_front_of_an_all_reduce() -> None:
    module = traced(lambda x, w, m: all_reduce((x @ w) * m.to(BF16)), X.to(BF16), W.to(BF16), COLUMN.bool())
    assert fuse(module) == 0 and prepare_products(module.graph, options=Options()) == 1
    expecttest.assert_expected_inline(
        text(module.graph),
        """\
x_1 [2, 32, 16]
w_1 [16, 24]
m_1 [2, 32, 1]
view [64, 16] = aten.view(x_1, [64, 16])
_to_copy [2, 32, 1] = aten._to_copy(m_1, dtype=torch.bfloat16)
matmul_all_reduce = ditron.matmul_all_reduce([view, w_1, _to_copy], "reduce_op=sum world_size=4 group_name=0 site='' trials num_extras=1 epilogue='pre: mm0 * column(x0); mm0'", None)
getitem [64, 24] = matmul_all_reduce[0]
_unsafe_view [2, 32, 24] = aten._unsafe_view(getitem, [2, 32, 24])
return _unsafe_view
""",
    )


@pytest.mark.parametrize(
    ("fn", "args", "wanted"),
    [
        (lambda x, w, b: scatter((x @ w) * b, 1), (X, W, B), "pre: mm0 * row(x0); mm0"),
        (lambda x, w, c: all_reduce((x @ w) * c), (X, W, COLUMN), "pre: mm0 * column(x0); mm0"),
        (lambda x, w, r: all_reduce(r + x @ w), (X, W, FULL), "pre: full(x0) + mm0; mm0"),
        (lambda x, w: reduce_scatter(F.silu(x @ w)), (X[0], W), "pre: silu(mm0); mm0"),
        (lambda x, w: all_reduce((x @ w) * 0.5), (X.to(FP16), W.to(FP16)), "pre: mm0 * 0.5; mm0"),
        # Rounded where eager rounds.
        (
            lambda x, w, c: all_reduce(((x @ w).float() * c).to(BF16) + 1.0),
            (X.to(BF16), W.to(BF16), COLUMN),
            "pre: cast(mm0 * column(x0), bf16) + 1.0; mm0",
        ),
        # A sum of products, and a bias, are one product.
        (
            lambda x, w, b, c: all_reduce((torch.addmm(b, x, w) + x @ (w + 1)) * c),
            (X[0], W, B, COLUMN[0]),
            "pre: mm0 * column(x0); mm0",
        ),
        # What stands behind the reduction joins it.
        (
            lambda x, w, c, r: r + scatter((x @ w) * c, 1),
            (X, W, COLUMN, S),
            "pre: mm0 * column(x0); full(x1) + mm0",
        ),
        # Columns are scattered: the transposed problem.
        (lambda x, w, c, b: scatter((x @ w) * c + b, 2), (X, W, COLUMN, B), "pre: mm0 * row(x0) + column(x1); mm0"),
    ],
)
def test_is_prepared(fn: Callable[..., Any], args: tuple[torch.Tensor, ...], wanted: str) -> None:
    assert prepared(fn, *args) == [wanted]


GUARDS: dict[str, tuple[str, Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "no text for the op": ("pointwise_between", lambda x, w: all_reduce((x @ w).sin()), (X, W)),
    "two products": (
        "products_combined",
        lambda x, w, c: all_reduce((x @ w) * c + (x @ w.square()) * (c + 1)),
        (X, W, COLUMN),
    ),
    "the product is used": ("intermediate_used", lambda x, w, c: ((p := x @ w), all_reduce(p * c)), (X, W, COLUMN)),
    "the result is used": ("intermediate_used", lambda x, w, c: ((p := (x @ w) * c), all_reduce(p)), (X, W, COLUMN)),
    "divided by minus nothing": ("pointwise_between", lambda x, w: all_reduce((x @ w) / -0.0), (X, W)),
    "another dtype": (
        "cast_between",
        lambda x, w, c: all_reduce((x @ w).float() * c),
        (X.to(BF16), W.to(BF16), COLUMN),
    ),
    "rows in another order": (
        "bias",
        lambda x, w, r: all_reduce(x @ w + r.transpose(0, 1)),
        (X, W, FULL.transpose(0, 1).contiguous()),
    ),
    "it grows": ("pointwise_between", lambda x, w, c: all_reduce((x @ w) * c), (X[0], W, torch.empty(3, 32, 24))),
    "columns of the product's shape": ("layout", lambda x, w, r: scatter(x @ w * r, 2), (X, W, FULL)),
}


@pytest.mark.parametrize("name", GUARDS)
def test_leaves_alone(name: str) -> None:
    code, fn, args = GUARDS[name]
    module = traced(fn, *args)
    run(module.graph, Options())
    assert not list(task_calls(module.graph)) and reasons(module) == [code]


def test_a_norm_behind_it_keeps_it() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor, c: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        h = r + all_reduce((x @ w) * c)
        return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)) @ w.t()

    module = traced(fn, X, W, COLUMN, FULL)
    run(module.graph, Options())
    ((_, task),) = task_calls(module.graph)
    assert isinstance(task, MatmulAllReduceRmsNorm) and task.extras == ("residual",)
    assert task.epilogue == "pre: mm0 * column(x0); mm0"


def test_a_view_between_casts_has_the_dtype_of_what_it_views() -> None:
    """As passes behind read it."""
    module = traced(
        lambda x, w: all_reduce((x @ w).float().mul(2.0).view(-1, 24).relu().to(BF16)), X.to(BF16), W.to(BF16)
    )
    run(module.graph, Options())
    (output,) = module.graph.find_nodes(op="output")
    assert len(list(task_calls(module.graph))) == 1 and output.args[0].meta["val"].dtype == BF16


def test_two_of_them_are_not_merged() -> None:
    module = traced(lambda x, w, c: all_reduce((x @ w) * c) + all_reduce(x @ w), X, W, COLUMN)
    assert merge_reductions(module.graph, options=Options()) == 0


def test_thousands_of_rows_are_divided() -> None:
    """As those of a plain product are: see sequence_parallel."""

    def fn(x: torch.Tensor, w: torch.Tensor, c: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(all_reduce((x @ w) * c), (24,)) @ v

    module = traced(fn, X[0], W, COLUMN[0], W.t().contiguous())
    run(module.graph, Options(sequence_parallel="on"))
    task = next(task for _, task in task_calls(module.graph))
    assert isinstance(task, MatmulReduceScatter) and task.epilogue == "pre: mm0 * column(x0); mm0"


def test_dynamic_sizes() -> None:
    assert prepared(lambda x, w, c: all_reduce((x @ w) * c), X[0], W, COLUMN[0], dynamic=True) == [
        "pre: mm0 * column(x0); mm0"
    ]


def test_fusions_that_are_left_out() -> None:
    module = traced(lambda x, w, c: all_reduce((x @ w) * c), X, W, COLUMN)
    run(module.graph, Options(fusions=(MatmulReduceScatter.kind,)))
    assert reasons(module) == ["disabled"]
