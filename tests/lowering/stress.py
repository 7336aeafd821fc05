"""Problems called many times: in random order by ranks that are late, on two streams, in graphs, in poisoned slots.

Every call has the bits of the problem's first one, whose outputs are compared with the reference.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ditron_inductor.device import slot_layout, workspaces
from tests.lowering.calls import Site
from tests.lowering.problems import Problem, Size
from tests.rank_process import RankContext

# By device and ranks: on the CPU device, ranks that wait take the cores from those that work.
BACK_TO_BACK = {("cpu", 2): 12, ("cpu", 4): 6, ("cuda", 2): 500, ("cuda", 4): 500}
CYCLES_PER_MS = 1_800_000


def delay(ctx: RankContext, milliseconds: float) -> None:
    """Hold up this rank: its stream on a GPU, where the host runs ahead, or the rank itself."""
    if ctx.device.type == "cuda":
        torch.cuda._sleep(int(milliseconds * CYCLES_PER_MS))
    else:
        time.sleep(milliseconds / 1000)


class Mismatches:
    """Counts, on the device and without a sync, outputs whose bits differ from the first ones of the same problem."""

    def __init__(self, ctx: RankContext) -> None:
        self.count = torch.zeros(1, dtype=torch.int64, device=ctx.device)

    def add(self, outputs: list[torch.Tensor], first: list[torch.Tensor]) -> None:
        """Compare one call's outputs."""
        for got, want in zip(outputs, first, strict=True):
            self.count += (got.view(torch.int16) != want.view(torch.int16)).any()

    def assert_none(self, calls_made: int) -> None:
        """AssertionError with the number of wrong calls."""
        wrong = int(self.count.item())
        assert wrong == 0, f"{wrong} outputs of {calls_made} calls differ from the first call with the same operands"


def check_all(problems: Sequence[Problem], outputs: Sequence[list[torch.Tensor]], what: str = "") -> None:
    """AssertionError unless the outputs of every problem are right. Collective."""
    for problem, found in zip(problems, outputs, strict=True):
        problem.check(found, what=what)


def first_outputs(problems: Sequence[Problem]) -> list[list[torch.Tensor]]:
    """What one call of each gives, which is right."""
    first = [problem() for problem in problems]
    check_all(problems, first)
    return first


def call_in_random_order(
    ctx: RankContext, problems: Sequence[Problem], count: int, late_rank: int | None = None
) -> None:
    """Back to back; before some calls one rank, or (None) every rank, is late."""
    first = first_outputs(problems)
    mismatches = Mismatches(ctx)
    milliseconds = (0.0, 0.0, 0.02, 0.2) if late_rank is None else (0.0, 0.02, 0.1, 0.5)
    # The order of the calls is the same on all ranks, the delays are not.
    order, delays = random.Random(ctx.seed), random.Random(ctx.rank)
    for _ in range(count):
        if late_rank is None or ctx.rank == late_rank % ctx.world_size:
            delay(ctx, delays.choice(milliseconds))
        index = order.randrange(len(problems))
        mismatches.add(problems[index](), first[index])
    # Nobody wrote into them since.
    check_all(problems, first)
    mismatches.assert_none(count)


def start_late(ctx: RankContext, problems: Sequence[Problem], late_rank: int) -> None:
    """One rank comes late to the first call of every problem."""
    for problem in problems:
        if ctx.rank == late_rank % ctx.world_size:
            delay(ctx, 300)
        for outputs in [problem() for _ in range(3)]:
            problem.check(outputs, what="late start:")


def fill_slots(ctx: RankContext) -> None:
    """0xFF, a NaN in every floating-point type, into all data of this rank's slots, while no rank runs a kernel."""

    def all_ranks_idle() -> None:
        if ctx.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()

    all_ranks_idle()
    found = workspaces.of_group(dist.distributed_c10d._resolve_process_group(ctx.group_name))
    rings = [generation for shared in found for generation in shared.generations]
    assert rings, "the group has no workspace to poison"
    for ring in rings:
        ring.heap.local[slot_layout.HEADER_BYTES :].fill_(0xFF)
    all_ranks_idle()


