"""projections: which matmuls of one tensor are put together, into which graph, and what keeps them apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch
from torch import fx
from torch.nn.functional import silu

from ditron_inductor.options import Options
from ditron_inductor.passes.absorb.absorb_epilogues import absorb_epilogues
from ditron_inductor.passes.fuse.projections import MOST_PRODUCTS, projections
from ditron_inductor.task.nodes import FEW_PROJECTED_ROWS, FEWEST_ALONE, MOST_PROJECTED_ROWS
from tests.passes.graphs import all_reduce, compiled_graphs, fuse, run_ranks, text, traced, twin

pytestmark = pytest.mark.usefixtures("group")

X = torch.empty(2, 1, 32)
WQ = torch.empty(32, 32)
WK = torch.empty(16, 32)
WV = torch.empty(16, 32)
WO = torch.empty(32, 32)


def layer(x: torch.Tensor, wq: torch.Tensor, wk: torch.Tensor, wv: torch.Tensor, wo: torch.Tensor) -> torch.Tensor:
    """A decode step without its attention: three projections and the row-wise one."""
    q, k, v = x @ wq.t(), x @ wk.t(), x @ wv.t()
    return all_reduce((q + torch.cat([k, v], -1)) @ wo.t())


def put_together(module: fx.GraphModule, options: Options | None = None) -> int:
    fuse(module, options)
    count = projections(module.graph, options=options or Options())
    absorb_epilogues(module.graph, options=options or Options())
    module.graph.lint()
    module.recompile()
    return count


def test_golden_decode_step() -> None:
    module = traced(layer, X, WQ, WK, WV, WO)
    assert put_together(module) == 1
    expecttest.assert_expected_inline(
        text(module.graph),
        """\
x_1 [2, 1, 32]
wq_1 [32, 32]
wk_1 [16, 32]
wv_1 [16, 32]
wo_1 [32, 32]
t [32, 32] = aten.t(wq_1)
view [2, 32] = aten.view(x_1, [2, 32])
t_1 [32, 16] = aten.t(wk_1)
t_2 [32, 16] = aten.t(wv_1)
projections = ditron.projections([view, t, t_1, t_2], 'num_weights=3', None)
getitem_1 [2, 32] = projections[0]
getitem_2 [2, 16] = projections[1]
getitem_3 [2, 16] = projections[2]
_unsafe_view [2, 1, 32] = aten._unsafe_view(getitem_1, [2, 1, 32])
_unsafe_view_1 [2, 1, 16] = aten._unsafe_view(getitem_2, [2, 1, 16])
_unsafe_view_2 [2, 1, 16] = aten._unsafe_view(getitem_3, [2, 1, 16])
cat [2, 1, 32] = aten.cat([_unsafe_view_1, _unsafe_view_2], -1)
add [2, 1, 32] = aten.add.Tensor(_unsafe_view, cat)
t_3 [32, 32] = aten.t(wo_1)
view_3 [2, 32] = aten.view(add, [2, 32])
matmul_all_reduce = ditron.matmul_all_reduce([view_3, t_3], "reduce_op=sum world_size=4 group_name=0 site='' trials", None)
getitem [2, 32] = matmul_all_reduce[0]
_unsafe_view_3 [2, 1, 32] = aten.reshape(getitem, [2, 1, 32])
return _unsafe_view_3
""",
    )


def test_inductor_graphs_hold_a_view_for_each_consumer() -> None:
    (module,) = compiled_graphs(layer, X, WQ, WK, WV, WO)
    assert put_together(module) == 1


def same_results(fn: Callable[..., Any], *args: torch.Tensor, calls: int, options: Options | None = None) -> None:
    after = traced(fn, *args)
    before = twin(after)
    assert put_together(after, options) == calls
    generator = torch.Generator().manual_seed(0)
    inputs = [[torch.randn(arg.shape, generator=generator) for arg in args] for _ in range(4)]
    torch.testing.assert_close(run_ranks(after, inputs), run_ranks(before, inputs))


def test_computes_the_same() -> None:
    same_results(layer, X, WQ, WK, WV, WO, calls=1)


def mlp(x: torch.Tensor, w1: torch.Tensor, w3: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    return all_reduce((silu(x @ w1.t()) * (x @ w3.t())) @ w2.t())


def test_golden_gate_and_up() -> None:
    (module,) = compiled_graphs(mlp, *(arg.bfloat16() for arg in (X, WQ, WQ.clone(), WO)))
    assert put_together(module) == 1
    expecttest.assert_expected_inline(
        text(module.graph),
        """\
