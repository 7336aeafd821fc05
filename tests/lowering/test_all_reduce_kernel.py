"""Small products added up by one kernel: in one shot and two, cut unevenly, among other launches, in failure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

import ditron_inductor
from ditron_inductor.core.layout import MAX_CHUNKS, REVOKED_ROW
from ditron_inductor.device import slot_layout
from ditron_inductor.lowering.all_reduce import all_reduce_kernel
from ditron_inductor.lowering.all_reduce.all_reduce_kernel import Cut, cut
from tests.cases import rare
from tests.conftest import Place
from tests.lowering import calls
from tests.lowering.calls import Site
from tests.lowering.failures import Failure, call_without_the_last, check_left_waiting, fails, nan_once_poisoned
from tests.lowering.problems import Problem, Size
from tests.lowering.stress import BACK_TO_BACK, call_in_poisoned_slots, call_in_random_order
from tests.lowering.test_matmul_all_reduce import BF16, FP16, FP32, Case, _check
from tests.rank_process import RankContext
from tests.ranks import RankPool, RankPools

KIND = "matmul_all_reduce"
# Handshakes are bounded by it too, so it leaves time to ranks on a busy machine.
TIMEOUT_S = 5.0
TWO, THREE = Place("cpu", 2), Place("cpu", 3)
CUT = {"programs": 132, "least_piece": 512, "round_bytes": all_reduce_kernel.ROUND_BYTES}


@pytest.mark.parametrize(
    ("rows", "itemsize", "world", "expected"),
    [
        (1, 2, 4, Cut(True, 512, 16)),
        (16, 2, 4, Cut(True, 1024, 128)),
        (64, 2, 4, Cut(False, 1024, 128)),
        (128, 2, 4, Cut(False, 2048, 128)),
        (256, 2, 4, Cut(False, 4096, 128)),
        # Two ranks send no less in two shots.
        (256, 2, 2, Cut(True, 8192, 256)),
        # As few pieces as there are flags.
        (1024, 2, 2, Cut(True, 16384, 512)),
        (32, 2, 8, Cut(False, 512, 64)),
        (64, 4, 4, Cut(False, 1024, 128)),
        (256, 4, 3, Cut(False, 4096, 171)),
    ],
)
def test_cut(rows: int, itemsize: int, world: int, expected: Cut) -> None:
    assert cut(rows * 8192, itemsize, world, **CUT) == expected


@pytest.mark.parametrize("num_sms", [1, 20, 132, 304])
def test_every_piece_has_its_flag(num_sms: int) -> None:
    for world in range(2, slot_layout.MAX_WORLD + 1):
        for itemsize in (2, 4):
            for numel in (1, 511, 513, 70_001, all_reduce_kernel.MOST_BYTES // itemsize):
                found = cut(numel, itemsize, world, **{**CUT, "programs": num_sms})
                total = found.piece * found.pieces * (1 if found.one_shot else world)
                assert numel <= total and found.piece & (found.piece - 1) == 0
                most = REVOKED_ROW.value if found.one_shot else MAX_CHUNKS.value // 2 - 1
                assert found.pieces <= most, (numel, itemsize, world, found)


# By bytes on the CPU device: pieces of 32 elements, at most 4; two shots save 4 ranks enough from 342 bytes on.
SHOTS = (
    Case((1, 64), 40, dtype=BF16),
    Case((1, 16), 1, dtype=FP32),
    Case((3, 3), 7, dtype=FP16, reduce_op="avg"),
    Case((5, 24), 33, dtype=BF16, b_layout="column"),
    Case((12, 40), 32, dtype=BF16),
    Case((2, 6, 40), 24, dtype=FP32, reduce_op="avg"),
    Case((11, 17), 43, dtype=FP16, a_layout="padded"),
    Case((13, 20), 77, dtype=BF16, a_layout="column", b_layout="offset"),
    Case((1, 5), 211, dtype=FP32),
)
GPU_SHOTS = (
    Case((1, 3584), 8192, b_layout="column"),
    Case((16, 1024), 8192, dtype=FP16, reduce_op="avg"),
    Case((63, 1024), 8192, b_layout="column"),
    Case((256, 1024), 8192, reduce_op="avg"),
    Case((64, 500), 5003),
    Case((333, 500), 5003, dtype=FP32),
    Case((2, 100, 512), 10240, dtype=FP16),
    # The most bytes, and nearly so many.
    Case((2048, 512), 4096, b_layout="column"),
    Case((2047, 512), 4093, dtype=FP16, reduce_op="avg"),
)


@pytest.mark.parametrize("case", SHOTS, ids=str)
def test_matches_reference(pool: RankPool, case: Case) -> None:
    pool.run(_check, case, "chunked")


@pytest.mark.parametrize("case", GPU_SHOTS, ids=str)
def test_matches_reference_at_size(gpu_pool: RankPool, case: Case) -> None:
    gpu_pool.run(_check, case, "chunked")


def _shots(ctx: RankContext, cases: tuple[Case, ...]) -> list[bool]:
    """Which of the cases were made in one shot; the one kernel made them all."""
    taken: list[bool] = []
    original = all_reduce_kernel.geometry

    def geometry(*args: Any) -> all_reduce_kernel.Geometry:
        sizes = original(*args)
        taken.append(sizes.cut.one_shot)
        return sizes

    all_reduce_kernel.geometry = geometry
    try:
        for index, case in enumerate(cases):
            a = calls.operand(ctx, case.a, case.dtype)
            site = Site(name=f"shots/{index}:{KIND}", strategy="chunked")
            calls.matmul_all_reduce(ctx, site, a, calls.weight(ctx, case.a[-1], case.n, case.dtype))
    finally:
        all_reduce_kernel.geometry = original
    return taken


@pytest.mark.parametrize("world", [2, 3, 4])
def test_both_ways_are_taken(rank_pools: RankPools, world: int) -> None:
    for taken in rank_pools.get("cpu", world).run(_shots, SHOTS):
        assert len(taken) == len(SHOTS) and True in taken
        assert (False in taken) == (world > 2)


def _rows_of_their_own(ctx: RankContext, cases: tuple[Case, ...]) -> list[int]:
    """How many products of each case the kernel of one row has computed."""
    counts = []
    for case in cases:
        with mock.patch.object(all_reduce_kernel, "projections", wraps=all_reduce_kernel.projections) as counted:
            _check(ctx, case, "chunked")
        counts.append(counted.call_count)
    return counts


def test_one_row_and_a_large_weight_have_a_kernel_of_their_own(rank_pools: RankPools) -> None:
    """Not several rows, a small weight, one whose columns lie together, or fp32."""
    row = Case((1, 64), 40, b_layout="column")
    others = replace(row, a=(2, 64)), replace(row, n=15), replace(row, b_layout="row"), replace(row, dtype=FP32)
    for counts in rank_pools.get("cpu", 2).run(_rows_of_their_own, (row, replace(row, a=(1, 1, 64)), *others)):
        assert min(counts[:2]) > 0 == max(counts[2:]), counts


def _three_ranks(ctx: RankContext) -> None:
    for case in SHOTS:
        _check(ctx, case, "chunked")


def test_three_ranks(rank_pools: RankPools) -> None:
    rank_pools.get("cpu", 3).run(_three_ranks)


# Rows for each rank, k, columns: one shot, two, and what is cut into parts.
SIZES = {
    "cpu": (Size(1, 40, 20), Size(3, 40, 50), Size(20, 40, 36)),
    "cuda": (Size(4, 520, 2048), Size(64, 520, 8200), Size(520, 1032, 4104)),
}


def _problems(ctx: RankContext, name: str) -> list[Problem]:
    """In one shot, in two, by the tile kernel, and in parts."""
    sizes = SIZES[ctx.device.type]
    kinds = [*((size, "chunked") for size in sizes), (sizes[0], "tile"), (sizes[1], "tile")]
    return [
        Problem(ctx, KIND, size, site=Site(name=f"{name}/{i}:{KIND}", strategy=strategy))
        for i, (size, strategy) in enumerate(kinds)
    ]


def _among_others(ctx: RankContext, count: int) -> None:
    """Launches that push and launches that pull share slots, flags and credits, and ranks come late."""
    call_in_random_order(ctx, _problems(ctx, "among"), count)


def test_among_other_launches(pool: RankPool) -> None:
    count = BACK_TO_BACK[pool.device_type, pool.world_size]
    pool.run(_among_others, count if pool.device_type == "cuda" else count // 2, timeout=100)


def test_among_other_launches_of_three_ranks(rank_pools: RankPools) -> None:
    rank_pools.get("cpu", 3).run(_among_others, 30, timeout=100)


@pytest.mark.parametrize("odd", [0, 1], ids=["one-shot", "two-shots"])
def test_poisoned_buffers(pool: RankPool, odd: int) -> None:
    """The last pieces are partly, or wholly, empty."""
    sizes = {"cpu": (Size(1, 33, 13), Size(3, 33, 47)), "cuda": (Size(5, 33, 777), Size(77, 33, 7777))}
    size = sizes[pool.device_type][odd]
    site = Site(name=f"poison/{size.rows}x{size.n}:{KIND}", strategy="chunked")
    pool.run(call_in_poisoned_slots, KIND, size, site)


def _problem(ctx: RankContext, name: str, index: int) -> Problem:
    """In one shot, or in two: a problem whose waits give up early."""
    site = Site(name=f"{name}/{index}:{KIND}", strategy="chunked", timeout_s=TIMEOUT_S)
    return Problem(ctx, KIND, SIZES[ctx.device.type][index], site=site)


def _poisoned_launch(ctx: RankContext) -> bool:
    return nan_once_poisoned(ctx, [_problem(ctx, "failed", index) for index in range(2)])


def _late(ctx: RankContext, index: int) -> Failure | None:
    return call_without_the_last(ctx, _problem(ctx, "late", index))


def _other_site(ctx: RankContext, index: int) -> Failure:
    """Rank 0 is at another site than its peers."""
    problems = [_problem(ctx, f"site{i}", index) for i in range(2)]
    for problem in problems:
        problem.check(problem())
    dist.barrier()
    return fails(ctx, problems[ctx.rank == 0])


def _reset(ctx: RankContext) -> None:
    ditron_inductor.reset(dist.group.WORLD)
    for problem in _problems(ctx, "works"):
        problem.check(problem())


@pytest.fixture(params=[TWO, THREE], ids=str)
def fragile_place(request: pytest.FixtureRequest) -> Place:
    """In place of the one of all files: three ranks are the fewest that take two shots."""
    return request.param


def test_a_poisoned_launch_is_nan(fragile_pool: RankPool) -> None:
    assert all(fragile_pool.run(_poisoned_launch))
    fragile_pool.run(_reset)


@pytest.mark.parametrize(("fragile_place", "index"), [(THREE, 1), *rare((TWO, 0))], indirect=["fragile_place"], ids=str)
def test_a_rank_that_comes_too_late(fragile_pool: RankPool, index: int) -> None:
    check_left_waiting(fragile_pool.run(_late, index, timeout=100), f"late/{index}")
    fragile_pool.run(_reset)


@pytest.mark.parametrize("index", [0, 1])
def test_a_rank_at_another_site(fragile_pool: RankPool, index: int) -> None:
    for failure in fragile_pool.run(_other_site, index, timeout=100):
        assert failure.type_name == "DitronDiverged", failure
        assert "site0" in failure.message and "site1" in failure.message, failure
    fragile_pool.run(_reset)
