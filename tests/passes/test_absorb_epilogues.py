"""absorb_epilogues: which text an op gets, what it computes, and every guard that keeps an op out of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch
import torch.nn.functional as F
from torch import fx

from ditron_inductor.options import Options
from ditron_inductor.passes.absorb.absorb_epilogues import absorb_epilogues
from ditron_inductor.task.verify import task_calls
from tests.passes.graphs import (
    WORLD_SIZE,
    all_gather,
    assert_no_new_guards,
    compiled_graphs,
    fuse,
    gather_dim,
    run_ranks,
    scatter_dim,
    text,
    traced,
    twin,
)

pytestmark = pytest.mark.usefixtures("group")

aten = torch.ops.aten
BF16 = torch.bfloat16
X, W, V, B = torch.empty(2, 8, 16), torch.empty(24, 16), torch.empty(24, 16), torch.empty(24)
FULL, COLUMN = torch.empty(2, 32, 24), torch.empty(2, 32, 1)


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return gather_dim(x, 1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return scatter_dim(grad, 1)


def absorb(module: fx.GraphModule) -> list[str]:
    """The epilogues of the graph after the pass."""
    fuse(module)
    absorb_epilogues(module.graph, options=Options())
    module.graph.lint()
    module.recompile()
    return [task.epilogue for _, task in task_calls(module.graph)]  # type: ignore[union-attr]


def absorbed(fn: Callable[..., Any], *args: torch.Tensor, dtype: torch.dtype = BF16) -> list[str]:
    """The epilogues, after a check that all ranks compute the same with them."""
    args = tuple(arg.to(dtype) for arg in args)
    after = traced(fn, *args)
    before = twin(after)
    found = absorb(after)
    generator = torch.Generator().manual_seed(0)
    inputs = [[torch.randn(arg.shape, generator=generator).to(arg.dtype) for arg in args] for _ in range(WORLD_SIZE)]
    torch.testing.assert_close(run_ranks(after, inputs), run_ranks(before, inputs), rtol=2e-2, atol=2e-2)
    return found


def swiglu(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    gathered = Gather.apply(x)
    return F.silu(F.linear(gathered, w)) * F.linear(gathered, v)


def test_golden_swiglu_for_inference() -> None:
    (graph,) = compiled_graphs(swiglu, *(torch.empty(one.shape, dtype=BF16) for one in (X, W, V)))
    absorb(graph)
    expecttest.assert_expected_inline(
        text(graph.graph),
        """\
arg0_1 [2, 8, 16]
arg1_1 [24, 16]
arg2_1 [24, 16]
permute [16, 24] = aten.permute(arg1_1, [1, 0])
permute_1 [16, 24] = aten.permute(arg2_1, [1, 0])
all_gather_matmul_1 = ditron.all_gather_matmul([arg0_1, permute, permute_1], "gather_dim=1 world_size=4 group_name=0 site='' trials num_weights=2 epilogue='cast(silu(mm0), bf16) * mm1'", None)
getitem_6 [64, 24] = all_gather_matmul_1[0]
reshape_default [2, 32, 24] = aten.reshape(getitem_6, [2, 32, 24])
return (reshape_default,)
""",
    )


def test_golden_swiglu_for_training() -> None:
    args = (torch.empty(one.shape, dtype=BF16, requires_grad=True) for one in (X, W, V))
    graph, _ = compiled_graphs(swiglu, *args)
    absorb(graph)
    expecttest.assert_expected_inline(
        text(graph.graph),
        """\
