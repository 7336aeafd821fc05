"""The harness that times contestants in turns: its orders, rounds and ranks, with scripted samples."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from benchmarks import timing
from benchmarks.timing import MIN_ROUNDS, Times, interleaved
from ditron_inductor.report.timing import captured
from tests.rank_process import RankContext
from tests.ranks import RankPools

NAMES = ("a", "b", "c", "d")


@dataclass
class Scripted:
    """A `Clock` whose sample of a contestant is one of its own, in turn. base_us: the first sample of each; noise: how
    much longer every other one takes.
    """

    group: Any
    base_us: dict[str, float]
    noise: float = 0.0
    device: torch.device = torch.device("cpu")
    order: list[str] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    collected: list[bool] = field(default_factory=list)

    def sample(self, call: Any, calls: int) -> float:
        name = call(0)
        self.order.append(name)
        self.counts.append(calls)
        self.collected.append(gc.isenabled())
        return self.base_us[name] * (1.0 + self.noise * (self.order.count(name) % 2))

    def largest(self, values: list[float]) -> list[float]:
        packed = torch.tensor(values, dtype=torch.float64)
        torch.distributed.all_reduce(packed, op=torch.distributed.ReduceOp.MAX, group=self.group)
        return packed.tolist()


def _timed(
    ctx: RankContext, slow_rank: int, noise_of: int = -1, options: dict[str, Any] | None = None
) -> tuple[dict[str, Times], list[str], list[bool], list[int], bool]:
    """What a run finds, the order of all samples, whether the collector of garbage was on in each, their calls, and
    whether it is on afterwards.
    """
    factor = 3.0 if ctx.rank == slow_rank else 1.0
    times = {name: 1000.0 * factor * (place + 1) for place, name in enumerate(NAMES)}
    clock: Any = Scripted(torch.distributed.group.WORLD, times, 0.5 if ctx.rank == noise_of else 0.0)
    contestants = {name: lambda index, name=name: name for name in NAMES}
    found = interleaved(clock, contestants, **options or {})
    return found, clock.order, clock.collected, clock.counts, gc.isenabled()


@pytest.mark.parametrize("slow_rank", [0, 1])
def test_the_slowest_rank_counts(slow_rank: int, rank_pools: RankPools) -> None:
    for found, *_ in rank_pools.get("cpu", 2).run(_timed, slow_rank, slow_rank, {"rounds": 4}):
        assert found["a"].p50_us == 3750.0 and (found["a"].p20_us, found["a"].p80_us) == (3000.0, 4500.0)
        assert found["a"].skew_pct == pytest.approx(100 * 2750 / 3750)
    for found, *_ in rank_pools.get("cpu", 2).run(_timed, slow_rank, -1, {"per_call": 4}):
        assert found["b"].p50_us == 6000.0 / 4


def test_every_round_has_a_new_order_which_all_ranks_have(rank_pools: RankPools) -> None:
    (_, order, *_), (_, other, *_) = rank_pools.get("cpu", 2).run(_timed, 0)
    assert order == other
    # The first samples say how many calls make one.
    rounds = [tuple(order[begin : begin + len(NAMES)]) for begin in range(len(NAMES), len(order), len(NAMES))]
    assert all(sorted(one) == sorted(NAMES) for one in rounds) and len(rounds) == MIN_ROUNDS
    assert len(set(rounds)) > MIN_ROUNDS // 2
    first = [one[0] for one in rounds]
    assert max(first.count(name) for name in NAMES) < MIN_ROUNDS


def test_no_garbage_is_collected_in_a_sample(rank_pools: RankPools) -> None:
    _, _, collected, _, after = rank_pools.get("cpu", 2).run(_timed, 0)[0]
    assert not any(collected[len(NAMES) :]) and after


def test_samples_are_as_long_on_all_ranks(rank_pools: RankPools) -> None:
    for _, _, _, counts, _ in rank_pools.get("cpu", 2).run(_timed, 1):
        assert set(counts[len(NAMES) :]) == {1}, "3000 us on the slow rank"
    for _, _, _, counts, _ in rank_pools.get("cpu", 2).run(_timed, 5, -1, {"least_calls": 3}):
        assert set(counts[len(NAMES) :]) == {3, 4}, "4000 us at 1000 us a call, or the least"


def test_rounds_end_when_all_ranks_have_settled(rank_pools: RankPools) -> None:
    def rounds(noise_of: int, **options: Any) -> set[int]:
        of_ranks = rank_pools.get("cpu", 2).run(_timed, 0, noise_of, options)
        return {len(order) // len(NAMES) - 1 for _, order, *_ in of_ranks}

    assert rounds(-1) == {MIN_ROUNDS}
    assert rounds(1) == {timing.ROUNDS} and rounds(1, rounds=9) == {9}
    assert rounds(1, most_s=0.0) == {2}


class _Scaled:
    """A call that reads a tensor that nothing else holds."""

    def __init__(self) -> None:
        self.factor = torch.full((1 << 20,), 3.0, device="cuda")
        self.x = torch.ones(1 << 20, device="cuda")

    def __call__(self, index: int) -> torch.Tensor:
        return self.x * self.factor


@pytest.mark.gpu
def test_a_replay_keeps_what_its_graph_reads() -> None:
    replay = captured(_Scaled(), 2)
    # If the memory of the call were free, these would get it.
    others = [torch.zeros(1 << 20, device="cuda") for _ in range(4)]
    assert torch.equal(replay(0), torch.full_like(others[0], 3.0))
