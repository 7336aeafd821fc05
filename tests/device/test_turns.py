"""Which slot and which ring a call takes: the same on all ranks, whatever one of them captures alone."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from ditron_inductor.device.ring import Generation
from ditron_inductor.device.streams import CallOrder
from ditron_inductor.device.workspace import SharedWorkspace
from ditron_inductor.lowering.host import planning
from ditron_inductor.task.nodes import MatmulAllReduce, Policy
from ditron_inductor.task.policy import number_of
from tests.device import jobs
from tests.device.one_rank import make_shared
from tests.rank_process import RankContext
from tests.ranks import RankPools


class Stream(CallOrder):
    """Stands in for the order of a CUDA device."""

    def enter(self) -> bool:
        return self.capturing


def slots(shared: SharedWorkspace, count: int, turn: int | None = None) -> list[int]:
    found = []
    for _ in range(count):
        found.append(shared.begin("r/0:site", 64, 1 << 30, 1.0, 2.0, turn)[1])
        shared.end()
    return found


def test_a_site_of_a_compiled_graph_keeps_its_slot() -> None:
    shared = make_shared()
    assert slots(shared, 1) == [0]
    assert slots(shared, 2, turn=4) == [0, 0] and slots(shared, 3, turn=7) == [1, 1, 1]
    assert slots(shared, 2) == [1, 0]


def test_captured_calls_count_within_their_capture() -> None:
    shared = make_shared()
    shared.order = order = Stream()
    assert slots(shared, 1) == [0]
    for capture in (7, 8):
        order.capturing, order.capture = True, capture
        assert slots(shared, 3) == [0, 1, 0]
        order.capturing = False
    assert slots(shared, 2) == [1, 0]


def test_a_call_takes_the_oldest_ring_that_fits() -> None:
    """So a graph that is captured again is on the ring of the graphs that were captured before the growth."""
    shared = make_shared()

    def larger(ring: Generation) -> Generation:
        return replace(ring, name="larger", slot_bytes=4 * ring.slot_bytes)

    small = shared.generations[0]
    shared.generations.append(larger(small))
    for nbytes, expected in ((64, small), (small.slot_bytes, small), (small.slot_bytes + 1, shared.generations[1])):
        assert shared.begin("r/0:site", nbytes, 1 << 30, 1.0, 2.0)[0] is expected
        shared.end()


@pytest.mark.parametrize(
    ("site", "number"), [("3f9c01ab/12:matmul_all_reduce@key", 12), ("ops", None), ("", None), ("test/3:site", None)]
)
def test_the_number_in_a_name(site: str, number: int | None) -> None:
    assert number_of(site) == number


def _captures_alone(ctx: RankContext) -> None:
    """Rank 1 captures calls, of sites and others, between calls that all ranks make."""
    _, workspace = jobs.opened(ctx)
    shared = workspace.shared
    jobs.ping_and_check(workspace)
    if ctx.rank == 1:
        usual, shared.order = shared.order, Stream()
        shared.order.capturing = True
        for turn in (None, 0, 1):
            with workspace.call("test/1:captured", 64, turn):
                pass
        shared.order = usual
    jobs.ping_and_check(workspace)
    with workspace.call("test/2:after", 64) as call:
        assert call.slot == 0


def test_a_rank_that_captures_alone(rank_pools: RankPools) -> None:
    rank_pools.get("cpu", 2).run(_captures_alone)


def test_a_node_of_a_graph_gives_its_number_to_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "workspaces", SimpleNamespace(get=lambda *given: make_shared()))
    node = MatmulAllReduce("sum", 2, "0", "3f9c01ab/2:matmul_all_reduce@key", Policy())
    assert planning.launch_of(node, torch.device("cpu"), torch.float32, [8]).turn == 2
    assert planning.launch_of(replace(node, site="ops"), torch.device("cpu"), torch.float32, [8]).turn is None
