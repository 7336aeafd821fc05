"""Norms that are one op of another library: ops with the schemas of vLLM's are opened where a fusion takes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import expecttest
import pytest
import torch

from ditron_inductor.passes.graph import foreign_norms as foreign_norms_module
from ditron_inductor.passes.graph.foreign_norms import NORM_OPS, find_foreign_norm, foreign_norms, open_norm
from ditron_inductor.task.nodes import Norm
from tests.passes.graphs import all_reduce, assert_no_new_guards, text, traced
from tests.passes.test_all_reduce_rms_norm import BF16, FP16, FP32, N, fused, graph_of, nodes_of, tensors
from tests.passes.test_unrounded_norms import assert_same_bits

pytestmark = pytest.mark.usefixtures("group", "ops")

EPS = 1e-5
LLAMA = Norm("rms", EPS, round_first=True)
UNROUNDED = Norm("rms", EPS, round_first=True, unrounded=True)
ir: Any = torch.ops.vllm_ir


def norm(wide: torch.Tensor, weight: torch.Tensor | None, epsilon: float, dtype: torch.dtype) -> torch.Tensor:
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return (scaled if weight is None else scaled.to(weight.dtype) * weight).to(dtype)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
) -> torch.Tensor:
    return norm(x.float(), weight, epsilon, x.dtype)


def fused_add_rms_norm(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    wide = x.float() + x_residual.float()
    return norm(wide, weight, epsilon, x.dtype), wide.to(x.dtype)


@pytest.fixture(scope="module")
def ops() -> Iterator[None]:
    """The ops with vLLM's names and schemas, unless this process has imported vLLM."""
    library = torch.library.Library("vllm_ir", "FRAGMENT")
    for function in (rms_norm, fused_add_rms_norm):
        name = function.__name__
        if not hasattr(torch.ops.vllm_ir, name):
            library.define(name + torch.library.infer_schema(function, mutates_args=[]))
            library.impl(name, function, "CPU")
            library._register_fake(name, function)
    yield
    library._destroy()


def weight_of(dtype: torch.dtype) -> torch.Tensor:
    return torch.rand(N, generator=torch.Generator().manual_seed(3)).to(dtype)


def block(weight: torch.Tensor | None, more: float = 0.0) -> Callable[..., Any]:
    def fn(a: torch.Tensor, b: torch.Tensor, residual: torch.Tensor, out: torch.Tensor) -> Any:
        factor = weight.float() + more if more and weight is not None else weight
        normed, total = ir.fused_add_rms_norm(all_reduce(a @ b), residual, factor, EPS)
        return normed @ out, total

    return fn


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("form", ["as the rows", "in fp32", "none", "one more"])
def test_the_bits_are_the_same(form: str, dtype: torch.dtype) -> None:
    """Of the norm behind a residual, whatever the weight is."""
    weight = None if form == "none" else weight_of(FP32 if form == "in fp32" else dtype)
    module = graph_of(block(weight, 1.0 * (form == "one more")), *tensors(dtype))
    assert_same_bits(module)
    (node,) = nodes_of(module)
    narrow = dtype != FP32
    assert node.norm == Norm("rms", EPS, form == "one more", narrow and form == "as the rows", narrow)
    assert node.extras == ("residual", *("weight",) * (form != "none"))


def test_without_a_residual() -> None:
    weight = weight_of(BF16)
    module = graph_of(lambda x, out: ir.rms_norm(all_reduce(x), weight, EPS) @ out, *tensors()[2:])
    assert_same_bits(module)
    assert nodes_of(module)[0].norm == LLAMA


def test_layers_in_a_row() -> None:
    first, second = (torch.rand(N).to(BF16) for _ in range(2))
    heads = torch.rand(4).to(BF16)

    def fn(a: torch.Tensor, b: torch.Tensor, residual: torch.Tensor, out: torch.Tensor) -> Any:
        normed, total = ir.fused_add_rms_norm(all_reduce(a @ b), residual, first, EPS)
        inner = ir.rms_norm((normed @ out).view(2, 4, 2, 4), heads, EPS).view(2, 4, 8)
        normed, total = ir.fused_add_rms_norm(all_reduce(inner @ out.t()), total, second, EPS)
        return normed @ out

    module = graph_of(fn, *tensors())
    assert_same_bits(module, 2)
    assert [node.norm for node in nodes_of(module)] == [UNROUNDED, UNROUNDED]
    # The norm of heads is nobody's, so it stays an op of its library; and nothing is left of the others.
    assert len(foreign_norms(module.graph)) == 1 and "aten.rsqrt" not in text(module.graph)


def test_golden() -> None:
    def fn(a: torch.Tensor, b: torch.Tensor, residual: torch.Tensor, out: torch.Tensor, weight: torch.Tensor) -> Any:
        return block(weight)(a, b, residual, out)

    module = traced(fn, *tensors(), weight_of(BF16))
    assert fused(module) == 1
    expecttest.assert_expected_inline(
        text(module.graph),
        """\
a_1 [2, 4, 16]
b_1 [16, 32]
residual_1 [2, 4, 32]
out_1 [32, 8]
weight_1 [32]
view [8, 16] = aten.view(a_1, [8, 16])
matmul_all_reduce_rms_norm = ditron.matmul_all_reduce_rms_norm([view, b_1, residual_1, weight_1], "reduce_op=sum norm=(eps=1e-05 round_first unrounded) extras=residual+weight world_size=4 group_name=0 site='' trials", None)
getitem_3 [8, 32] = matmul_all_reduce_rms_norm[0]
getitem_4 [8, 32] = matmul_all_reduce_rms_norm[1]
rows_1 [2, 4, 32] = aten.reshape(getitem_4, [2, 4, 32])
rows [2, 4, 32] = aten.reshape(getitem_3, [2, 4, 32])
view_1 [8, 32] = aten.view(rows, [8, 32])
mm_1 [8, 8] = aten.mm(view_1, out_1)
_unsafe_view_1 [2, 4, 8] = aten._unsafe_view(mm_1, [2, 4, 8])
return (_unsafe_view_1, rows_1)
""",
    )


