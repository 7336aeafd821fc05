"""A rank that compiles for much longer than its peers is waited for: nothing is given up, nobody is left waiting."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch._dynamo.callback import CallbackTrigger, callback_handler
from torch.distributed import distributed_c10d

from ditron_inductor import backend, graph_meeting
from ditron_inductor.device import meetings
from ditron_inductor.device.agreements import Decision
from ditron_inductor.device.compilations import compilations
from tests.models.test_replicas import Step, groups_of
from tests.ranks import RankContext, RankPools

MEETING_S = 1.5
SLOW_S = 4.0
OPTIONS: dict[str, Any] = {"ditron.strategy": "tile", "ditron.meeting_s": MEETING_S, "ditron.timeout_s": 60.0}


class Watched:
    """The compilations and meetings of a rank, and what these decide.

    Rank 0 ends its compilation of a number in `slow` SLOW_S seconds after rank 1 has come to its meeting of the same
    number, or, if `outlasts`, when rank 1 has left it.
    """

    def __init__(self, rank: int, name: str, slow: Sequence[int], outlasts: bool = False) -> None:
        self.rank, self.slow, self.outlasts = rank, slow, outlasts
        self.store = dist.PrefixStore(name, distributed_c10d._get_default_store())
        self.plain: list[str] = []
        self.compiled = self.compiled_again = 0
        self._compile, self._meet = backend.compile_fx, meetings.Meetings.meet
        self._conform = graph_meeting.ConformPipeline

    def compile(self, *operands: Any, **named: Any) -> Any:
        if self.rank == 0 and self.compiled in self.slow:
            self.store.wait([f"{'left' if self.outlasts else 'come'} {self.compiled}"], timedelta(seconds=100))
            time.sleep(0.0 if self.outlasts else SLOW_S)
        self.compiled += 1
        return self._compile(*operands, **named)

    def meet(self, own: meetings.Meetings, *operands: Any) -> Decision:
        if self.rank == 1:
            self.store.set(f"come {len(self.plain)}", "")
        decision = self._meet(own, *operands)
        if self.rank == 1:
            self.store.set(f"left {len(self.plain)}", "")
        self.plain.append(decision.plain)
        return decision

    def conform(self, *operands: Any) -> Any:
        self.compiled_again += 1
        return self._conform(*operands)

    def run(self, call: Callable[[], Any]) -> Any:
        with (
            mock.patch.object(backend, "compile_fx", self.compile),
            mock.patch.object(meetings.Meetings, "meet", lambda own, *operands: self.meet(own, *operands)),
            mock.patch.object(graph_meeting, "ConformPipeline", self.conform),
        ):
            return call()


def tokens_change(ctx: RankContext, longest_s: float = meetings.COMPILING_S, outlasts: bool = False) -> Any:
    """What is decided for graphs of two numbers of tokens, which rank 0 compiles slowly; and how often this rank
    compiled another one in the place of its own.
    """
    torch._dynamo.reset()
    group = dist.new_group()

    def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return funcol.wait_tensor(funcol.all_reduce(x @ w, "sum", group)).sin()

    watched = Watched(ctx.rank, group.group_name, (0, 1), outlasts)
    compiled = torch.compile(step, backend="ditron", dynamic=False, options=OPTIONS)
    generator = torch.Generator().manual_seed(ctx.rank)
    with mock.patch.object(meetings, "COMPILING_S", longest_s):
        for tokens in (8, 12, 8):
            x, w = (torch.randn(*shape, generator=generator) for shape in ((tokens, 16), (16, 24)))
            found = watched.run(lambda x=x, w=w: compiled(x, w))
            torch.testing.assert_close(found, step(x, w), atol=1e-4, rtol=1e-4)
    return watched.plain, watched.compiled_again


def test_ranks_wait_for_one_that_compiles(rank_pools: RankPools) -> None:
    for plain, compiled_again in rank_pools.get("cpu", 2).run(tokens_change, timeout=150.0):
        assert plain == ["", ""] and not compiled_again


def test_they_do_not_wait_for_ever(rank_pools: RankPools) -> None:
    for plain, _ in rank_pools.get("cpu", 2).run(tokens_change, MEETING_S, True, timeout=150.0):
        assert plain[0]


def a_replica_changes(ctx: RankContext) -> list[str]:
    """The same where the other replica keeps its tokens, and so its graph."""
    torch._dynamo.reset()
    replica, *names = groups_of(ctx.rank)
    program = Step(*names, logs_from=1 if ctx.rank == 0 else None)
    watched = Watched(ctx.rank, program.replica, (1,))
    compiled = torch.compile(program.__call__, backend="ditron", dynamic=False, options=OPTIONS)
    generator = torch.Generator().manual_seed(ctx.rank)
    for call, tokens in enumerate([(8, 8), (12, 8), (12, 8)]):
        x, w = (torch.randn(*shape, generator=generator) for shape in ((tokens[replica], 16), (16, 24)))
        found = watched.run(lambda x=x, w=w, call=call: compiled(x, w, call))
        torch.testing.assert_close(found, program(x, w, call), atol=1e-4, rtol=1e-4)
    return watched.plain


@pytest.mark.all_cases
def test_ranks_of_a_replica_wait_for_one_that_compiles(rank_pools: RankPools) -> None:
    """If one of them gave up, it would wait for the other replica in the library's collective, and that in a kernel."""
    for plain in rank_pools.get("cpu", 4).run(a_replica_changes, timeout=150.0):
        assert not any(plain)


def counted(ctx: RankContext) -> list[bool]:
    """Whether anybody compiles: nobody, this rank by torch, nobody, who records, rank 0 on its own, nobody."""
    torch._dynamo.reset()
    compilations.watch()
    seen: list[bool] = []

    def look() -> None:
        dist.barrier()
        seen.append(compilations.counts()[0] > 0)
        dist.barrier()

    def traced(module: Any, operands: Any) -> Any:
        look()
        return module

    look()
    torch.compile(lambda x: x + 1, backend=traced)(torch.ones(2))
    look()
    with callback_handler.install_callbacks(CallbackTrigger.CUDAGRAPH_RECORDING, ""):
        look()
    if ctx.rank == 0:
        with pytest.raises(ZeroDivisionError), compilations.announced():
            look()
            raise ZeroDivisionError
    else:
        look()
    look()
    return seen


def test_compilations_are_counted(rank_pools: RankPools) -> None:
    for seen in rank_pools.get("cpu", 2).run(counted):
        assert seen == [False, True, False, False, True, False]


def test_the_time_begins_anew() -> None:
    """While somebody compiles, and once when that has ended; but not for ever."""
    meeting = object.__new__(meetings._Meeting)
    meeting.limit_s, meeting.began, meeting.compiled = MEETING_S, time.monotonic(), 3
    for counts, longest_s, goes_on in (
        ((0, 3), 60.0, False),
        ((1, 3), 60.0, True),
        ((0, 4), 60.0, True),
        ((0, 4), 60.0, False),
        ((1, 4), 0.0, False),
    ):
        with (
            mock.patch.object(compilations, "counts", return_value=counts),
            mock.patch.object(meetings, "COMPILING_S", longest_s),
        ):
            assert meeting._has_more_time() == goes_on, counts
