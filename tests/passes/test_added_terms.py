"""all_reduce_rms_norm where a second tensor is added in front of the residual: a shared expert that is not sharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import expecttest
import pytest
import torch

from ditron_inductor.passes.graph import reduced_sums
from tests.passes.graphs import WORLD_SIZE, all_reduce, assert_no_new_guards, compiled_graphs, run_ranks, text
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
)

pytestmark = pytest.mark.usefixtures("group")

Branch = Callable[..., torch.Tensor]
"""(reduced rows [8, N], term [8, N], residual [2, 4, N], gate [8, 1], row [N]) -> what is normalised [2, 4, N]."""


def block(branch: Branch, dtype: torch.dtype = BF16) -> Callable[..., Any]:
    norm = frozen(LlamaNorm, dtype)

    def fn(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor, out: torch.Tensor, *given: torch.Tensor) -> Any:
        total = branch(all_reduce(a.flatten(0, 1) @ b), given[0], x, *given[1:])
        return norm(total) @ out, total

    return fn


def operands(dtype: torch.dtype = BF16) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    more = (torch.randn(shape, generator=generator).to(dtype) for shape in ((8, N), (8, 1), (N,)))
    return [*tensors(dtype), *more]


def rows(y: torch.Tensor) -> torch.Tensor:
    return y.view(2, 4, N)


FORMS: dict[str, tuple[Branch, str]] = {
    "hunyuan": (lambda y, a, x, gate, row: x + (rows(y) + rows(a)), "residual weight"),
    "a gate": (lambda y, a, x, gate, row: x + rows(y + gate.sigmoid() * a), "residual weight"),
    "behind the residual": (lambda y, a, x, gate, row: rows(a) + (x + rows(y)), "residual weight"),
    "granite": (lambda y, a, x, gate, row: x + rows(y + a) * 0.22, "residual weight"),
    "by a row": (lambda y, a, x, gate, row: x + row * rows(y + a), "residual weight scale"),
    "behind the scale": (lambda y, a, x, gate, row: x + (rows(y * 0.5) + rows(a)), "residual weight"),
    "a bias": (lambda y, a, x, gate, row: x + rows((y + row) + a), "bias residual weight"),
    "a bias in between": (lambda y, a, x, gate, row: x + rows((y + a) + row), "bias residual weight"),
}


@pytest.mark.parametrize("form", FORMS)
def test_computes_the_same(form: str) -> None:
    branch, extras = FORMS[form]
    module = graph_of(block(branch, FP32), *operands(FP32))
    assert_same_when_fused(module)
    (node,) = nodes_of(module)
    assert node.extras == tuple(extras.split())


@pytest.mark.parametrize("form", FORMS)
def test_rounds_nearly_the_same(form: str) -> None:
    module = graph_of(block(FORMS[form][0]), *operands())
    exact = graph_of(block(FORMS[form][0], FP32), *operands(FP32))
    generator = torch.Generator().manual_seed(1)
    values = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    inputs = [[torch.randn(value.shape, generator=generator).to(BF16) for value in values] for _ in range(WORLD_SIZE)]
    wanted = run_ranks(exact, [[value.float() for value in rank] for rank in inputs])
    eager = run_ranks(module, inputs)
    assert fused(module) == 1
    for got, narrow, wide in zip(run_ranks(module, inputs)[0], eager[0], wanted[0], strict=True):
        limit = 1.5 * (narrow.float() - wide).norm() + 1e-3 * wide.norm()
        assert (got.float() - wide).norm() <= limit


def test_golden() -> None:
    """The product by the scale and the views move with the term."""
    module = graph_of(block(FORMS["granite"][0]), *operands())
    assert fused(module) == 1
    expecttest.assert_expected_inline(text(module.graph), """\
