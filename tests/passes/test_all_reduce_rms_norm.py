"""all_reduce_rms_norm: the norms that it reads off a compiled graph, into which graph, and every guard."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch
from torch import fx, nn

from ditron_inductor.options import Options
from ditron_inductor.passes.finish.name_sites import name_sites
from ditron_inductor.passes.finish.order_collectives import order_collectives
from ditron_inductor.passes.fuse.all_reduce_rms_norm import all_reduce_rms_norm, prove, rsqrts
from ditron_inductor.passes.graph.norm_forms import FoundNorm, find_norm, normalised
from ditron_inductor.passes.graph.reasons import ReasonCode
from ditron_inductor.passes.graph.reduced_sums import find_sum
from ditron_inductor.task.nodes import Norm, ReductionWithNorm
from ditron_inductor.task.verify import task_calls, verify_graph
from tests.passes.graphs import (
    WORLD_SIZE,
    all_reduce,
    assert_no_new_guards,
    compiled_graphs,
    fuse,
    reasons,
    run_ranks,
    text,
)
from tests.passes.norms import (
    CohereNorm,
    Gemma4Norm,
    GemmaNorm,
    LlamaNorm,
    N,
    OlmoNorm,
    OtherDeviation,
    OtherMean,
    T5Norm,
)

pytestmark = pytest.mark.usefixtures("group")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

LLAMA = Norm("rms", 1e-6, round_first=True)
FORMS: dict[str, tuple[Callable[[torch.dtype], nn.Module], Norm, str]] = {
    "llama": (LlamaNorm, LLAMA, "residual weight"),
    "gemma": (GemmaNorm, Norm("rms", 1e-6, plus_one=True), "residual weight"),
    "olmo": (OlmoNorm, Norm("rms", 1e-6), "residual weight"),
    "gemma4": (Gemma4Norm, Norm("rms", 1e-6), "residual weight"),
    "cohere": (CohereNorm, Norm("layer", 1e-6), "residual weight"),
    "t5": (T5Norm, LLAMA, "residual weight"),
    "rms": (lambda dtype: nn.RMSNorm(N, eps=0.25, dtype=dtype), Norm("rms", 0.25), "residual weight"),
    "rms_plain": (lambda dtype: nn.RMSNorm(N, eps=0.5, elementwise_affine=False), Norm("rms", 0.5), "residual"),
    "layer": (lambda dtype: nn.LayerNorm(N, dtype=dtype), Norm("layer", 1e-5), "residual weight shift"),
    "layer_no_shift": (lambda dtype: nn.LayerNorm(N, dtype=dtype, bias=False), Norm("layer", 1e-5), "residual weight"),
    "layer_plain": (lambda dtype: nn.LayerNorm(N, elementwise_affine=False), Norm("layer", 1e-5), "residual"),
}
A, B, OUT = (2, 4, 16), (16, N), (N, 8)


def block(norm: nn.Module) -> Callable[..., Any]:
    """The end of one half of a layer and the beginning of the next."""

    def fn(a: torch.Tensor, b: torch.Tensor, residual: torch.Tensor, out: torch.Tensor) -> Any:
        x = all_reduce(a @ b) + residual
        return norm(x) @ out, x

    return fn


def tensors(dtype: torch.dtype = BF16) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in (A, B, (2, 4, N), OUT)]


def graph_of(fn: Callable[..., Any], *args: torch.Tensor, dynamic: bool | None = None) -> fx.GraphModule:
    """As the compiler hands it to our passes, in inference."""
    with torch.no_grad():
        (module,) = compiled_graphs(fn, *args, dynamic=dynamic)
    return module


def fused(module: fx.GraphModule, options: Options | None = None) -> int:
    """How many norms were fused."""
    fuse(module, options)
    count = all_reduce_rms_norm(module.graph, options=options or Options())
    module.graph.lint()
    module.recompile()
    return count


def codes(module: fx.GraphModule) -> list[str]:
    """Why the norms of reduced tensors are not fused."""
    found = []
    for rsqrt in rsqrts(module.graph):
        rows = normalised(rsqrt)
        total = None if rows is None else find_sum(rows)
        proved = None if total is None else prove(total, rsqrt)
        found += [proved.value] if isinstance(proved, ReasonCode) else []
    return found


def nodes_of(module: fx.GraphModule) -> list[Any]:
    """The Task nodes with a norm."""
    return [task for _, task in task_calls(module.graph) if isinstance(task, ReductionWithNorm)]


def frozen(make: Callable[[torch.dtype], nn.Module], dtype: torch.dtype) -> nn.Module:
    return make(dtype).requires_grad_(False)


@pytest.mark.parametrize("form", FORMS)
def test_reads_every_form(form: str) -> None:
    make, norm, extras = FORMS[form]
    module = graph_of(block(frozen(make, BF16)), *tensors(BF16))
    (rsqrt,) = rsqrts(module.graph)
    assert isinstance(find_norm(rsqrt), FoundNorm)
    assert fused(module) == 1 and not reasons(module)
    (node,) = nodes_of(module)
    assert node.norm == norm and node.extras == tuple(extras.split())


@pytest.mark.parametrize("form", FORMS)
def test_computes_the_same(form: str) -> None:
    make, norm, extras = FORMS[form]
    module = graph_of(block(frozen(make, FP32)), *tensors(FP32))
    assert_same_when_fused(module)
    (node,) = nodes_of(module)
    # Nothing is rounded first.
    assert node.norm == dataclasses.replace(norm, round_first=False) and node.extras == tuple(extras.split())


def test_golden_llama() -> None:
    module = graph_of(block(frozen(LlamaNorm, BF16)), *tensors())
    fused(module)
    expecttest.assert_expected_inline(
        text(module.graph),
        """\
