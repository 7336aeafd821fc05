"""A sort may return the slots of an expert in any order: what becomes of the graph computes the same for each of them."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import fx

from benchmarks.tolerances import relative_error
from ditron_inductor import pipeline
from tests.passes import test_grouped_matmul_all_reduce as whole
from tests.passes import test_grouped_matmul_reduce_scatter as scattered
from tests.passes import test_sorted_experts as few
from tests.passes.graphs import WORLD_SIZE, compiled_graphs, fuse, only_task, run_ranks, twin

pytestmark = pytest.mark.usefixtures("group")
SORT = torch.ops.aten.sort.default
T = 72
Operands = tuple[torch.Tensor, ...]


def any_order(keys: torch.Tensor, dim: int = -1, descending: bool = False) -> Operands:
    """What `torch.sort` may return for one dimension: equal keys lie in another order in each call."""
    drawn = torch.randperm(len(keys))
    values, places = keys[drawn].sort(stable=True, descending=descending)
    return values, drawn[places]


def unstable(module: fx.GraphModule) -> tuple[fx.GraphModule, int]:
    """(The same graph with sorts like that, how many these are)."""
    other = twin(module)
    sorts = other.graph.find_nodes(op="call_function", target=SORT)
    for node in sorts:
        node.target = any_order
    other.recompile()
    return other, len(sorts)


def assert_same(
    after: fx.GraphModule, before: fx.GraphModule, given: Operands, sorts: int, tolerance: float = 2e-2
) -> None:
    """What the graph `before` computes with torch's sort, both compute with any other one, of which each rank has its
    own. sorts: how many of them are left in `after`.
    """
    torch.manual_seed(0)
    graphs = unstable(after), unstable(before)
    assert [count for _, count in graphs] == [sorts, 1]
    for _ in range(3):
        inputs = [[torch.randn(one.shape).to(one.dtype) for one in given] for _ in range(WORLD_SIZE)]
        wanted = run_ranks(before, inputs)
        for graph, _ in graphs:
            for got, right in zip(run_ranks(graph, inputs), wanted, strict=True):
                assert all(relative_error(one, other) < tolerance for one, other in zip(got, right, strict=True))


@pytest.mark.parametrize(
    ("of", "name"),
    [
        *((whole, name) for name in ("experts", "with_another", "scattered", "added_rows", "put_rows", "masked")),
        *((scattered, name) for name in ("experts", "sequences", "sequences_in_order")),
    ],
)
def test_sums_of_a_prompt(monkeypatch: pytest.MonkeyPatch, of: ModuleType, name: str) -> None:
    monkeypatch.setattr(whole.module, "LEAST_TOKENS", len(of.OPERANDS[0]))
    (after,) = compiled_graphs(getattr(of, name), *of.OPERANDS)
    before = twin(after)
    fuse(after)
    task, _ = only_task(after, of.KIND)
    assert task.top_k == whole.K
    assert_same(after, before, of.OPERANDS, 1, 1e-2 if of is whole else 2e-2)


def by_all_passes(fn: Callable[..., Any], operands: Operands) -> tuple[fx.GraphModule, fx.GraphModule, dict[str, int]]:
    """The graph of a layer, what the passes make of it, and how often each of them made something."""
    after = few.graph_of(fn, operands)
    before = twin(after)
    counts = pipeline.run(after.graph, few.TILE)
    after.recompile()
    return before, after, counts


def test_a_prompt_whose_rows_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole.module, "LEAST_TOKENS", T)
    operands = torch.empty(T, few.D).bfloat16(), torch.empty(T, few.E), few.GATE_UP, few.DOWN
    before, after, counts = by_all_passes(few.experts, operands)
    assert counts["grouped_projections"] == counts[whole.KIND] == 1
    assert_same(after, before, (operands[0], few.NORM, *operands[1:]), 1)


@pytest.mark.parametrize(
    ("fn", "operands"),
    [
        (few.experts, few.OPERANDS),
        (few.with_biases, (few.X, few.SCORES, few.GATE_UP, few.BIAS, few.DOWN, few.OUTER)),
        (few.of_ranks, (few.X, few.SCORES, few.GATE_UP[: few.OWN], few.DOWN[: few.OWN])),
    ],
)
def test_a_few_tokens_that_are_not_sorted(fn: Callable[..., Any], operands: Operands) -> None:
    before, after, counts = by_all_passes(fn, operands)
    assert counts["expert_projections"] == 2
    assert_same(after, before, (operands[0], few.NORM, *operands[1:]), 0)