arg0_1 [2, 4, 16]
arg1_1 [16, 32]
arg2_1 [8, 32]
arg3_1 [2, 4, 32]
arg4_1 [32]
arg5_1 [32, 8]
view [8, 16] = aten.reshape(arg0_1, [8, 16])
rows [2, 4, 32] = aten.reshape(arg2_1, [2, 4, 32])
mul_tensor [2, 4, 32] = aten.mul.Tensor(rows, 0.22)
add_tensor [2, 4, 32] = aten.add.Tensor(mul_tensor, arg3_1)
matmul_all_reduce_rms_norm = ditron.matmul_all_reduce_rms_norm([view, arg1_1, add_tensor, arg4_1], "reduce_op=sum norm=(round_first) extras=residual+weight world_size=4 group_name=0 site='' trials factor=0.22", None)
getitem_1 [8, 32] = matmul_all_reduce_rms_norm[0]
getitem_2 [8, 32] = matmul_all_reduce_rms_norm[1]
rows_2 [2, 4, 32] = aten.reshape(getitem_2, [2, 4, 32])
rows_1 [2, 4, 32] = aten.reshape(getitem_1, [2, 4, 32])
view_2 [8, 32] = aten.reshape(rows_1, [8, 32])
mm_1 [8, 8] = aten.mm(view_2, arg5_1)
view_3 [2, 4, 8] = aten.reshape(mm_1, [2, 4, 8])
return (view_3, rows_2)
""")


def test_training() -> None:
    args = operands(FP32)
    for index in (0, 2, 4):
        args[index].requires_grad_()
    fn = block(FORMS["hunyuan"][0], FP32)
    forward, backward = compiled_graphs(lambda *given: sum(one.sum() for one in fn(*given)), *args)
    assert fused(forward) == 1 and fused(backward) == 0
    (node,) = nodes_of(forward)
    assert "rstd" in node.saved


def test_dynamic_rows() -> None:
    args = operands()
    for index in (0, 2):
        torch._dynamo.mark_dynamic(args[index], 1)
    norm = frozen(LlamaNorm, BF16)

    def fn(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor, out: torch.Tensor, *given: torch.Tensor) -> Any:
        return norm(x + (all_reduce(a @ b) + x.relu())) @ out

    module = graph_of(fn, *args)
    with assert_no_new_guards(module):
        # Nobody knows how many bytes these will be.
        assert fused(module) == 0 and not codes(module)


def test_rows_of_which_there_are_few() -> None:
    """The sizes of views, which are symbols, are known before the reduction too."""
    args = operands()
    for index, dim, low in ((0, 1, 2), (2, 1, 2), (4, 0, 4)):
        torch._dynamo.mark_dynamic(args[index], dim, min=low, max=16 * low)
    norm = frozen(LlamaNorm, BF16)

    def fn(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor, out: torch.Tensor, *given: torch.Tensor) -> Any:
        y = all_reduce(a.flatten(0, 1) @ b)
        return norm(x + (y + given[0]).view(2, x.shape[1], N)) @ out

    module = graph_of(fn, *args)
    with assert_no_new_guards(module):
        assert fused(module) == 1


def _float16() -> bool:
    return fused(graph_of(block(FORMS["hunyuan"][0], FP16), *operands(FP16))) == 1


def _many_bytes() -> bool:
    with mock.patch.object(reduced_sums, "NORM_BYTES", 8 * N * 2 - 1):
        return fused(graph_of(block(FORMS["hunyuan"][0]), *operands())) == 1


def _depends() -> bool:
    norm = frozen(LlamaNorm, BF16)

    def fn(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor, out: torch.Tensor, *given: torch.Tensor) -> Any:
        y = all_reduce(a.flatten(0, 1) @ b)
        return norm(x + rows(y + (y @ out) @ out.t())) @ out

    return fused(graph_of(fn, *operands())) == 1


def _used_elsewhere() -> bool:
    norm = frozen(LlamaNorm, BF16)

    def fn(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor, out: torch.Tensor, *given: torch.Tensor) -> Any:
        inner = rows(all_reduce(a.flatten(0, 1) @ b) + given[0])
        return norm(x + inner) @ out, inner

    return fused(graph_of(fn, *operands())) == 1


def _other_strides() -> bool:
    args = operands()
    args[4] = args[4].t().contiguous().t()
    return fused(graph_of(block(FORMS["hunyuan"][0]), *args)) == 1


def _in_front_of_a_norm() -> bool:
    post = frozen(GemmaNorm, BF16)
    return fused(graph_of(block(lambda y, a, x, gate, row: x + post(rows(y + a))), *operands())) == 1


def _three_terms() -> bool:
    return fused(graph_of(block(lambda y, a, x, gate, row: x + (rows(y + a) + x.relu())), *operands())) == 1


@pytest.mark.parametrize(
    "fires", [_float16, _many_bytes, _depends, _used_elsewhere, _other_strides, _in_front_of_a_norm, _three_terms]
)
def test_does_not_fire(fires: Callable[[], bool]) -> None:
    assert not fires()