arg0_1 [2, 4, 16]
arg1_1 [16, 32]
arg2_1 [2, 4, 32]
arg3_1 [32]
arg4_1 [32, 8]
view [8, 16] = aten.reshape(arg0_1, [8, 16])
matmul_all_reduce_rms_norm = ditron.matmul_all_reduce_rms_norm([view, arg1_1, arg2_1, arg3_1], "reduce_op=sum norm=(round_first) extras=residual+weight world_size=4 group_name=0 site='' trials", None)
getitem_1 [8, 32] = matmul_all_reduce_rms_norm[0]
getitem_2 [8, 32] = matmul_all_reduce_rms_norm[1]
rows_1 [2, 4, 32] = aten.reshape(getitem_2, [2, 4, 32])
rows [2, 4, 32] = aten.reshape(getitem_1, [2, 4, 32])
view_2 [8, 32] = aten.reshape(rows, [8, 32])
mm_1 [8, 8] = aten.mm(view_2, arg4_1)
view_3 [2, 4, 8] = aten.reshape(mm_1, [2, 4, 8])
return (view_3, rows_1)
""",
    )


def test_golden_bias_and_layer_norm() -> None:
    norm = frozen(lambda dtype: nn.LayerNorm(N, dtype=dtype), FP16)

    def fn(x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor, out: torch.Tensor) -> Any:
        total = residual + (all_reduce(x, "avg").view(2, 4, N) + bias)
        return norm(total.view(8, N)) @ out, total

    args = [torch.randn(shape).to(FP16) for shape in ((8, N), (N,), (2, 4, N), OUT)]
    module = graph_of(fn, *args)
    assert fused(module) == 1
    expecttest.assert_expected_inline(
        text(module.graph),
        """\
arg0_1 [8, 32]
arg1_1 [32]
arg2_1 [2, 4, 32]
arg3_1 [32]
arg4_1 [32]
arg5_1 [32, 8]
all_reduce_rms_norm = ditron.all_reduce_rms_norm([arg0_1, arg1_1, arg2_1, arg3_1, arg4_1], "reduce_op=avg norm=(form=layer eps=1e-05) extras=bias+residual+weight+shift world_size=4 group_name=0 site='' trials", None)
getitem_2 [8, 32] = all_reduce_rms_norm[0]
getitem_3 [8, 32] = all_reduce_rms_norm[1]
rows_2 [2, 4, 32] = aten.reshape(getitem_3, [2, 4, 32])
rows [2, 4, 32] = aten.reshape(getitem_2, [2, 4, 32])
rows_1 [8, 32] = aten.reshape(rows, [8, 32])
mm [8, 8] = aten.mm(rows_1, arg5_1)
return (mm, rows_2)
""",
    )


def test_golden_two_sites_in_order() -> None:
    norm = frozen(LlamaNorm, FP32)

    def fn(a: torch.Tensor, b: torch.Tensor, residual: torch.Tensor, out: torch.Tensor) -> Any:
        x = all_reduce(a @ b) + residual
        y = all_reduce((norm(x) @ out) @ out.t()) + x
        return norm(y) @ out, y

    module = graph_of(fn, *tensors(FP32))
    assert fused(module) == 2
    order_collectives(module.graph, options=Options())
    assert name_sites(module.graph, options=Options()) == 2
    verify_graph(module.graph)
    expecttest.assert_expected_inline(
        text(module.graph),
        """\
