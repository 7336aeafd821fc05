"""flash_decode: near fp64, the same bytes on every rank; other lengths, late ranks, launches that fail."""

from __future__ import annotations

import pytest
import torch

from ditron_inductor.errors import InvalidOperands, InvalidTaskNode
from ditron_inductor.ops import flash_decode
from ditron_inductor.task import flash_decode as task
from tests.conftest import Place
from tests.lowering import calls
from tests.lowering.calls import Site
from tests.lowering.decode_problems import Decode, DecodeProblem
from tests.lowering.failures import (
    Failure,
    call_without_the_last,
    check_left_waiting,
    lose_a_rank_of,
    nan_once_poisoned,
    reset,
    stop,
)
from tests.lowering.problems import SMALL, Problem
from tests.lowering.stress import call_in_random_order, check_in_poisoned_slots, replay_with_new_operands
from tests.rank_process import RankContext
from tests.ranks import RankPool, RankPools

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TIMEOUT_S = 3.0

CASES = {
    "cpu": (
        Decode(1, 4, 1, 32, 50, BF16),
        Decode(1, 16, 1, 64, 40, BF16),
        Decode(3, 6, 2, 16, 37, page=8, softcap=5.0),
        Decode(2, 3, 3, 16, 33, FP32, heads_first=True),
        # Of more heads than one program takes, in two parts; some flags are shared.
        Decode(5, 66, 1, 16, 20),
    ),
    "cuda": (
        Decode(1, 32, 8, 128, 4096, BF16),
        Decode(3, 64, 8, 128, 1000, BF16, page=16),
        Decode(2, 8, 8, 64, 333, FP32, heads_first=True),
        Decode(5, 132, 2, 64, 777, softcap=5.0),
        Decode(64, 32, 32, 64, 130, BF16),
        Decode(7, 16, 2, 256, 4097, BF16, page=100),
        Decode(2, 32, 8, 128, 70_000, BF16, heads_first=True),
    ),
}

FORMS = {"cpu": (0, 1, 2, 3), "cuda": (0, 3, 4)}
"""Cases that are in band; of which a program takes one ticket; two launches; a loop over tickets."""


def _check_all(ctx: RankContext, strategy: str) -> None:
    for index, case in enumerate(CASES[ctx.device.type]):
        problem = DecodeProblem(ctx, case, site=Site(f"decode/{index}:{strategy}", strategy))
        problem.check(problem())
        # Of one form: nothing is looked at anew but the lengths.
        problem.refill()
        problem.check(problem())


@pytest.mark.parametrize("strategy", ["tile", "library"])
def test_matches_reference(pool: RankPool, strategy: str) -> None:
    pool.run(_check_all, strategy, timeout=200)


def _problems(ctx: RankContext, label: str, timeout_s: float = calls.TIMEOUT_S) -> list[DecodeProblem]:
    cases = CASES[ctx.device.type]
    return [
        DecodeProblem(ctx, cases[index], site=Site(f"{label}/{index}:decode", "tile", timeout_s))
        for index in FORMS[ctx.device.type]
    ]


def _among_others(ctx: RankContext, count: int) -> None:
    """Slots, flags and credits are shared, and ranks come late."""
    other = Problem(ctx, "matmul_all_reduce", SMALL[ctx.device.type], site=Site("among/9:other"))
    call_in_random_order(ctx, [*_problems(ctx, "among"), other], count)


def test_among_other_launches(rank_pools: RankPools) -> None:
    rank_pools.get("cpu", 2).run(_among_others, 4, timeout=100)


def test_among_other_launches_on_gpus(gpu_pool: RankPool) -> None:
    gpu_pool.run(_among_others, 500, timeout=100)


def _replayed(ctx: RankContext) -> None:
    replay_with_new_operands(ctx, _problems(ctx, "replayed"))


def test_replayed_in_a_graph_with_other_lengths(gpu_pool: RankPool) -> None:
    gpu_pool.run(_replayed, timeout=100)


def _poisoned_slots(ctx: RankContext) -> None:
    for problem in _problems(ctx, "poison"):
        check_in_poisoned_slots(ctx, problem)


def test_poisoned_buffers(rank_pools: RankPools) -> None:
    rank_pools.get("cpu", 2).run(_poisoned_slots)


def test_poisoned_buffers_on_gpus(gpu_pool: RankPool) -> None:
    gpu_pool.run(_poisoned_slots)