primals_1 [2, 8, 16]
primals_2 [24, 16]
primals_3 [24, 16]
permute [16, 24] = aten.permute(primals_2, [1, 0])
permute_1 [16, 24] = aten.permute(primals_3, [1, 0])
all_gather_matmul_1 = ditron.all_gather_matmul([primals_1, permute, permute_1], "gather_dim=1 world_size=4 group_name=0 return_gathered site='' trials num_weights=2 epilogue='cast(silu(mm0), bf16) * mm1; mm0; mm1'", None)
getitem_7 [64, 24] = all_gather_matmul_1[0]
getitem_8 [64, 24] = all_gather_matmul_1[1]
getitem_9 [64, 24] = all_gather_matmul_1[2]
getitem_10 [2, 32, 16] = all_gather_matmul_1[3]
view [64, 16] = aten.reshape(getitem_10, [64, 16])
reshape_default [2, 32, 24] = aten.reshape(getitem_7, [2, 32, 24])
permute_4 [24, 16] = aten.permute(permute_1, [1, 0])
permute_8 [24, 16] = aten.permute(permute, [1, 0])
return (reshape_default, view, getitem_8, getitem_9, permute_4, permute_8)
""",
    )


def test_golden_bias() -> None:
    module = traced(lambda x, w, b: F.linear(gather_dim(x, 1), w, b), X, W, B)
    absorb(module)
    expecttest.assert_expected_inline(
        text(module.graph),
        """\