arg0_1 [2, 4, 16]
arg1_1 [16, 32]
arg2_1 [2, 4, 32]
arg3_1 [32]
arg4_1 [32, 8]
view [8, 16] = aten.reshape(arg0_1, [8, 16])
matmul_all_reduce_rms_norm = ditron.matmul_all_reduce_rms_norm([view, arg1_1, arg2_1, arg3_1], 'reduce_op=sum norm=() extras=residual+weight world_size=4 group_name=0 site=82de0bd8/0:matmul_all_reduce_rms_norm trials', None)
getitem_6 [1] = matmul_all_reduce_rms_norm[2]
getitem_2 [8, 32] = matmul_all_reduce_rms_norm[0]
getitem_3 [8, 32] = matmul_all_reduce_rms_norm[1]
rows_1 [2, 4, 32] = aten.reshape(getitem_3, [2, 4, 32])
rows [2, 4, 32] = aten.reshape(getitem_2, [2, 4, 32])
view_2 [8, 32] = aten.reshape(rows, [8, 32])
mm_1 [8, 8] = aten.mm(view_2, arg4_1)
permute [8, 32] = aten.permute(arg4_1, [1, 0])
matmul_all_reduce_rms_norm_1 = ditron.matmul_all_reduce_rms_norm([mm_1, permute, rows_1, arg3_1], 'reduce_op=sum norm=() extras=residual+weight world_size=4 group_name=0 site=82de0bd8/1:matmul_all_reduce_rms_norm trials', getitem_6)
getitem_4 [8, 32] = matmul_all_reduce_rms_norm_1[0]
getitem_5 [8, 32] = matmul_all_reduce_rms_norm_1[1]
rows_3 [2, 4, 32] = aten.reshape(getitem_5, [2, 4, 32])
rows_2 [2, 4, 32] = aten.reshape(getitem_4, [2, 4, 32])
view_6 [8, 32] = aten.reshape(rows_2, [8, 32])
mm_3 [8, 8] = aten.mm(view_6, arg4_1)
view_7 [2, 4, 8] = aten.reshape(mm_3, [2, 4, 8])
return (view_7, rows_3)
""",
    )


def test_dynamic_rows() -> None:
    args = tensors()
    for index in (0, 2):
        torch._dynamo.mark_dynamic(args[index], 1)
    module = graph_of(block(frozen(LlamaNorm, BF16)), *args)
    with assert_no_new_guards(module):
        assert fused(module) == 1


def test_a_dynamic_eps() -> None:
    """With everything dynamic, a number of a module is an input of its graph."""
    module = graph_of(block(frozen(LlamaNorm, BF16)), *tensors(), dynamic=True)
    with assert_no_new_guards(module):
        assert fused(module) == 0
    assert codes(module) == ["norm_form"]


def test_a_dynamic_width() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(all_reduce(x), [x.shape[-1]], None, 0.5)

    module = graph_of(fn, torch.ones(4, N), dynamic=True)
    assert fused(module) == 0 and reasons(module) == ["norm_width"]


def test_is_idempotent() -> None:
    module = graph_of(block(frozen(LlamaNorm, BF16)), *tensors())
    fused(module)
    before = text(module.graph)
    assert all_reduce_rms_norm(module.graph, options=Options()) == 0
    assert text(module.graph) == before


def test_two_norms_of_one_sum() -> None:
    first, second = frozen(LlamaNorm, BF16), frozen(LlamaNorm, BF16)

    def fn(a: torch.Tensor, b: torch.Tensor, residual: torch.Tensor, out: torch.Tensor) -> Any:
        x = all_reduce(a @ b) + residual
        return first(x) @ out, second(x) @ out

    assert fused(graph_of(fn, *tensors())) == 1


def sandwich(post: nn.Module, norm: nn.Module) -> Callable[..., Any]:
    """As in Gemma 2 and 3: a norm in front of the residual, and one behind."""

    def fn(a: torch.Tensor, b: torch.Tensor, residual: torch.Tensor, out: torch.Tensor) -> Any:
        x = residual + post(all_reduce(a @ b))
        return norm(x) @ out, x

    return fn


def assert_same_when_fused(module: fx.GraphModule) -> None:
    """What all ranks compute before and after one norm has been fused."""
    generator = torch.Generator().manual_seed(1)
    values = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    inputs = [[torch.randn(value.shape, generator=generator) for value in values] for _ in range(WORLD_SIZE)]
    before = run_ranks(module, inputs)
    assert fused(module) == 1
    torch.testing.assert_close(run_ranks(module, inputs), before)


@pytest.mark.parametrize(("post", "norm"), [("gemma", "gemma"), ("layer", "llama")])
def test_a_norm_in_front_of_the_residual(post: str, norm: str) -> None:
    module = graph_of(sandwich(frozen(FORMS[post][0], FP32), frozen(FORMS[norm][0], FP32)), *tensors(FP32))
    assert_same_when_fused(module)
    (node,) = nodes_of(module)
    assert node.post == FORMS[post][1] and node.norm.form == "rms"
    assert set(node.extras) >= {"post_weight", "residual", "weight"} and ("post_shift" in node.extras) == (
        post == "layer"
    )


def test_golden_norm_in_front_of_the_residual() -> None:
    module = graph_of(sandwich(frozen(GemmaNorm, BF16), frozen(LlamaNorm, BF16)), *tensors())
    assert fused(module) == 1
    expecttest.assert_expected_inline(
        text(module.graph),
        """\
