"""all_reduce_rms_norm where the reduced rows are multiplied before the residual is added: Granite, layer scale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch

from tests.passes.graphs import all_reduce, assert_no_new_guards, text
from tests.passes.test_all_reduce_rms_norm import (
    BF16,
    FP16,
    FP32,
    GemmaNorm,
    LlamaNorm,
    N,
    assert_same_when_fused,
    codes,
    frozen,
    fused,
    graph_of,
    nodes_of,
    tensors,
    training,
)
from tests.passes.test_unrounded_norms import AddLlama, assert_same_bits

pytestmark = pytest.mark.usefixtures("group")

Branch = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(reduced rows, residual, a row) -> what is normalised."""


def block(branch: Branch, dtype: torch.dtype = BF16) -> Callable[..., Any]:
    norm = frozen(LlamaNorm, dtype)

    def fn(a: torch.Tensor, b: torch.Tensor, residual: torch.Tensor, out: torch.Tensor, row: torch.Tensor) -> Any:
        x = branch(all_reduce(a @ b), residual, row)
        return norm(x) @ out, x

    return fn


def operands(dtype: torch.dtype = BF16, row: tuple[int, ...] = (N,)) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [*tensors(dtype), torch.randn(row, generator=generator).to(dtype)]


NUMBERS: dict[str, tuple[Branch, float, str]] = {
    "granite": (lambda y, x, row: x + y * 0.22, 0.22, "residual weight"),
    "in front": (lambda y, x, row: 3 * y + x, 3.0, "residual weight"),
    "embeddings": (lambda y, x, row: y * 12.0, 12.0, "weight"),
    "behind a bias": (lambda y, x, row: x + (y + row) * 0.3, 0.3, "bias residual weight"),
    # The residual is an operand, whoever computed it.
    "scaled residual": (lambda y, x, row: x * 3.5 + y, 1.0, "residual weight"),
    "both scaled": (lambda y, x, row: x * 3.5 + 0.7 * y, 0.7, "residual weight"),
}


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("form", NUMBERS)
def test_a_number(form: str, dtype: torch.dtype) -> None:
    branch, factor, extras = NUMBERS[form]
    module = graph_of(block(branch, dtype), *operands(dtype))
    assert_same_bits(module)
    (node,) = nodes_of(module)
    assert node.factor == factor and node.extras == tuple(extras.split())


@pytest.mark.parametrize("row", [(N,), (1, 1, N), (), (1,)], ids=str)
def test_a_row_and_one_element(row: tuple[int, ...]) -> None:
    module = graph_of(block(lambda y, x, row: x + row * y), *operands(row=row))
    assert_same_bits(module)
    (node,) = nodes_of(module)
    assert node.factor == 1.0 and node.extras == ("residual", "weight", "scale")


