"""all_gather_contract, every strategy: products near the fp64 reference, the gathered tensor bit for bit."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch

from benchmarks.tolerances import assert_near
from ditron_inductor.lowering.all_gather_contract.chunked import cut
from tests.lowering import calls
from tests.lowering.calls import Site
from tests.rank_process import RankContext
from tests.ranks import RankPool

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Case:
    """shard gathered along gather_dim, and factors given as (N, layout), on the other side of it."""

    shard: tuple[int, ...]
    factors: tuple[tuple[int, str], ...]
    gather_dim: int = 0
    first: bool = True
    dtype: torch.dtype = BF16
    layout: str = "row"
    return_gathered: bool = True

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shard))
        factors = "+".join(f"{n}{layout[0]}" for n, layout in self.factors)
        gathered = "" if self.return_gathered else "-nogather"
        side = "first" if self.first else "second"
        return f"{shape}@{self.gather_dim}-{side}-{self.layout[0]}-{factors}-{str(self.dtype)[6:]}{gathered}"

    @property
    def depth(self) -> int:
        """Of the contraction, on one rank."""
        return self.shard[-1] if self.gather_dim == len(self.shard) - 1 else math.prod(self.shard[:-1])


CASES = (
    # A weight gradient; two of one gather; one of a shard whose rows and columns nothing divides.
    Case((32, 96), ((48, "row"),), return_gathered=False),
    Case((33, 41), ((50, "column"), (7, "padded"))),
    Case((19, 37), ((23, "offset"),), dtype=FP32, layout="column", return_gathered=False),
    # The gathered tensor second.
    Case((40, 72), ((36, "row"), (1, "column")), first=False),
    Case((17, 130), ((20, "padded"),), first=False, dtype=FP16, return_gathered=False),
    # A batch of sequences, and sequences of one token.
    Case((3, 18, 40), ((24, "row"),), gather_dim=1),
    Case((2, 3, 1, 24), ((16, "column"),), gather_dim=2, first=False, return_gathered=False),
    Case((2, 5, 3, 24), ((16, "row"),), gather_dim=1, dtype=FP32),
    # The last dimension.
    Case((70, 24), ((40, "column"),), gather_dim=1, return_gathered=False),
    Case((2, 35, 19), ((33, "row"), (8, "row")), gather_dim=2, dtype=FP32),
    Case((45, 33), ((21, "offset"),), gather_dim=1, first=False, layout="column"),
    # Single rows and columns.
    Case((1, 16), ((1, "row"),), dtype=FP16),
    Case((1, 1), ((1, "row"),), gather_dim=1, first=False),
)


def _check(ctx: RankContext, case: Case, strategy: str) -> None:
    site = Site(strategy=strategy, name=f"test/0:{strategy}")
    shard = calls.operand(ctx, case.shard, case.dtype, layout=case.layout)
    depth = ctx.world_size * case.depth
    scale = 1.0 / math.sqrt(depth)
    shapes = [((depth, n) if case.first else (n, depth), layout) for n, layout in case.factors]
    factors = [calls.operand(ctx, shape, case.dtype, layout=layout, scale=scale) for shape, layout in shapes]
    before = [x.clone() for x in (shard, *factors)]
    where = case.gather_dim, case.first
    *outputs, token = calls.all_gather_contract(ctx, site, shard, factors, *where, case.return_gathered)
    *expected, gathered = calls.reference_all_gather_contract(ctx, site, shard, factors, *where)
    assert token.dtype == torch.uint8 and token.shape == (1,)
    assert len(outputs) == len(factors) + case.return_gathered
    for index, (got, want) in enumerate(zip(outputs, expected, strict=False)):
        assert got.dtype == case.dtype and got.is_contiguous()
        assert_near(got, want, what=f"output {index}")
    if case.return_gathered:
        assert outputs[-1].is_contiguous() and torch.equal(outputs[-1], gathered)
    for x, y in zip((shard, *factors), before, strict=True):
        assert torch.equal(x, y), "an input changed"


@pytest.mark.parametrize("strategy", ["tile", "chunked", "library"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_reference(pool: RankPool, case: Case, strategy: str) -> None:
    pool.run(_check, case, strategy)


def _replicated(ctx: RankContext, strategy: str) -> None:
    site = Site(strategy=strategy, name=f"replicated/0:{strategy}")
    shard = calls.operand(ctx, (24, 40), BF16)
    factor = torch.randn(24 * ctx.world_size, 33, generator=torch.Generator().manual_seed(1)).to(ctx.device, BF16)
    calls.assert_replicated(ctx, calls.all_gather_contract(ctx, site, shard, [factor])[0])


@pytest.mark.parametrize("strategy", ["tile", "chunked"])
def test_the_same_factors_give_the_same_bits_on_all_ranks(pool: RankPool, strategy: str) -> None:
    """As the library does: no rank may sample another token than its peers."""
    pool.run(_replicated, strategy)


def test_parts_cover_the_kept_dimension() -> None:
    assert cut(4096, 4096, 132, 256) == ((0, 1024), (1024, 2048), (2048, 3072), (3072, 4096))
    # Too few tiles for four, or for two; not a multiple of anything.
    assert cut(1024, 8192, 132, 256) == ((0, 512), (512, 1024))
    assert cut(4096, 256, 132, 256) == ((0, 4096),)
    assert cut(4099, 8192, 132, 256)[-1] == (3096, 4099)
    assert cut(1, 1, 132, 256) == ((0, 1),)


GPU_CASES = (
    Case((1024, 4096), ((3584, "row"), (1032, "row"))),
    Case((1000, 1111), ((777, "row"),), dtype=FP16),
    Case((2, 513, 2048), ((1030, "column"), (514, "row")), gather_dim=1, first=False),
    Case((2048, 520), ((4096, "column"),), gather_dim=1, return_gathered=False),
    Case((777, 1024), ((640, "column"),), dtype=FP32),
)


@pytest.mark.parametrize("strategy", ["tile", "chunked"])
@pytest.mark.parametrize("large_case", GPU_CASES, ids=str)
def test_matches_reference_at_size(gpu_pool: RankPool, large_case: Case, strategy: str) -> None:
    gpu_pool.run(_check, large_case, strategy)
