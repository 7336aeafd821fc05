"""all_reduce_rms_norm where the residual is added in fp32, and the norm is that of the sum before it is rounded (vLLM)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch
from torch import fx, nn
from torch._inductor import config

from ditron_inductor.options import Options
from ditron_inductor.passes.absorb.absorb_norms import absorb_norms
from ditron_inductor.passes.normalize.keep_roundings import show_roundings
from ditron_inductor.pipeline import BEFORE_JOINT, JointPipeline
from ditron_inductor.task.nodes import Norm, ShardNorm
from tests.passes.graphs import WORLD_SIZE, all_reduce, assert_no_new_guards, reasons, run_ranks, scatter_dim, text
from tests.passes.test_absorb_norms import FORCED, A, G, R, V, W, absorbed, gathered, prologues
from tests.passes.test_absorb_norms import graph_of as gather_graph
from tests.passes.test_all_reduce_rms_norm import (
    BF16,
    FP16,
    FP32,
    GemmaNorm,
    LlamaNorm,
    N,
    codes,
    frozen,
    fused,
    nodes_of,
    tensors,
)
from tests.passes.test_all_reduce_rms_norm import graph_of as compiled_graph

pytestmark = pytest.mark.usefixtures("group")

UNROUNDED = Norm("rms", 1e-6, round_first=True, unrounded=True)

def graph_of(fn: Callable[..., Any], *args: torch.Tensor, dynamic: bool | None = None) -> fx.GraphModule:
    """As the compiler hands it to our passes, with every rounding that the program makes."""
    first, last = (JointPipeline(Options(), passes=passes) for passes in (BEFORE_JOINT, (show_roundings,)))
    with config.patch(joint_custom_pre_pass=first, joint_custom_post_pass=last):
        return compiled_graph(fn, *args, dynamic=dynamic)



class AddLlama(LlamaNorm):
    """The sum with a residual, its norm with the weight in the dtype of the rows, and the rounded sum."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        wide = x.to(torch.float32) + residual.to(torch.float32)
        return self.scaled(wide).to(x.dtype) * self.weight, wide.to(x.dtype)


class AddGemma(GemmaNorm):
    """With 1 + weight in fp32."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        wide = x.float() + residual.float()
        return (self.scaled(wide) * (self.weight.float() + 1.0)).to(x.dtype), wide.to(x.dtype)


class AddLayer(LlamaNorm):
    """A layer norm in fp32."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        wide = residual.float() + x.float()
        normed = nn.functional.layer_norm(wide, (N,), self.weight.float(), self.weight.float(), self.eps)
        return normed.to(x.dtype), wide.to(x.dtype)


FORMS = {
    "llama": (AddLlama, UNROUNDED, "residual weight"),
    "gemma": (AddGemma, Norm("rms", 1e-6, plus_one=True, unrounded=True), "residual weight"),
    "layer": (AddLayer, Norm("layer", 1e-6, unrounded=True), "residual weight shift"),
}


def block(norm: nn.Module) -> Callable[..., Any]:
    def fn(a: torch.Tensor, b: torch.Tensor, residual: torch.Tensor, out: torch.Tensor) -> Any:
        normed, total = norm(all_reduce(a @ b), residual)
        return normed @ out, total

    return fn


def assert_same_bits(module: fx.GraphModule, count: int = 1) -> None:
    """All ranks compute the same bits before and after so many norms have been fused, each by its operations in turn."""
    generator = torch.Generator().manual_seed(1)
    values = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    inputs = [
        [torch.randn(value.shape, generator=generator).to(value.dtype) for value in values] for _ in range(WORLD_SIZE)
    ]
    before = run_ranks(module, inputs)
    assert fused(module) == count
    for rank, other in zip(run_ranks(module, inputs), before, strict=True):
        assert all(torch.equal(one, wanted) for one, wanted in zip(rank, other, strict=True))


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_has_the_same_bits(form: str, dtype: torch.dtype) -> None:
    make, norm, extras = FORMS[form]
    module = graph_of(block(frozen(make, dtype)), *tensors(dtype))
    assert_same_bits(module)
    (node,) = nodes_of(module)
    assert node.norm == norm and node.extras == tuple(extras.split()) and not reasons(module)