def call_in_poisoned_slots(ctx: RankContext, kind: str, size: Size, site: Site) -> None:
    """`check_in_poisoned_slots` of a problem of this kind."""
    check_in_poisoned_slots(ctx, Problem(ctx, kind, size, site=site))


def check_in_poisoned_slots(ctx: RankContext, problem: Problem) -> None:
    """Nothing is read that was not written: slots are full of NaN before a call, and so are outputs when allocated."""
    problem.check(problem())
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(8, dtype=torch.bfloat16, device=ctx.device).isnan().all()
        for _ in range(slot_layout.NUM_SLOTS):
            fill_slots(ctx)
            problem.check(problem())
    finally:
        torch.use_deterministic_algorithms(False)


def call_late_and_poisoned(ctx: RankContext, problems: Sequence[Problem]) -> None:
    """The first problem with a late rank and with slots that hold NaN, then all in a random order."""
    start_late(ctx, problems[:1], late_rank=-1)
    fill_slots(ctx)
    problems[0].check(problems[0](), "poisoned:")
    call_in_random_order(ctx, problems, BACK_TO_BACK[ctx.device.type, ctx.world_size] // 2)


def call_on_two_streams(ctx: RankContext, problems: Sequence[Problem], count: int) -> None:
    """In random order on streams that nothing orders but the workspace itself; every rank is late at times."""
    first = first_outputs(problems)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    mismatches = [Mismatches(ctx) for _ in streams]
    torch.cuda.synchronize()
    order, delays = random.Random(ctx.seed), random.Random(ctx.rank)
    for _ in range(count):
        which = order.randrange(len(streams))
        with torch.cuda.stream(streams[which]):
            delay(ctx, delays.choice((0.0, 0.02, 0.2)))
            index = order.randrange(len(problems))
            mismatches[which].add(problems[index](), first[index])
    for each in mismatches:
        torch.cuda.synchronize()
        each.assert_none(count)


class Captured:
    """The calls of `problems` in one CUDA graph, after one eager call of each."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = problems
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for problem in problems:
                problem()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.outputs = [problem() for problem in problems]

    def replay(self, what: str) -> None:
        """Once, with outputs that are right."""
        self.graph.replay()
        check_all(self.problems, self.outputs, what)


def replay_with_new_operands(ctx: RankContext, problems: Sequence[Problem]) -> None:
    """One graph of all problems; another rank is late at each replay."""
    captured = Captured(problems)
    for replay in range(5):
        for problem in problems:
            problem.refill()
        if ctx.rank == replay % ctx.world_size:
            delay(ctx, 20)
        captured.replay(f"replay {replay}:")


def mix_graphs_with_eager_calls(
    ctx: RankContext,
    eager: Sequence[Problem],
    in_graphs: Sequence[Sequence[Problem]],
    count: int,
    second_priority: int = 0,
) -> None:
    """Graphs of problems, and eager ones, in random order on two streams that the user orders, with ranks that come
    late. `second_priority` is that of the second stream.
    """
    first = first_outputs(eager)
    graphs = [Captured(problems) for problems in in_graphs]
    expected = []
    for index, captured in enumerate(graphs):
        captured.replay(f"graph {index}:")
        expected.append([[x.clone() for x in outputs] for outputs in captured.outputs])
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(), torch.cuda.Stream(priority=second_priority)]
    mismatches = Mismatches(ctx)
    torch.cuda.synchronize()
    order, delays = random.Random(ctx.seed), random.Random(ctx.rank)
    for _ in range(count):
        choice = order.randrange(len(graphs) + len(eager))
        stream = streams[order.randrange(len(streams))]
        # Whoever uses two streams for one group orders replays himself: the host does not see them.
        for other in streams:
            stream.wait_stream(other)
        with torch.cuda.stream(stream):
            if ctx.rank == order.randrange(ctx.world_size):
                delay(ctx, delays.choice((0.0, 0.02, 0.2)))
            if choice < len(graphs):
                graphs[choice].graph.replay()
                for outputs, wanted in zip(graphs[choice].outputs, expected[choice], strict=True):
                    mismatches.add(outputs, wanted)
            else:
                index = choice - len(graphs)
                mismatches.add(eager[index](), first[index])
    torch.cuda.synchronize()
    mismatches.assert_none(count)
