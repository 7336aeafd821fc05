"""Casts, factors and transposes on the wrong side of a collective: moved where that sends less or lets a fusion follow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch

from ditron_inductor import pipeline
from ditron_inductor.device.facts import compare
from ditron_inductor.options import Options
from ditron_inductor.passes.finish.wire_facts import before_passes, facts_of, graph_facts
from ditron_inductor.passes.forms.move_across import move_across
from ditron_inductor.passes.normalize.normalize_collectives import normalize_collectives
from tests.passes.graphs import (
    all_gather,
    all_reduce,
    assert_no_new_guards,
    assert_same_on_all_ranks,
    fuse,
    gather_dim,
    reasons,
    reduce_scatter,
    scatter_dim,
    text,
    traced,
)

pytestmark = pytest.mark.usefixtures("group")

X = torch.empty(2, 8, 16)
W = torch.empty(16, 24)
NARROW = torch.empty(2, 8, 16, dtype=torch.bfloat16)


def moved(fn: Callable[..., Any], *args: torch.Tensor) -> tuple[int, str]:
    """How many casts moved, and the graph."""
    module = traced(fn, *args)
    normalize_collectives(module.graph, options=Options())
    count = move_across(module.graph, options=Options())
    module.graph.lint()
    return count, text(module.graph)


def test_golden_cast() -> None:
    _, graph = moved(lambda x: gather_dim(x.float(), 1).sin(), NARROW)
    expecttest.assert_expected_inline(
        graph,
        """\
x_1 [2, 8, 16]
all_gather_into_tensor [8, 8, 16] = _c10d_functional.all_gather_into_tensor(x_1, 4, '0')
wait_tensor [8, 8, 16] = _c10d_functional.wait_tensor(all_gather_into_tensor)
split = aten.split.Tensor(wait_tensor, 2)
getitem [2, 8, 16] = split[0]
getitem_1 [2, 8, 16] = split[1]
getitem_2 [2, 8, 16] = split[2]
getitem_3 [2, 8, 16] = split[3]
cat [2, 32, 16] = aten.cat([getitem, getitem_1, getitem_2, getitem_3], 1)
_to_copy_default [2, 32, 16] = aten._to_copy(cat, dtype=torch.float32)
sin [2, 32, 16] = aten.sin(_to_copy_default)
return sin
""",
    )


def test_golden_factor_and_transpose() -> None:
    module = traced(lambda x, w: all_reduce(((x @ w) * 0.3).transpose(0, 1)).sin(), X, W)
    assert fuse(module) == 1
    expecttest.assert_expected_inline(
        text(module.graph),
        """\
x_1 [2, 8, 16]
w_1 [16, 24]
view [16, 16] = aten.view(x_1, [16, 16])
matmul_all_reduce = ditron.matmul_all_reduce([view, w_1], "reduce_op=sum world_size=4 group_name=0 site='' trials", None)
getitem [16, 24] = matmul_all_reduce[0]
_unsafe_view [2, 8, 24] = aten._unsafe_view(getitem, [2, 8, 24])
mul [2, 8, 24] = aten.mul.Tensor(_unsafe_view, 0.3)
transpose [8, 2, 24] = aten.transpose.int(mul, 0, 1)
clone_default [8, 2, 24] = aten.clone(transpose, memory_format=torch.contiguous_format)
sin [8, 2, 24] = aten.sin(clone_default)
return sin
""",
    )


def test_golden_factor_before_a_scatter() -> None:
    module = traced(lambda x, w: scatter_dim(-(x @ w) / 4, 1), X, W)
    assert fuse(module) == 1
    expecttest.assert_expected_inline(
        text(module.graph),
        """\
