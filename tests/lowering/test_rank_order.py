"""Sums over ranks are taken in rank order and in fp32, whoever takes them: the bits of every strategy's kernel."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.lowering import calls
from tests.lowering.calls import Site
from tests.rank_process import RankContext
from tests.ranks import RankPools

COLUMNS = 8
ROWS = (3, 70)
"""Of a tensor that is reduced in one shot, and of one that is not."""
DTYPES = (torch.float32, torch.float16)


def in_rank_order(ctx: RankContext, x: torch.Tensor) -> torch.Tensor:
    """((x_0 + x_1) + x_2) + ..., in fp32, rounded once."""
    every = [torch.empty_like(x) for _ in range(ctx.world_size)]
    dist.all_gather(every, x)
    total = torch.zeros(x.shape)
    for one in every:
        total += one.float()
    return total.to(x.dtype)


def check(ctx: RankContext) -> None:
    for dtype in DTYPES:
        # A product with it is exact, so only the sum is rounded.
        unit = torch.eye(COLUMNS, dtype=dtype)
        x = calls.operand(ctx, [ROWS[-1], COLUMNS], dtype)
        expected = in_rank_order(ctx, x)
        for strategy in ("tile", "chunked"):
            site = Site(name=f"order/0:{strategy}:{dtype}", strategy=strategy)
            few = slice(0, ROWS[0] * ctx.world_size)
            own = expected[few].chunk(ctx.world_size)[ctx.rank]
            assert torch.equal(calls.matmul_reduce_scatter(ctx, site, x[few], unit), own), site
            for rows in ROWS:
                assert torch.equal(calls.matmul_all_reduce(ctx, site, x[:rows], unit), expected[:rows]), (site, rows)


def test_every_sum_has_the_bits_of_the_sum_in_rank_order(rank_pools: RankPools) -> None:
    rank_pools.get("cpu", 3).run(check)