def test_golden_opened() -> None:
    """What an op computes, in the ops that a norm is read from."""
    rows = tensors()[2]
    module = traced(lambda x, y, weight: ir.fused_add_rms_norm(x, y, weight, EPS), rows, rows.clone(), weight_of(BF16))
    (found,) = foreign_norms(module.graph)
    open_norm(module.graph, found)
    module.graph.lint()
    expecttest.assert_expected_inline(
        text(module.graph),
        """\
x_1 [2, 4, 32]
y_1 [2, 4, 32]
weight_1 [32]
convert_element_type_default [2, 4, 32] = prims.convert_element_type(x_1, torch.float32)
convert_element_type_default_1 [2, 4, 32] = prims.convert_element_type(y_1, torch.float32)
add_tensor [2, 4, 32] = aten.add.Tensor(convert_element_type_default, convert_element_type_default_1)
convert_element_type_default_2 [2, 4, 32] = prims.convert_element_type(add_tensor, torch.bfloat16)
pow_tensor_scalar [2, 4, 32] = aten.pow.Tensor_Scalar(add_tensor, 2)
mean_dim [2, 4, 1] = aten.mean.dim(pow_tensor_scalar, [-1], True)
add_tensor_1 [2, 4, 1] = aten.add.Tensor(mean_dim, 1e-05)
rsqrt_default [2, 4, 1] = aten.rsqrt(add_tensor_1)
mul_tensor [2, 4, 32] = aten.mul.Tensor(add_tensor, rsqrt_default)
convert_element_type_default_3 [2, 4, 32] = prims.convert_element_type(mul_tensor, torch.bfloat16)
mul_tensor_1 [2, 4, 32] = aten.mul.Tensor(convert_element_type_default_3, weight_1)
return (mul_tensor_1, convert_element_type_default_2)
""",
    )


def test_a_norm_that_no_fusion_takes_stays() -> None:
    """An elementwise op follows: the compiler would make one kernel of both, if it knew the norm."""
    weight = weight_of(BF16)

    def fn(a: torch.Tensor, b: torch.Tensor, residual: torch.Tensor) -> Any:
        normed, total = ir.fused_add_rms_norm(all_reduce(a @ b), residual, weight, EPS)
        return normed.relu(), total

    module = graph_of(fn, *tensors()[:3])
    assert fused(module) == 0 and len(foreign_norms(module.graph)) == 1
    assert "fused_add_rms_norm" in text(module.graph) and "aten.rsqrt" not in text(module.graph)


def test_dynamic_rows() -> None:
    args = tensors()
    for index in (0, 2):
        torch._dynamo.mark_dynamic(args[index], 1)
    module = graph_of(block(weight_of(BF16)), *args)
    with assert_no_new_guards(module):
        assert fused(module) == 1


X, NARROW, WIDE = torch.empty(2, 4, N, dtype=BF16), torch.empty(N, dtype=BF16), torch.empty(N)


@pytest.mark.parametrize(
    ("fn", "x", "weight"),
    [
        (lambda x, weight: ir.rms_norm(x, weight, EPS, 16), X, NARROW),
        (lambda x, weight: ir.rms_norm(x, weight, EPS), X, NARROW.half()),
        (lambda x, weight: ir.rms_norm(x, weight, EPS), X.float(), NARROW),
        (lambda x, weight: ir.rms_norm(x, weight, EPS), X, NARROW[:1]),
        (lambda x, weight: ir.rms_norm(x, weight, EPS), X, NARROW.view(1, N)),
        (lambda x, weight: ir.rms_norm(x, weight, EPS), X.transpose(0, 1), NARROW),
        (lambda x, weight: ir.rms_norm(x, weight, EPS), X.double(), WIDE.double()),
        (lambda x, weight: ir.fused_add_rms_norm(x, x.half(), weight, EPS), X, NARROW),
        (lambda x, weight: ir.fused_add_rms_norm(x, x[:, :1], weight, EPS), X, NARROW),
    ],
)
def test_what_is_not_established_stays(fn: Callable[..., Any], x: torch.Tensor, weight: torch.Tensor) -> None:
    """A part of a row; weights for which versions differ; other layouts, shapes and dtypes."""
    module = traced(fn, x, weight)
    assert foreign_norms(module.graph) == [] and "vllm_ir" in text(module.graph)


def test_another_schema_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    module = traced(lambda x, weight: ir.rms_norm(x, weight, EPS), X, NARROW)
    assert len(foreign_norms(module.graph)) == 1
    (call,) = [node for node in module.graph.nodes if "rms_norm" in str(node.target)]
    form = NORM_OPS["vllm_ir::rms_norm"]
    other = replace(form, arguments=(*form.arguments, "zero_centered"))
    monkeypatch.setattr(foreign_norms_module, "NORM_OPS", {"vllm_ir::rms_norm": other})
    assert find_foreign_norm(call) is None
