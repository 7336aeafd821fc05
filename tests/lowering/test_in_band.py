"""Rows that are sent in band: any bits, call after call, among other kernels; and what is said when a rank stays away.

That sums and norms are right, in every form, is a matter of test_all_reduce_rms_norm.py, whose small cases are in band.
"""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from benchmarks.tolerances import assert_near
from ditron_inductor.core.layout import IN_BAND_AREAS, IN_BAND_BYTES, IN_BAND_DATA, IN_BAND_LINES, IN_BAND_USES
from ditron_inductor.device import workspaces
from ditron_inductor.lowering.all_reduce_rms_norm.norm_in_band import (
    FEW_BYTES,
    MOST_BYTES,
    MOST_ELEMENTS,
    MOST_RANKS,
    Shares,
    shares,
)
from ditron_inductor.lowering.norms.rows import block_of
from ditron_inductor.task.nodes import EXTRAS, NORM_KINDS
from tests.lowering import calls
from tests.lowering.calls import Site
from tests.lowering.failures import Failure, call_without_the_last, check_left_waiting, fails, nan_once_poisoned, reset
from tests.lowering.problems import NORM, SMALL, Problem, Size
from tests.lowering.stress import call_in_random_order, check_in_poisoned_slots, replay_with_new_operands
from tests.rank_process import RankContext
from tests.ranks import RankPool, RankPools

FP16 = torch.float16
# A wait in band may take 2.4 times as long on a GPU.
TIMEOUT_S = {"cpu": 3.0, "cuda": 2.0}
# One row, and five; those of a GPU are decode's, up to the most bytes.
SIZES = {
    "cpu": (Size(1, 1, 34), Size(5, 1, 50)),
    "cuda": (Size(1, 1, 8192), Size(5, 1, 5120), Size(4, 1, 256), Size(128, 1, 4096), Size(60, 1, 8192)),
}


@pytest.mark.parametrize(
    ("m", "n", "itemsize", "world", "expected"),
    [
        (1, 4096, 2, 4, Shares(1, 1, 256, 8, 2048)),
        (1, 8192, 2, 4, Shares(1, 1, 256, 16, 4096)),
        (8, 8192, 2, 4, Shares(1, 8, 512, 64, 32768)),
        (16, 8192, 2, 4, Shares(1, 16, 1024, 64, 65536)),
        (5, 26, 4, 2, Shares(1, 5, 256, 1, 160)),
        # More rows than programs, half of which add up at most.
        (500, 128, 2, 2, Shares(8, 63, 512, 63, 32000)),
        # Two programs for each SM, and a reader for fewer than all SMs.
        (17, 8192, 2, 4, Shares(1, 17, 512, 136, 69632)),
        (128, 4096, 2, 2, Shares(1, 128, 2048, 128, 262144)),
        (132, 2048, 2, 2, Shares(2, 66, 1024, 132, 135168)),
        (1000, 500, 2, 2, Shares(8, 125, 2048, 123, 250016)),
        (132, 3900, 2, 2, Shares(2, 66, 2048, 126, 257408)),
        # Rows in half words; too many bytes; too many for an area; too many ranks.
        (1, 4095, 2, 4, None),
        (65, 8192, 2, 2, None),
        (17, 8192, 2, 8, None),
        (1, 1024, 2, 16, None),
    ],
)
def test_shares(m: int, n: int, itemsize: int, world: int, expected: Shares | None) -> None:
    assert shares(m, n, itemsize, world, num_sms=132) == expected