arg0_1 [32, 32]
arg1_1 [2, 1, 32]
arg2_1 [32, 32]
arg3_1 [32, 32]
view [2, 32] = aten.reshape(arg1_1, [2, 32])
permute [32, 32] = aten.permute(arg0_1, [1, 0])
permute_1 [32, 32] = aten.permute(arg2_1, [1, 0])
projections_1 = ditron.projections([view, permute, permute_1], "num_weights=2 epilogue='cast(silu(mm0), bf16) * mm1'", None)
getitem_3 [2, 32] = projections_1[0]
reshape_default [2, 1, 32] = aten.reshape(getitem_3, [2, 1, 32])
view_4 [2, 32] = aten.reshape(reshape_default, [2, 32])
permute_2 [32, 32] = aten.permute(arg3_1, [1, 0])
matmul_all_reduce = ditron.matmul_all_reduce([view_4, permute_2], "reduce_op=sum world_size=4 group_name=0 site='' trials", None)
getitem [2, 32] = matmul_all_reduce[0]
view_5 [2, 1, 32] = aten.reshape(getitem, [2, 1, 32])
return (view_5,)
""",
    )


def test_golden_biases() -> None:
    def fn(x: torch.Tensor, wq: torch.Tensor, bq: torch.Tensor, wk: torch.Tensor, wo: torch.Tensor) -> torch.Tensor:
        q, k = torch.addmm(bq, x.view(2, 32), wq.t()), x.view(2, 32) @ wk.t()
        return all_reduce(torch.cat([q, k], -1) @ wo.t())

    args = X, WQ, torch.empty(32), WK, torch.empty(32, 48)
    module = traced(fn, *args)
    assert put_together(module) == 1
    expecttest.assert_expected_inline(
        text(module.graph),
        """\
