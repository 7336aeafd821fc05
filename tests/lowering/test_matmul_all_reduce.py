"""matmul_all_reduce, every strategy: near the fp64 reference, and the same bytes on every rank."""

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
    """a [.., K] times b [K, n], reduced over the ranks."""

    a: tuple[int, ...]
    n: int
    dtype: torch.dtype = BF16
    a_layout: str = "row"
    b_layout: str = "row"
    reduce_op: str = "sum"

    def __str__(self) -> str:
        shape = "x".join(map(str, self.a))
        return f"{shape}-{self.n}-{self.a_layout[0]}{self.b_layout[0]}-{str(self.dtype)[6:]}-{self.reduce_op}"


CASES = (
    Case((64, 64), 64),
    Case((64, 64), 64, dtype=FP16, reduce_op="avg"),
    Case((32, 128), 48, dtype=FP32, b_layout="column"),
    # Nothing is a multiple of anything.
    Case((131, 41), 50),
    Case((67, 100), 129, b_layout="column", reduce_op="avg"),
    Case((19, 37), 23, b_layout="offset", dtype=FP32),
    # Fewer rows than ranks, single columns, K below a tile.
    Case((1, 64), 40),
    Case((1, 16), 1),
    Case((2, 48), 100, b_layout="column"),
    Case((3, 3), 7, dtype=FP16),
    Case((1, 1), 1),
    # Leading dimensions.
    Case((2, 5, 24), 16, reduce_op="avg"),
    Case((1, 1, 40), 33, b_layout="padded"),
    Case((2, 1, 3, 16), 20),
    # Left operands that are not contiguous.
    Case((24, 40), 32, a_layout="column"),
    Case((24, 40), 32, a_layout="padded", b_layout="column"),
    Case((2, 12, 40), 32, a_layout="offset"),
)


def _check(ctx: RankContext, case: Case, strategy: str) -> None:
    site = Site(strategy=strategy, name=f"test/2:{strategy}")
    a = calls.operand(ctx, case.a, case.dtype, layout=case.a_layout)
    b = calls.weight(ctx, case.a[-1], case.n, case.dtype, case.b_layout)
    before = a.clone(), b.clone()
    out = calls.matmul_all_reduce(ctx, site, a, b, case.reduce_op)
    assert out.dtype == case.dtype and out.is_contiguous()
    expected = calls.reference_matmul_all_reduce(ctx, site, a, b, case.reduce_op)
    assert_near(out, expected, num_partials=ctx.world_size)
    calls.assert_replicated(ctx, out)
    assert torch.equal(a, before[0]) and torch.equal(b, before[1]), "an input changed"


@pytest.mark.parametrize("strategy", ["tile", "library"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_reference(pool: RankPool, case: Case, strategy: str) -> None:
    pool.run(_check, case, strategy)


GPU_CASES = (
    Case((2048, 3584), 4096, b_layout="column"),
    Case((1001, 1111), 777, dtype=FP16),
    Case((2, 513, 2048), 1030, b_layout="column", reduce_op="avg"),
    Case((777, 1024), 640, dtype=FP32),
    Case((1, 7168), 8192, b_layout="column"),
    Case((128, 7168), 8192, b_layout="column"),
)


@pytest.mark.parametrize("large_case", GPU_CASES, ids=str)
def test_matches_reference_at_size(gpu_pool: RankPool, large_case: Case) -> None:
    gpu_pool.run(_check, large_case, "tile")