def _no_tokens(ctx: RankContext) -> None:
    for index, strategy in enumerate(("tile", "library")):
        problem = DecodeProblem(ctx, CASES[ctx.device.type][0], site=Site(f"empty/{index}:decode", strategy))
        problem.lengths.zero_()
        assert (problem()[0] == 0).all()
        # Of a length that the cache does not have, all that it has.
        problem.lengths.fill_(1 << 30)
        problem.k.fill_(1.0)
        problem.v.fill_(2.0)
        assert (problem()[0] == 2).all()
        problem.lengths.fill_(-1)
        assert (problem()[0] == 0).all()


def test_lengths_beyond_the_cache(rank_pools: RankPools) -> None:
    rank_pools.get("cpu", 2).run(_no_tokens)


def test_lengths_beyond_the_cache_on_gpus(gpu_pool: RankPool) -> None:
    gpu_pool.run(_no_tokens)


def _poisoned_launch(ctx: RankContext) -> bool:
    return nan_once_poisoned(ctx, _problems(ctx, "failed"))


def _late(ctx: RankContext) -> Failure | None:
    return call_without_the_last(ctx, _problems(ctx, "late", TIMEOUT_S)[0])


def _reset_and_work(ctx: RankContext) -> None:
    reset(ctx)
    for problem in _problems(ctx, "works"):
        problem.check(problem())


@pytest.fixture
def fragile_place() -> Place:
    """In place of the one of all files: once is enough for one kernel."""
    return Place("cpu", 2)


def test_a_poisoned_launch_is_nan(fragile_pool: RankPool) -> None:
    assert all(fragile_pool.run(_poisoned_launch))
    fragile_pool.run(_reset_and_work)


def test_a_rank_that_comes_too_late(fragile_pool: RankPool) -> None:
    check_left_waiting(fragile_pool.run(_late, timeout=100), "late/0")
    fragile_pool.run(_reset_and_work)


def _stopped(ctx: RankContext, victim: int, signal_number: int) -> Failure | None:
    return lose_a_rank_of(ctx, _problems(ctx, "stopped", TIMEOUT_S)[0], victim, signal_number)


def test_a_stopped_rank(fragile_pool: RankPool) -> None:
    stop(fragile_pool, _stopped, site="stopped/0")
    fragile_pool.run(_reset_and_work)


def _refused(ctx: RankContext) -> list[str]:
    q, k = torch.zeros(2, 4, 16), torch.zeros(2, 8, 2, 16)
    lengths, pages = torch.zeros(2, dtype=torch.int32), torch.zeros(2, 3, dtype=torch.int32)
    found = []
    for args, more in (
        ((q[0], k, k, lengths), {}),
        ((q, k.half(), k, lengths), {}),
        ((q, k, k[:, :4], lengths), {}),
        ((q, k[..., :8], k, lengths), {}),
        ((q[:, :3], k, k, lengths), {}),
        ((q, k, k, lengths.long()), {}),
        ((q, k[:1], k[:1], lengths), {}),
        ((q, k, k, lengths), {"block_table": pages[:1]}),
        ((q.clone().requires_grad_(), k, k, lengths), {}),
        ((q, k, k, lengths), {"scale": -1.0}),
    ):
        with pytest.raises((InvalidOperands, InvalidTaskNode)) as error:
            flash_decode(*args, **more)  # type: ignore[arg-type]
        found.append(str(error.value))
    return found


def test_operands_that_do_not_fit(rank_pools: RankPools) -> None:
    for found in rank_pools.get("cpu", 2).run(_refused):
        named = ["q", "k_cache", "v_cache", "k_cache", "q", "lengths", "k_cache", "block_table", "q, k_cache"]
        assert all(f"flash_decode: {name} " in text for name, text in zip(named, found, strict=False)), found
        assert "scale" in found[-1]


def test_parts_merge_to_the_whole() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 16).double(), torch.randn(2, 30, 2, 16).double(), torch.randn(2, 30, 2, 16).double()
    whole = torch.nn.functional.scaled_dot_product_attention(
        q[:, :, None], k.transpose(1, 2), v.transpose(1, 2), enable_gqa=True
    )[:, :, 0]
    parts = []
    for begin, end in ((0, 7), (7, 7), (7, 30)):
        lengths = torch.full([2], end - begin, dtype=torch.int32)
        # Longer than the part is.
        padded = [torch.cat([x[:, begin:end], torch.full([2, 3, 2, 16], torch.nan)], 1) for x in (k, v)]
        parts.append(task.local_attention(q, *padded, lengths, scale=0.25))
    torch.testing.assert_close(task.merge(*zip(*parts, strict=True)), whole)
