"""The strategy `chunked` when a rank is stopped, elsewhere, or so slow that peers give up: errors, never wrong data."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

import ditron_inductor
from ditron_inductor.core import layout as words
from ditron_inductor.device import layout, workspaces
from ditron_inductor.device.workspace import SharedWorkspace
from ditron_inductor.errors import DitronError
from ditron_inductor.lowering import exchange
from tests.conftest import CPU_PLACES, GPU_PLACES, Place
from tests.lowering.calls import Site
from tests.lowering.problems import KINDS, SMALL, Problem
from tests.lowering.test_failures import Failure, _fails, _reset
from tests.rank_process import RankContext
from tests.ranks import RankPool, RankPools

TIMEOUT_S = 3.0
SHORT_S = 1.0


@pytest.fixture(scope="module", params=[CPU_PLACES[0], *GPU_PLACES])
def fragile_place(request: pytest.FixtureRequest) -> Place:
    """Two ranks on the CPU device: with more, those that wait take the cores, and limits say little."""
    return request.param


@pytest.fixture
def fragile_pool(rank_pools: RankPools, fragile_place: Place) -> RankPool:
    """Ranks apart from those of other tests: these break their group."""
    where = fragile_place.device_type, fragile_place.world_size
    pool = rank_pools.get(*where, label="chunked failures")
    if any(outcome.error or outcome.lost for outcome in pool.outcomes(_reset)):
        pool.close()
    return rank_pools.get(*where, label="chunked failures")


def _problem(ctx: RankContext, name: str, kind: str, timeout_s: float = TIMEOUT_S) -> Problem:
    site = Site(name=f"{name}:{kind}", strategy="chunked", timeout_s=timeout_s)
    return Problem(ctx, kind, SMALL[ctx.device.type], site=site)


def _reset_and_work(ctx: RankContext) -> None:
    ditron_inductor.reset(dist.group.WORLD)
    for kind in KINDS:
        problem = _problem(ctx, "works/0", kind)
        for outputs in [problem() for _ in range(2)]:
            problem.check(outputs)


def _lose_a_rank(ctx: RankContext, kind: str, victim: int) -> Failure | None:
    problem = _problem(ctx, "lost/0", kind)
    problem.check(problem())
    dist.barrier()
    if ctx.rank == victim:
        os.kill(os.getpid(), signal.SIGSTOP)
        return None
    return _fails(ctx, problem)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stopped_rank(fragile_pool: RankPool, kind: str) -> None:
    victim = fragile_pool.world_size - 1
    outcomes = fragile_pool.outcomes(_lose_a_rank, kind, victim, timeout=60, stop=victim)
    failures = [outcome.value for outcome in outcomes if outcome.rank != victim]
    assert all(failure is not None for failure in failures), outcomes
    assert {failure.type_name for failure in failures} == {"DitronTimeout"}, failures
    assert all(f"lost/0:{kind}" in failure.message for failure in failures), failures
    named = [f"for rank {victim}" in failure.message for failure in failures]
    # Whoever waits for an owner that waits for the victim may name the owner.
    assert all(named) or (kind == "matmul_all_reduce" and any(named)), failures
    fragile_pool.run(_reset_and_work)


def _run_another_site(ctx: RankContext, kind: str, odd_rank: int) -> Failure:
    problems = [_problem(ctx, f"diverged/{index}", kind) for index in range(2)]
    for problem in problems:
        problem.check(problem())
    return _fails(ctx, problems[ctx.rank == odd_rank])


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_at_another_site(fragile_pool: RankPool, kind: str) -> None:
    failures = fragile_pool.run(_run_another_site, kind, 1)
    for rank, failure in enumerate(failures):
        assert failure.type_name == "DitronDiverged", failures
        assert "diverged/0" in failure.message and "diverged/1" in failure.message, failures
        assert rank == 1 or "rank 1" in failure.message, failures
    fragile_pool.run(_reset_and_work)


def _shared(ctx: RankContext) -> SharedWorkspace:
    (found,) = workspaces.of_group(dist.distributed_c10d._resolve_process_group(ctx.group_name))
    return found


@dataclass(frozen=True)
class Slow:
    """How a call ended on a rank that held up its peers: its error, if any, and whether outputs were right, or NaN."""

    type_name: str
    message: str
    right: bool
    missing: bool


def _too_slow(ctx: RankContext, kind: str) -> Slow | Failure:
    """Rank 1 has copied nothing yet when rank 0 gives up on its credit and uses the slot again."""
    problem = _problem(ctx, "slow/0", kind, SHORT_S)
    # Products go into the own slot, whatever happens.
    other = _problem(ctx, "slow/1", "matmul_reduce_scatter", SHORT_S)
    expected = problem()
    problem.check(expected)
    other.check(other())
    dist.barrier()
    if ctx.rank == 0:
        problem()
        # As if the call for the next slot, which would fail here and now, were still queued, as on a GPU.
        _shared(ctx).calls += layout.NUM_SLOTS - 1
        return _fails(ctx, other)
    waiting = "wait_all" if kind == "all_gather_matmul" else "wait"
    original = getattr(exchange.Exchange, waiting)
    last = exchange.Exchange.close if kind == "all_gather_matmul" else exchange.Exchange.reduce
    outputs: list[torch.Tensor] = []

    def late(self: exchange.Exchange, *args: object, **kwargs: object) -> None:
        """In place of the first wait, which comes before all copies."""
        setattr(exchange.Exchange, waiting, original)
        time.sleep(SHORT_S * 6)
        original(self, *args, **kwargs)

    def keep(self: exchange.Exchange, *args: object, **kwargs: object) -> None:
        last(self, *args, **kwargs)
        found = args[0] if kind == "all_gather_matmul" else [args[1]]
        outputs.extend(found)  # type: ignore[arg-type]

    name = last.__name__
    setattr(exchange.Exchange, waiting, late)
    setattr(exchange.Exchange, name, keep)
    try:
        problem()
        return Slow("", "", True, False)
    except DitronError as error:
        flat = [out.flatten() for out in outputs]
        wanted = [out.flatten() for out in expected]
        missing = [bool(out.isnan().all()) for out in flat]
        right = [torch.equal(out, want) for out, want in zip(flat, wanted, strict=True)]
        return Slow(type(error).__name__, str(error), all(right), all(missing))
    finally:
        setattr(exchange.Exchange, waiting, original)
        setattr(exchange.Exchange, name, last)


@pytest.mark.parametrize("kind", ["all_gather_matmul", "matmul_reduce_scatter"])
def test_a_reader_that_is_overtaken(rank_pools: RankPools, kind: str) -> None:
    """Rank 0 overwrites what rank 1 has not read, and says so: rank 1 raises, and what it holds is NaN."""
    pool = rank_pools.get("cpu", 2, label="chunked failures")
    pool.run(_reset)
    hasty, slow = pool.run(_too_slow, kind)
    assert hasty.type_name == "DitronTimeout" and "rank 1" in hasty.message, hasty
    assert slow.type_name == "DitronTimeout" and "rank 0" in slow.message, slow
    assert slow.missing and not slow.right, slow
    pool.run(_reset_and_work)


def _revoke_words(ctx: RankContext) -> list[int]:
    """The words with which peers revoked slots of this rank."""
    header = _shared(ctx).generations[-1].heap.local[: layout.HEADER_BYTES].view(torch.int64)
    places = [
        slot * words.SLOT_WORDS.value + words.REVOKED_ROW.value * layout.MAX_WORLD + source
        for slot in range(layout.NUM_SLOTS)
        for source in range(ctx.world_size)
    ]
    return [int(header[place]) for place in places]


def test_a_healthy_group_revokes_nothing(rank_pools: RankPools) -> None:
    pool = rank_pools.get("cpu", 2, label="chunked failures")
    pool.run(_reset_and_work)
    assert not any(any(found) for found in pool.run(_revoke_words))
