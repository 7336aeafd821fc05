"""Static orders: own chunks first where they need no wait and last where peers wait for theirs; every tile once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ditron_inductor.core.order import gather_order, grouped, interleaved_row, scatter_order
from tests.rank_process import RankContext
from tests.ranks import RankPools

WORLD = 3


@triton.jit(do_not_specialize=["rank"])
def ranks_kernel(gathered, scattered, rank, WORLD: tl.constexpr):
    """The rank of each step when gathering, and when scattering."""
    for step in range(WORLD):
        tl.store(gathered + step, gather_order(step, rank, WORLD))
        tl.store(scattered + step, scatter_order(step, rank, WORLD))


@triton.jit(do_not_specialize=["num_m", "num_n"])
def tiles_kernel(rows, columns, num_m, num_n, GROUP_M: tl.constexpr):
    """Block row and block column of each tile."""
    for tile in range(num_m * num_n):
        row, column = grouped(tile, num_m, num_n, GROUP_M)
        tl.store(rows + tile, row)
        tl.store(columns + tile, column)


@triton.jit(do_not_specialize=["rows", "block"])
def rows_kernel(out, rows, block, WORLD: tl.constexpr, INTERLEAVED: tl.constexpr):
    """out[chunk, row]: where that row of that rank's shard is in the whole tensor."""
    for chunk in range(WORLD):
        for row in range(rows):
            tl.store(out + chunk * rows + row, interleaved_row(row, chunk, rows, block, WORLD, INTERLEAVED))


def check_ranks(ctx: RankContext) -> None:
    for rank in range(WORLD):
        gathered, scattered = torch.full((2, WORLD), -1, dtype=torch.int32)
        ranks_kernel[(1,)](gathered, scattered, rank, WORLD)
        following = [(rank + i) % WORLD for i in range(1, WORLD)]
        assert gathered.tolist() == [rank, *following]
        assert scattered.tolist() == [*following, rank]


def check_tiles(ctx: RankContext) -> None:
    for num_m, num_n, group in ((5, 3, 2), (1, 4, 8), (4, 1, 4)):
        rows, columns = torch.full((2, num_m * num_n), -1, dtype=torch.int32)
        tiles_kernel[(1,)](rows, columns, num_m, num_n, group)
        found = list(zip(rows.tolist(), columns.tolist(), strict=True))
        assert sorted(found) == [(row, column) for row in range(num_m) for column in range(num_n)]
        assert [row // group for row, _ in found] == sorted(row // group for row in range(num_m) for _ in range(num_n))


def check_rows(ctx: RankContext) -> None:
    # Shards [2, 3, 4] of a tensor [2, WORLD * 3, 4]: runs of 12 rows. Then of one [WORLD * 6, 4].
    rows = torch.arange(2 * WORLD * 3 * 4, dtype=torch.int32).view(2, WORLD * 3, 4)
    for interleaved, whole in ((True, rows), (False, rows.view(WORLD * 6, 4))):
        shards = whole.chunk(WORLD, 1 if interleaved else 0)
        out = torch.full((WORLD, 24), -1, dtype=torch.int32)
        rows_kernel[(1,)](out, 24, 12, WORLD, interleaved)
        assert torch.equal(out, torch.stack([shard.flatten() for shard in shards]))


def check(ctx: RankContext) -> None:
    check_ranks(ctx)
    check_tiles(ctx)
    check_rows(ctx)


def test_orders(rank_pools: RankPools) -> None:
    rank_pools.get("cpu", 2).run(check)
