"""Reductions of sums of products and of biased products, every strategy, near the fp64 reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from benchmarks.tolerances import assert_near
from tests.lowering import calls
from tests.lowering.calls import Site
from tests.rank_process import RankContext
from tests.ranks import RankPool

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
STRATEGIES = ("tile", "chunked", "library")


@dataclass(frozen=True)
class Case:
    """sum_i a_i @ b_i + bias: a_i [.., depths[i]], b_i [depths[i], n].

    scatter_dim: the dimension that is scattered, where `rows`, the leading sizes, has what one rank keeps of it; None
    for an all-reduce. layouts: of the b_i, in turns; left_layouts: of the a_i.
    """

    rows: tuple[int, ...]
    depths: tuple[int, ...]
    n: int
    scatter_dim: int | None = None
    bias: bool = False
    dtype: torch.dtype = BF16
    reduce_op: str = "sum"
    layouts: tuple[str, ...] = ("row", "column")
    left_layouts: tuple[str, ...] = ("row",)

    def __str__(self) -> str:
        sizes = f"{'x'.join(map(str, self.rows))}x{'+'.join(map(str, self.depths))}-{self.n}"
        kind = "reduce" if self.scatter_dim is None else f"scatter{self.scatter_dim}"
        return f"{kind}-{sizes}-{str(self.dtype)[6:]}-{self.reduce_op}{'-bias' * self.bias}"


CASES = (
    Case((32,), (64, 32, 32), 64, scatter_dim=0),
    Case((70,), (64, 32), 48, bias=True),
    # A few rows: one shot.
    Case((5,), (64, 32, 40), 40, bias=True, reduce_op="avg"),
    # The shortest first; nothing is a multiple of anything.
    Case((33,), (7, 41), 50, scatter_dim=0, bias=True, reduce_op="avg"),
    Case((37,), (3, 65, 12), 23, dtype=FP32, bias=True),
    # One product with a bias.
    Case((40,), (64,), 64, scatter_dim=0, bias=True, dtype=FP16),
    Case((2, 33), (48,), 36, bias=True),
    Case((1,), (24,), 1, bias=True),
    # Inner dimensions; a batch of 1.
    Case((2, 17), (24, 8), 24, scatter_dim=1, bias=True),
    Case((1, 20), (32, 16, 16), 40, scatter_dim=1, reduce_op="avg"),
    Case((2, 3, 5), (16, 40), 33, scatter_dim=2, dtype=FP32, bias=True),
    # Operands that are not contiguous.
    Case((24,), (40, 24), 32, scatter_dim=0, left_layouts=("column", "padded"), layouts=("offset", "padded")),
    Case((40,), (24, 40), 32, left_layouts=("offset", "column"), bias=True),
    # Slices of K that some ranks have nothing of.
    Case((12,), (0, 16), 24, scatter_dim=0, bias=True),
)


def operands(ctx: RankContext, case: Case) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor | None]:
    """This rank's a_i, b_i and bias, at random."""
    rows = list(case.rows)
    if case.scatter_dim is not None:
        rows[case.scatter_dim] *= ctx.world_size
    total = sum(case.depths)

    def layout(layouts: Sequence[str], index: int) -> str:
        return layouts[index % len(layouts)]

    lefts = [
        calls.operand(ctx, [*rows, k], case.dtype, layout=layout(case.left_layouts, i))
        for i, k in enumerate(case.depths)
    ]
    # Together as large as one product.
    rights = [
        calls.operand(ctx, [k, case.n], case.dtype, layout=layout(case.layouts, i), scale=total**-0.5)
        for i, k in enumerate(case.depths)
    ]
    return lefts, rights, calls.operand(ctx, [1, case.n], case.dtype)[0] if case.bias else None


def check(ctx: RankContext, case: Case, strategies: Sequence[str]) -> None:
    for strategy in strategies:
        site = Site(strategy=strategy, name=f"sums/0:{strategy}")
        # The second call finds what the first one has prepared.
        for _ in range(2):
            lefts, rights, bias = operands(ctx, case)
            before = [one.clone() for one in (*lefts, *rights)]
            if case.scatter_dim is None:
                out = calls.matmul_all_reduce(ctx, site, lefts, rights, case.reduce_op, bias)
                expected = calls.reference_matmul_all_reduce(ctx, site, lefts, rights, case.reduce_op, bias)
                calls.assert_replicated(ctx, out)
            else:
                how = case.scatter_dim, case.reduce_op, bias
                out = calls.matmul_reduce_scatter(ctx, site, lefts, rights, *how)
                expected = calls.reference_matmul_reduce_scatter(ctx, site, lefts, rights, *how)
            assert out.dtype == case.dtype and out.is_contiguous()
            # The library rounds after every product; and a sum of more terms is larger, and so is what rounding takes.
            terms = len(case.depths) + case.bias
            assert_near(out, expected, num_partials=ctx.world_size * terms, what=strategy)
            assert all(map(torch.equal, before, (*lefts, *rights))), "an input changed"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_reference(pool: RankPool, case: Case) -> None:
    pool.run(check, case, STRATEGIES)


