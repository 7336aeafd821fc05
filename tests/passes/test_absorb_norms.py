"""absorb_norms: what a gather gets as its prologue, what it computes, and every guard that keeps a norm out of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import expecttest
import pytest
import torch
import torch.nn.functional as F
from torch import fx

from ditron_inductor.options import Options
from ditron_inductor.passes.absorb.absorb_epilogues import absorb_epilogues
from ditron_inductor.passes.absorb.absorb_norms import COMPUTED, FEW_ROWS, LEAST_ROWS, absorb_norms, find_prologue
from ditron_inductor.passes.finish.name_sites import name_sites
from ditron_inductor.passes.finish.order_collectives import order_collectives
from ditron_inductor.passes.finish.verify_tasks import verify_tasks
from ditron_inductor.passes.graph import rewriting
from ditron_inductor.passes.graph.reasons import ReasonCode
from ditron_inductor.task.nodes import AllGatherMatmul, Norm, ShardNorm
from ditron_inductor.task.verify import task_calls
from tests.passes.graphs import (
    WORLD_SIZE,
    assert_no_new_guards,
    compiled_graphs,
    fuse,
    gather_dim,
    run_ranks,
    scatter_dim,
    text,
    traced,
)

pytestmark = pytest.mark.usefixtures("group")

BF16 = torch.bfloat16
FORCED = Options(strategy="chunked")
X, R, G, W = torch.empty(2, 8, 16), torch.empty(2, 8, 16), torch.empty(16), torch.empty(24, 16)
A16, A, V = torch.empty(2, 32, 16), torch.empty(2, 32, 12), torch.empty(16, 12)
ALONE = ShardNorm(Norm("rms", 1e-6, round_first=True), ("weight",))
BEHIND_A_SUM = replace(ALONE, extras=("residual", "weight"))
"""The norm of `llama`, and the same of a sum."""


def llama(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    h = x.float()
    return weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def gathered(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.linear(gather_dim(h, 1), w)


def layer(a: torch.Tensor, v: torch.Tensor, r: torch.Tensor, g: torch.Tensor, w: torch.Tensor) -> Any:
    """What lies between two blocks: a reduce-scatter, the residual, the norm, and a gather."""
    total = r + scatter_dim(F.linear(a, v), 1)
    return gathered(llama(total, g), w), total


def graph_of(
    fn: Callable[..., Any], *args: torch.Tensor, dtype: torch.dtype = BF16, train: bool = False, compiled: bool = False
) -> Any:
    """The forward graph, with its fusions. compiled: as Inductor hands it over, which takes longer."""
    given = [one.to(dtype).detach().requires_grad_(train) for one in args]
    graph = compiled_graphs(fn, *given)[0] if compiled or train else traced(fn, *given)
    fuse(graph, FORCED)
    absorb_epilogues(graph.graph, options=FORCED)
    return graph


def prologues(graph: fx.GraphModule) -> list[ShardNorm | None]:
    return [task.prologue for _, task in task_calls(graph.graph) if isinstance(task, AllGatherMatmul)]


def why(fn: Callable[..., Any], *args: torch.Tensor, options: Options = FORCED) -> object:
    """Why the norm in front of the one gather stays where it is; nothing may change."""
    graph = graph_of(fn, *args)
    before = text(graph.graph)
    assert absorb_norms(graph.graph, options=options) == 0
    assert text(graph.graph) == before
    ((call, task),) = [(call, task) for call, task in task_calls(graph.graph) if isinstance(task, AllGatherMatmul)]
    return find_prologue(call, task, options)


def absorbed(fn: Callable[..., Any], *args: torch.Tensor, dtype: torch.dtype = BF16, **how: bool) -> list[ShardNorm | None]:
    """The prologues, after a check that all ranks compute the same with them, and that the graph is legal."""
    after = graph_of(fn, *args, dtype=dtype, **how)
    before = fx.GraphModule(after, rewriting.copied(after.graph)[0])
    count = absorb_norms(after.graph, options=FORCED)
    found = prologues(after)
    assert count == sum(one is not None for one in found)
    assert absorb_norms(after.graph, options=FORCED) == 0
    generator = torch.Generator().manual_seed(0)
    shapes = [node.meta["val"].shape for node in after.graph.nodes if node.op == "placeholder"]
    inputs = [[torch.randn(shape, generator=generator).to(dtype) for shape in shapes] for _ in range(WORLD_SIZE)]
    # The order of sums in fp32 may differ, and then a rounding of the rows.
    torch.testing.assert_close(run_ranks(after, inputs), run_ranks(before, inputs), rtol=4e-2, atol=4e-2)
    for each in (order_collectives, name_sites, verify_tasks):
        each(after.graph, options=FORCED)
    after.graph.lint()
    return found


def test_golden() -> None:
    graph = graph_of(layer, A, V, R, G, W, compiled=True)
    expecttest.assert_expected_inline(
        text(graph.graph),
        """\
