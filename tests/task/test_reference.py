"""The reference in plain collectives, all ranks in one process, against matmuls of whole tensors."""

from __future__ import annotations

import pytest
import torch

from ditron_inductor.task import reference
from tests.passes.graphs import WORLD_SIZE, group_name, run_ranks, traced

pytestmark = pytest.mark.usefixtures("group")

SHAPES = [((8, 16), 0), ((2, 8, 16), 0), ((2, 8, 16), 1), ((1, 8, 16), 1), ((2, 3, 4, 16), 2)]


def random(shape: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.randn(shape, dtype=torch.float64) for _ in range(WORLD_SIZE)]


@pytest.mark.parametrize(("shape", "dim"), SHAPES)
def test_all_gather_matmul(shape: tuple[int, ...], dim: int) -> None:
    def fn(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
        return reference.all_gather_matmul(
            x, [w, v], gather_dim=dim, world_size=WORLD_SIZE, group_name=group_name(), return_gathered=True
        )

    shards, weights, others = random(shape), random((16, 24)), random((16, 5))
    module = traced(fn, shards[0], weights[0], others[0])
    outputs = run_ranks(module, [list(one) for one in zip(shards, weights, others, strict=True)])
    gathered = torch.cat(shards, dim)
    for rank, (first, second, whole) in enumerate(outputs):
        torch.testing.assert_close(first, gathered.flatten(0, -2) @ weights[rank])
        torch.testing.assert_close(second, gathered.flatten(0, -2) @ others[rank])
        torch.testing.assert_close(whole, gathered)
        assert whole.is_contiguous()


@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize(("shape", "dim"), SHAPES)
def test_matmul_reduce_scatter(shape: tuple[int, ...], dim: int, op: str) -> None:
    def fn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return reference.matmul_reduce_scatter(
            a, b, scatter_dim=dim, reduce_op=op, world_size=WORLD_SIZE, group_name=group_name()
        )

    full = list(shape)
    full[dim] *= WORLD_SIZE
    lhs, rhs = random(tuple(full)), random((16, 24))
    outputs = run_ranks(traced(fn, lhs[0], rhs[0]), [list(one) for one in zip(lhs, rhs, strict=True)])
    total = sum(a @ b for a, b in zip(lhs, rhs, strict=True)) / (WORLD_SIZE if op == "avg" else 1)
    assert isinstance(total, torch.Tensor)
    for chunk, expected in zip(outputs, total.chunk(WORLD_SIZE, dim), strict=True):
        torch.testing.assert_close(chunk, expected)


@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("shape", [(8, 16), (2, 8, 16)])
def test_matmul_all_reduce(shape: tuple[int, ...], op: str) -> None:
    def fn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return reference.matmul_all_reduce(a, b, reduce_op=op, world_size=WORLD_SIZE, group_name=group_name())

    lhs, rhs = random(shape), random((16, 24))
    outputs = run_ranks(traced(fn, lhs[0], rhs[0]), [list(one) for one in zip(lhs, rhs, strict=True)])
    total = sum(a @ b for a, b in zip(lhs, rhs, strict=True)) / (WORLD_SIZE if op == "avg" else 1)
    for output in outputs:
        torch.testing.assert_close(output, total)