x_1 [2, 8, 16]
w_1 [24, 16]
b_1 [24]
t [16, 24] = aten.t(w_1)
all_gather_matmul_1 = ditron.all_gather_matmul([x_1, t, b_1], "gather_dim=1 world_size=4 group_name=0 site='' trials num_weights=1 num_extras=1 epilogue='mm0 + row(x0)'", None)
getitem_5 [64, 24] = all_gather_matmul_1[0]
view_1 [2, 32, 24] = aten.view(getitem_5, [2, 32, 24])
return view_1
""",
    )


def test_gelu_of_a_biased_product_in_training() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.gelu(F.linear(Gather.apply(x), w, b), approximate="tanh")

    args = (torch.empty(one.shape, dtype=BF16, requires_grad=True) for one in (X, W, B))
    graph, _ = compiled_graphs(fn, *args)
    # The backward reads the biased product.
    assert absorb(graph) == ["mm0 + row(x0); gelu_tanh(cast(mm0 + row(x0), bf16))"]


def g(x: torch.Tensor, *weights: torch.Tensor) -> Any:
    gathered = gather_dim(x, 1)
    products = [gathered @ weight.t() for weight in weights]
    return products[0] if len(products) == 1 else products


@pytest.mark.parametrize(
    ("fn", "args", "wanted"),
    [
        (lambda x, w: F.relu(g(x, w)) ** 2, (X, W), "square(relu(mm0))"),
        (lambda x, w: F.gelu(g(x, w)), (X, W), "gelu(mm0)"),
        (lambda x, w, b: g(x, w) * 0.5 - b, (X, W, B), "cast(mm0 * 0.5, bf16) - row(x0)"),
        (lambda x, w, r: r + torch.tanh(g(x, w)), (X, W, FULL), "full(x0) + cast(tanh(mm0), bf16)"),
        (lambda x, w, c: g(x, w) / c, (X, W, COLUMN), "mm0 / column(x0)"),
        (lambda x, w, s: g(x, w) * s, (X, W, torch.empty(1)), "mm0 * scalar(x0)"),
        (lambda x, w: g(x, w).float(), (X, W), "cast(mm0, fp32)"),
        (lambda x, w, v: ((p := g(x, w, v))[0] - p[1], p[0]), (X, W, V), "mm0 - mm1; mm0"),
        # An operand that Inductor would compute on the way.
        (lambda x, w, r: g(x, w) * torch.exp(r), (X, W, FULL), "mm0 * cast(exp(full(x0)), bf16)"),
        (lambda x, w, b: g(x, w).view(64, 24) + b.view(1, 24), (X, W, B), "mm0 + row(x0)"),
        (lambda x, w, b: (F.silu(p := g(x, w) + b), p), (X, W, B), "silu(cast(mm0 + row(x0), bf16)); mm0 + row(x0)"),
    ],
)
def test_absorbs(fn: Callable[..., Any], args: tuple[torch.Tensor, ...], wanted: str) -> None:
    found = absorbed(fn, *args)
    assert sorted(found[0].split("; ")) == sorted(wanted.split("; "))


def three(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    a, b, c = g(x, w, v, u)
    return a * b + c


def late(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    product = all_gather(x) @ w.t()
    return product + all_gather(b)


GUARDS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "a reduction follows": (lambda x, w: F.silu(g(x, w)).sum(-1), (X, W)),
    "a reduction reads the product too": (lambda x, w: (F.silu(p := g(x, w)), p.sum(-1)), (X, W)),
    "a pointwise op that has no text follows": (lambda x, w: torch.sin(F.silu(g(x, w))), (X, W)),
    "a norm follows": (lambda x, w, r: F.rms_norm(r + g(x, w), (24,)), (X, W, FULL)),
    "a copy follows": (lambda x, w: F.silu(g(x, w)).transpose(0, 1).contiguous(), (X, W)),
    "a concatenation follows": (lambda x, w, r: torch.cat([F.silu(g(x, w)), r]), (X, W, FULL)),
    "the shape grows": (lambda x, w: g(x, w).unsqueeze(0) * torch.ones(3, 1, 1, 1, dtype=x.dtype), (X, W)),
    "another dimension is the last": (lambda x, w, b: g(x, w).view(64, 4, 6) * b, (X, W, torch.empty(6))),
    "an operand is reduced on the way": (lambda x, w, r: g(x, w) * r.softmax(-1), (X, W, FULL)),
    "an operand depends on the product": (lambda x, w: (p := g(x, w)) * p.amax(-1, keepdim=True), (X, W)),
    "an operand comes late": (late, (torch.empty(8, 16), W, torch.empty(8, 24))),
    "an operand has another order": (lambda x, w, r: g(x, w) + r.transpose(0, 1), (X, W, torch.empty(32, 2, 24))),
    "an operand lies in another order": (lambda x, w, r: g(x, w) + r, (X, W, FULL.mT.contiguous().mT)),
    "an operand is no float": (lambda x, w, r: g(x, w) + r.long(), (X, W, FULL)),
    "a matrix is added": (lambda x, w, r: torch.addmm(r, all_gather(x), w.t()), (X[0], W, FULL[0])),
    "the sum has a factor": (lambda x, w, b: torch.add(g(x, w), b, alpha=2), (X, W, B)),
}


@pytest.mark.parametrize("name", GUARDS)
def test_leaves_alone(name: str) -> None:
    fn, args = GUARDS[name]
    assert not any(absorbed(fn, *args))


def test_more_than_two_products_stay_apart() -> None:
    assert absorbed(three, X, W, V, W) == [""]


def test_a_bias_in_front_of_fused_work_is_left_to_inductor() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(F.linear(gather_dim(x, 1), w, b), (24,))

    module = traced(fn, X, W, B)
    assert absorb(module) == [""]
    assert "biased [64, 24] = aten.add.Tensor(getitem_7, b_1)" in text(module.graph)


@pytest.mark.parametrize("kwargs", [{"beta": 2}, {"alpha": 0.5}])
def test_addmm_with_factors_is_not_fused(kwargs: dict[str, float]) -> None:
    module = traced(lambda x, w, b: torch.addmm(b, all_gather(x), w.t(), **kwargs), X[0], W, B)
    assert fuse(module) == 0


def test_dynamic_shapes_stay_dynamic() -> None:
    module = traced(lambda x, w, b, r: F.silu(F.linear(gather_dim(x, 1), w, b)) * r, X, W, B, FULL, dynamic=True)
    with assert_no_new_guards(module):
        assert absorb(module) == ["silu(mm0 + row(x0)) * full(x1)"]


def test_a_product_that_nobody_uses() -> None:
    module = traced(lambda x, w, v: g(x, w, v), X, W, V)
    fuse(module)
    (call,) = [call for call, _ in task_calls(module.graph)]
    first, _ = (user for user in call.users if user.args[1] in (0, 1))
    with module.graph.inserting_before(module.graph.output_node()):
        relu = module.graph.call_function(aten.relu.default, (first,))
    relu.meta["val"] = first.meta["val"]
    module.graph.output_node().args = (relu,)
    module.graph.eliminate_dead_code()
    assert absorb_epilogues(module.graph, options=Options()) == 0


def test_twice_is_once() -> None:
    module = traced(lambda x, w: F.relu(g(x, w)), X, W)
    assert absorb(module) == ["relu(mm0)"]
    assert absorb_epilogues(module.graph, options=Options()) == 0
