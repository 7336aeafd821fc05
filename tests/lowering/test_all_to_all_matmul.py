"""all_to_all_matmul, our strategies: near the fp64 reference, and what was received bit for bit."""

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
    """x of the shape `x`, with W times as many rows at `dim`, parts * c columns, times a weight [parts * W * c, n]."""

    x: tuple[int, ...]
    c: int
    n: int
    dtype: torch.dtype = BF16
    parts: int = 1
    x_layout: str = "row"
    w_layout: str = "column"
    dim: int = 0
    received: bool = True

    def __str__(self) -> str:
        shape = "x".join(map(str, self.x))
        layouts = self.x_layout[0] + self.w_layout[0]
        received = "-received" * self.received
        return f"{shape}-{self.parts}x{self.c}-{self.n}-{layouts}-{str(self.dtype)[6:]}-dim{self.dim}{received}"


CASES = (
    Case((64,), 64, 64, received=False),
    Case((64,), 32, 96, parts=3, dtype=FP16),
    # Nothing is a multiple of anything; several chunks and tiles.
    Case((35,), 41, 37, dtype=FP32),
    Case((131,), 50, 70, w_layout="row", received=False),
    Case((19,), 23, 31, parts=2, w_layout="offset", dtype=FP32),
    Case((1,), 1, 1),
    # Rows inside of batches; x that is not contiguous.
    Case((2, 25), 40, 24, dim=1),
    Case((2, 2, 9), 20, 40, parts=3, dim=2, dtype=FP16),
    Case((3, 5), 16, 20, dim=0, x_layout="padded", received=False),
    Case((2, 12), 40, 33, dim=1, x_layout="column", w_layout="padded"),
)


def _check(ctx: RankContext, case: Case, strategy: str) -> None:
    site = Site(strategy=strategy, name=f"test/6:{strategy}")
    shape = [*case.x, case.parts * case.c]
    shape[case.dim] *= ctx.world_size
    x = calls.operand(ctx, shape, case.dtype, layout=case.x_layout)
    weight = calls.weight(ctx, case.parts * ctx.world_size * case.c, case.n, case.dtype, case.w_layout)
    before = [x.clone(), weight.clone()]
    outputs = calls.all_to_all_matmul(ctx, site, x, weight, case.dim, case.parts, case.received)
    wanted = calls.reference_all_to_all_matmul(ctx, site, x, weight, case.dim, case.parts)
    assert all(one.dtype == case.dtype and one.is_contiguous() for one in outputs)
    # The library rounds a product before it adds the next one.
    assert_near(outputs[0], wanted[0], num_partials=1 if strategy == "tile" else case.parts * ctx.world_size)
    if case.received:
        assert torch.equal(outputs[1], wanted[1]), "other bits than the ranks'"
    assert all(map(torch.equal, (x, weight), before)), "an input changed"


@pytest.mark.parametrize("strategy", ["tile", "chunked"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_reference(pool: RankPool, case: Case, strategy: str) -> None:
    pool.run(_check, case, strategy)


def _check_runs(ctx: RankContext, strategy: str) -> None:
    """Element (row, column) of rank s is a number of its own, so every place is checked."""
    world, rank, parts, c, batches, rows = ctx.world_size, ctx.rank, 3, 5, 2, 7
    numbers = torch.arange(world * batches * world * rows * parts * c, dtype=torch.float32)
    numbers = numbers.view(world, batches, world, rows, parts, c)
    x = numbers[rank].reshape(batches, world * rows, parts * c)
    out, received = calls.all_to_all_matmul(ctx, Site(strategy=strategy), x, torch.eye(parts * world * c), 1, parts)
    want = numbers[:, :, rank].permute(1, 2, 3, 0, 4).reshape(batches, rows, parts * world * c)
    assert torch.equal(received, want)
    assert torch.equal(out, want.flatten(0, 1))


@pytest.mark.parametrize("strategy", ["library", "tile", "chunked"])
def test_every_element_has_its_place(rank_pools: RankPools, strategy: str) -> None:
    rank_pools.get("cpu", 2).run(_check_runs, strategy)


GPU_CASES = (
    Case((2048,), 1024, 4096),
    Case((1024,), 256, 2048, parts=3, received=False),
    Case((1001,), 333, 777, dtype=FP16, w_layout="row"),
    Case((2, 513), 256, 640, dim=1),
    Case((777,), 160, 1024, dtype=FP32),
)


@pytest.mark.parametrize("strategy", ["tile", "chunked"])
@pytest.mark.parametrize("large_case", GPU_CASES, ids=str)
def test_matches_reference_at_size(gpu_pool: RankPool, large_case: Case, strategy: str) -> None:
    gpu_pool.run(_check, large_case, strategy)
