"""projections: near the fp64 reference by the kernel and by the library, with and without an epilogue."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from unittest import mock

import pytest
import torch

from benchmarks.tolerances import assert_near
from ditron_inductor.core.matmul_row import SHORT_STEPS
from ditron_inductor.lowering import config
from ditron_inductor.lowering.projections import projections_kernel as lowering
from ditron_inductor.task.epilogue import parse
from ditron_inductor.task.epilogue_torch import evaluate
from ditron_inductor.task.nodes import Projections
from tests.cases import rare
from tests.lowering.assembly import dialect_of, resources
from tests.lowering.cross_compile import NUM_WEIGHTS, compile_case
from tests.lowering.cross_compile import Case as Compilation
from tests.rank_process import RankContext
from tests.ranks import RankPools

SWIGLU = "cast(silu(mm0), bf16) * mm1"
SWIGLU_OF_FP32 = "silu(mm0) * mm1"


@dataclass(frozen=True)
class Case:
    """x [rows, k] times weights [k, n] for each of `columns`."""

    rows: int
    k: int
    columns: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16
    epilogue: str = ""

    def __str__(self) -> str:
        widths = "-".join(map(str, self.columns))
        return f"{self.rows}x{self.k}-{widths}-{str(self.dtype)[6:]}{'-epilogue' if self.epilogue else ''}"

    def widths_of_extras(self) -> list[int]:
        return [self.columns[-1]] if "row(x0)" in self.epilogue else []


CASES = (
    Case(1, 64, (32, 16, 16)),
    Case(1, 70, (33, 17, 5), torch.float16),
    Case(1, 41, (64, 1), torch.float32),
    Case(1, 33, (50, 50, 17), epilogue=f"{SWIGLU}; mm2 + row(x0)"),
    Case(1, 70, (45,)),
    Case(2, 64, (32, 16, 16)),
    Case(3, 70, (33, 17, 5), torch.float16),
    Case(17, 41, (64, 1), torch.float32),
    Case(64, 96, (40, 40)),
    Case(2, 64, (48, 48), epilogue=SWIGLU),
    Case(5, 33, (50, 50, 17), epilogue=f"{SWIGLU}; mm2 + row(x0)"),
    Case(90, 48, (32, 7), torch.float16),
    # More rows than a tile has: by the library.
    Case(129, 48, (32, 32), epilogue=SWIGLU),
)
# As wide as a model's, and odd.
LARGE_CASES = (
    Case(1, 4096, (4096,)),
    Case(1, 4096, (2048, 512, 512)),
    Case(1, 4096, (7168, 7168), epilogue=SWIGLU),
    Case(1, 2880, (2048, 256, 77), torch.float16),
    Case(1, 1, (40, 1), torch.float32),
    Case(1, 1001, (33, 17, 9)),
    Case(16, 8192, (1024, 256, 256)),
    Case(64, 4096, (7168, 7168), epilogue=SWIGLU),
    # Rows in tiles of 64 and 16, and in one of 128.
    Case(128, 4096, (2048, 512, 512)),
    Case(61, 4096, (1024, 256, 256)),
    Case(99, 8192, (4096, 512, 512)),
    Case(80, 1000, (1792, 1792), epilogue=SWIGLU),
    Case(7, 1000, (333, 333, 77), epilogue=f"{SWIGLU}; mm2 + row(x0)"),
    Case(33, 2048, (640, 640), torch.float16),
    Case(9, 512, (384, 40), torch.float32),
)


def operands(case: Case, device: torch.device) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(device, case.dtype)

    weights = [draw(n, case.k, scale=case.k**-0.5).t() for n in case.columns]
    return draw(case.rows, case.k), weights, [draw(n) for n in case.widths_of_extras()]


def wanted(
    case: Case, x: torch.Tensor, weights: Sequence[torch.Tensor], extras: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    products = [x.double() @ weight.double() for weight in weights]
    if not case.epilogue:
        return products
    return evaluate(parse(case.epilogue), [one.to(case.dtype) for one in products], extras)


def call(x: torch.Tensor, weights: Sequence[torch.Tensor], strategy: str = "auto") -> list[torch.Tensor]:
    """The products, as the op computes them."""
    return lowering.projections(Projections(len(weights), strategy=strategy), [x, *weights])


def check(case: Case, device: torch.device) -> None:
    x, weights, extras = operands(case, device)
    node = Projections(len(weights), len(extras), case.epilogue)
    by_kernel = lowering.prepare(node, x, weights, extras, "tile")
    for run in (by_kernel, by_kernel, lowering.by_library(node, x, extras)):
        outs = run(x, weights, extras)
        for out, value in zip(outs, wanted(case, x, weights, extras), strict=True):
            # Two roundings where an epilogue follows the product.
            assert_near(out, value, num_partials=3 if case.epilogue else 1, what=str(case))


def _check_in_rank(ctx: RankContext, case: Case) -> None:
    check(case, ctx.device)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_near_the_reference_in_the_interpreter(rank_pools: RankPools, case: Case) -> None:
    rank_pools.get("cpu", 2).run(_check_in_rank, case)


def _check_in_divided_rows(ctx: RankContext, case: Case) -> None:
    tile = replace(config.INTERPRETER, block_m=16)
    with mock.patch.object(lowering, "select_projections_config", lambda **_: tile):
        check(case, ctx.device)


@pytest.mark.parametrize(
    "case", [Case(40, 70, (33, 17), torch.float16), Case(37, 33, (18, 18), torch.float32, SWIGLU_OF_FP32)], ids=str
)
def test_rows_in_several_tiles_in_the_interpreter(rank_pools: RankPools, case: Case) -> None:
    rank_pools.get("cpu", 2).run(_check_in_divided_rows, case)


@pytest.mark.parametrize(
    ("rows", "columns", "rows_of_tile"),
    [
        (2, (2048, 512, 512), 16),
        (64, (1024, 256, 256), 16),
        (64, (2048, 512, 512), 32),
        (64, (4096, 512, 512), 64),
        (96, (2048, 512, 512), 64),
        (128, (1024, 256, 256), 32),
        (128, (2048, 512, 512), 64),
        (128, (4096, 512, 512), 128),
        (64, (3584,), 32),
        (64, (7168,), 64),
        (64, (14336,), 64),
    ],
)
def test_all_programs_run_at_once_where_they_can(rows: int, columns: tuple[int, ...], rows_of_tile: int) -> None:
    """By these columns of each group, on a GPU with 132 SMs."""
    selected = config.select_projections_config(
        rows=rows, columns=columns, paired=False, dtype=torch.bfloat16, interpreted=False, num_sms=132
    )
    assert selected == config.PROJECTIONS[rows_of_tile]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_only_a_single_row_has_its_own_tile(dtype: torch.dtype) -> None:
    def select(rows: int, interpreted: bool) -> config.Config:
        return config.select_projections_config(
            rows=rows, columns=(8,), paired=True, dtype=dtype, interpreted=interpreted, num_sms=132
        )

    assert select(1, False) == config.ROW and select(1, True).block_m == 1
    assert select(2, False).block_m == select(2, True).block_m == 16


@pytest.mark.gpu
@pytest.mark.parametrize("case", (*CASES, *LARGE_CASES), ids=str)
def test_near_the_reference_on_a_gpu(case: Case) -> None:
    check(case, torch.device("cuda", 0))


@pytest.mark.gpu
def test_in_a_graph_it_follows_its_operands() -> None:
    case = LARGE_CASES[0]
    x, weights, _ = operands(case, torch.device("cuda", 0))
    call(x, weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = call(x, weights)
    x.mul_(2.0)
    graph.replay()
    for out, weight in zip(outs, weights, strict=True):
        assert_near(out, x.double() @ weight.double(), num_partials=2)


def test_other_layouts_and_many_rows_go_to_the_library() -> None:
    x, weights, _ = operands(Case(2, 16, (8, 8)), torch.device("cpu"))
    outs = call(x, [weights[0].contiguous(), weights[1]], "tile")
    for out, weight in zip(outs, weights, strict=True):
        assert_near(out, x.double() @ weight.double())
    assert [out.shape for out in call(x[:0], weights, "tile")] == [(0, 8), (0, 8)]


@pytest.mark.parametrize("epilogue", [*rare(""), SWIGLU], ids=["plain", "epilogue"])
@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_compiles_for_gpus(target: str, epilogue: str) -> None:
    shapes = config.PAIRS if epilogue else config.PROJECTIONS
    for tile in (shapes[16], shapes[32], shapes[64], shapes[128]):
        compiled = compile_case(Compilation("projections", target, tile, "bf16", epilogue=epilogue))
        # Some compilers split a loop. There is one for all weights.
        assert compiled.listing.loops(dialect_of(target).dot)
        if target == "sm_90":
            # Several steps of K under way at once, and nothing in memory of its own.
            step = (
                (tile.block_m + 2 * tile.block_n) * tile.block_k // 2
                if epilogue
                else ((tile.block_m + tile.block_n) * tile.block_k)
            )
            assert compiled.shared_bytes > (tile.num_stages - 2) * step * 2
            assert resources(compiled.assembly).spilled_bytes == 0


@pytest.mark.parametrize(
    ("target", "epilogue", "even_k"), [("sm_90", "", True), ("sm_90", SWIGLU, False), *rare(("sm_90", SWIGLU, True))]
)
def test_one_row_is_read_by_wide_loads(target: str, epilogue: str, even_k: bool) -> None:
    case = Compilation("projections", target, config.ROW, "bf16", even_k=even_k, epilogue=epilogue)
    compiled, dialect = compile_case(case), dialect_of(target)
    loops = compiled.listing.loops(r"\bfma\.")
    ((first, last),) = loops
    assert not compiled.listing.places(dialect.dot)
    loads = [line for line in compiled.listing.lines[first:last] if re.search(r"\bld\.", line)]
    assert all("v4.b32" in line for line in loads), loads
    of_weights = [line for line in loads if "evict_first" in line]
    assert len(of_weights) == SHORT_STEPS * (NUM_WEIGHTS if epilogue else 1) < len(loads)
    assert compiled.shared_bytes < 1 << 10 and resources(compiled.assembly).spilled_bytes == 0


def test_one_row_compiles_for_amd() -> None:
    compiled = compile_case(Compilation("projections", "gfx942", config.ROW, "bf16", epilogue=SWIGLU))
    assert not compiled.listing.places(dialect_of("gfx942").dot)


def test_operands_are_not_kept_alive() -> None:
    x, weights, _ = operands(Case(2, 16, (8, 8)), torch.device("cpu"))
    call(x, weights)
    kept = [weakref.ref(one) for one in (x, *weights)]
    del x, weights
    gc.collect()
    assert not any(one() is not None for one in kept)
