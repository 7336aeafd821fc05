"""matmul_all_to_all, our strategies: near the fp64 reference, every rank's columns of every rank's rows in their
place.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from benchmarks.tolerances import assert_near
from tests.lowering import calls
from tests.lowering.calls import Site
from tests.rank_process import RankContext
from tests.ranks import RankPool, RankPools

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Case:
    """a [.., K] times b [K, parts * W * c], plus a second product of so many K, plus a bias; rows gathered along
    dim.
    """

    a: tuple[int, ...]
    c: int
    dtype: torch.dtype = BF16
    parts: int = 1
    a_layout: str = "row"
    b_layout: str = "column"
    bias: bool = False
    dim: int = 0
    second: int = 0

    def __str__(self) -> str:
        shape = "x".join(map(str, self.a))
        added = f"-and{self.second}" * (self.second > 0) + "-bias" * self.bias
        layouts = self.a_layout[0] + self.b_layout[0]
        return f"{shape}-{self.parts}x{self.c}-{layouts}-{str(self.dtype)[6:]}-dim{self.dim}{added}"


CASES = (
    Case((64, 64), 32),
    Case((64, 64), 32, parts=3, dtype=FP16, bias=True),
    # Nothing is a multiple of anything.
    Case((35, 41), 37, dtype=FP32),
    Case((131, 41), 50, b_layout="row", bias=True),
    Case((19, 37), 23, parts=2, b_layout="offset", dtype=FP32),
    # Single rows and columns, K below a tile.
    Case((1, 3), 1, bias=True),
    # Rows inside of batches.
    Case((2, 25, 24), 40, dim=1, bias=True),
    Case((2, 2, 9, 16), 20, parts=3, dim=2, dtype=FP16),
    Case((3, 5, 16), 20, dim=0),
    # A sum, the longer one second; a left operand that is not contiguous.
    Case((40, 24), 40, second=64, bias=True, a_layout="column"),
)


def _check(ctx: RankContext, case: Case, strategy: str) -> None:
    site = Site(strategy=strategy, name=f"test/5:{strategy}")
    depths = [case.a[-1], case.second] if case.second else [case.a[-1]]
    n = case.parts * ctx.world_size * case.c
    a = [calls.operand(ctx, (*case.a[:-1], deep), case.dtype, layout=case.a_layout) for deep in depths]
    b = [calls.weight(ctx, deep, n, case.dtype, case.b_layout) for deep in depths]
    bias = calls.operand(ctx, [n], case.dtype) if case.bias else None
    before = [one.clone() for one in (*a, *b)]
    out = calls.matmul_all_to_all(ctx, site, a, b, bias, case.dim, case.parts)
    assert out.dtype == case.dtype and out.is_contiguous()
    # The library may round a product before it adds the next one, or the bias.
    partials = len(depths) + (bias is not None) + (strategy != "tile")
    want = calls.reference_matmul_all_to_all(ctx, site, a, b, bias, case.dim, case.parts)
    assert_near(out, want, num_partials=partials)
    assert all(map(torch.equal, (*a, *b), before)), "an input changed"


@pytest.mark.parametrize("strategy", ["tile", "chunked"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_reference(pool: RankPool, case: Case, strategy: str) -> None:
    pool.run(_check, case, strategy)


def _check_runs(ctx: RankContext, strategy: str) -> None:
    """The identity as the product: element (row, column) of rank s is a number of its own, so every place is
    checked.
    """
    world, rank, parts, c, batches, rows = ctx.world_size, ctx.rank, 3, 5, 2, 7
    n = parts * world * c
    numbers = torch.arange(world * batches * rows * n, dtype=torch.float32).view(world, batches, rows, parts, world, c)
    out = calls.matmul_all_to_all(
        ctx, Site(strategy=strategy), numbers[rank].reshape(batches, rows, n), torch.eye(n), None, 1, parts
    )
    want = numbers[:, :, :, :, rank].transpose(0, 1).reshape(batches, world * rows, parts * c)
    assert torch.equal(out, want)


@pytest.mark.parametrize("strategy", ["library", "tile", "chunked"])
def test_every_element_has_its_place(rank_pools: RankPools, strategy: str) -> None:
    rank_pools.get("cpu", 2).run(_check_runs, strategy)


GPU_CASES = (
    Case((2048, 4096), 1536),
    Case((1024, 2048), 256, parts=3, bias=True),
    Case((1001, 1111), 777, dtype=FP16, b_layout="row"),
    Case((2, 513, 1024), 640, dim=1),
    Case((777, 1024), 160, dtype=FP32),
)


@pytest.mark.parametrize("strategy", ["tile", "chunked"])
@pytest.mark.parametrize("large_case", GPU_CASES, ids=str)
def test_matches_reference_at_size(gpu_pool: RankPool, large_case: Case, strategy: str) -> None:
    gpu_pool.run(_check, large_case, strategy)
