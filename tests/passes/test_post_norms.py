"""all_reduce_rms_norm where a norm stands in front of the residual, and none behind, as OLMo 2 has it; and where two
stand behind, as in GPT-NeoX.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.passes.graphs import all_reduce, text
from tests.passes.test_all_reduce_rms_norm import (
    BF16,
    FP32,
    LlamaNorm,
    assert_same_when_fused,
    codes,
    frozen,
    fused,
    graph_of,
    nodes_of,
    tensors,
    training,
)

pytestmark = pytest.mark.usefixtures("group")


def post_norm(post: nn.Module) -> Callable[..., Any]:
    """As in OLMo 2: a norm in front of the residual, and none behind."""

    def fn(a: torch.Tensor, b: torch.Tensor, residual: torch.Tensor, out: torch.Tensor) -> Any:
        x = residual + post(all_reduce(a @ b))
        return x @ out, x.sin()

    return fn


def test_golden_norm_in_front_of_the_residual_alone() -> None:
    module = graph_of(post_norm(frozen(LlamaNorm, FP32)), *tensors(FP32))
    assert_same_when_fused(module)
    expecttest.assert_expected_inline(
        text(module.graph),
        """\
arg0_1 [2, 4, 16]
arg1_1 [16, 32]
arg2_1 [32]
arg3_1 [2, 4, 32]
arg4_1 [32, 8]
view [8, 16] = aten.reshape(arg0_1, [8, 16])
matmul_all_reduce_rms_norm = ditron.matmul_all_reduce_rms_norm([view, arg1_1, arg2_1, arg3_1], "reduce_op=sum norm=(form=none eps=0.0) extras=post_weight+residual world_size=4 group_name=0 site='' trials post=()", None)
getitem_1 [8, 32] = matmul_all_reduce_rms_norm[0]
rows [2, 4, 32] = aten.reshape(getitem_1, [2, 4, 32])
view_2 [8, 32] = aten.reshape(rows, [8, 32])
mm_1 [8, 8] = aten.mm(view_2, arg4_1)
view_3 [2, 4, 8] = aten.reshape(mm_1, [2, 4, 8])
sin [2, 4, 32] = aten.sin(rows)
return (view_3, sin)
""",
    )


def test_training_with_a_norm_in_front_of_the_residual_alone() -> None:
    module = training(post_norm(LlamaNorm(FP32)), FP32)
    assert_same_when_fused(module)
    (node,) = nodes_of(module)
    assert node.norm.form == "none" and node.saved == ("reduced", "post_rstd")


def norms_of_one_sum(*norms: nn.Module) -> Callable[..., Any]:
    """As in GPT-NeoX: attention and MLP have a norm each."""

    def fn(a: torch.Tensor, b: torch.Tensor, residual: torch.Tensor, out: torch.Tensor) -> Any:
        x = all_reduce(a @ b) + residual
        return *(norm(x) @ out for norm in norms), x

    return fn


def layer_norms(count: int, dtype: torch.dtype) -> list[nn.Module]:
    return [varied(nn.LayerNorm(32, dtype=dtype)) for _ in range(count)]


def varied(norm: nn.Module) -> nn.Module:
    """With weights that no other norm has."""
    with torch.no_grad():
        for index, parameter in enumerate(norm.parameters()):
            parameter.copy_(torch.randn(parameter.shape) / 4 + 1 - index)
    return norm


def test_golden_two_norms_of_one_sum_in_training() -> None:
    """The compiler has found what both compute: they share their scaled rows, and means and deviations are saved once."""
    module = training(norms_of_one_sum(*layer_norms(2, BF16)), BF16)
    assert fused(module) == 1
    # The order of the inputs is another one in each version of torch.
    _, behind = re.sub(r"primals_\d", "primals", text(module.graph)).split("view ", 1)
    expecttest.assert_expected_inline(
        behind,
        """\
