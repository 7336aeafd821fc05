"""all_gather_matmul, every strategy: products near the fp64 reference, the gathered tensor bit for bit."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from benchmarks.tolerances import assert_near
from tests.lowering import calls
from tests.lowering.calls import Site
from tests.rank_process import RankContext
from tests.ranks import RankPool

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Case:
    """shard [.., K] gathered along gather_dim, times weights given as (N, layout)."""

    shard: tuple[int, ...]
    weights: tuple[tuple[int, str], ...]
    gather_dim: int = 0
    dtype: torch.dtype = BF16
    layout: str = "row"
    return_gathered: bool = True

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shard))
        weights = "+".join(f"{n}{layout[0]}" for n, layout in self.weights)
        gathered = "" if self.return_gathered else "-nogather"
        return f"{shape}@{self.gather_dim}-{self.layout[0]}-{weights}-{str(self.dtype)[6:]}{gathered}"


CASES = (
    Case((64, 64), ((64, "row"),)),
    Case((64, 64), ((64, "row"),), dtype=FP16, return_gathered=False),
    Case((32, 128), ((48, "column"),), dtype=FP32),
    # Nothing is a multiple of anything.
    Case((33, 41), ((50, "row"),)),
    Case((67, 100), ((129, "column"), (1, "row"), (24, "padded")), return_gathered=False),
    Case((19, 37), ((23, "offset"),), dtype=FP32),
    # Single rows and columns, K below a tile.
    Case((1, 16), ((1, "row"),)),
    Case((5, 3), ((7, "column"),), dtype=FP16),
    Case((1, 1), ((1, "row"),)),
    # Inner gather dimensions: a batch, a batch of 1, a sequence of 1, four dimensions.
    Case((2, 17, 48), ((24, "row"), (72, "column")), gather_dim=1),
    Case((1, 20, 32), ((40, "column"),), gather_dim=1, return_gathered=False),
    Case((3, 1, 32), ((16, "row"),), gather_dim=1),
    Case((3, 9, 24), ((16, "row"),), gather_dim=0),
    Case((4, 3, 5, 16), ((33, "row"),), gather_dim=2),
    Case((2, 3, 5, 16), ((33, "row"),), gather_dim=1),
    # Shards that are not contiguous.
    Case((24, 40), ((32, "row"),), layout="column"),
    Case((24, 40), ((32, "row"),), layout="padded", return_gathered=False),
    Case((2, 12, 40), ((32, "column"),), layout="offset", gather_dim=1),
    Case((2, 12, 40), ((32, "row"),), layout="column", gather_dim=1),
)


def _check(ctx: RankContext, case: Case, strategy: str) -> None:
    site = Site(strategy=strategy, name=f"test/0:{strategy}")
    shard = calls.operand(ctx, case.shard, case.dtype, layout=case.layout)
    weights = [calls.weight(ctx, case.shard[-1], n, case.dtype, layout) for n, layout in case.weights]
    before = [x.clone() for x in (shard, *weights)]
    *outputs, token = calls.all_gather_matmul(ctx, site, shard, weights, case.gather_dim, case.return_gathered)
    *expected, gathered = calls.reference_all_gather_matmul(ctx, site, shard, weights, case.gather_dim)
    assert token.dtype == torch.uint8 and token.shape == (1,)
    assert len(outputs) == len(weights) + case.return_gathered
    for index, (got, want) in enumerate(zip(outputs, expected, strict=False)):
        assert got.dtype == case.dtype and got.is_contiguous()
        assert_near(got, want, what=f"output {index}")
    if case.return_gathered:
        assert outputs[-1].is_contiguous() and torch.equal(outputs[-1], gathered)
    for x, y in zip((shard, *weights), before, strict=True):
        assert torch.equal(x, y), "an input changed"


@pytest.mark.parametrize("strategy", ["tile", "library"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_reference(pool: RankPool, case: Case, strategy: str) -> None:
    pool.run(_check, case, strategy)


# The four largest weight matrices make a grid with several tiles per program on a GPU.
GPU_CASES = (
    Case((1024, 4096), ((3584, "column"), (3584, "row"))),
    Case((1000, 1111), ((777, "row"),), dtype=FP16),
    Case((2, 513, 2048), ((1030, "column"), (514, "row"), (513, "row")), gather_dim=1),
    Case((16, 125, 2048), ((1030, "column"), (514, "row")), gather_dim=1),
    Case((777, 1024), ((640, "column"),), dtype=FP32),
    Case((4, 8192), ((4096, "column"),)),
)


@pytest.mark.parametrize("large_case", GPU_CASES, ids=str)
def test_matches_reference_at_size(gpu_pool: RankPool, large_case: Case) -> None:
    gpu_pool.run(_check, large_case, "tile")
