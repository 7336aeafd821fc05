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
    return [torch.randn(shape, dtype=torch.float64, generator=generator).to(ctx.device) for _ in range(ctx.world_size)]


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


Operands = tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor | None]


def _products(ctx: RankContext, shape: tuple[int, ...], op: str, count: int) -> tuple[Operands, torch.Tensor]:
    """This rank's operands of `count` products, and of a bias if there are several, and the reduction of all."""
    depths = [shape[-1] + 3 * index for index in range(count)]
    lefts, rights = [everyones(ctx, *shape[:-1], k) for k in depths], [everyones(ctx, k, 24) for k in depths]
    biases = everyones(ctx, 24)
    total = torch.stack([a @ b for lhs, rhs in zip(lefts, rights, strict=True) for a, b in zip(lhs, rhs, strict=True)])
    whole = total.sum(0) + (sum(biases) if count > 1 else 0)
    mine = [one[ctx.rank] for one in lefts], [one[ctx.rank] for one in rights], biases[ctx.rank] if count > 1 else None
    return mine, whole / (ctx.world_size if op == "avg" else 1)


def _matmul_reduce_scatter(ctx: RankContext, shape: tuple[int, ...], dim: int, op: str, count: int) -> None:
    full = (*shape[:dim], shape[dim] * ctx.world_size, *shape[dim + 1 :])
    operands, total = _products(ctx, full, op, count)
    out = reference.matmul_reduce_scatter(
        *operands, scatter_dim=dim, reduce_op=op, world_size=ctx.world_size, group_name=ctx.group_name
    )
    torch.testing.assert_close(out, total.chunk(ctx.world_size, dim)[ctx.rank])


def _matmul_all_reduce(ctx: RankContext, shape: tuple[int, ...], op: str, count: int) -> None:
    operands, total = _products(ctx, shape, op, count)
    out = reference.matmul_all_reduce(*operands, reduce_op=op, world_size=ctx.world_size, group_name=ctx.group_name)
    torch.testing.assert_close(out, total)


def _matmul_all_gather(ctx: RankContext, shape: tuple[int, ...], dim: int) -> None:
    lhs, rhs, bias = everyones(ctx, *shape), everyones(ctx, 16, 24), everyones(ctx, 24)
    for biases in (bias, None):
        products = [a @ b + (0 if biases is None else c) for a, b, c in zip(lhs, rhs, bias, strict=True)]
        out = reference.matmul_all_gather(
            [lhs[ctx.rank]],
            [rhs[ctx.rank]],
            None if biases is None else biases[ctx.rank],
            gather_dim=dim,
            world_size=ctx.world_size,
            group_name=ctx.group_name,
        )
        torch.testing.assert_close(out, torch.cat(products, dim))


@pytest.mark.parametrize(("shape", "dim"), [((8, 16), 0), ((8, 16), 1), ((2, 3, 16), 2), ((1, 1, 16), 2)])
def test_matmul_all_gather(pool: RankPool, shape: tuple[int, ...], dim: int) -> None:
    pool.run(_matmul_all_gather, shape, dim)


@pytest.mark.parametrize(("shape", "dim"), SHAPES)
def test_all_gather_matmul(pool: RankPool, shape: tuple[int, ...], dim: int) -> None:
    pool.run(_all_gather_matmul, shape, dim)


@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize(("shape", "dim"), SHAPES)
def test_matmul_reduce_scatter(pool: RankPool, shape: tuple[int, ...], dim: int, op: str) -> None:
    for count in (1, 3):
        pool.run(_matmul_reduce_scatter, shape, dim, op, count)


@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("shape", [(8, 16), (2, 8, 16)])
def test_matmul_all_reduce(pool: RankPool, shape: tuple[int, ...], op: str) -> None:
    for count in (1, 3):
        pool.run(_matmul_all_reduce, shape, op, count)
