"""A product of few rows in parts of K, which the kernel that reduces and normalises it adds up."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from triton.compiler import ASTSource

from ditron_inductor.core.matmul import Tiles
from ditron_inductor.core.overlap import FOLLOWS
from ditron_inductor.lowering.config import DIVIDED, FEW_ROWS, Config, select_few_rows_config
from ditron_inductor.lowering.host.launch import ceil_div, round_up
from ditron_inductor.lowering.host.launcher import local_launcher
from ditron_inductor.lowering.matmul_all_reduce_rms_norm import divided_product as lowering
from ditron_inductor.lowering.matmul_all_reduce_rms_norm.divided_product import DividedProduct
from ditron_inductor.lowering.overlapping import launch_options
from ditron_inductor.task.nodes import NORM_KINDS
from tests.lowering.assembly import NVIDIA, Listing, resources
from tests.lowering.calls import Site
from tests.lowering.cross_compile import compile_for
from tests.lowering.problems import Problem, Size
from tests.lowering.stress import call_in_random_order, replay_with_new_operands
from tests.rank_process import RankContext
from tests.ranks import RankPool, RankPools

KIND = NORM_KINDS[1]
# In band, with several parts. K of the last one is that of no whole step; the columns of the first one are fewer than a
# tile's, and those of the others more than one tile's.
SIZES = {
    "cpu": (Size(1, 96, 30), Size(3, 70, 34), Size(2, 200, 60)),
    "cuda": (Size(1, 7168, 4096), Size(32, 2048, 4096), Size(5, 1000, 770), Size(64, 3584, 5120)),
}
FP32_SUM = 1e-6
"""The error of a sum in fp32, over the sum of the terms' sizes."""


def _tiles(config: Config, even: bool, interpreted: bool) -> Tiles:
    sizes = config.block_m, config.block_n, config.block_k
    return Tiles(*sizes, 1, False, 0, even, "ieee", interpreted, 0, 0)


