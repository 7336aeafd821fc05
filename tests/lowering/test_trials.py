"""Trials in place: every call is right whatever it tries, and all ranks end with the same strategy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc

import ditron_inductor
from benchmarks.tolerances import assert_near
from ditron_inductor.lowering.host import trials
from ditron_inductor.lowering.host.trials import Sample
from ditron_inductor.task import trial
from ditron_inductor.task.plan import Choice, PlanRequest, decisions
from ditron_inductor.task.table import Table
from tests.cases import rare
from tests.conftest import CPU_PLACES, GPU_PLACES
from tests.lowering import calls
from tests.lowering.calls import Site
from tests.lowering.problems import SMALL, Problem
from tests.lowering.tried import ORDER, STEPS, tried
from tests.rank_process import RankContext
from tests.ranks import RankPool, RankPools

on_two = pytest.mark.parametrize("place", [CPU_PLACES[0], GPU_PLACES[0]], indirect=True)


def last(ctx: RankContext, site: str) -> tuple[str, str]:
    found = decisions.last(ctx.group_name, site)
    assert found is not None
    return found[1].strategy, found[1].source


def _problem(ctx: RankContext, name: str, kind: str = "matmul_reduce_scatter") -> Problem:
    return Problem(ctx, kind, SMALL[ctx.device.type], site=Site(name=name, strategy="auto", trials=True))


def _decide(ctx: RankContext, kind: str) -> list[str]:
    # Each rank alone would choose another one than both together.
    times = [{"library": 90.0, "tile": 50.0, "chunked": 95.0}, {"library": 90.0, "tile": 300.0, "chunked": 60.0}]
    name = f"trials/{kind}"
    problem, ran = _problem(ctx, name, kind), []
    with tried(times[ctx.rank % 2]):
        for _ in range(STEPS + 3):
            problem.check(problem())
            ran.append(last(ctx, name)[0])
        assert last(ctx, name) == ("library", "trial")
        found = decisions.last(ctx.group_name, name)
        assert found is not None and found[1].tried_us == {"library": 90.0, "tile": 300.0, "chunked": 95.0}
    return ran


@pytest.mark.parametrize("kind", ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"])
def test_every_strategy_has_its_calls_and_the_slowest_rank_decides(pool: RankPool, kind: str) -> None:
    for ran in pool.run(_decide, kind):
        assert ran[:STEPS] == ORDER
        assert set(ran[STEPS:]) == {"library"}


def _dropped(ctx: RankContext) -> tuple[str, str]:
    """The workspace has grown, so that all ranks agree anew, and strategies take other times."""
    problem, name = _problem(ctx, "trials/dropped"), "trials/dropped"
    with tried({"library": 90.0, "tile": 50.0, "chunked": 95.0}):
        for _ in range(STEPS + 2):
            problem()
        (shared,) = [
            shared for shared, known in trials._trials.items() if any(one.times for one in known.by_name.values())
        ]
        shared.largest = {what: (own, most) for what, (own, most) in shared.largest.items()}
        before = last(ctx, name)[0]
        with mock.patch.object(Sample, "device_ns", lambda self: 1 << 20):
            for _ in range(STEPS + 2):
                problem()
        return before, last(ctx, name)[0]


def test_a_trial_that_is_dropped_measures_anew(rank_pools: RankPools) -> None:
    assert set(rank_pools.get("cpu", 2).run(_dropped)) == {("tile", "library")}


def _begun_again(ctx: RankContext) -> list[str]:
    """What the same problem ends with at three sites, of which the last one is new after `begin_again`."""
    ended = []
    for name, tile_us, again in (("one", 50.0, False), ("two", 300.0, False), ("three", 300.0, True)):
        problem = _problem(ctx, f"trials/again/{name}")
        if again:
            trials.begin_again()
        with tried({"library": 90.0, "tile": tile_us, "chunked": 95.0}, reset=name == "one"):
            for _ in range(STEPS + 2):
                problem()
        ended.append(last(ctx, f"trials/again/{name}")[0])
    return ended


def test_trials_begin_again_where_they_are_to(rank_pools: RankPools) -> None:
    for ended in rank_pools.get("cpu", 2).run(_begun_again):
        assert ended == ["tile", "tile", "library"]


def _slow_moments(ctx: RankContext) -> Mapping[str, trial.Times]:
    """The times of a trial in which the host is slow in all calls by one strategy but one."""
    problem, name, slow = _problem(ctx, "trials/slow"), "trials/slow", iter(range(1, 1000))

    def device_ns(self: Sample) -> int:
        self.host_ns = 20_000 if next(slow) % (trial.CALLS - trial.UNTIMED) == 0 else 90_000
        return 50_000

    with tried({}), mock.patch.object(Sample, "device_ns", device_ns):
        for _ in range(STEPS + 2):
            problem()
    found = decisions.last(ctx.group_name, name)
    assert found is not None and found[1].source == "trial"
    return next(times for request, times in trials.ended() if request.site == name)


def test_slow_moments_of_the_host_do_not_count(rank_pools: RankPools) -> None:
    for times in rank_pools.get("cpu", 2).run(_slow_moments):
        assert set(times.values()) == {trial.Times(50.0, 20.0)}


def _waiting_for_the_host(ctx: RankContext, clean: int) -> float:
    """What a trial measures if the device does not wait for the host in so many of the calls by each strategy."""
    problem, name, count, take = _problem(ctx, "trials/waits"), "trials/waits", iter(range(1000)), Sample.take

    def waits(self: Sample, *given: Any) -> Any:
        result = take(self, *given)
        # Three strategies take turns.
        self.is_clean = next(count) // 3 >= trial.CALLS - trial.UNTIMED - clean
        return result

    def device_ns(self: Sample) -> int:
        return 30_000 if self.is_clean else 150_000

    with tried({}), mock.patch.object(Sample, "take", waits), mock.patch.object(Sample, "device_ns", device_ns):
        for _ in range(STEPS + 2):
            problem()
    (times,) = {times.device_us for times in next(t for r, t in trials.ended() if r.site == name).values()}
    return times


@pytest.mark.parametrize("clean", [1, *rare(0, trial.CALLS - trial.UNTIMED)])
def test_calls_in_which_the_device_waited_for_the_host_do_not_count(rank_pools: RankPools, clean: int) -> None:
    """Unless there are no others."""
    found = rank_pools.get("cpu", 2).run(_waiting_for_the_host, clean)
    assert found == [30.0 if clean else 150.0] * 2


LATER = 5 + 5 + 2 * trial.CALLS
"""Calls behind a second look in which there would be a third one."""


def _looks_again(ctx: RankContext, chosen: str) -> list[str]:
    """The calls of both looks and between them, where `library` or `chunked` is as slow later as the other one is
    fast, and `tile` is not near.
    """
    problem, name, us = _problem(ctx, "trials/again"), "trials/again", {"library": 93.0, "tile": 200.0, "chunked": 90.0}
    ran = []
    with mock.patch.object(trial, "CALLS_BETWEEN", 5), tried(us):
        for step in range(STEPS + 1 + 5 + 2 * trial.CALLS + 1 + LATER):
            if step == STEPS + 3:
                assert last(ctx, name) == ("chunked", "trial")
                us |= {"library": 98.0, "chunked": 98.0, "tile": 1.0} | {chosen: 90.0}
            problem.check(problem())
            ran.append(last(ctx, name)[0])
        found = decisions.last(ctx.group_name, name)
        assert found is not None and found[1].source == "trial"
        # The time of `tile` is that of the first look.
        assert found[1].tried_us == {"library": 98.0, "tile": 200.0, "chunked": 98.0} | {chosen: 90.0}
    return ran


@on_two
@pytest.mark.parametrize("chosen", ["library", "chunked"])
def test_what_is_near_is_decided_again(pool: RankPool, chosen: str) -> None:
    near = ("chunked", "library")
    second = [step[0] for calls in range(2 * trial.CALLS) if (step := trial.strategy_of_call(near, calls))]
    # The call in which the ranks decide runs as before.
    wanted = [*ORDER, "library", *["chunked"] * 5, *second, "chunked", *[chosen] * LATER]
    for ran in pool.run(_looks_again, chosen):
        assert ran == wanted


def _warm(ctx: RankContext) -> tuple[str, dict[str, float]]:
    """What a trial ends with whose calls all take longer later, though `chunked` is timed at the first look alone."""
    problem, name, us = _problem(ctx, "trials/warm"), "trials/warm", {"library": 100.0, "tile": 104.0, "chunked": 111.0}
    with mock.patch.object(trial, "CALLS_BETWEEN", 5), tried(us):
        for step in range(STEPS + 1 + 5 + 2 * trial.CALLS + 2):
            if step == STEPS + 3:
                us |= {strategy: 1.2 * time for strategy, time in us.items()}
            problem()
    found = decisions.last(ctx.group_name, name)
    assert found is not None and found[1].tried_us is not None
    return found[1].strategy, {strategy: round(time, 1) for strategy, time in found[1].tried_us.items()}


def test_a_gpu_that_is_warm_later_favours_nobody(rank_pools: RankPools) -> None:
    for found in rank_pools.get("cpu", 2).run(_warm):
        assert found == ("library", {"library": 120.0, "tile": 124.8, "chunked": 133.2})


def _same_bits_later(ctx: RankContext) -> list[str]:
    """The calls of a trial, between whose looks one rank asks for determinism."""
    problem, ran = _problem(ctx, "trials/later"), []
    with mock.patch.object(trial, "CALLS_BETWEEN", 5), tried({"library": 90.0, "tile": 85.0, "chunked": 200.0}):
        try:
            for step in range(STEPS + 1 + LATER):
                if step == STEPS + 3:
                    torch.use_deterministic_algorithms(ctx.rank == 0, warn_only=True)
                problem.check(problem())
                ran.append(last(ctx, "trials/later")[0])
        finally:
            torch.use_deterministic_algorithms(False)
    return ran


def test_who_wants_the_same_bits_later_gets_no_second_look(rank_pools: RankPools) -> None:
    for ran in rank_pools.get("cpu", 2, label="deterministic").run(_same_bits_later):
        assert ran[STEPS + 1 :] == ["tile"] * LATER


def _for_captures(ctx: RankContext) -> list[str]:
    """The calls of a site that shares a trial and is rarely called, where captures take another strategy: after each
    look it makes what they need.
    """
    often, rarely = (_problem(ctx, f"trials/captures/{name}") for name in ("often", "rarely"))
    ran = []

    def decided(eager: str, captured: str, times: Any) -> tuple[str, str]:
        return "library", "tile" if times["chunked"].device_us < 89.0 else "chunked"

    us = {"library": 85.0, "tile": 90.0, "chunked": 88.0}
    with (
        mock.patch.object(trial, "CALLS_BETWEEN", 5),
        mock.patch.object(trial, "decide", decided),
        tried(us),
    ):
        for calls_before in (STEPS + 4, STEPS + 10):
            for _ in range(calls_before):
                often()
            for _ in range(2):
                rarely()
                ran.append(last(ctx, "trials/captures/rarely")[0])
            us["chunked"] = 92.0
    return ran


def test_a_capture_finds_what_it_needs_after_each_look(rank_pools: RankPools) -> None:
    for ran in rank_pools.get("cpu", 2).run(_for_captures):
        assert ran == ["tile", "library", "chunked", "library"]


def _share(ctx: RankContext) -> None:
    first, second, third = (_problem(ctx, f"trials/{name}") for name in ("one", "two", "three"))
    with tried({"library": 90.0, "tile": 50.0, "chunked": 95.0}):
        for _ in range(STEPS):
            first.check(first())
            second.check(second())
        first.check(first())
        for name, problem in (("two", second), ("three", third)):
            problem.check(problem())
            assert last(ctx, f"trials/{name}") == ("tile", "trial"), "an equal problem is decided"


@on_two
def test_sites_with_equal_problems_share_a_trial(pool: RankPool) -> None:
    pool.run(_share)


def _refuse(ctx: RankContext) -> None:
    problem = _problem(ctx, "trials/same bits")
    torch.use_deterministic_algorithms(ctx.rank == 0, warn_only=True)
    try:
        with tried({}):
            for _ in range(3):
                problem.check(problem())
                assert last(ctx, "trials/same bits") == ("library", "model")
    finally:
        torch.use_deterministic_algorithms(False)


def test_one_rank_that_wants_the_same_bits_is_enough(rank_pools: Any) -> None:
    rank_pools.get("cpu", 2, label="deterministic").run(_refuse)


def _save(ctx: RankContext, path: str) -> list[str]:
    """The lines that a trial adds to a table, which all ranks read."""
    problem = _problem(ctx, "trials/saved")
    with tried({"library": 90.0, "tile": 50.0, "chunked": 95.0}):
        for _ in range(STEPS):
            problem.check(problem())
        assert ditron_inductor.save_trials(path) == 0, "it goes on"
        problem.check(problem())
        count = ditron_inductor.save_trials(path)
    dist.barrier()
    lines = Path(path).read_text().splitlines()
    assert len(lines) == 1 + count
    return lines[1:]


def test_what_was_decided_can_be_saved(rank_pools: Any, tmp_path: Path) -> None:
    first, second = rank_pools.get("cpu", 2).run(_save, str(tmp_path / "table.csv"))
    assert first == second
    entries = Table.parse((tmp_path / "table.csv").read_text()).entries
    # The times are said to be those of a GPU, which the host does not hold up.
    assert [entry.graph for entry in entries] == [0, 1]
    for entry in entries:
        assert (entry.op, entry.world) == ("matmul_reduce_scatter", 2)
        assert entry.us == {"library": 90.0, "tile": 50.0, "chunked": 95.0}


def _reset(ctx: RankContext) -> None:
    problem = _problem(ctx, "trials/reset", "matmul_all_reduce")
    with tried({"library": 90.0, "tile": 50.0, "chunked": 95.0}):
        for calls_before in (ORDER.index("tile") + 1, STEPS + 1):
            for _ in range(calls_before):
                problem.check(problem())
            assert last(ctx, "trials/reset")[0] == "tile"
            ditron_inductor.reset(dist.group.WORLD)
            problem.check(problem())
            assert last(ctx, "trials/reset") == ("library", "trial"), "a trial begins again"


@on_two
def test_a_reset_begins_again(pool: RankPool) -> None:
    pool.run(_reset)


def _one_rank_prepares_again(ctx: RankContext) -> None:
    """One rank's operand changes its strides in the middle: it looks up anew, alone, and counts on."""
    problem, ran = _problem(ctx, "trials/strides", "matmul_all_reduce"), []
    with tried({"library": 90.0, "tile": 50.0, "chunked": 95.0}):
        for step in range(STEPS + 2):
            if ctx.rank == 0 and step in (3, 9):
                left = problem.left
                problem.left = left.t().contiguous().t() if left.is_contiguous() else left.contiguous()
            problem.check(problem())
            ran.append(last(ctx, "trials/strides")[0])
    assert ran == [*ORDER, "library", "tile"], ran