arg0_1 [2, 4, 16]
arg1_1 [16, 32]
arg2_1 [32]
arg3_1 [2, 4, 32]
arg4_1 [32]
arg5_1 [32, 8]
view [8, 16] = aten.reshape(arg0_1, [8, 16])
matmul_all_reduce_rms_norm = ditron.matmul_all_reduce_rms_norm([view, arg1_1, arg2_1, arg3_1, arg4_1], "reduce_op=sum norm=(round_first) extras=post_weight+residual+weight world_size=4 group_name=0 site='' trials post=(plus_one)", None)
getitem_1 [8, 32] = matmul_all_reduce_rms_norm[0]
getitem_2 [8, 32] = matmul_all_reduce_rms_norm[1]
convert_element_type_3 [32] = prims.convert_element_type(arg2_1, torch.float32)
add_1 [32] = aten.add.Tensor(convert_element_type_3, 1.0)
rows_1 [2, 4, 32] = aten.reshape(getitem_2, [2, 4, 32])
rows [2, 4, 32] = aten.reshape(getitem_1, [2, 4, 32])
view_2 [8, 32] = aten.reshape(rows, [8, 32])
mm_1 [8, 8] = aten.mm(view_2, arg5_1)
view_3 [2, 4, 8] = aten.reshape(mm_1, [2, 4, 8])
return (view_3, rows_1)
""",
    )


def test_second_bias() -> None:
    norm = frozen(LlamaNorm, FP32)

    def fn(a: torch.Tensor, b: torch.Tensor, residual: torch.Tensor, one: torch.Tensor, two: torch.Tensor) -> Any:
        x = (all_reduce(a @ b) + one) + two + residual
        return norm(x) @ b.t(), x

    first, second = torch.ones(N), torch.full([N], 2.0)
    module = graph_of(fn, *tensors(FP32)[:3], first, second)
    assert_same_when_fused(module)
    (node,) = nodes_of(module)
    assert node.extras == ("bias", "second_bias", "residual", "weight")
    module = graph_of(lambda *args: norm(fn(*args)[1] + first.sin()), *tensors(FP32)[:3], first, second)
    assert fused(module) == 0


def training(fn: Callable[..., Any], dtype: torch.dtype, dynamic: bool = False) -> fx.GraphModule:
    """The forward graph of training; fn returns several tensors."""
    args = tensors(dtype)
    for index in (0, 2):
        args[index].requires_grad_()
        if dynamic:
            torch._dynamo.mark_dynamic(args[index], 1)
    graphs = compiled_graphs(lambda *given: sum(one.float().sum() for one in fn(*given)), *args)
    assert len(graphs) == 2
    return graphs[0]


@pytest.mark.parametrize("form", ["llama", "t5", "rms", "layer"])
def test_training_computes_the_same(form: str) -> None:
    module = training(block(FORMS[form][0](FP32)), FP32)
    assert_same_when_fused(module)
    (node,) = nodes_of(module)
    assert {"rstd"} <= set(node.saved) <= {"reduced", "rstd", "scaled"}


def test_training_with_a_norm_in_front_of_the_residual() -> None:
    module = training(sandwich(GemmaNorm(FP32), GemmaNorm(FP32)), FP32)
    assert_same_when_fused(module)
    (node,) = nodes_of(module)
    assert node.saved == ("reduced", "post_rstd", "rstd")


def test_golden_training() -> None:
    module = training(block(LlamaNorm(BF16).requires_grad_(True)), BF16)
    assert fused(module) == 1
    expecttest.assert_expected_inline(
        text(module.graph),
        """\
