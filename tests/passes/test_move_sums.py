"""Sums of what an all-reduce returns move in front of it, as the experts of Llama 4 need it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch

from ditron_inductor.device.facts import compare
from ditron_inductor.options import Options
from ditron_inductor.passes.forms.move_across import move_across
from ditron_inductor.passes.normalize.normalize_collectives import normalize_collectives
from tests.passes.graphs import (
    WORLD_SIZE,
    all_reduce,
    assert_no_new_guards,
    reduce_scatter,
    run_ranks,
    text,
    traced,
)
from tests.passes.test_all_reduce_rms_norm import LlamaNorm, N, frozen, fused, graph_of, nodes_of
from tests.passes.test_move_across import told

pytestmark = pytest.mark.usefixtures("group")

X = torch.empty(4, 8, 16)
W = torch.empty(4, 16, 24)
BF16 = torch.bfloat16


def experts(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The sum over all experts [8, 24] of products that are reduced as one matrix, as `transformers` has it."""
    return all_reduce(torch.bmm(x, w).view(-1, 24)).view(4, 8, 24).sum(dim=0)


def moved(fn: Callable[..., Any], *args: torch.Tensor, **how: Any) -> tuple[int, Any]:
    module = traced(fn, *args, **how)
    normalize_collectives(module.graph, options=Options())
    count = move_across(module.graph, options=Options())
    module.graph.lint()
    module.recompile()
    return count, module


def test_golden() -> None:
    count, module = moved(experts, X, W)
    assert count == 1
    expecttest.assert_expected_inline(
        text(module.graph),
        """\
x_1 [4, 8, 16]
w_1 [4, 16, 24]
bmm [4, 8, 24] = aten.bmm(x_1, w_1)
view [32, 24] = aten.reshape(bmm, [-1, 24])
view_1 [4, 8, 24] = aten.reshape(view, [4, 8, 24])
sum_1 [8, 24] = aten.sum.dim_IntList(view_1, [0])
all_reduce [8, 24] = _c10d_functional.all_reduce(sum_1, 'sum', '0')
wait_tensor [8, 24] = _c10d_functional.wait_tensor(all_reduce)
return wait_tensor
""",
    )


MOVED: dict[str, Callable[..., Any]] = {
    "llama 4": experts,
    "the slots of a token": lambda x, w: all_reduce(torch.bmm(x, w).view(-1, 24)).view(16, 2, 24).sum(1),
    "without views": lambda x, w: all_reduce(torch.bmm(x, w)).sum(0),
    "two dimensions": lambda x, w: all_reduce(torch.bmm(x, w)).sum((0, 1)),
    "kept": lambda x, w: all_reduce(torch.bmm(x, w)).sum(1, keepdim=True),
    "of columns": lambda x, w: all_reduce(torch.bmm(x, w)).sum(-1),
    "a mean over ranks": lambda x, w: all_reduce(torch.bmm(x, w), "avg").sum(0),
    "used twice": lambda x, w: (total := all_reduce(torch.bmm(x, w)).sum(0)).sin() + total,
}


@pytest.mark.parametrize("form", MOVED)
def test_computes_the_same(form: str) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = [[torch.randn(given.shape, generator=generator) for given in (X, W)] for _ in range(WORLD_SIZE)]
    before = run_ranks(traced(MOVED[form], X, W), inputs)
    count, module = moved(MOVED[form], X, W)
    assert count == 1
    torch.testing.assert_close(run_ranks(module, inputs), before)


def test_is_merged_with_a_shared_expert_and_gets_its_norm() -> None:
    norm = frozen(LlamaNorm, torch.float32)

    def layer(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, v: torch.Tensor, residual: torch.Tensor) -> Any:
        chosen = all_reduce(torch.bmm(x, w).view(-1, N)).view(4, 8, N).sum(dim=0)
        total = residual + (all_reduce(y @ v) + chosen)
        return norm(total) @ v.t(), total

    shapes = (4, 8, 16), (4, 16, N), (8, 16), (16, N), (8, N)
    module = graph_of(layer, *map(torch.empty, shapes))
    assert fused(module) == 1
    (node,) = nodes_of(module)
    assert node.kind == "all_reduce_rms_norm" and node.extras == ("residual", "weight")


KEPT: dict[str, Callable[..., Any]] = {
    "another dtype": lambda x, w: all_reduce(torch.bmm(x, w)).sum(0, dtype=torch.float64),
    "the largest": lambda x, w: all_reduce(torch.bmm(x, w), "max").sum(0),
    "the product": lambda x, w: all_reduce(torch.bmm(x, w), "product").sum(0),
    "used elsewhere": lambda x, w: ((y := all_reduce(torch.bmm(x, w))).sum(0), y),
    "a view used elsewhere": lambda x, w: ((y := all_reduce(torch.bmm(x, w)).view(32, 24)).sum(0), y),
    "transposed": lambda x, w: all_reduce(torch.bmm(x, w).transpose(1, 2)).sum(0),
    "something in between": lambda x, w: all_reduce(torch.bmm(x, w)).relu().sum(0),
    "a scatter": lambda x, w: reduce_scatter(torch.bmm(x, w)).sum(0),
    "nothing to add": lambda x, w: all_reduce(torch.bmm(x, w)).view(1, 4, 8, 24).sum(0),
    "by a number of the result": lambda x, w: all_reduce(torch.bmm(x, w)).sum(),
}


@pytest.mark.parametrize("form", KEPT)
def test_left_alone(form: str) -> None:
    assert moved(KEPT[form], X, W)[0] == 0


def test_float16_stays() -> None:
    assert moved(experts, X.half(), W.half())[0] == 0 and moved(experts, X.to(BF16), W.to(BF16))[0] == 1


def test_nothing_without_fusions() -> None:
    module = traced(experts, X, W)
    assert move_across(module.graph, options=Options(fusions=())) == 0


def test_dynamic_shapes() -> None:
    module = traced(lambda x, w: all_reduce(torch.bmm(x, w)).sum(0), X, W, dynamic=True)
    with assert_no_new_guards(module):
        normalize_collectives(module.graph, options=Options())
        assert move_across(module.graph, options=Options()) == 1


def facts(rows: tuple[int, int], dim: int) -> Any:
    """What a rank tells the others of a graph that sums 4 x 4 rows over one of the two dimensions."""
    return told(traced(lambda x, w: all_reduce(x @ w).view(*rows, 24).sum(dim), torch.empty(16, 16), W[0]))


@pytest.mark.parametrize("other", [((4, 4), 1), ((2, 8), 0)], ids=str)
def test_ranks_with_other_sums_run_their_graphs_as_they_are(other: Any) -> None:
    assert not compare([facts((4, 4), 0)] * 2, [{}, {}]).plain
    assert compare([facts((4, 4), 0), facts(*other)], [{}, {}]).plain
