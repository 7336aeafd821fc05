"""all_gather_matmul by `chunked` with weights that are multiplied with all rows at once: right in every form."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from ditron_inductor.device.reset import reset
from ditron_inductor.lowering.all_gather_matmul import chunked
from ditron_inductor.lowering.schedules import Gathering
from tests.lowering import test_all_gather_matmul as plain
from tests.lowering import test_epilogues as epilogues
from tests.lowering import test_shard_norm as norms
from tests.lowering.problems import chunked_problems, chunked_with
from tests.lowering.stress import call_late_and_poisoned
from tests.rank_process import RankContext
from tests.ranks import RankPool

KIND = "all_gather_matmul"
MODULES: dict[str, Any] = {"plain": plain, "epilogues": epilogues, "norms": norms}


@contextmanager
def whole(first: bool) -> Iterator[None]:
    """Makes all weights whole but the first one, or but the last one, whatever the schedule would be."""
    def forced(*args: Any) -> Any:
        sizes = chunked.geometry(*args)

        def schedule(widths: tuple[int, ...]) -> Gathering:
            last = len(widths) - 1
            return Gathering(sizes.schedule(widths).groups, tuple(range(last) if first else range(1, last + 1)))

        return replace(sizes, schedule=schedule)

    with chunked_with(KIND, forced):
        # What calls of the same sites have kept.
        reset(dist.group.WORLD)
        try:
            yield
        finally:
            reset(dist.group.WORLD)


def _check(ctx: RankContext, module: str, cases: tuple[Any, ...], first: bool) -> None:
    with whole(first):
        for case in cases:
            MODULES[module]._check(ctx, case, "chunked")


@pytest.mark.parametrize(("module", "first"), [*((module, False) for module in MODULES), ("plain", True)])
def test_matches_reference(pool: RankPool, module: str, first: bool) -> None:
    cases = MODULES[module].CASES
    # On four CPU ranks what depends on their number: the groups.
    few = pool.device_type == "cpu" and pool.world_size > 2
    pool.run(_check, module, cases[-2:] if few else cases, first)


@pytest.mark.parametrize("module", MODULES)
def test_matches_reference_at_size(gpu_pool: RankPool, module: str) -> None:
    gpu_pool.run(_check, module, MODULES[module].GPU_CASES, False)


def _stress(ctx: RankContext) -> None:
    with whole(False):
        call_late_and_poisoned(ctx, chunked_problems(ctx, [KIND], "whole"))


def test_late_ranks_and_poisoned_slots(pool: RankPool) -> None:
    if pool.device_type == "cpu" and pool.world_size > 2:
        pytest.skip("two ranks show it")
    pool.run(_stress, timeout=100)
