"""A meeting waits for a rank that is still compiling, and no longer than before for one that is not."""

from __future__ import annotations

import logging
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ditron_inductor import backend, graph_meeting
from ditron_inductor.device import compiling, meetings
from tests.models import divergent
from tests.ranks import RankContext, RankPools

MEETING_S = 1.0
LATE_S = 4.0
# With this limit no ranks have met before, whatever ran in this process.
OPTIONS = {"ditron.strategy": "tile", "ditron.meeting_s": MEETING_S, "ditron.workspace_limit": (1 << 28) + 77}


def late_in_backend(ctx: RankContext, name: str, longest_s: float) -> tuple[dict[str, int], list[str]]:
    """Rank 1 takes long to compile a program. Returns how its sites ran, and the warnings of meetings."""
    # What torch imports and compiles once in a process takes longer than a meeting waits here.
    divergent.check(ctx, "epilogue_behind", {"ditron.strategy": "tile"}, calls=1)
    dist.barrier()
    compile_fx, said = backend.compile_fx, []

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(LATE_S if ctx.rank == 1 else 0.0)
        return compile_fx(*args, **kwargs)

    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    graph_meeting.logger.addHandler(handler)
    try:
        with mock.patch.object(backend, "compile_fx", slow), mock.patch.object(meetings, "LONGEST_S", longest_s):
            return divergent.check(ctx, name, OPTIONS, calls=1), said
    finally:
        graph_meeting.logger.removeHandler(handler)


def test_a_rank_that_compiles_for_long_is_waited_for(rank_pools: RankPools) -> None:
    for strategies, said in rank_pools.get("cpu", 2).run(late_in_backend, "bias_before", 60.0):
        assert strategies == {"tile": 1} and not said


def test_a_mark_that_stays_is_not_waited_for_without_end(rank_pools: RankPools) -> None:
    """As that of a rank that died."""
    found = rank_pools.get("cpu", 2).run(late_in_backend, "residual_behind", MEETING_S)
    assert all(not strategies for strategies, _ in found)
    assert [len(said) for _, said in found] == [1, 1]
    assert f"did not bring a compiled graph within {2 * MEETING_S:g} s" in found[0][1][0]


def refused(ctx: RankContext) -> list[bool]:
    """Whether rank 1 compiles, in its own eyes and in its peer's: before, inside, further inside, and behind errors."""
    seen = []

    def look() -> None:
        dist.barrier()
        seen.append(compiling.is_compiling([1]))
        dist.barrier()

    look()
    for depth in (1, 2):
        with pytest.raises(ZeroDivisionError):
            if ctx.rank == 1:
                with compiling.compiling():
                    if depth == 2:
                        with compiling.compiling():
                            pass
                    look()
                    raise ZeroDivisionError
            look()
            raise ZeroDivisionError
        look()
    assert not compiling.is_compiling([0]) and not compiling.is_compiling([])
    return seen


def test_the_mark_ends_with_the_compilation(rank_pools: RankPools) -> None:
    assert rank_pools.get("cpu", 2).run(refused) == [[False, True, False, True, False]] * 2


def test_without_a_default_group_nobody_is_told() -> None:
    assert not dist.is_initialized()
    with compiling.compiling():
        assert not compiling.is_compiling([0])
    assert torch.compile(torch.sin, backend="ditron")(torch.zeros(1)) == 0
