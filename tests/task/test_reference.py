"""The reference in plain collectives, on real ranks, against matmuls of whole tensors."""

from __future__ import annotations

import pytest
import torch

from ditron_inductor.task import reference
from tests.rank_process import RankContext
from tests.ranks import RankPool

SHAPES = [((8, 16), 0), ((2, 8, 16), 0), ((2, 8, 16), 1), ((1, 8, 16), 1), ((2, 3, 4, 16), 2)]


def everyones(ctx: RankContext, *shape: int) -> list[torch.Tensor]:
    """A random fp64 tensor for each rank: the same list on all of them."""
    generator = torch.Generator().manual_seed(sum(shape))
    return [
        torch.randn(shape, dtype=torch.float64, generator=generator).to(ctx.device) for _ in range(ctx.world_size)
    ]


def _all_gather_matmul(ctx: RankContext, shape: tuple[int, ...], dim: int) -> None:
    shards, weights, others = everyones(ctx, *shape), everyones(ctx, 16, 24), everyones(ctx, 16, 5)
    first, second, whole = reference.all_gather_matmul(
        shards[ctx.rank],
        [weights[ctx.rank], others[ctx.rank]],
        gather_dim=dim,
        world_size=ctx.world_size,
        group_name=ctx.group_name,
        return_gathered=True,
    )
    gathered = torch.cat(shards, dim)
    torch.testing.assert_close(first, gathered.flatten(0, -2) @ weights[ctx.rank])
    torch.testing.assert_close(second, gathered.flatten(0, -2) @ others[ctx.rank])
    torch.testing.assert_close(whole, gathered)
    assert whole.is_contiguous()


def _products(ctx: RankContext, shape: tuple[int, ...], op: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """This rank's operands, and the sum or average of all products."""
    lhs, rhs = everyones(ctx, *shape), everyones(ctx, 16, 24)
    total = torch.stack([a @ b for a, b in zip(lhs, rhs, strict=True)]).sum(0)
    return lhs[ctx.rank], rhs[ctx.rank], total / (ctx.world_size if op == "avg" else 1)


def _matmul_reduce_scatter(ctx: RankContext, shape: tuple[int, ...], dim: int, op: str) -> None:
    full = (*shape[:dim], shape[dim] * ctx.world_size, *shape[dim + 1 :])
    a, b, total = _products(ctx, full, op)
    out = reference.matmul_reduce_scatter(
        a, b, scatter_dim=dim, reduce_op=op, world_size=ctx.world_size, group_name=ctx.group_name
    )
    torch.testing.assert_close(out, total.chunk(ctx.world_size, dim)[ctx.rank])


def _matmul_all_reduce(ctx: RankContext, shape: tuple[int, ...], op: str) -> None:
    a, b, total = _products(ctx, shape, op)
    out = reference.matmul_all_reduce(a, b, reduce_op=op, world_size=ctx.world_size, group_name=ctx.group_name)
    torch.testing.assert_close(out, total)


@pytest.mark.parametrize(("shape", "dim"), SHAPES)
def test_all_gather_matmul(pool: RankPool, shape: tuple[int, ...], dim: int) -> None:
    pool.run(_all_gather_matmul, shape, dim)


@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize(("shape", "dim"), SHAPES)
def test_matmul_reduce_scatter(pool: RankPool, shape: tuple[int, ...], dim: int, op: str) -> None:
    pool.run(_matmul_reduce_scatter, shape, dim, op)


@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("shape", [(8, 16), (2, 8, 16)])
def test_matmul_all_reduce(pool: RankPool, shape: tuple[int, ...], op: str) -> None:
    pool.run(_matmul_all_reduce, shape, op)