def test_golden_number() -> None:
    module = graph_of(block(lambda y, x, row: x + y * 0.22), *operands())
    assert fused(module) == 1
    expecttest.assert_expected_inline(
        text(module.graph),
        """\
arg0_1 [2, 4, 16]
arg1_1 [16, 32]
arg2_1 [2, 4, 32]
arg3_1 [32]
arg4_1 [32, 8]
view [8, 16] = aten.reshape(arg0_1, [8, 16])
matmul_all_reduce_rms_norm = ditron.matmul_all_reduce_rms_norm([view, arg1_1, arg2_1, arg3_1], "reduce_op=sum norm=(round_first) extras=residual+weight world_size=4 group_name=0 site='' trials factor=0.22", None)
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


def test_golden_one_element() -> None:
    """It becomes a row, before the node."""
    module = graph_of(block(lambda y, x, row: x + row * y), *operands(row=()))
    assert fused(module) == 1
    expecttest.assert_expected_inline(
        text(module.graph),
        """\
arg0_1 [2, 4, 16]
arg1_1 [16, 32]
arg2_1 []
arg3_1 [2, 4, 32]
arg4_1 [32]
arg5_1 [32, 8]
view [8, 16] = aten.reshape(arg0_1, [8, 16])
scale [1] = aten.reshape(arg2_1, [1])
scale_1 [32] = aten.expand(scale, [32])
matmul_all_reduce_rms_norm = ditron.matmul_all_reduce_rms_norm([view, arg1_1, arg3_1, arg4_1, scale_1], "reduce_op=sum norm=(round_first) extras=residual+weight+scale world_size=4 group_name=0 site='' trials", None)
getitem_1 [8, 32] = matmul_all_reduce_rms_norm[0]
getitem_2 [8, 32] = matmul_all_reduce_rms_norm[1]
rows_1 [2, 4, 32] = aten.reshape(getitem_2, [2, 4, 32])
rows [2, 4, 32] = aten.reshape(getitem_1, [2, 4, 32])
view_2 [8, 32] = aten.reshape(rows, [8, 32])
mm_1 [8, 8] = aten.mm(view_2, arg5_1)
view_3 [2, 4, 8] = aten.reshape(mm_1, [2, 4, 8])
return (view_3, rows_1)
""",
    )


def test_behind_a_norm() -> None:
    post = frozen(GemmaNorm, BF16)
    module = graph_of(block(lambda y, x, row: x + post(y) * 0.5), *operands())
    assert_same_bits(module)
    (node,) = nodes_of(module)
    assert node.factor == 0.5 and node.post is not None and "residual" in node.extras


def test_added_before_it_is_rounded() -> None:
    norm = frozen(AddLlama, BF16)

    def fn(a: torch.Tensor, b: torch.Tensor, residual: torch.Tensor, out: torch.Tensor) -> Any:
        normed, total = norm((all_reduce(a @ b) + b[0]) * 0.3, residual)
        return normed @ out, total

    module = graph_of(fn, *tensors())
    assert_same_bits(module)
    (node,) = nodes_of(module)
    assert node.factor == 0.3 and node.norm.unrounded and node.extras == ("bias", "residual", "weight")


def test_training_saves_the_reduced_rows() -> None:
    """The gradient of a row is made of them."""
    row = torch.nn.Parameter(torch.rand(N))
    norm = LlamaNorm(FP32)

    def fn(a: torch.Tensor, b: torch.Tensor, residual: torch.Tensor, out: torch.Tensor) -> Any:
        x = residual + row * all_reduce(a @ b)
        return norm(x) @ out, x

    module = training(fn, FP32)
    assert_same_when_fused(module)
    (node,) = nodes_of(module)
    assert node.saved == ("reduced", "rstd") and "scale" in node.extras


def test_dynamic_rows() -> None:
    args = operands()
    for index in (0, 2):
        torch._dynamo.mark_dynamic(args[index], 1)
    module = graph_of(block(lambda y, x, row: x + row * y), *args)
    with assert_no_new_guards(module):
        assert fused(module) == 1


def _column(y: torch.Tensor, x: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    return x + y * x[..., :1]


def _twice(y: torch.Tensor, x: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    return x + (y * row) * 0.3


def _bias_behind(y: torch.Tensor, x: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    return x + (y * 0.3 + row)


def _only_a_bias_behind(y: torch.Tensor, x: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    return y * 0.3 + row


def _residual_scaled_too(y: torch.Tensor, x: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    return (x + y) * 0.3


def _square(y: torch.Tensor, x: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    return x + y * y


def _wide_row(y: torch.Tensor, x: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    return x + (y * row.float()).to(x.dtype)


def _no_number(y: torch.Tensor, x: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    return x + y * float("inf")


@pytest.mark.parametrize(
    "branch",
    [_column, _twice, _bias_behind, _only_a_bias_behind, _residual_scaled_too, _square, _wide_row, _no_number],
)
def test_does_not_fire(branch: Branch) -> None:
    module = graph_of(block(branch), *operands())
    assert fused(module) == 0 and codes(module) == []


def test_scaled_rows_that_are_used_elsewhere() -> None:
    norm = frozen(LlamaNorm, BF16)

    def fn(a: torch.Tensor, b: torch.Tensor, residual: torch.Tensor, out: torch.Tensor) -> Any:
        y = all_reduce(a @ b) * 0.3
        return norm(residual + y) @ out, y

    module = graph_of(fn, *tensors())
    assert fused(module) == 0 and codes(module) == ["intermediate_used"]
