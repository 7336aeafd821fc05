"""all_gather_matmul by `chunked` with epilogues that are computed run by run, and biases of batches, however small the
problem is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch.distributed as dist

from ditron_inductor.device.reset import reset
from ditron_inductor.lowering import chunked_exchange, schedules
from ditron_inductor.lowering.all_gather_matmul import chunked
from ditron_inductor.lowering.schedules import Gathering
from ditron_inductor.task.epilogue import parse
from tests.lowering import test_epilogues as epilogues
from tests.lowering.test_epilogues import BF16, Case
from tests.rank_process import RankContext
from tests.ranks import RankPool

CASES = (
    Case("cast(silu(mm0), bf16) * mm1; mm0; mm1", epilogues.PAIR, (11, 3, 24), 1, repeats=3),
    Case("mm0 + row(x0); cast(gelu(mm1 + row(x1)), bf16)", epilogues.PAIR, (3, 9, 24), 1),
    Case("cast(silu(mm0), bf16) * mm1; mm2 + row(x0)", ((33, "row"), (33, "column"), (8, "row")), (40, 24)),
    Case("mm0 + row(x0); mm1 + row(x1)", epilogues.PAIR, (3, 9, 24), 1),
)


@contextmanager
def in_runs() -> Iterator[list[int]]:
    """Every epilogue that can be computed in runs is, as are all products, and those of batches with a bias are made
    one by one. The places of the runs as they are made.
    """
    made: list[int] = []
    ends_make, gather_schedule = chunked.RunEnds.make, schedules.gather_schedule

    def without_whole(*sizes: Any, **options: Any) -> Gathering:
        return replace(gather_schedule(*sizes, **options), whole=())

    def noted(ends: chunked.RunEnds, place: int) -> None:
        made.append(place)
        ends_make(ends, place)

    # What calls of the same sites have kept.
    reset(dist.group.WORLD)
    with (
        mock.patch.object(chunked, "RUN_ELEMENTS", 0),
        mock.patch.object(chunked_exchange, "BIASED_OPERATIONS", 0.0),
        mock.patch.object(chunked.RunEnds, "make", noted),
        mock.patch.object(schedules, "gather_schedule", without_whole),
    ):
        yield made
    reset(dist.group.WORLD)


def _check(ctx: RankContext, cases: tuple[Case, ...]) -> list[int]:
    counts = []
    for case in cases:
        with in_runs() as made:
            epilogues._check(ctx, case, "chunked")
        assert len(set(made)) * case.repeats == len(made)
        counts.append(len(set(made)))
    return counts


def test_matches_the_text(pool: RankPool) -> None:
    cases = CASES if pool.world_size == 2 or pool.device_type == "cuda" else CASES[:1]
    for counts in pool.run(_check, cases):
        # The own run and others, and none where biases are all that there is.
        assert all(count >= 2 for count in counts[:3]) and counts[3:] in ([], [0])


def test_matches_the_text_at_size(gpu_pool: RankPool) -> None:
    counts = gpu_pool.run(_check, epilogues.GPU_CASES)[0]
    by_rows = [{one.kind for one in parse(case.epilogue).extras()} <= {"row"} for case in epilogues.GPU_CASES]
    assert [count > 0 for count in counts] == by_rows


def _check_large(ctx: RankContext) -> None:
    weights = ((4096, "column"), (4096, "column"))
    for case in (
        Case("cast(silu(mm0), bf16) * mm1", weights, (1, 1024, 512), 1, BF16),
        Case("cast(silu(mm0 + row(x0)), bf16) * mm1", weights, (2, 512, 512), 1, BF16),
        Case("cast(silu(mm0), bf16) * mm1", weights, (16, 67, 512), 1, BF16),
    ):
        with mock.patch.object(chunked.RunEnds, "make", autospec=True, side_effect=chunked.RunEnds.make) as made:
            epilogues._check(ctx, case, "chunked")
        assert made.call_count >= ctx.world_size


def test_large_shards_are_finished_in_runs(gpu_pool: RankPool) -> None:
    gpu_pool.run(_check_large)