arg0_1 [2, 32, 12]
arg1_1 [16, 12]
arg2_1 [2, 8, 16]
arg3_1 [16]
arg4_1 [24, 16]
permute [12, 16] = aten.permute(arg1_1, [1, 0])
matmul_reduce_scatter = ditron.matmul_reduce_scatter([arg0_1, permute], "scatter_dim=1 reduce_op=sum world_size=4 group_name=0 site='' strategy=chunked trials", None)
getitem_9 [2, 8, 16] = matmul_reduce_scatter[0]
add [2, 8, 16] = aten.add.Tensor(arg2_1, getitem_9)
convert_element_type_2 [2, 8, 16] = prims.convert_element_type(add, torch.float32)
pow_1 [2, 8, 16] = aten.pow.Tensor_Scalar(convert_element_type_2, 2)
mean [2, 8, 1] = aten.mean.dim(pow_1, [-1], True)
add_1 [2, 8, 1] = aten.add.Tensor(mean, 1e-06)
rsqrt [2, 8, 1] = aten.rsqrt(add_1)
mul [2, 8, 16] = aten.mul.Tensor(convert_element_type_2, rsqrt)
convert_element_type_3 [2, 8, 16] = prims.convert_element_type(mul, torch.bfloat16)
mul_1 [2, 8, 16] = aten.mul.Tensor(arg3_1, convert_element_type_3)
permute_1 [16, 24] = aten.permute(arg4_1, [1, 0])
all_gather_matmul = ditron.all_gather_matmul([mul_1, permute_1], "gather_dim=1 world_size=4 group_name=0 site='' strategy=chunked trials num_weights=1", None)
getitem_8 [64, 24] = all_gather_matmul[0]
view_3 [2, 32, 24] = aten.reshape(getitem_8, [2, 32, 24])
return (view_3, add)
""",
    )
    assert absorb_norms(graph.graph, options=FORCED) == 1
    expecttest.assert_expected_inline(
        text(graph.graph),
        """\
arg0_1 [2, 32, 12]
arg1_1 [16, 12]
arg2_1 [2, 8, 16]
arg3_1 [16]
arg4_1 [24, 16]
permute [12, 16] = aten.permute(arg1_1, [1, 0])
matmul_reduce_scatter = ditron.matmul_reduce_scatter([arg0_1, permute], "scatter_dim=1 reduce_op=sum world_size=4 group_name=0 site='' strategy=chunked trials", None)
getitem_9 [2, 8, 16] = matmul_reduce_scatter[0]
permute_1 [16, 24] = aten.permute(arg4_1, [1, 0])
all_gather_matmul_1 = ditron.all_gather_matmul([arg2_1, permute_1, getitem_9, arg3_1], "gather_dim=1 world_size=4 group_name=0 site='' strategy=chunked trials num_weights=1 prologue=(norm=(round_first) extras=residual+weight)", None)
getitem_10 [64, 24] = all_gather_matmul_1[0]
getitem_11 [2, 8, 16] = all_gather_matmul_1[1]
view_3 [2, 32, 24] = aten.reshape(getitem_10, [2, 32, 24])
return (view_3, getitem_11)
""",
    )


def test_a_layer_computes_the_same() -> None:
    assert absorbed(layer, A, V, R, G, W) == [BEHIND_A_SUM]


def test_golden_training() -> None:
    """The sum, and the inverse deviations that the backward wants, are returned."""
    graph = graph_of(layer, A, V, R, G, W, train=True)
    assert absorb_norms(graph.graph, options=FORCED) == 1
    expecttest.assert_expected_inline(
        text(graph.graph),
        """\
