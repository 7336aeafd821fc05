"""What GPU ranks run besides tests/device/jobs.py: streams and CUDA graphs."""

from __future__ import annotations

import ctypes
import random
import time

import torch
import torch.distributed as dist

from ditron_inductor.device import Workspace, reset
from ditron_inductor.device.slot_layout import NUM_SLOTS
from ditron_inductor.device.streams import is_foreign
from tests.device.jobs import LIMIT_S, caught, expected, opened, ping
from tests.rank_process import RankContext

DELAY_CYCLES = 20_000_000


class Uses:
    """Counts the uses of each slot, as the device does, over eager calls and replays."""

    def __init__(self) -> None:
        self.calls = 0
        self.epochs = [0] * NUM_SLOTS

    def host_call(self) -> int:
        """The slot of the next call that the host makes, eager or while capturing."""
        self.calls += 1
        return (self.calls - 1) % NUM_SLOTS

    def run(self, slot: int) -> int:
        """The epoch of the next execution on `slot`."""
        self.epochs[slot] += 1
        return self.epochs[slot]


def eager(workspace: Workspace, uses: Uses) -> None:
    out = ping(workspace)
    assert out.tolist() == expected(workspace, uses.run(uses.host_call()))


def capture(
    workspace: Workspace, uses: Uses, num_calls: int
) -> tuple[torch.cuda.CUDAGraph, list[torch.Tensor], list[int]]:
    """A graph of some calls, their outputs, and the slots that are baked into it."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [ping(workspace) for _ in range(num_calls)]
    return graph, outs, [uses.host_call() for _ in range(num_calls)]


def streams_take_turns(ctx: RankContext, num_calls: int) -> None:
    """Calls on changing streams, never synchronised by the caller, one rank's streams delayed at random."""
    _, workspace = opened(ctx)
    ping(workspace)
    ping(workspace)
    chance = random.Random(ctx.rank)
    streams = [torch.cuda.Stream() for _ in range(3)]
    outs = []
    for call in range(num_calls):
        with torch.cuda.stream(streams[call % 3]):
            if chance.random() < 0.3:
                torch.cuda._sleep(DELAY_CYCLES)
            outs.append(ping(workspace))
    torch.cuda.synchronize()
    for call, out in enumerate(outs):
        assert out.tolist() == expected(workspace, call // 2 + 2)


def foreign_streams_come_and_go(ctx: RankContext) -> None:
    """Calls on streams that somebody else made, and destroys while their calls may still be running."""
    _, workspace = opened(ctx)
    uses = Uses()
    driver = ctypes.CDLL("libcuda.so.1")
    outs = []
    for turn in range(6):
        handle = ctypes.c_void_p()
        assert driver.cuStreamCreate(ctypes.byref(handle), 1) == 0
        with torch.cuda.stream(torch.cuda.ExternalStream(handle.value)):
            assert is_foreign(torch.cuda.current_stream())
            torch.cuda._sleep(DELAY_CYCLES * (turn % 2))
            outs += [(ping(workspace), uses.run(uses.host_call())) for _ in range(3)]
        assert driver.cuStreamDestroy_v2(handle) == 0
        assert not is_foreign(torch.cuda.current_stream()) and not is_foreign(torch.cuda.Stream())
        outs.append((ping(workspace), uses.run(uses.host_call())))
    torch.cuda.synchronize()
    for out, epoch in outs:
        assert out.tolist() == expected(workspace, epoch)


def graphs_and_eager_calls_mix(ctx: RankContext, num_rounds: int) -> None:
    """Two graphs and eager calls in random order, equal on all ranks, with random delays on one of them."""
    _, workspace = opened(ctx)
    uses = Uses()
    eager(workspace, uses)
    eager(workspace, uses)
    graphs = [capture(workspace, uses, num_calls) for num_calls in (3, 1)]
    order = random.Random(7)
    for _ in range(num_rounds):
        choice = order.randrange(3)
        if ctx.rank == 0 and choice == 1:
            time.sleep(0.01)
        if choice == 2:
            eager(workspace, uses)
            continue
        graph, outs, slots = graphs[choice]
        graph.replay()
        epochs = [uses.run(slot) for slot in slots]
        for out, epoch in zip(outs, epochs, strict=True):
            assert out.tolist() == expected(workspace, epoch)


def streams_inside_a_graph(ctx: RankContext) -> None:
    """A capture that forks: calls on both branches are ordered inside the graph, which replays right."""
    _, workspace = opened(ctx)
    uses = Uses()
    eager(workspace, uses)
    eager(workspace, uses)
    side = torch.cuda.Stream()
    for _ in range(2):  # the second capture meets the events of the first
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            main = torch.cuda.current_stream()
            side.wait_stream(main)
            outs = []
            for call in range(4):
                with torch.cuda.stream(side if call % 2 == 0 else main):
                    outs.append(ping(workspace))
            main.wait_stream(side)
        slots = [uses.host_call() for _ in range(4)]
        for _ in range(5):
            graph.replay()
            epochs = [uses.run(slot) for slot in slots]
            for out, epoch in zip(outs, epochs, strict=True):
                assert out.tolist() == expected(workspace, epoch)
        eager(workspace, uses)
        eager(workspace, uses)


def growth_leaves_graphs_alone(ctx: RankContext) -> tuple[str, str]:
    """Slots do not grow inside a capture; grown outside, an older graph still replays right, also after a reset."""
    registry, workspace = opened(ctx)
    uses = Uses()
    eager(workspace, uses)
    eager(workspace, uses)
    graph, outs, slots = capture(workspace, uses, 2)

    def grow_in_capture() -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            ping(workspace, nbytes=3_000_000)

    error = caught(grow_in_capture)
    before = workspace.nbytes
    new = Uses()
    for _ in range(4):
        assert ping(workspace, nbytes=3_000_000).tolist() == expected(workspace, new.run(new.host_call()))
    assert workspace.nbytes > before + 3_000_000, "the ring that the graph holds has to stay"
    for _ in range(3):
        graph.replay()
        epochs = [uses.run(slot) for slot in slots]
        assert [out.tolist() for out in outs] == [expected(workspace, epoch) for epoch in epochs]
    dist.barrier()
    reset(registry=registry, timeout_s=LIMIT_S)
    graph.replay()
    assert [out.tolist() for out in outs] == [expected(workspace, 1)] * 2
    return error