@contextmanager
def _counted() -> Iterator[list[int]]:
    """Yields the numbers of parts of all products that are made in parts meanwhile."""
    multiply, parts = DividedProduct.multiply, list[int]()

    def counting(self: DividedProduct, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        parts.append(self.parts)
        return multiply(self, x, weight)

    with mock.patch.object(DividedProduct, "multiply", counting):
        yield parts


def _problems(ctx: RankContext, label: str, dtype: torch.dtype = torch.bfloat16) -> list[Problem]:
    return [
        Problem(ctx, KIND, size, site=Site(f"{label}/{place}:divided", "chunked"), dtype=dtype, few=size.rows)
        for place, size in enumerate(SIZES[ctx.device.type])
    ]


def _near_the_reference(ctx: RankContext) -> list[int]:
    with _counted() as parts:
        for dtype in lowering.DTYPES:
            for problem in _problems(ctx, f"near {dtype}", dtype):
                for _ in range(2):
                    problem.check(problem())
    return parts


def test_near_the_reference(rank_pools: RankPools) -> None:
    for parts in rank_pools.get("cpu", 2).run(_near_the_reference):
        assert len(parts) == 2 * len(lowering.DTYPES) * len(SIZES["cpu"]) and max(parts) > 2, parts


def _by_the_library(ctx: RankContext) -> list[int]:
    """Of fp32, and by a weight whose columns are contiguous."""
    with _counted() as parts:
        exact = Problem(ctx, KIND, Size(2, 20, 16), site=Site("library/1", "chunked"), dtype=torch.float32, few=2)
        across = Problem(ctx, KIND, Size(2, 20, 16), site=Site("library/2", "chunked"), few=2)
        across.weights = [weight.contiguous() for weight in across.weights]
        for problem in (exact, across):
            problem.check(problem())
    return parts


def test_other_products_are_the_library_s(rank_pools: RankPools) -> None:
    assert rank_pools.get("cpu", 2).run(_by_the_library) == [[], []]


@pytest.mark.parametrize(("rows", "columns", "k"), [(65, 8, 16), (0, 8, 16), (2, 0, 16), (2, 8, 0)])
def test_products_that_are_not_divided(rows: int, columns: int, k: int) -> None:
    x = torch.empty(rows, k, dtype=torch.bfloat16)
    assert lowering.divided_product(x, rows, columns) is None
    few = lowering.divided_product(torch.empty(2, 48, dtype=torch.bfloat16), 2, 8)
    assert few is not None and (few.parts, few.depths) == (2, (48, 32))


def _uneven(ctx: RankContext) -> list[int]:
    """K of the ranks differs, so they have other numbers of parts."""
    problem = Problem(ctx, KIND, Size(2, 40 + 100 * ctx.rank, 30), site=Site("uneven/0", "chunked"), few=2)
    with _counted() as parts:
        problem.check(problem())
    return parts


def test_ranks_divide_their_own_k(rank_pools: RankPools) -> None:
    (first,), (second,) = rank_pools.get("cpu", 2).run(_uneven)
    assert first < second


def _check_parts(ctx: RankContext, rows: int, k: int, n: int) -> None:
    x = torch.randn(rows, k, device=ctx.device).to(torch.bfloat16)
    weight = (torch.randn(n, k, device=ctx.device) * k**-0.5).to(torch.bfloat16).t()
    interpreted = ctx.device.type == "cpu"
    config = select_few_rows_config(rows=rows, dtype=x.dtype, interpreted=interpreted, shapes=DIVIDED)
    tiles = _tiles(config, k % config.block_k == 0, interpreted)
    for wanted in (1, 3, 5):
        launcher = local_launcher(lowering.divided_product_kernel, x.device)
        part = round_up(ceil_div(k, wanted), config.block_k)
        parts = ceil_div(k, part)
        product = DividedProduct(rows, n, lowering.Depths(k, part), parts, config, tiles, launcher)
        assert product.takes(x, weight) and (k == 1 or not product.takes(x, weight.contiguous()))
        for number, got in enumerate(product.multiply(x, weight)):
            columns = slice(number * part, (number + 1) * part)
            a, b = x[:, columns].double(), weight[columns].double()
            # A sum in fp32 is as exact as its terms are large, and a term that is missing is a hundred times as much.
            error = (got.double() - a @ b).abs() / (a.abs() @ b.abs())
            assert float(error.max()) < FP32_SUM, f"part {number} of {parts}: {float(error.max())}"


def _check_all_parts(ctx: RankContext, sizes: list[tuple[int, int, int]]) -> None:
    for size in sizes:
        _check_parts(ctx, *size)


def test_parts_are_those_of_the_product(rank_pools: RankPools) -> None:
    rank_pools.get("cpu", 1).run(_check_all_parts, [(1, 64, 32), (1, 141, 33), (5, 141, 33), (3, 1, 64)])


@pytest.mark.gpu
def test_parts_are_those_of_the_product_on_a_gpu(rank_pools: RankPools) -> None:
    sizes = [(1, 7168, 4096), (1, 1001, 33), (32, 2048, 4096), (64, 3000, 777), (3, 1, 64)]
    rank_pools.get("cuda", 1).run(_check_all_parts, sizes, timeout=100)


def compiled_product(target: str, config: Config, overlap: int = 0) -> Any:
    """The kernel, in a launch that overlaps so. If that follows, two steps are loaded ahead."""
    config = config.for_arch(target)
    tiles = _tiles(config, True, False)._replace(OVERLAP=overlap, AHEAD=2 if overlap == FOLLOWS.value else 0)
    kernel, pair = lowering.divided_product_kernel, ("i32", "i32")
    kinds: dict[str, Any] = {"x": "*bf16", "weight": "*bf16", "out": "*fp32", "M": "i32", "TILES": "constexpr"}
    signature = kinds | {"depths": lowering.Depths(*pair), "columns": lowering.WeightColumns(*pair)}
    ordered = {name: signature[name] for name in kernel.arg_names}
    places = {name: place for place, name in enumerate(kernel.arg_names)}
    aligned = [["tt.divisibility", 16]]
    attributes: dict[tuple[int, ...], Any] = {(places[name],): aligned for name in ("x", "weight", "out")}
    attributes |= {(places[name], i): aligned for name in ("depths", "columns") for i in range(2)}
    source = ASTSource(kernel, ordered, {(places["TILES"],): tiles}, attributes)
    return compile_for(target, source, {**config.options, **launch_options(overlap)})


@pytest.mark.parametrize("rows", FEW_ROWS)
def test_it_compiles_for_nvidia(rows: int) -> None:
    """Several steps of K are under way at once, 16 bytes for each thread, and nothing is in memory of its own."""
    compiled, config = compiled_product("sm_90", DIVIDED[rows]), DIVIDED[rows]
    listing = Listing(compiled.asm["ptx"])
    ((first, last),) = listing.loops(NVIDIA.dot)
    copies = [line for line in listing.lines[first:last] if "cp.async.cg" in line]
    assert copies and all(", 0x10, " in line for line in copies), copies
    step = (rows + config.block_n) * config.block_k * 2
    assert (config.num_stages - 2) * step < compiled.metadata.shared <= 227 << 10
    assert resources(compiled.asm["ptx"]).spilled_bytes == 0


def test_it_compiles_for_amd() -> None:
    assert "v_mfma" in compiled_product("gfx942", DIVIDED[16]).asm["amdgcn"]


def test_one_row_is_read_by_wide_loads() -> None:
    listing = Listing(compiled_product("sm_90", DIVIDED[1]).asm["ptx"])
    ((first, last),) = listing.loops(r"\bfma\.")
    loads = [line for line in listing.lines[first:last] if re.search(r"\bld\.", line)]
    assert loads and all("v4.b32" in line for line in loads) and not listing.places(NVIDIA.dot)


def _among_others(ctx: RankContext, count: int) -> None:
    """Ranks come late, and other sites reduce other rows in between."""
    size = SIZES[ctx.device.type][1]
    rows = Problem(ctx, NORM_KINDS[0], size, site=Site("others/9:rows", "tile"), few=size.rows)
    call_in_random_order(ctx, [*_problems(ctx, "others"), rows], count)


def test_among_other_launches(rank_pools: RankPools) -> None:
    rank_pools.get("cpu", 3).run(_among_others, 6, timeout=100)


def test_among_other_launches_on_gpus(gpu_pool: RankPool) -> None:
    gpu_pool.run(_among_others, 500, timeout=100)


def _replayed(ctx: RankContext) -> None:
    replay_with_new_operands(ctx, _problems(ctx, "replayed"))


def test_replayed_in_a_graph(gpu_pool: RankPool) -> None:
    gpu_pool.run(_replayed, timeout=100)