x_1 [2, 8, 16]
w_1 [16, 24]
matmul_reduce_scatter = ditron.matmul_reduce_scatter([x_1, w_1], "scatter_dim=1 reduce_op=sum world_size=4 group_name=0 site='' trials", None)
getitem_4 [2, 2, 24] = matmul_reduce_scatter[0]
neg_default [2, 2, 24] = aten.neg(getitem_4)
div_tensor [2, 2, 24] = aten.div.Tensor(neg_default, 4)
return div_tensor
""",
    )


GATHERS: dict[str, Callable[..., Any]] = {
    "dim_0": lambda x: all_gather(x.float()).sin(),
    "returned": lambda x: gather_dim(x.float(), 1),
    "double": lambda x: all_gather(x.double()).sum(),
    "used_wide_before": lambda x: (y := x.float()).sin().sum() + all_gather(y).cos().sum(),
    "viewed": lambda x: all_gather(x.float()).view(-1, 16).sin(),
}


@pytest.mark.parametrize("fn", GATHERS.values(), ids=GATHERS)
def test_a_widening_cast_moves_behind_a_gather(fn: Callable[..., Any]) -> None:
    count, graph = moved(fn, NARROW)
    assert count == 1
    (line,) = [line for line in graph.splitlines() if "all_gather_into_tensor(" in line]
    assert "(x_1, 4" in line
    assert_same_on_all_ranks(fn, NARROW, fused=0)


def test_a_cast_back_goes_and_a_fusion_follows() -> None:
    module = traced(lambda x, w: all_gather(x.float()).bfloat16() @ w, NARROW, W.bfloat16())
    assert fuse(module) == 1
    assert "_to_copy" not in text(module.graph)


def test_two_casts_back_that_are_returned_stay_two() -> None:
    def twice(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        whole = all_gather(x.float())
        return whole.bfloat16(), whole.bfloat16()

    module = traced(twice, NARROW)
    assert fuse(module) == 0
    first, second = next(iter(module.graph.find_nodes(op="output"))).args[0]
    assert first is not second


ALONE: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "narrows": (lambda x: all_gather(x.bfloat16()).sin(), (X,)),
    "same_size": (lambda x: all_gather(x.half()).sin(), (NARROW,)),
    "integer": (lambda x: all_gather(x.float()).sin(), (torch.empty(2, 8, dtype=torch.int8),)),
    # Some libraries gather none of these.
    "of_8_bits": (lambda x: all_gather(x.float()).sin(), (torch.empty(2, 8, dtype=torch.float8_e4m3fn),)),
    "cut": (lambda x: all_gather(x.float())[:7].sin(), (NARROW,)),
    "inner_cut": (lambda x: gather_dim(x.float(), 1)[:, :31].sin(), (NARROW,)),
    "fused": (lambda x, w: all_gather(x.float()) @ w, (NARROW, W)),
    "all_reduce": (lambda x: all_reduce(x.float()).sin(), (NARROW,)),
    "reduce_scatter": (lambda x: reduce_scatter(torch.cat([x, x]).float()).sin(), (NARROW,)),
}


@pytest.mark.parametrize("name", ALONE)
def test_casts_that_stay(name: str) -> None:
    fn, args = ALONE[name]
    assert moved(fn, *args)[0] == 0


def slices(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x.narrow(1, 2 * index, 2) for index in range(4)])


FUSED: dict[str, Callable[..., Any]] = {
    "factor": lambda x, w: all_reduce((x @ w) * 0.5),
    "division": lambda x, w: all_reduce((x @ w) / 3, "avg"),
    "negation": lambda x, w: all_reduce(-(x @ w)),
    "several": lambda x, w: all_reduce((-(x @ w) * 3).view(16, 24) / 7),
    "transpose": lambda x, w: all_reduce((x @ w).transpose(0, 1)).view(-1),
    "permute": lambda x, w: all_reduce((x @ w).view(2, 8, 4, 6).permute(0, 2, 1, 3)).view(8, 48),
    "result_returned": lambda x, w: ((y := all_reduce((x @ w) * 0.5)), y.sin()),
    "scatter": lambda x, w: scatter_dim((x @ w) * 0.5, 1),
    "scatter_slices": lambda x, w: reduce_scatter(slices((x @ w) * 0.5)),
    "scatter_rows": lambda x, w: reduce_scatter(((x @ w) * 0.5).view(16, 24) * 3),
}


@pytest.mark.parametrize("fn", FUSED.values(), ids=FUSED)
def test_fused(fn: Callable[..., Any]) -> None:
    assert_same_on_all_ranks(fn, X, W, fused=1)


GUARDS: list[Any] = [
    pytest.param("pointwise_between", lambda x, w, f: all_reduce((x @ w) * f), X, id="tensor"),
    pytest.param("pointwise_between", lambda x, w, f: all_reduce((x @ w) * float("inf")), X, id="infinite"),
    pytest.param("pointwise_between", lambda x, w, f: all_reduce((x.half() @ w.half()) * 0.5), X, id="float16"),
    pytest.param("bias", lambda x, w, f: all_reduce((x @ w) + 1), X, id="shift"),
    pytest.param("pointwise_between", lambda x, w, f: ((y := (x @ w) * 0.5).sin(), all_reduce(y)), X, id="used"),
    pytest.param("pointwise_between", lambda x, w, f: ((y := x @ w).sin(), all_reduce(y * 0.5)), X, id="product_used"),
    pytest.param("reduce_op", lambda x, w, f: all_reduce((x @ w) * 0.5, "max"), X, id="max"),
    pytest.param("layout", lambda x, w, f: reduce_scatter((x @ w).permute(1, 2, 0)), X, id="scattered_permute"),
    pytest.param("no_matmul", lambda x, w, f: all_reduce(x * 0.5), X, id="no_matmul"),
]


@pytest.mark.parametrize(("code", "fn", "x"), GUARDS)
def test_left_alone(code: str, fn: Callable[..., Any], x: torch.Tensor) -> None:
    module = traced(fn, x, W, torch.empty(()))
    normalize_collectives(module.graph, options=Options())
    before = text(module.graph)
    assert fuse(module) == 0
    assert text(module.graph) == before
    assert reasons(module) == [code]


def test_nothing_without_fusions() -> None:
    module = traced(GATHERS["dim_0"], NARROW)
    assert move_across(module.graph, options=Options(fusions=())) == 0


def test_dynamic_shapes() -> None:
    module = traced(lambda x, w: all_reduce(((x @ w) * 0.5).transpose(0, 1)), X, W, dynamic=True)
    with assert_no_new_guards(module):
        assert fuse(module) == 1
    module = traced(lambda x: gather_dim(x.float(), 1).sin(), NARROW, dynamic=True)
    with assert_no_new_guards(module):
        normalize_collectives(module.graph, options=Options())
        assert move_across(module.graph, options=Options()) == 1


def told(module: Any) -> Any:
    """What a rank tells the others of a graph in which passes move something across a collective."""
    before = before_passes(module.graph)
    found = pipeline.run(module.graph, Options())
    moved_by = ", ".join(f"{name} {found[name]}" for name in pipeline.MOVING if found.get(name))
    assert moved_by
    return graph_facts(before, facts_of(module.graph), moved_by, {}).groups[0]


@pytest.mark.parametrize("whole", [True, False])
def test_ranks_with_other_factors_run_their_graphs_as_they_are(whole: bool) -> None:
    """As means over batches of several sizes have."""
    def facts(factor: float) -> Any:
        return told(traced(lambda x, w: all_reduce((x @ w) / factor), X, W))

    same, other = (5, 8) if whole else (5.0, 8.0)
    assert not compare([facts(same)] * 2, [{}, {}]).plain
    assert compare([facts(same), facts(other)], [{}, {}]).plain