[8, 16] = aten.reshape(primals, [8, 16])
matmul_all_reduce_rms_norm = ditron.matmul_all_reduce_rms_norm([view, primals, primals, primals, primals, primals, primals], "reduce_op=sum norm=(form=layer eps=1e-05) extras=residual+weight+shift+other_weight+other_shift world_size=4 group_name=0 site='' trials saved=mean+rstd+other", None)
getitem_3 [8, 32] = matmul_all_reduce_rms_norm[0]
getitem_4 [8, 32] = matmul_all_reduce_rms_norm[1]
getitem_5 [8, 1] = matmul_all_reduce_rms_norm[2]
getitem_6 [8, 1] = matmul_all_reduce_rms_norm[3]
getitem_7 [8, 32] = matmul_all_reduce_rms_norm[4]
rows_2 [2, 4, 32] = aten.reshape(getitem_4, [2, 4, 32])
convert_element_type_2 [2, 4, 32] = prims.convert_element_type(rows_2, torch.float32)
saved [2, 4, 1] = aten.reshape(getitem_5, [2, 4, 1])
saved_1 [2, 4, 1] = aten.reshape(getitem_6, [2, 4, 1])
rows [2, 4, 32] = aten.reshape(getitem_3, [2, 4, 32])
convert_element_type_4 [2, 4, 1] = prims.convert_element_type(saved, torch.bfloat16)
convert_element_type_5 [2, 4, 1] = prims.convert_element_type(saved_1, torch.bfloat16)
view_2 [8, 32] = aten.reshape(rows, [8, 32])
mm_1 [8, 8] = aten.mm(view_2, primals)
view_3 [2, 4, 8] = aten.reshape(mm_1, [2, 4, 8])
rows_1 [2, 4, 32] = aten.reshape(getitem_7, [2, 4, 32])
view_4 [8, 32] = aten.reshape(rows_1, [8, 32])
mm_2 [8, 8] = aten.mm(view_4, primals)
view_5 [2, 4, 8] = aten.reshape(mm_2, [2, 4, 8])
convert_element_type_14 [2, 4, 8] = prims.convert_element_type(view_3, torch.float32)
sum_1 [] = aten.sum(convert_element_type_14)
add_5 [] = aten.add.Tensor(sum_1, 0)
convert_element_type_15 [2, 4, 8] = prims.convert_element_type(view_5, torch.float32)
sum_2 [] = aten.sum(convert_element_type_15)
add_6 [] = aten.add.Tensor(add_5, sum_2)
sum_3 [] = aten.sum(convert_element_type_2)
add_7 [] = aten.add.Tensor(add_6, sum_3)
permute [8, 32] = aten.permute(primals, [1, 0])
permute_2 [32, 16] = aten.permute(primals, [1, 0])
return (add_7, primals, primals, rows_2, convert_element_type_4, convert_element_type_5, permute, permute_2)
""",
    )


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm, LlamaNorm])
@pytest.mark.parametrize("trains", [True, False])
def test_two_norms_of_one_sum(norm: Any, trains: bool) -> None:
    made = [varied(norm(FP32) if norm is LlamaNorm else norm(32, eps=1e-6)) for _ in range(2)]
    if trains:
        module = training(norms_of_one_sum(*made), FP32)
    else:
        module = graph_of(norms_of_one_sum(*map(frozen_module, made)), *tensors(FP32))
    assert_same_when_fused(module)
    (node,) = nodes_of(module)
    assert "other" in node.saved and "other_weight" in node.extras
    assert not module.graph.find_nodes(op="call_function", target=torch.ops.aten.rsqrt.default)


def test_norms_of_one_sum_that_are_not_two() -> None:
    """Of three that share their scaled rows no node takes one; of two that do not, and differ in form, it takes one."""
    module = training(norms_of_one_sum(*layer_norms(3, FP32)), FP32)
    assert fused(module) == 0 and codes(module) == ["norm_shared"]
    for second in (nn.LayerNorm(32, eps=1e-3), nn.RMSNorm(32, eps=1e-5)):
        module = graph_of(norms_of_one_sum(frozen_module(nn.LayerNorm(32)), frozen_module(second)), *tensors(FP32))
        assert_same_when_fused(module)
        assert nodes_of(module)[0].saved == ()


def test_one_of_two_norms_that_an_op_on_elements_follows() -> None:
    """In training they share their rows, and stay; else the node takes the other one."""

    def fn(a: torch.Tensor, b: torch.Tensor, residual: torch.Tensor, out: torch.Tensor) -> Any:
        x = all_reduce(a @ b) + residual
        return first(x) @ out, second(x).sin(), x

    first, second = layer_norms(2, FP32)
    module = training(fn, FP32)
    assert fused(module) == 0 and codes(module) == ["norm_consumer"]
    for one in (first, second):
        frozen_module(one)
    module = graph_of(fn, *tensors(FP32))
    assert_same_when_fused(module)
    assert nodes_of(module)[0].saved == ()


def frozen_module(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


def test_a_sum_that_nothing_wants_in_memory_stays() -> None:
    """The compiler computes it with what follows."""
    post = frozen(LlamaNorm, FP32)

    def fn(a: torch.Tensor, b: torch.Tensor, residual: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return (residual + post(all_reduce(a @ b))).sin()

    assert fused(graph_of(fn, *tensors(FP32))) == 0


@pytest.mark.parametrize("behind", [False, True])
def test_a_norm_of_other_rows_in_front_of_the_residual_stays(behind: bool) -> None:
    """Of each head: the node has one length of rows."""

    def fn(a: torch.Tensor, b: torch.Tensor, residual: torch.Tensor, out: torch.Tensor) -> Any:
        heads = all_reduce(a @ b).unflatten(-1, (2, 16))
        x = residual + F.rms_norm(heads, (16,)).flatten(-2)
        return (F.rms_norm(x, (32,)) if behind else x) @ out, x

    assert fused(graph_of(fn, *tensors(FP32))) == 0