GPU_CASES = (
    Case((1024,), (512, 2048, 512), 4096, scatter_dim=0, layouts=("column",)),
    Case((1000,), (1111, 300), 777, scatter_dim=0, bias=True, dtype=FP16),
    Case((2, 513), (2048, 2048), 1030, scatter_dim=1, bias=True, reduce_op="avg"),
    Case((2048,), (3584, 3584), 4096, layouts=("column",)),
    Case((777,), (1024, 64, 64), 640, bias=True, dtype=FP32),
    Case((16,), (1024, 256, 256), 8192, layouts=("column",), bias=True),
    Case((128,), (7168,), 8192, layouts=("column",), bias=True),
)


@pytest.mark.parametrize("large_case", GPU_CASES, ids=str)
def test_matches_reference_at_size(gpu_pool: RankPool, large_case: Case) -> None:
    gpu_pool.run(check, large_case, STRATEGIES)


def _uneven(ctx: RankContext) -> None:
    """Every K differs from rank to rank, and one rank has nothing of the first."""
    for strategy in STRATEGIES:
        site = Site(strategy=strategy, name=f"sums/1:{strategy}")
        depths = (8 * ctx.rank, 24 - 8 * ctx.rank % 16)
        a = [calls.operand(ctx, (6 * ctx.world_size, k), FP32) for k in depths]
        b = [calls.weight(ctx, k, 20, FP32, "column") for k in depths]
        bias = calls.operand(ctx, (1, 20), FP32)[0]
        for reduced in (calls.matmul_reduce_scatter, calls.matmul_all_reduce):
            reference = getattr(calls, f"reference_{reduced.__name__}")
            want = reference(ctx, site, a, b, bias=bias)
            assert_near(reduced(ctx, site, a, b, bias=bias), want, num_partials=3 * ctx.world_size, what=strategy)


def test_uneven_weights(pool: RankPool) -> None:
    pool.run(_uneven)


def _rounded_once(ctx: RankContext) -> None:
    """Products that cancel: what the sum of the rounded ones would have lost."""
    site = Site(strategy="tile", name="sums/2:tile")
    a = torch.full((4 * ctx.world_size, 16), 3.0, dtype=BF16, device=ctx.device)
    b = torch.full((16, 32), 0.4, dtype=BF16, device=ctx.device)
    tiny = torch.full((16, 32), 2.0**-10, dtype=BF16, device=ctx.device)
    out = calls.matmul_reduce_scatter(ctx, site, [a, a, -a], [b, tiny, b])
    assert torch.equal(out, torch.full_like(out, ctx.world_size * 16 * 3 * 2.0**-10))


def test_a_sum_is_rounded_once(pool: RankPool) -> None:
    pool.run(_rounded_once)


def _columns(ctx: RankContext) -> None:
    """A bias that is a column, as in the transposed problem of a scatter of columns."""
    for strategy in STRATEGIES:
        site = Site(strategy=strategy, name=f"sums/3:{strategy}")
        for rows, depths, n in ((33, (24,), 20), (40, (16, 32), 64)):
            a = [calls.operand(ctx, (rows * ctx.world_size, k), BF16) for k in depths]
            b = [calls.weight(ctx, k, n, BF16, "column") for k in depths]
            bias = calls.operand(ctx, (rows * ctx.world_size, 1), BF16)
            want = calls.reference_matmul_reduce_scatter(ctx, site, a, b, bias=bias)
            got = calls.matmul_reduce_scatter(ctx, site, a, b, bias=bias)
            assert_near(got, want, num_partials=3 * ctx.world_size, what=strategy)


def test_a_bias_may_be_a_column(pool: RankPool) -> None:
    if pool.device_type == "cuda" or pool.world_size == 2:
        pool.run(_columns)
