"""combine_experts_reduce_scatter: which reduce-scatters of experts become a node, and what keeps them as they are."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx

from benchmarks.tolerances import relative_error
from ditron_inductor.options import Options
from tests.passes.graphs import WORLD_SIZE, compiled_graphs, fuse, only_task, reasons, reduce_scatter, run_ranks
from tests.passes.test_combine_experts_all_reduce import D, E, F, K, routed, sorted_slots

pytestmark = pytest.mark.usefixtures("group", "few_tokens")
KIND = "combine_experts_reduce_scatter"
NAMED = replace(Options(), fusions=(*Options().fusions, KIND))
T = 6 * WORLD_SIZE
OPERANDS = (
    torch.empty(T, E), torch.empty(T, D).bfloat16(), torch.empty(E, F, D).bfloat16(), torch.empty(E, D, F).bfloat16(),
)  # fmt: skip


@pytest.fixture
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graphs of these tests have few tokens."""
    whole = importlib.import_module("ditron_inductor.passes.fuse.combine_experts_all_reduce")
    monkeypatch.setattr(whole, "LEAST_TOKENS", T)


def scattered(x: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """As DTensor scatters a dimension."""
    return reduce_scatter(torch.cat(x.chunk(WORLD_SIZE, dim)) if dim else x)


def experts(*operands: torch.Tensor) -> torch.Tensor:
    return scattered(routed(*operands).sum(1).bfloat16())


def sequences(*operands: torch.Tensor) -> torch.Tensor:
    """As TorchTitan writes it: the sequences of a batch are cut, and another expert's result is added."""
    products, order = sorted_slots(*operands)
    index = (order // K).reshape(-1, 1).expand(-1, D)
    total = torch.zeros_like(operands[1]).scatter_add(0, index, products.bfloat16())
    return scattered((total + operands[1].sin()).view(2, -1, D), 1)


def sequences_in_order(*operands: torch.Tensor) -> torch.Tensor:
    return scattered(routed(*operands).sum(1).bfloat16().view(3, 2 * WORLD_SIZE, D), 1).cos()


def fused(fn: Callable[..., Any]) -> fx.GraphModule:
    """The graph after the fusions, which computes on all ranks what it computed before."""
    (before,), (after,) = compiled_graphs(fn, *OPERANDS), compiled_graphs(fn, *OPERANDS)
    fuse(after, NAMED)

    def inputs() -> list[list[torch.Tensor]]:
        drawn = torch.Generator().manual_seed(0)
        return [[torch.randn(one.shape, generator=drawn).to(one.dtype) for one in OPERANDS] for _ in range(WORLD_SIZE)]

    # The node rounds once, and the graph several times.
    for got, wanted in zip(run_ranks(after, inputs()), run_ranks(before, inputs()), strict=True):
        assert all(relative_error(one, other) < 2e-2 for one, other in zip(got, wanted, strict=True))
    return after


@pytest.mark.parametrize(
    ("fn", "added", "outer"), [(experts, False, 1), (sequences, True, 2), (sequences_in_order, False, 3)]
)
def test_sums_are_scattered_by_one_node(fn: Callable[..., Any], added: bool, outer: int) -> None:
    task, operands = only_task(fused(fn), KIND)
    assert (task.top_k, task.has_added, task.reduce_op, task.outer) == (K, added, "sum", outer)
    assert operands["products"].startswith("_grouped_mm")


def columns(*operands: torch.Tensor) -> torch.Tensor:
    return scattered(routed(*operands).sum(1).bfloat16(), 1)


def permuted(*operands: torch.Tensor) -> torch.Tensor:
    total = routed(*operands).sum(1).bfloat16().view(2, -1, D)
    return reduce_scatter(torch.cat(total.chunk(WORLD_SIZE, 1)[::-1]))


def used_elsewhere(*operands: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    total = routed(*operands).sum(1).bfloat16().view(2, -1, D)
    return scattered(total, 1), total.sin()


@pytest.mark.parametrize("fn", [columns, permuted, used_elsewhere])
def test_it_must_not_fire(fn: Callable[..., Any]) -> None:
    after = fused(fn)
    assert not any(node.name.startswith(KIND) for node in after.graph.nodes) and len(reasons(after)) == 1
