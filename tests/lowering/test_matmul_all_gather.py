"""matmul_all_gather, our strategies: near the fp64 reference, and on every rank the bits of each rank's product."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from benchmarks.tolerances import assert_near
from ditron_inductor.lowering.config import FEW_ROWS
from ditron_inductor.lowering.matmul_all_gather import few_rows
from ditron_inductor.lowering.sums import Geometry
from ditron_inductor.task import reference
from tests.lowering import calls
from tests.lowering.calls import Site
from tests.rank_process import RankContext
from tests.ranks import RankPool

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Case:
    """a [.., K] times b [K, n], plus a second product of so many K, plus a bias; gathered along a dimension."""

    a: tuple[int, ...]
    n: int
    dtype: torch.dtype = BF16
    a_layout: str = "row"
    b_layout: str = "column"
    bias: bool = False
    dim: int = -1
    second: int = 0

    def __str__(self) -> str:
        shape = "x".join(map(str, self.a))
        bias = f"-and{self.second}" * (self.second > 0) + "-bias" * self.bias
        return f"{shape}-{self.n}-{self.a_layout[0]}{self.b_layout[0]}-{str(self.dtype)[6:]}-dim{self.dim}{bias}"


# Up to 16 rows are a few on the CPU device.
CASES = (
    Case((64, 64), 64),
    Case((64, 64), 64, dtype=FP16, bias=True, dim=0),
    Case((1, 64), 160, bias=True),
    # Nothing is a multiple of anything; several tiles for a run.
    Case((13, 41), 301, dtype=FP32),
    Case((131, 41), 50, b_layout="row", bias=True),
    Case((67, 100), 129),
    Case((19, 37), 23, b_layout="offset", dtype=FP32, dim=0),
    # Single rows and columns, K below a tile.
    Case((1, 16), 1),
    Case((2, 48), 100, b_layout="row"),
    Case((3, 3), 7, dtype=FP16, bias=True),
    Case((1, 1), 1, dim=0),
    # Leading dimensions, each of them gathered.
    Case((2, 5, 24), 16, dim=1),
    Case((2, 25, 24), 40, dim=1, bias=True),
    Case((2, 25, 24), 40, dim=0, dtype=FP16),
    Case((3, 1, 40), 33, b_layout="padded"),
    Case((2, 1, 30, 16), 20),
    Case((2, 2, 3, 16), 20, dim=2),
    # Sums, the longer one second.
    Case((40, 24), 40, second=64, bias=True),
    Case((2, 3, 24), 100, second=40, dtype=FP32, dim=1),
    # Left operands that are not contiguous.
    Case((24, 40), 32, a_layout="column"),
    Case((12, 40), 32, a_layout="padded", b_layout="row"),
    Case((2, 12, 40), 32, a_layout="offset"),
)


def _check(ctx: RankContext, case: Case, strategy: str) -> None:
    site = Site(strategy=strategy, name=f"test/3:{strategy}")
    depths = [case.a[-1], case.second] if case.second else [case.a[-1]]
    a = [calls.operand(ctx, (*case.a[:-1], deep), case.dtype, layout=case.a_layout) for deep in depths]
    b = [calls.weight(ctx, deep, case.n, case.dtype, case.b_layout) for deep in depths]
    bias = calls.operand(ctx, [case.n], case.dtype) if case.bias else None
    before = [one.clone() for one in (*a, *b)]
    out = calls.matmul_all_gather(ctx, site, a, b, bias, case.dim)
    assert out.dtype == case.dtype and out.is_contiguous()
    # The library may round a product before it adds the next one, or the bias, and parts of a product that it divides.
    partials = len(depths) + (bias is not None) + (strategy != "tile")
    assert_near(out, calls.reference_matmul_all_gather(ctx, site, a, b, bias, case.dim), num_partials=partials)
    calls.assert_replicated(ctx, out)
    assert all(map(torch.equal, (*a, *b), before)), "an input changed"
    # What is gathered are the bits of the rank's own product, wherever they went.
    dim = case.dim % a[0].dim()
    mine = out.chunk(ctx.world_size, dim)[ctx.rank].contiguous()
    gathered = reference.all_gather(mine, gather_dim=dim, **site.group(ctx))
    assert torch.equal(gathered, out), "the parts are not in the order of the ranks"


@pytest.mark.parametrize("strategy", ["tile", "library"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_reference(pool: RankPool, case: Case, strategy: str) -> None:
    pool.run(_check, case, strategy)


GPU_CASES = (
    Case((2048, 2048), 4104),
    Case((1001, 1111), 777, dtype=FP16, bias=True, b_layout="row"),
    Case((2, 513, 2048), 1030, dim=1),
    Case((777, 1024), 640, dtype=FP32),
    Case((1, 4096), 16032),
    Case((16, 4096), 16033, bias=True),
    Case((64, 1024), 64128),
    Case((33, 1024), 5000, dtype=FP32, dim=0),
)


@pytest.mark.parametrize("strategy", ["tile", "library"])
@pytest.mark.parametrize("large_case", GPU_CASES, ids=str)
def test_matches_reference_at_size(gpu_pool: RankPool, large_case: Case, strategy: str) -> None:
    gpu_pool.run(_check, large_case, strategy)


@pytest.mark.parametrize("world_size", [2, 4, 8, 16])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_copies_of_a_run_fit_into_registers(world_size: int, itemsize: int) -> None:
    for rows, config in FEW_ROWS.items():
        sizes = Geometry(rows, 16032, config, tiles=251, chunk_tiles=4, programs=63, nbytes=0)
        columns = few_rows.copy_columns(sizes, world_size, itemsize)
        assert columns >= 16 and columns & (columns - 1) == 0
        held = few_rows.COPY_ROWS.value * columns * (world_size - 1) * itemsize // (32 * config.num_warps)
        assert held <= few_rows.COPY_BYTES or columns == 16
