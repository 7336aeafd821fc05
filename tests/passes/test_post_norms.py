"""all_reduce_rms_norm where a norm stands in front of the residual, and none behind, as OLMo 2 has it; and where two
stand behind, as in GPT-NeoX.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch
from torch import nn

from tests.passes.graphs import all_reduce, text
from tests.passes.test_all_reduce_rms_norm import (
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
matmul_all_reduce_rms_norm = ditron.matmul_all_reduce_rms_norm([view], [arg1_1], None, None, None, arg2_1, None, arg3_1, None, None, None, 'sum', 'none', 0.0, False, False, 'rms', 1e-06, False, False, '', 4, '0', '', 'auto', 1073741824, 0.0)
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


def test_two_norms_of_one_sum_are_named_in_training() -> None:
    """The compiler has found what both compute; in inference it has not, and the node takes one of them."""
    first, second = (nn.LayerNorm(32, dtype=FP32) for _ in range(2))

    def fn(a: torch.Tensor, b: torch.Tensor, residual: torch.Tensor, out: torch.Tensor) -> Any:
        x = all_reduce(a @ b) + residual
        return first(x) @ out, second(x) @ out

    module = training(fn, FP32)
    assert fused(module) == 0 and codes(module) == ["norm_shared"]


def test_a_sum_that_nothing_wants_in_memory_stays() -> None:
    """The compiler computes it with what follows."""
    post = frozen(LlamaNorm, FP32)

    def fn(a: torch.Tensor, b: torch.Tensor, residual: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return (residual + post(all_reduce(a @ b))).sin()

    assert fused(graph_of(fn, *tensors(FP32))) == 0