primals_1 [2, 4, 16]
primals_2 [16, 32]
primals_3 [2, 4, 32]
primals_4 [32]
primals_5 [32, 8]
view [8, 16] = aten.reshape(primals_1, [8, 16])
matmul_all_reduce_rms_norm = ditron.matmul_all_reduce_rms_norm([view, primals_2, primals_3, primals_4], "reduce_op=sum norm=(round_first) extras=residual+weight world_size=4 group_name=0 site='' trials saved=rstd", None)
getitem_1 [8, 32] = matmul_all_reduce_rms_norm[0]
getitem_2 [8, 32] = matmul_all_reduce_rms_norm[1]
getitem_3 [8, 1] = matmul_all_reduce_rms_norm[2]
rows_1 [2, 4, 32] = aten.reshape(getitem_2, [2, 4, 32])
convert_element_type_2 [2, 4, 32] = prims.convert_element_type(rows_1, torch.float32)
saved [2, 4, 1] = aten.reshape(getitem_3, [2, 4, 1])
rows [2, 4, 32] = aten.reshape(getitem_1, [2, 4, 32])
view_2 [8, 32] = aten.reshape(rows, [8, 32])
mm_1 [8, 8] = aten.mm(view_2, primals_5)
view_3 [2, 4, 8] = aten.reshape(mm_1, [2, 4, 8])
convert_element_type_6 [2, 4, 8] = prims.convert_element_type(view_3, torch.float32)
sum_1 [] = aten.sum(convert_element_type_6)
add_2 [] = aten.add.Tensor(sum_1, 0)
sum_2 [] = aten.sum(convert_element_type_2)
add_3 [] = aten.add.Tensor(add_2, sum_2)
permute [8, 32] = aten.permute(primals_5, [1, 0])
permute_1 [32, 16] = aten.permute(primals_2, [1, 0])
return (add_3, primals_4, rows_1, saved, permute, permute_1)
""",
    )


def test_dynamic_rows_in_training() -> None:
    module = training(block(LlamaNorm(BF16).requires_grad_(True)), BF16, dynamic=True)
    with assert_no_new_guards(module):
        assert fused(module) == 1


def _post_used(norm: nn.Module) -> Callable[..., Any]:
    def fn(a: torch.Tensor, b: torch.Tensor, residual: torch.Tensor, out: torch.Tensor) -> Any:
        y = norm(all_reduce(a @ b))
        return norm(y + residual) @ out, y

    return fn


def _bias_behind_post(norm: nn.Module) -> Callable[..., Any]:
    def fn(a: torch.Tensor, b: torch.Tensor, residual: torch.Tensor, out: torch.Tensor) -> Any:
        return norm((norm(all_reduce(a @ b)) + b[0]) + residual) @ out

    return fn


def _residual_in_front_of_post(norm: nn.Module) -> Callable[..., Any]:
    def fn(a: torch.Tensor, b: torch.Tensor, residual: torch.Tensor, out: torch.Tensor) -> Any:
        return norm(norm(all_reduce(a @ b) + residual) + residual) @ out

    return fn


def _partial_sum_used(norm: nn.Module) -> Callable[..., Any]:
    def fn(a: torch.Tensor, b: torch.Tensor, residual: torch.Tensor, out: torch.Tensor) -> Any:
        y = all_reduce(a @ b) + b[0]
        return norm(y + residual) @ out, y

    return fn


def _elements(norm: nn.Module) -> Callable[..., Any]:
    return lambda a, b, residual, out: (torch.relu(norm(all_reduce(a @ b) + residual)) @ out,)


def _reduced_used(norm: nn.Module) -> Callable[..., Any]:
    def fn(a: torch.Tensor, b: torch.Tensor, residual: torch.Tensor, out: torch.Tensor) -> Any:
        reduced = all_reduce(a @ b)
        return norm(reduced + residual) @ out, reduced.relu()

    return fn


def _depends(norm: nn.Module) -> Callable[..., Any]:
    def fn(a: torch.Tensor, b: torch.Tensor, residual: torch.Tensor, out: torch.Tensor) -> Any:
        reduced = all_reduce(a @ b)
        return norm(reduced + residual * reduced.amax(-1, keepdim=True)) @ out

    return fn


def _saved(norm: nn.Module) -> Callable[..., Any]:
    def fn(a: torch.Tensor, b: torch.Tensor, residual: torch.Tensor, out: torch.Tensor) -> Any:
        x = (all_reduce(a @ b) + residual).float()
        mean = x.pow(2).mean(-1, keepdim=True)
        return (x * torch.rsqrt(mean + 1e-6)).to(a.dtype) @ out, mean

    return fn


def _other_dim(norm: nn.Module) -> Callable[..., Any]:
    def fn(a: torch.Tensor, b: torch.Tensor, residual: torch.Tensor, out: torch.Tensor) -> Any:
        x = (all_reduce(a @ b) + residual).float()
        return (x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6)).to(a.dtype) @ out

    return fn


def _other_numerator(norm: nn.Module) -> Callable[..., Any]:
    def fn(a: torch.Tensor, b: torch.Tensor, residual: torch.Tensor, out: torch.Tensor) -> Any:
        x = (all_reduce(a @ b) + residual).float()
        return (residual * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)).to(a.dtype) @ out

    return fn


def _unbiased(norm: nn.Module) -> Callable[..., Any]:
    def fn(a: torch.Tensor, b: torch.Tensor, residual: torch.Tensor, out: torch.Tensor) -> Any:
        x = (all_reduce(a @ b) + residual).float()
        variance, mean = torch.var_mean(x, -1, correction=1, keepdim=True)
        return ((x - mean) * torch.rsqrt(variance + 1e-6)).to(a.dtype) @ out

    return fn


def _largest(norm: nn.Module) -> Callable[..., Any]:
    return lambda a, b, residual, out: norm(all_reduce(a @ b, "max") + residual) @ out


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (_elements, ["norm_consumer"]),
        (_reduced_used, ["intermediate_used"]),
        (_depends, ["operand_depends"]),
        (_saved, ["norm_used"]),
        (_other_numerator, ["norm_form"]),
        (_post_used, ["norm_consumer", "intermediate_used"]),
        (_bias_behind_post, ["norm_consumer"]),
        (_residual_in_front_of_post, ["norm_consumer"]),
        (_partial_sum_used, ["intermediate_used"]),
        (_largest, ["reduce_op"]),
        # Nothing that looks like a norm of the sum.
        (_other_dim, []),
        (_unbiased, []),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_does_not_fire(make: Callable[[nn.Module], Callable[..., Any]], expected: list[str]) -> None:
    module = graph_of(make(frozen(LlamaNorm, BF16)), *tensors())
    assert fused(module) == 0
    assert codes(module) == expected


@pytest.mark.parametrize("make", [OtherMean, OtherDeviation])
def test_reads_only_the_mean_of_the_same_rows(make: Callable[[torch.dtype], nn.Module]) -> None:
    module = graph_of(block(make(BF16)), *tensors())
    assert fused(module) == 0
    (rsqrt,) = rsqrts(module.graph)
    found = find_norm(rsqrt)
    # The second one is the RMS norm of what the compiler makes of the sum, which is no sum of a reduction.
    assert found is ReasonCode.NORM_FORM or (isinstance(found, FoundNorm) and find_sum(found.x) is None)


def test_the_option_leaves_it_out() -> None:
    module = graph_of(block(frozen(LlamaNorm, BF16)), *tensors())
    assert fused(module, Options(fusions=("matmul_all_reduce",))) == 0
    assert not reasons(module)


def test_a_reduction_without_a_matmul_gets_a_reason() -> None:
    norm = frozen(LlamaNorm, BF16)
    module = graph_of(lambda x: norm(all_reduce(x)).relu(), tensors()[2])
    assert fused(module) == 0 and reasons(module) == ["norm_consumer"]
    module = graph_of(lambda x: norm(all_reduce(x)), tensors()[2])
    assert fused(module, Options(fusions=())) == 0 and reasons(module) == ["disabled"]


def test_what_is_used_elsewhere_is_returned() -> None:
    norm = frozen(LlamaNorm, BF16)

    def fn(a: torch.Tensor, b: torch.Tensor, residual: torch.Tensor, out: torch.Tensor) -> Any:
        reduced = all_reduce(a @ b)
        return norm(reduced + residual) @ out, reduced

    module = graph_of(fn, *tensors())
    assert fused(module) == 1
    (node,) = nodes_of(module)
    assert node.saved == ("reduced",)