x_1 [2, 1, 32]
wq_1 [32, 32]
bq_1 [32]
wk_1 [16, 32]
wo_1 [32, 48]
view [2, 32] = aten.view(x_1, [2, 32])
t [32, 32] = aten.t(wq_1)
t_1 [32, 16] = aten.t(wk_1)
projections = ditron.projections([view, t, t_1], 'num_weights=2', None)
getitem_1 [2, 32] = projections[0]
getitem_2 [2, 16] = projections[1]
biased [2, 32] = aten.add.Tensor(getitem_1, bq_1)
cat [2, 48] = aten.cat([biased, getitem_2], -1)
t_2 [48, 32] = aten.t(wo_1)
matmul_all_reduce = ditron.matmul_all_reduce([cat, t_2], "reduce_op=sum world_size=4 group_name=0 site='' trials", None)
getitem [2, 32] = matmul_all_reduce[0]
return getitem
""",
    )
    same_results(fn, *args, calls=1)


def test_products_of_different_tensors_stay_apart() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor, wq: torch.Tensor, wo: torch.Tensor) -> torch.Tensor:
        return all_reduce((x @ wq.t() + y @ wq.t()) @ wo.t())

    same_results(fn, X, X.clone(), WQ, WO, calls=0)


def test_another_shape_of_the_tensor_is_another_group() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor, u: torch.Tensor, wo: torch.Tensor) -> torch.Tensor:
        wide, narrow = x.view(2, 32), x.view(4, 16)
        left, right = wide @ w.t() + wide @ w.relu().t(), narrow @ u.t() + narrow @ u.relu().t()
        return all_reduce((left + right.view(2, 32)) @ wo.t())

    same_results(fn, X, WQ, torch.empty(16, 16), WO, calls=2)


def test_a_weight_computed_from_a_product_is_late() -> None:
    def fn(x: torch.Tensor, wq: torch.Tensor, wo: torch.Tensor) -> torch.Tensor:
        q = x.view(2, 32) @ wq.t()
        return all_reduce((q + x.view(2, 32) @ (wq + q.sum()).t()) @ wo.t())

    same_results(fn, X, WQ, WO, calls=0)


def test_a_weight_computed_from_another_groups_product_stays_behind_it() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor, wq: torch.Tensor, wo: torch.Tensor) -> torch.Tensor:
        q = y.view(2, 32) @ wq.t()
        first = x.view(2, 32) @ wq.t()
        k = y.view(2, 32) @ wo.t()
        return all_reduce((first + k + x.view(2, 32) @ (wo + q.sum()).t()) @ wo.t())

    same_results(fn, X, X.clone(), WQ, WO, calls=2)


@pytest.mark.parametrize("rows", [MOST_PROJECTED_ROWS, MOST_PROJECTED_ROWS + 1])
def test_rows_are_few(rows: int) -> None:
    same_results(layer, torch.empty(rows, 1, 32), WQ, WK, WV, WO, calls=int(rows <= MOST_PROJECTED_ROWS))


@pytest.mark.parametrize("more", [0, 1])
def test_many_rows_with_wide_weights_are_left(more: int) -> None:
    """With few rows weights of any width are taken."""
    width = MOST_PRODUCTS // MOST_PROJECTED_ROWS // 2

    def fn(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, wo: torch.Tensor) -> torch.Tensor:
        return all_reduce((x @ gate.t())[:, :32] @ wo.t() + (x @ up.t())[:, :32] @ wo.t())

    gate, up = torch.empty(width, 32), torch.empty(width + more, 32)
    same_results(fn, torch.empty(MOST_PROJECTED_ROWS, 32), gate, up, WO, calls=1 - more)
    same_results(fn, torch.empty(FEW_PROJECTED_ROWS, 32), gate, up, WO, calls=1)


@pytest.mark.parametrize("rows, more, calls", [(1, 0, 1), (2, 0, 0), (1, -1, 0)])
def test_one_row_and_a_large_weight_alone(rows: int, more: int, calls: int) -> None:
    def fn(x: torch.Tensor, large: torch.Tensor, wo: torch.Tensor) -> torch.Tensor:
        return all_reduce((x @ large.t())[:, :32] @ wo.t())

    large = torch.empty(FEWEST_ALONE // 1024 + more, 1024)
    same_results(fn, torch.empty(rows, 1024), large, WO, calls=calls)


def test_dynamic_rows_are_left() -> None:
    module = traced(layer, X, WQ, WK, WV, WO, dynamic=True)
    assert put_together(module) == 0


def test_weights_that_lie_the_other_way_are_left() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor, u: torch.Tensor, wo: torch.Tensor) -> torch.Tensor:
        return all_reduce((x @ w + x @ u) @ wo.t())

    same_results(fn, X, WQ, WQ.clone(), WO, calls=0)


def test_a_graph_without_a_fused_site_is_left() -> None:
    def fn(x: torch.Tensor, wq: torch.Tensor, wk: torch.Tensor) -> torch.Tensor:
        return x @ wq.t() + x @ wk.t()

    same_results(fn, X, WQ, WQ.clone(), calls=0)


def test_options_leave_it_out() -> None:
    args = X, WQ, WK, WV, WO
    same_results(layer, *args, calls=0, options=Options(fusions=("matmul_all_reduce",)))
    same_results(layer, *args, calls=0, options=Options(strategy="library"))


def test_float64_is_left() -> None:
    args = [arg.double() for arg in (X, WQ, WK, WV, WO)]
    module = traced(lambda x, wq, wk, wv, wo: layer(x, wq, wk, wv, wo).float(), *args)
    assert put_together(module) == 0


def test_nothing_is_left_for_a_second_run() -> None:
    module = traced(layer, X, WQ, WK, WV, WO)
    put_together(module)
    before = text(module.graph)
    assert projections(module.graph, options=Options()) == 0
    assert text(module.graph) == before
