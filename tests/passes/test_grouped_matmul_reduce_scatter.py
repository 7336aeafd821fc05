"""grouped_matmul_reduce_scatter: which reduce-scatters of experts become a node, and what keeps them as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from ditron_inductor.options import Options
from tests.passes import test_grouped_matmul_all_reduce as whole
from tests.passes.graphs import WORLD_SIZE, only_task, reasons, reduce_scatter
from tests.passes.test_grouped_matmul_all_reduce import D, E, F, K, routed, sorted_slots

pytestmark = pytest.mark.usefixtures("group", "few_tokens")
KIND = "grouped_matmul_reduce_scatter"
T = 6 * WORLD_SIZE
OPERANDS = (
    torch.empty(T, E), torch.empty(T, D).bfloat16(), torch.empty(E, F, D).bfloat16(), torch.empty(E, D, F).bfloat16(),
)  # fmt: skip


@pytest.fixture
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graphs of these tests have few tokens."""
    monkeypatch.setattr(whole.module, "LEAST_TOKENS", T)


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
    return whole.fused(fn, Options(), OPERANDS, 2e-2)


@pytest.mark.parametrize(
    ("fn", "added", "outer"), [(experts, False, 1), (sequences, True, 2), (sequences_in_order, False, 3)]
)
def test_sums_are_scattered_by_one_node(fn: Callable[..., Any], added: bool, outer: int) -> None:
    task, operands = only_task(fused(fn), KIND)
    assert (task.top_k, task.has_added, task.reduce_op, task.outer) == (K, added, "sum", outer)
    assert operands["x"].startswith("_grouped_mm") and operands["weight"].startswith("permute")


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
