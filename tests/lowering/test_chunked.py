"""The strategy `chunked`: every op against its reference, cut in any way, among other strategies, under stress."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks.tolerances import assert_near
from ditron_inductor.device import driver
from ditron_inductor.lowering.all_gather_matmul import chunked as gather
from ditron_inductor.lowering.all_reduce import chunked as reduce
from ditron_inductor.lowering.matmul_reduce_scatter import chunked as scatter
from ditron_inductor.lowering.schedules import Gathering, Piece, Reduction
from tests.lowering import calls
from tests.lowering import test_all_gather_matmul as gather_cases
from tests.lowering import test_matmul_all_reduce as reduce_cases
from tests.lowering import test_matmul_reduce_scatter as scatter_cases
from tests.lowering.calls import Site
from tests.lowering.problems import CHUNKED_KINDS, CUT_KINDS, ODD, SMALL, Problem, Size, chunked_problems, chunked_with
from tests.lowering.stress import BACK_TO_BACK, call_in_poisoned_slots, call_in_random_order, start_late
from tests.rank_process import RankContext
from tests.ranks import RankPool, RankPools


@pytest.fixture
def three(rank_pools: RankPools) -> RankPool:
    """Three ranks: the fewest where one may push while two others pull."""
    return rank_pools.get("cpu", 3)


@pytest.mark.parametrize("case", gather_cases.CASES, ids=str)
def test_gather_matches_reference(pool: RankPool, case: gather_cases.Case) -> None:
    pool.run(gather_cases._check, case, "chunked")


@pytest.mark.parametrize("case", scatter_cases.CASES, ids=str)
def test_scatter_matches_reference(pool: RankPool, case: scatter_cases.Case) -> None:
    pool.run(scatter_cases._check, case, "chunked")


@pytest.mark.parametrize("case", reduce_cases.CASES, ids=str)
def test_reduce_matches_reference(pool: RankPool, case: reduce_cases.Case) -> None:
    pool.run(reduce_cases._check, case, "chunked")


LARGE: list[tuple[Callable[..., None], Any]] = [
    *((gather_cases._check, case) for case in gather_cases.GPU_CASES),
    *((scatter_cases._check, case) for case in scatter_cases.GPU_CASES),
    *((reduce_cases._check, case) for case in reduce_cases.GPU_CASES),
]


@pytest.mark.parametrize("large_case", LARGE, ids=lambda pair: f"{pair[0].__module__[19:]}-{pair[1]}")
def test_matches_reference_at_size(gpu_pool: RankPool, large_case: tuple[Callable[..., None], Any]) -> None:
    check, case = large_case
    gpu_pool.run(check, case, "chunked")


def _three_ranks(ctx: RankContext) -> None:
    for kind in CHUNKED_KINDS:
        for dtype in (torch.float32, torch.bfloat16):
            site = Site(name=f"three/{dtype}:{kind}", strategy="chunked")
            problem = Problem(ctx, kind, Size(11, 40, 26), site=site, dtype=dtype)
            for outputs in [problem() for _ in range(2)]:
                problem.check(outputs)


def test_three_ranks(three: RankPool) -> None:
    three.run(_three_ranks)


def _cut(ctx: RankContext, kind: str, parts: int, together: int, rows: int) -> None:
    """Every way to cut, whatever the schedule would choose for this size."""
    modules: dict[str, Any] = {
        "all_gather_matmul": gather,
        "matmul_reduce_scatter": scatter,
        "matmul_all_reduce": reduce,
    }
    original = modules[kind].geometry if kind != "matmul_all_reduce" else reduce.parts_geometry
    world = ctx.world_size

    def cut(*args: Any) -> Any:
        sizes = original(*args)
        if kind == "all_gather_matmul":
            length = -(-rows // parts)
            runs = [(first, min(first + length, rows)) for first in range(0, rows, length)]
            pieces = [Piece(step, *run) for step in range(1, world) for run in runs]
            together_at = range(0, len(pieces), together)
            groups = tuple(tuple(pieces[i : i + together]) for i in together_at)
            return replace(sizes, schedule=lambda widths: Gathering(groups))
        steps = (world - 1) * (parts if kind == "matmul_reduce_scatter" else 1)
        groups = tuple((first, min(together, steps - first)) for first in range(0, steps, together))
        if kind == "matmul_reduce_scatter":
            return replace(sizes, cut=Reduction(parts, groups))
        length = -(-sizes.M // (parts * world))
        stride = -(-length * sizes.N // 128) * 128
        results = parts * (world - 1) * stride
        nbytes = (results + parts * stride) * 4
        cuts = {"parts": parts, "length": length, "stride": stride, "results": results, "nbytes": nbytes}
        return replace(sizes, groups=groups, **cuts)

    with chunked_with(kind, cut):
        site = Site(name=f"cut/{parts}/{together}/{rows}:{kind}", strategy="chunked")
        problem = Problem(ctx, kind, Size(rows, 32, 128 if rows % 2 == 0 else 24), site=site)
        for outputs in [problem() for _ in range(2)]:
            problem.check(outputs)


@pytest.mark.parametrize(("parts", "together", "rows"), [(2, 1, 16), (4, 3, 16), (3, 2, 13), (1, 9, 8)])
@pytest.mark.parametrize("kind", CUT_KINDS)
def test_any_cut(pool: RankPool, three: RankPool, kind: str, parts: int, together: int, rows: int) -> None:
    pool.run(_cut, kind, parts, together, rows)
    if pool.device_type == "cpu" and pool.world_size == 2:
        three.run(_cut, kind, parts, together, rows)


def _uneven(ctx: RankContext) -> None:
    """Columns of the weights, and K of a reduction, differ from rank to rank; one has none at all."""
    mine = 24 * ctx.rank
    site = Site(name="uneven/0:all_gather_matmul", strategy="chunked")
    shard = calls.operand(ctx, (10, 40), torch.bfloat16)
    weight = calls.weight(ctx, 40, mine, torch.bfloat16)
    *outputs, gathered, _ = calls.all_gather_matmul(ctx, site, shard, [weight], 0, True)
    *expected, wanted = calls.reference_all_gather_matmul(ctx, site, shard, [weight])
    assert_near(outputs[0], expected[0])
    assert torch.equal(gathered, wanted)
    for reduced in (calls.matmul_reduce_scatter, calls.matmul_all_reduce):
        site = Site(name=f"uneven/1:{reduced.__name__}", strategy="chunked")
        a = calls.operand(ctx, (6 * ctx.world_size, mine), torch.float32)
        b = calls.weight(ctx, mine, 20, torch.float32, "column")
        reference = getattr(calls, f"reference_{reduced.__name__}")
        assert_near(reduced(ctx, site, a, b), reference(ctx, site, a, b), num_partials=ctx.world_size)


def test_uneven_weights(pool: RankPool) -> None:
    pool.run(_uneven)


def _modes(ctx: RankContext) -> None:
    """What one call keeps for the others was made in another mode than theirs."""
    modes = [torch.inference_mode, torch.no_grad, torch.enable_grad]
    for first in range(len(modes)):
        problems = chunked_problems(ctx, CUT_KINDS, f"modes {first}")
        for turn in range(4):
            for problem in problems:
                with modes[(first + turn) % len(modes)]():
                    outputs = problem()
                    problem.check(outputs)


def test_modes_of_autograd_in_turns(pool: RankPool) -> None:
    if pool.device_type == "cpu" and pool.world_size > 2:
        pytest.skip("two ranks show it")
    pool.run(_modes)


def _copies_of_a_batch(ctx: RankContext) -> list[int]:
    """How many copies each call makes; its results are checked by the cases."""
    counts: list[int] = []
    site = Site(name="batch/0:all_gather_matmul", strategy="chunked")
    shard = calls.operand(ctx, (17, 3, 16), torch.float32)
    weights = [calls.weight(ctx, 16, 8, torch.float32)]
    for _ in range(2):
        with mock.patch.object(driver, "host_copy", autospec=True, side_effect=driver.host_copy) as copied:
            *outputs, _ = calls.all_gather_matmul(ctx, site, shard, weights, 1, True)
        counts.append(copied.call_count)
        *expected, gathered = calls.reference_all_gather_matmul(ctx, site, shard, weights, 1)
        assert torch.equal(outputs[-1], gathered)
        assert_near(outputs[0], expected[0], what="product")
    return counts


def test_a_batch_takes_one_copy_from_each_peer(three: RankPool) -> None:
    assert three.run(_copies_of_a_batch) == [[2, 2]] * 3


def _mixed(ctx: RankContext, kinds: tuple[str, ...], late_rank: int, count: int) -> None:
    """Sites of both our strategies in turn: their launches share slots, flags and credits."""
    size = SMALL[ctx.device.type]
    problems = [
        Problem(ctx, kind, size, site=Site(name=f"mixed/{strategy}:{kind}", strategy=strategy))
        for kind in kinds
        for strategy in ("chunked", "tile")
    ]
    call_in_random_order(ctx, problems, count, late_rank)


@pytest.mark.parametrize("late_rank", [-1, 0])
@pytest.mark.parametrize("kinds", [CUT_KINDS[:1], CUT_KINDS[1:]], ids="+".join)
def test_among_tile_launches(pool: RankPool, kinds: tuple[str, ...], late_rank: int) -> None:
    count = BACK_TO_BACK[pool.device_type, pool.world_size]
    pool.run(_mixed, kinds, late_rank, count if pool.device_type == "cuda" else count // 2, timeout=100)


def _alone(ctx: RankContext, count: int) -> None:
    call_in_random_order(ctx, chunked_problems(ctx, CUT_KINDS * 2, "alone"), count)


def test_back_to_back(pool: RankPool) -> None:
    pool.run(_alone, BACK_TO_BACK[pool.device_type, pool.world_size], timeout=100)


def _late_start(ctx: RankContext, late_rank: int) -> None:
    start_late(ctx, chunked_problems(ctx, CHUNKED_KINDS, "late"), late_rank)


@pytest.mark.parametrize("late_rank", [-1, 0])
def test_a_rank_starts_late(pool: RankPool, late_rank: int) -> None:
    pool.run(_late_start, late_rank)


@pytest.mark.parametrize("kind", CUT_KINDS)
def test_poisoned_buffers(pool: RankPool, kind: str) -> None:
    site = Site(name=f"poison/1:{kind}", strategy="chunked")
    pool.run(call_in_poisoned_slots, kind, ODD[pool.device_type], site)