primals_1 [2, 32, 12]
primals_2 [16, 12]
primals_3 [2, 8, 16]
primals_4 [16]
primals_5 [24, 16]
permute [12, 16] = aten.permute(primals_2, [1, 0])
view [64, 12] = aten.reshape(primals_1, [64, 12])
matmul_reduce_scatter = ditron.matmul_reduce_scatter([primals_1, permute], "scatter_dim=1 reduce_op=sum world_size=4 group_name=0 site='' strategy=chunked trials", None)
getitem_10 [2, 8, 16] = matmul_reduce_scatter[0]
permute_1 [16, 24] = aten.permute(primals_5, [1, 0])
all_gather_matmul_1 = ditron.all_gather_matmul([primals_3, permute_1, getitem_10, primals_4], "gather_dim=1 world_size=4 group_name=0 return_gathered site='' strategy=chunked trials num_weights=1 prologue=(norm=(round_first) extras=residual+weight saved=rstd)", None)
getitem_11 [64, 24] = all_gather_matmul_1[0]
getitem_12 [2, 32, 16] = all_gather_matmul_1[1]
getitem_13 [2, 8, 16] = all_gather_matmul_1[2]
getitem_14 [2, 8, 1] = all_gather_matmul_1[3]
view_2 [64, 16] = aten.reshape(getitem_12, [64, 16])
view_3 [2, 32, 24] = aten.reshape(getitem_11, [2, 32, 24])
permute_4 [24, 16] = aten.permute(permute_1, [1, 0])
permute_8 [16, 12] = aten.permute(permute, [1, 0])
return (view_3, getitem_13, primals_4, view, getitem_13, getitem_14, view_2, permute_4, permute_8)
""",
    )


def test_training_computes_the_same() -> None:
    (found,) = absorbed(layer, A, V, R, G, W, train=True)
    assert found == replace(BEHIND_A_SUM, saved=("rstd",))


def test_without_a_residual() -> None:
    assert absorbed(lambda x, g, w: gathered(llama(x, g), w), X, G, W) == [ALONE]


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_layer_norm_and_epilogue(dtype: torch.dtype) -> None:
    """Several weights, an epilogue, and a gathered tensor that is returned keep their places."""

    def block(x: torch.Tensor, g: torch.Tensor, b: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> Any:
        h = gather_dim(F.layer_norm(x, (16,), g, b), 1)
        return F.gelu(F.linear(h, w)), F.linear(h, v), h

    (found,) = absorbed(block, X, G, torch.empty(16), W, torch.empty(6, 16), dtype=dtype, compiled=True)
    assert found == ShardNorm(Norm("layer", 1e-5), ("weight", "shift"))


def test_a_view_in_between() -> None:
    def block(x: torch.Tensor, r: torch.Tensor, g: torch.Tensor, w: torch.Tensor) -> Any:
        total = x + r
        return gathered(llama(total, g).view(2, 8, 16), w), total

    flat = torch.empty(16, 16)
    assert absorbed(block, flat, flat, G, W) == [BEHIND_A_SUM]


def test_layers_in_a_row() -> None:
    """The sum of one layer is the residual of the next."""

    def model(a: Any, v: Any, r: Any, g: Any, w: Any, u: Any) -> Any:
        y, total = layer(a, v, r, g, w)
        return layer(torch.relu(y), u, total, g, w)

    (first, second) = absorbed(model, A, V, R, G, W, torch.empty(16, 24))
    assert first == second == BEHIND_A_SUM


def test_a_sum_that_is_read_before_the_gather_stays() -> None:
    """The node would return it too late; the norm goes all the same, as the sum is stored."""

    def block(x: Any, r: Any, g: Any, w: Any, v: Any) -> Any:
        total = x + r
        y = scatter_dim(total @ v, 1)
        return gathered(llama(total, g), w), scatter_dim(y @ v.t(), 1)

    assert absorbed(block, A16, A16, G, W, V) == [ALONE]


def test_a_result_that_is_used_elsewhere_stays() -> None:
    def block(x: Any, g: Any, w: Any) -> Any:
        h = llama(x, g)
        return gathered(h, w), h

    assert why(block, X, G, W) == ReasonCode.INTERMEDIATE_USED


def test_a_value_inside_that_is_used_elsewhere_stays() -> None:
    def block(x: Any, g: Any, w: Any) -> Any:
        h = x.float()
        squares = h.pow(2)
        y = g * (h * torch.rsqrt(squares.mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        return gathered(y, w), squares

    assert why(block, X, G, W) == ReasonCode.NORM_USED


def test_what_the_compiler_computes_with_the_norm_stays() -> None:
    """Neither the product nor its sum with the residual would be in memory."""
    assert why(lambda x, g, w: gathered(llama(x * 2, g), w), X, G, W) == COMPUTED
    assert why(lambda x, r, g, w: gathered(llama(r + x * 2, g), w), X, R, G, W) == COMPUTED


def test_a_sum_that_grows_a_tensor_stays() -> None:
    assert why(lambda x, b, g, w: gathered(llama(x + b, g), w), X, torch.empty(16), G, W) == COMPUTED


def test_a_cast_in_between_stays() -> None:
    def block(x: Any, g: Any, w: Any) -> Any:
        return gathered(llama(x, g).float(), w.float())

    assert why(block, X, G, W) == ReasonCode.NORM_FORM


def test_rows_that_are_cut_stay() -> None:
    """Half of a normalised row in each row that is gathered."""
    block = lambda x, g, w: gathered(llama(x, g).view(2, 16, 8), w)  # noqa: E731
    assert why(block, X, G, torch.empty(24, 8)) == ReasonCode.LAYOUT


def test_long_rows_stay() -> None:
    block = lambda x, g, w: gathered(llama(x, g), w)  # noqa: E731
    assert why(block, torch.empty(1, 2, 16400), torch.empty(16400), torch.empty(4, 16400)) == ReasonCode.NORM_WIDTH


@pytest.mark.parametrize("strategy", ["auto", "tile", "library"])
def test_few_rows_and_other_strategies_stay(strategy: str) -> None:
    block = lambda x, g, w: gathered(llama(x, g), w)  # noqa: E731
    options = Options(strategy=strategy)
    assert why(block, X, G, W, options=options) == FEW_ROWS
    if strategy != "auto":
        assert why(block, torch.empty(1, LEAST_ROWS, 16), G, W, options=options) == FEW_ROWS


def test_many_rows_are_enough() -> None:
    graph = graph_of(lambda x, g, w: gathered(llama(x, g), w), torch.empty(1, LEAST_ROWS // WORLD_SIZE, 16), G, W)
    assert absorb_norms(graph.graph, options=Options()) == 1


def test_dynamic_rows() -> None:
    """Left alone unless forced, and never specialised."""

    def block(x: Any, r: Any, g: Any, w: Any) -> Any:
        total = x + r
        return gathered(llama(total, g), w), total

    args = [one.to(BF16) for one in (X, R, G, W)]
    for one in args[:2]:
        torch._dynamo.mark_dynamic(one, 1)
    (graph,) = compiled_graphs(block, *args)
    fuse(graph, FORCED)
    with assert_no_new_guards(graph):
        assert absorb_norms(graph.graph, options=Options()) == 0
        assert absorb_norms(graph.graph, options=FORCED) == 1


def test_a_graph_without_a_norm() -> None:
    module = traced(lambda x, w: gathered(x, w), X, W)
    fuse(module)
    assert absorb_norms(module.graph, options=FORCED) == 0