def test_in_fp32_nothing_is_rounded() -> None:
    module = graph_of(block(frozen(AddLlama, FP32)), *tensors(FP32))
    assert_same_bits(module)
    assert nodes_of(module)[0].norm == Norm("rms", 1e-6)


def test_golden() -> None:
    module = graph_of(block(frozen(AddLlama, BF16)), *tensors())
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
matmul_all_reduce_rms_norm = ditron.matmul_all_reduce_rms_norm([view, arg1_1, arg2_1, arg3_1], "reduce_op=sum norm=(round_first unrounded) extras=residual+weight world_size=4 group_name=0 site='' trials", None)
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


def test_layers_in_a_row() -> None:
    """The rounded sum of one layer is the residual of the next; the last one is nobody's."""
    norm = frozen(AddLlama, BF16)

    def fn(a: torch.Tensor, b: torch.Tensor, residual: torch.Tensor, out: torch.Tensor) -> Any:
        normed, total = norm(all_reduce(a @ b), residual)
        normed, total = norm(all_reduce((normed @ out) @ out.t()), total)
        return normed @ out

    module = graph_of(fn, *tensors())
    assert fused(module) == 2
    first, second = nodes_of(module)
    assert first.norm == second.norm == UNROUNDED
    assert not module.graph.find_nodes(op="call_function", target=torch.ops.aten.rsqrt.default)


def test_views_and_an_average() -> None:
    norm = frozen(AddLlama, BF16)

    def fn(x: torch.Tensor, residual: torch.Tensor, out: torch.Tensor) -> Any:
        normed, total = norm(all_reduce(x, "avg").view(2, 4, N), residual)
        return normed.view(8, N) @ out, total.view(8, N)

    module = graph_of(fn, *(torch.randn(shape).to(BF16) for shape in ((8, N), (2, 4, N), (N, 8))))
    assert_same_bits(module)
    assert nodes_of(module)[0].reduce_op == "avg"


def test_behind_a_norm() -> None:
    """As vLLM has Gemma 2 and 3: one norm of the reduced rows, and one of the unrounded sum with the residual."""
    post, norm = frozen(GemmaNorm, BF16), frozen(AddGemma, BF16)

    def fn(a: torch.Tensor, b: torch.Tensor, residual: torch.Tensor, out: torch.Tensor) -> Any:
        normed, total = norm(post(all_reduce(a @ b)), residual)
        return normed @ out, total

    module = graph_of(fn, *tensors())
    assert_same_bits(module)
    (node,) = nodes_of(module)
    assert node.norm.unrounded and node.post == Norm("rms", 1e-6, plus_one=True)


def test_two_norms_of_one_sum() -> None:
    first, second = frozen(LlamaNorm, BF16), frozen(LlamaNorm, BF16)

    def fn(a: torch.Tensor, b: torch.Tensor, residual: torch.Tensor, out: torch.Tensor) -> Any:
        wide = all_reduce(a @ b).float() + residual.float()
        one, other = (norm.scaled(wide).to(a.dtype) * norm.weight for norm in (first, second))
        return one @ out, other @ out, wide.to(a.dtype)

    module = graph_of(fn, *tensors())
    assert_same_bits(module)
    assert nodes_of(module)[0].saved == ("other",)


def test_dynamic_rows() -> None:
    args = tensors()
    for index in (0, 2):
        torch._dynamo.mark_dynamic(args[index], 1)
    module = graph_of(block(frozen(AddLlama, BF16)), *args)
    with assert_no_new_guards(module):
        assert fused(module) == 1


def _sum_used(wide: torch.Tensor, x: torch.Tensor, norm: LlamaNorm) -> Any:
    return norm.scaled(wide).to(x.dtype) * norm.weight, wide