@pytest.mark.parametrize("num_sms", [4, 7, 132, 304])
def test_all_is_dealt_out(num_sms: int) -> None:
    for world in range(2, MOST_RANKS + 1):
        for m, n in ((1, 2), (3, 16384), (64, 1024), (1000, 34), (127, 130), (128, 4096), (64, 8192), (263, 1900)):
            found = shares(m, n, 2, world, num_sms=num_sms)
            nbytes = m * n * 2
            if found is None:
                most = min(num_sms - 1, num_sms // 2 if nbytes <= FEW_BYTES else num_sms)
                too_wide = m > most and block_of(n) * 2 ** (-(-m // most) - 1).bit_length() > MOST_ELEMENTS
                assert too_wide or nbytes > MOST_BYTES or nbytes * world > IN_BAND_BYTES.value - 128 * world
            else:
                assert found.programs <= num_sms * (1 if nbytes <= FEW_BYTES else 2)
                # Whatever starts first, a program that sends finds an SM.
                assert found.readers < num_sms
                assert found.rows * found.readers >= m and found.senders * found.chunk >= m * n // 2
                assert found.stride * 2 >= m * n and world * found.stride * 4 <= IN_BAND_BYTES.value
                assert found.rows * block_of(n) <= 16384


def _ring(ctx: RankContext) -> tuple[torch.Tensor, torch.Tensor]:
    """The control words, and the areas as words [areas, words], of the ring in use."""
    (shared,) = workspaces.of_group(dist.distributed_c10d._resolve_process_group(ctx.group_name))
    ring = shared.generations[-1]
    first = IN_BAND_DATA.value
    areas = ring.heap.local[first : first + IN_BAND_AREAS.value * IN_BAND_BYTES.value].view(torch.int32)
    return ring.ctl, areas.view(IN_BAND_AREAS.value, -1)


def _problems(ctx: RankContext, label: str, timeout_s: float = calls.TIMEOUT_S, overlap: str = "") -> list[Problem]:
    sizes = enumerate(SIZES[ctx.device.type])
    sites = {Site(f"{label}/{place}:in_band", "tile", timeout_s, overlap=overlap): size for place, size in sizes}
    return [Problem(ctx, NORM_KINDS[0], size, site=site, dtype=FP16, few=size.rows) for site, size in sites.items()]


def _call(ctx: RankContext, x: torch.Tensor, label: str) -> torch.Tensor:
    """The sum of x over all ranks, normalised, and what it is of."""
    normed, total = calls.all_reduce_rms_norm(ctx, Site(label, "tile"), [x], [None] * len(EXTRAS), NORM)
    assert normed.shape == x.shape
    return total


def _any_bits(ctx: RankContext) -> None:
    """Zeros, infinities, and the one word that cannot be sent as it is, all of whose bits are set."""
    for dtype in (FP16, torch.bfloat16, torch.float32):
        for turn, half in enumerate((0, -1, 0x3C01, 0x7C00, 0x7F80, -32768)):
            halves = torch.zeros(3, 64, dtype=torch.int16, device=ctx.device)
            if ctx.rank != 1:
                halves[1], halves[2, ::2] = half, half
            x = halves.view(dtype)
            everyone = [torch.empty_like(x) for _ in range(ctx.world_size)]
            dist.all_gather(everyone, x)
            wanted = sum(one.float() for one in everyone).to(dtype)
            got = _call(ctx, x, f"bits/{turn}:{dtype}")
            assert torch.equal(got.isnan(), wanted.isnan()), (dtype, half)
            assert torch.equal(got.nan_to_num(0), wanted.nan_to_num(0)), (dtype, half)


def test_any_bits_are_sent(rank_pools: RankPools) -> None:
    rank_pools.get("cpu", 2).run(_any_bits)


def test_any_bits_are_sent_on_gpus(gpu_pool: RankPool) -> None:
    gpu_pool.run(_any_bits)


def _misaligned(ctx: RankContext) -> None:
    """Rows that begin in the middle of a word."""
    x = calls.operand(ctx, [65], FP16)[1:]
    assert x.data_ptr() % 4 == 2
    everyone = [torch.empty(64, dtype=FP16, device=ctx.device) for _ in range(ctx.world_size)]
    dist.all_gather(everyone, x.clone())
    assert_near(_call(ctx, x, "misaligned/0"), sum(one.double() for one in everyone), num_partials=ctx.world_size)


def test_misaligned_rows(rank_pools: RankPools) -> None:
    rank_pools.get("cpu", 2).run(_misaligned)


def test_misaligned_rows_on_gpus(gpu_pool: RankPool) -> None:
    gpu_pool.run(_misaligned)


def _zeros_are_left(ctx: RankContext) -> None:
    """Large uses and small ones: of what they wrote, only that of the last one is there."""
    small, large, *larger = _problems(ctx, "zeros")
    if larger and ctx.world_size == 2 and torch.cuda.get_device_properties(ctx.device).multi_processor_count > 60:
        # More ranks share an area, and a program on fewer SMs has more rows than it can hold.
        large = larger[-1]
    before = 0
    for turn, problem in enumerate((large, small, small, large, small, large, small)):
        problem.check(problem())
        ctl, areas = _ring(ctx)
        uses, lines = int(ctl[IN_BAND_USES.value]), int(ctl[IN_BAND_LINES.value])
        assert turn == 0 or uses == before + 1, "the call was not in band"
        before = uses
        # Nobody sends any more.
        dist.barrier()
        written = areas.ne(0).any(1).tolist()
        assert written == [place == uses % IN_BAND_AREAS.value for place in range(IN_BAND_AREAS.value)]
        assert not areas[uses % IN_BAND_AREAS.value, 32 * lines :].any()
        dist.barrier()


def test_areas_are_put_back_to_zero(rank_pools: RankPools) -> None:
    rank_pools.get("cpu", 3).run(_zeros_are_left)


def test_areas_are_put_back_to_zero_on_gpus(gpu_pool: RankPool) -> None:
    gpu_pool.run(_zeros_are_left)


def _poisoned_slots(ctx: RankContext) -> None:
    for problem in _problems(ctx, "slots"):
        check_in_poisoned_slots(ctx, problem)


def test_slots_are_not_read(rank_pools: RankPools) -> None:
    rank_pools.get("cpu", 2).run(_poisoned_slots)


def test_slots_are_not_read_on_gpus(gpu_pool: RankPool) -> None:
    gpu_pool.run(_poisoned_slots)


def _among_others(ctx: RankContext, count: int) -> None:
    """Slots and credits are shared, and ranks come late."""
    size = SMALL[ctx.device.type]
    sends = Problem(ctx, "all_gather_matmul", size, site=Site("mixed/9:all_gather_matmul", "tile"), dtype=FP16)
    call_in_random_order(ctx, [*_problems(ctx, "mixed"), sends], count)


def test_among_other_launches(rank_pools: RankPools) -> None:
    rank_pools.get("cpu", 3).run(_among_others, 8, timeout=100)


def test_among_other_launches_on_gpus(gpu_pool: RankPool) -> None:
    gpu_pool.run(_among_others, 2000, timeout=100)


def _replayed(ctx: RankContext) -> None:
    # Two problems use each slot once, one problem the same slot at each replay.
    problems = _problems(ctx, "replayed")
    replay_with_new_operands(ctx, problems[:2] * 3)
    replay_with_new_operands(ctx, problems[-2:] * 3)
    replay_with_new_operands(ctx, problems[:1])


def test_replayed_in_a_graph(gpu_pool: RankPool) -> None:
    gpu_pool.run(_replayed, timeout=100)


def _reset_and_work(ctx: RankContext, overlap: str = "") -> None:
    reset(ctx)
    ctl, areas = _ring(ctx)
    assert not areas.any() and int(ctl[IN_BAND_USES.value]) == 0
    dist.barrier()
    for problem in _problems(ctx, "works", overlap=overlap):
        for _ in range(2):
            problem.check(problem())


def _late(ctx: RankContext, place: int, overlap: str) -> Failure | None:
    return call_without_the_last(ctx, _problems(ctx, "late", TIMEOUT_S[ctx.device.type], overlap)[place])


@pytest.mark.parametrize(("place", "overlap"), [(1, ""), (0, "follows")])
def test_a_rank_that_comes_too_late(fragile_pool: RankPool, place: int, overlap: str) -> None:
    """Also where the launches of a single row begin before the one in front of them has given up."""
    check_left_waiting(fragile_pool.run(_late, place, overlap, timeout=100), f"late/{place}")
    fragile_pool.run(_reset_and_work, overlap)


def _poisoned_launch(ctx: RankContext, overlap: str) -> bool:
    return nan_once_poisoned(ctx, _problems(ctx, "failed", overlap=overlap))


@pytest.mark.parametrize("overlap", ["", "follows"])
def test_a_poisoned_launch_is_nan_and_sends_nothing(fragile_pool: RankPool, overlap: str) -> None:
    assert all(fragile_pool.run(_poisoned_launch, overlap))
    fragile_pool.run(_reset_and_work, overlap)


def _at_another_site(ctx: RankContext, kinds: tuple[str, str]) -> Failure:
    """The last rank calls the second site when all others call the first."""
    problems = []
    for place, kind in enumerate(kinds):
        size = SIZES[ctx.device.type][0] if kind in NORM_KINDS else SMALL[ctx.device.type]
        site = Site(f"strange/{place}:{kind}", "tile", TIMEOUT_S[ctx.device.type])
        problems.append(Problem(ctx, kind, size, site=site, dtype=FP16, few=size.rows))
    for problem in problems:
        problem.check(problem())
    if ctx.rank == 0:
        time.sleep(0.02)
    return fails(ctx, problems[ctx.rank == ctx.world_size - 1])


@pytest.mark.parametrize("other", [NORM_KINDS[0], "all_gather_matmul"])
def test_a_rank_at_another_site(fragile_pool: RankPool, other: str) -> None:
    """In band too, or in a kernel that waits for flags: every rank names both sites, and none an innocent rank."""
    failures = fragile_pool.run(_at_another_site, (NORM_KINDS[0], other), timeout=100)
    for failure in failures:
        assert failure.type_name == "DitronDiverged", failures
        assert "strange/0" in failure.message and "strange/1" in failure.message, failures
    fragile_pool.run(_reset_and_work)