@on_two
def test_a_rank_that_prepares_again_counts_on(pool: RankPool) -> None:
    pool.run(_one_rank_prepares_again)


def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return fc.all_reduce(x @ w, "sum", dist.group.WORLD)


@contextmanager
def noted() -> Iterator[list[tuple[str, Choice]]]:
    """The sites of all calls in the block, and what is chosen for them."""
    note, found = decisions.note, list[tuple[str, Choice]]()

    def observe(group_name: str, request: Any, choice: Any) -> None:
        found.append((request.site, choice))
        note(group_name, request, choice)

    with mock.patch.object(decisions, "note", observe):
        yield found


def _compiled(ctx: RankContext) -> None:
    torch._dynamo.reset()
    x, w = calls.operand(ctx, [24, 40], torch.bfloat16), calls.weight(ctx, 40, 48, torch.bfloat16)
    site = Site(name="reference")
    want = calls.reference_matmul_all_reduce(ctx, site, x, w)
    # With one limit for all calls of the pool.
    options = {"ditron.trials": True, "ditron.timeout_s": calls.TIMEOUT_S}
    compiled = torch.compile(product, backend="ditron", options=options)
    with tried({"library": 90.0, "tile": 50.0, "chunked": 95.0}), noted() as found:
        with torch.no_grad():
            for _ in range(STEPS + 4):
                assert_near(compiled(x, w), want, num_partials=ctx.world_size)
        (name,) = {site for site, _ in found}
        assert last(ctx, name) == ("tile", "trial")