def _exact_result(wide: torch.Tensor, x: torch.Tensor, norm: LlamaNorm) -> Any:
    return norm.scaled(wide) * norm.weight.float(), wide.to(x.dtype)


def _reduced_twice(wide: torch.Tensor, x: torch.Tensor, norm: LlamaNorm) -> Any:
    return norm.scaled(wide).to(x.dtype) * norm.weight, x.float().exp()


def _scaled_elsewhere(wide: torch.Tensor, x: torch.Tensor, norm: LlamaNorm) -> Any:
    """By the deviation of the sum: this is the norm of nothing."""
    return (x.float() * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.eps)).to(x.dtype) * norm.weight, wide


@pytest.mark.parametrize(
    ("tail", "expected"),
    [
        (_sum_used, "intermediate_used"),
        (_exact_result, "norm_form"),
        (_reduced_twice, "intermediate_used"),
        (_scaled_elsewhere, "norm_form"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_does_not_fire(tail: Callable[..., Any], expected: str) -> None:
    norm = frozen(LlamaNorm, BF16)

    def fn(a: torch.Tensor, b: torch.Tensor, residual: torch.Tensor, out: torch.Tensor) -> Any:
        reduced = all_reduce(a @ b)
        normed, total = tail(reduced.float() + residual.float(), reduced, norm)
        return normed @ out.to(normed.dtype), total

    module = graph_of(fn, *tensors())
    assert fused(module) == 0 and codes(module) == [expected]


@pytest.mark.parametrize("addend", [torch.ones(N).to(BF16), torch.ones(2, 4, N).half()], ids=["a row", "fp16"])
def test_another_addend_is_no_residual(addend: torch.Tensor) -> None:
    """It is neither of the shape nor of the dtype of the rows."""
    norm = frozen(LlamaNorm, BF16)

    def fn(a: torch.Tensor, b: torch.Tensor, addend: torch.Tensor, out: torch.Tensor) -> Any:
        wide = all_reduce(a @ b).float() + addend.float()
        return (norm.scaled(wide).to(a.dtype) * norm.weight) @ out

    a, b, _, out = tensors()
    assert fused(graph_of(fn, a, b, addend, out)) == 0


def sequence_layer(a: torch.Tensor, v: torch.Tensor, r: torch.Tensor, g: torch.Tensor, w: torch.Tensor) -> Any:
    """What lies between two blocks of a model that is sequence-parallel."""
    y = scatter_dim(nn.functional.linear(a, v), 1)
    wide = y.float() + r.float()
    normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(y.dtype) * g
    return gathered(normed, w), wide.to(y.dtype)


def test_in_front_of_a_gather() -> None:
    assert absorbed(sequence_layer, A, V, R, G, W) == [ShardNorm(UNROUNDED, ("residual", "weight"))]


def test_in_front_of_a_gather_the_bits_are_the_same() -> None:
    graph = gather_graph(sequence_layer, A, V, R, G, W)
    generator = torch.Generator().manual_seed(0)
    shapes = [node.meta["val"].shape for node in graph.graph.find_nodes(op="placeholder")]
    inputs = [[torch.randn(shape, generator=generator).to(BF16) for shape in shapes] for _ in range(WORLD_SIZE)]
    before = run_ranks(graph, inputs)
    assert absorb_norms(graph.graph, options=FORCED) == 1 and prologues(graph)[0] is not None
    graph.recompile()
    for rank, other in zip(run_ranks(graph, inputs), before, strict=True):
        assert all(torch.equal(one, wanted) for one, wanted in zip(rank, other, strict=True))


def test_in_front_of_a_gather_an_unrounded_sum_that_is_used_stays() -> None:
    def fn(a: torch.Tensor, v: torch.Tensor, r: torch.Tensor, g: torch.Tensor, w: torch.Tensor) -> Any:
        y = scatter_dim(nn.functional.linear(a, v), 1)
        wide = y.float() + r.float()
        normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(y.dtype) * g
        return gathered(normed, w), wide

    graph = gather_graph(fn, A, V, R, G, W)
    assert absorb_norms(graph.graph, options=FORCED) == 0
