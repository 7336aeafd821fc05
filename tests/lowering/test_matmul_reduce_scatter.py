"""matmul_reduce_scatter, every strategy, near the fp64 reference."""

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
    """a [.., K] times b [K, n], scattered; `chunk` is a's shape with scatter_dim as it is after the scatter."""

    chunk: tuple[int, ...]
    n: int
    scatter_dim: int = 0
    dtype: torch.dtype = BF16
    a_layout: str = "row"
    b_layout: str = "row"
    reduce_op: str = "sum"

    def __str__(self) -> str:
        shape = "x".join(map(str, self.chunk))
        layouts = self.a_layout[0] + self.b_layout[0]
        return f"{shape}@{self.scatter_dim}-{self.n}-{layouts}-{str(self.dtype)[6:]}-{self.reduce_op}"


CASES = (
    Case((64, 64), 64),
    Case((64, 64), 64, dtype=FP16, reduce_op="avg"),
    Case((32, 128), 48, dtype=FP32, b_layout="column"),
    # Nothing is a multiple of anything.
    Case((33, 41), 50),
    Case((67, 100), 129, b_layout="column", reduce_op="avg"),
    Case((19, 37), 23, b_layout="offset", dtype=FP32),
    # Single rows and columns, K below a tile.
    Case((1, 16), 1),
    Case((5, 3), 7, dtype=FP16, b_layout="column"),
    Case((1, 1), 1),
    # Inner scatter dimensions: a batch, a batch of 1, a sequence of 1, four dimensions.
    Case((2, 17, 48), 24, scatter_dim=1),
    Case((1, 20, 32), 40, scatter_dim=1, b_layout="padded"),
    Case((3, 1, 32), 16, scatter_dim=1, reduce_op="avg"),
    Case((3, 9, 24), 16),
    Case((4, 3, 5, 16), 33, scatter_dim=2),
    Case((2, 3, 5, 16), 33, scatter_dim=1),
    # Left operands that are not contiguous.
    Case((24, 40), 32, a_layout="column"),
    Case((24, 40), 32, a_layout="padded", b_layout="column"),
    Case((2, 12, 40), 32, a_layout="offset", scatter_dim=1),
    # Of one column, either stride may be 1.
    Case((1, 40, 1), 40, scatter_dim=1, dtype=FP32, a_layout="column"),
)


def _check(ctx: RankContext, case: Case, strategy: str) -> None:
    site = Site(strategy=strategy, name=f"test/1:{strategy}")
    shape = list(case.chunk)
    shape[case.scatter_dim] *= ctx.world_size
    a = calls.operand(ctx, shape, case.dtype, layout=case.a_layout)
    b = calls.weight(ctx, shape[-1], case.n, case.dtype, case.b_layout)
    before = a.clone(), b.clone()
    out = calls.matmul_reduce_scatter(ctx, site, a, b, case.scatter_dim, case.reduce_op)
    assert out.dtype == case.dtype and out.is_contiguous()
    expected = calls.reference_matmul_reduce_scatter(ctx, site, a, b, case.scatter_dim, case.reduce_op)
    assert_near(out, expected, num_partials=ctx.world_size)
    assert torch.equal(a, before[0]) and torch.equal(b, before[1]), "an input changed"


@pytest.mark.parametrize("strategy", ["tile", "library"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_reference(pool: RankPool, case: Case, strategy: str) -> None:
    pool.run(_check, case, strategy)


GPU_CASES = (
    Case((1024, 3584), 4096, b_layout="column"),
    Case((1000, 1111), 777, dtype=FP16),
    Case((2, 513, 2048), 1030, scatter_dim=1, b_layout="column", reduce_op="avg"),
    Case((16, 125, 2048), 1030, scatter_dim=1),
    Case((777, 1024), 640, dtype=FP32),
    Case((1, 7168), 8192, b_layout="column"),
)


@pytest.mark.parametrize("large_case", GPU_CASES, ids=str)
def test_matches_reference_at_size(gpu_pool: RankPool, large_case: Case) -> None:
    gpu_pool.run(_check, large_case, "tile")