@on_two
def test_a_compiled_graph_tries_and_keeps_the_winner(pool: RankPool) -> None:
    pool.run(_compiled)


def _for_cuda_graphs(ctx: RankContext) -> None:
    """A graph that torch captures runs by the strategy for CUDA graphs before that too, and tries nothing: a peer may
    replay what this rank runs.
    """
    torch._dynamo.reset()
    x, w = calls.operand(ctx, [24, 40], torch.bfloat16), calls.weight(ctx, 40, 48, torch.bfloat16)

    def planned(request: PlanRequest, table: str) -> Choice:
        return Choice("tile" if request.problem.captured else "library", "planned", None, "model")

    options = {"ditron.trials": True, "ditron.timeout_s": calls.TIMEOUT_S, "triton.cudagraphs": True}
    compiled = torch.compile(product, backend="ditron", options=options)
    with (
        torch.no_grad(),
        tried({"library": 90.0, "tile": 50.0, "chunked": 95.0}),
        mock.patch.object(trials, "choose", planned),
        noted() as found,
    ):
        for _ in range(3):
            compiled(x, w)
    assert {(choice.strategy, choice.source) for _, choice in found} == {("tile", "model")}


def test_a_graph_that_torch_captures_tries_nothing(rank_pools: RankPools) -> None:
    rank_pools.get("cpu", 2).run(_for_cuda_graphs)


def _captured(ctx: RankContext) -> None:
    problem = _problem(ctx, "trials/captured", "matmul_all_reduce")
    with tried({"library": 90.0, "tile": 50.0, "chunked": 95.0}):
        for _ in range(STEPS + 2):
            problem.check(problem())
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            problem()
            with torch.cuda.graph(graph, stream=stream):
                outputs = problem()
            assert last(ctx, "trials/captured") == ("tile", "trial")
            for _ in range(3):
                graph.replay()
            stream.synchronize()
        problem.check(outputs)


def test_a_capture_takes_what_was_decided(gpu_pool: RankPool) -> None:
    gpu_pool.run(_captured)
