"""What `chunked` queues on which stream and what it waits for: the same in every call, and little work for the host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ditron_inductor.device import slot_layout
from ditron_inductor.device.lanes import StreamLane
from ditron_inductor.lowering.all_gather_matmul import chunked as gather
from ditron_inductor.lowering.all_reduce import chunked as reduce
from ditron_inductor.lowering.matmul_reduce_scatter import chunked as scatter
from ditron_inductor.lowering.schedules import Gathering, Piece, Reduction
from ditron_inductor.task.nodes import AllGatherMatmul, MatmulAllReduce, MatmulReduceScatter, Policy
from tests.lowering.recording import WORLD, FakeOrder, Log, make_launch, record

POLICY = Policy("chunked", 1 << 30, 30.0)
Call = Callable[[], Any]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    return record(monkeypatch)


def a_gather(
    log: Log, shape: tuple[int, ...], gather_dim: int, groups: Any = None, whole: tuple[int, ...] = ()
) -> Call:
    """With two weights, and the gathered tensor as a result; what is no group is a rank's."""
    launch = a_site(log)
    node = AllGatherMatmul(gather_dim, WORLD, "g", True, "s", POLICY, 2)
    shard = torch.zeros(shape)
    weights = [torch.zeros(shape[-1], columns) for columns in (24, 48)]
    sizes = gather.geometry(node, launch, shard, 72, shape[-1])
    cut = groups or tuple((Piece(step, 0, sizes.rows),) for step in range(1, WORLD))
    sizes = replace(sizes, schedule=lambda widths: Gathering(cut, whole))
    return lambda: gather.all_gather_matmul(node, launch, sizes, shard, weights)


def a_scatter(log: Log, shape: tuple[int, ...], scatter_dim: int, cut: Reduction | None = None) -> Call:
    launch = a_site(log)
    node = MatmulReduceScatter(scatter_dim, "sum", WORLD, "g", "s", POLICY)
    a, b = torch.zeros(shape), torch.zeros(shape[-1], 24)
    sizes = scatter.geometry(node, launch, a, 24, shape[-1])
    if cut is not None:
        sizes = replace(sizes, cut=cut)
    return lambda: scatter.matmul_reduce_scatter(node, launch, sizes, [a], [b])


def a_reduce(log: Log, rows: int, parts: int, groups: tuple[tuple[int, int], ...]) -> Call:
    launch = a_site(log)
    node = MatmulAllReduce("avg", WORLD, "g", "s", POLICY)
    a, b = torch.zeros(rows, 32), torch.zeros(32, 24)
    length = -(-rows // (parts * WORLD))
    stride = -(-length * 24 // 128) * 128
    sizes = replace(
        reduce.parts_geometry(node, launch, a, 24, 32),
        parts=parts,
        length=length,
        groups=groups,
        stride=stride,
        results=parts * (WORLD - 1) * stride,
        nbytes=parts * WORLD * stride * 4,
    )
    return lambda: reduce.reduced_sum(node, launch, sizes, [a], [b])


def a_site(log: Log) -> Any:
    order = FakeOrder(log)
    return make_launch(StreamLane(torch.device("cuda", 0), order), order)


THREE_GROUPS = (
    (Piece(1, 0, 64),),
    (Piece(2, 0, 32), Piece(2, 32, 64), Piece(3, 0, 32)),
    (Piece(3, 32, 64),),
)
ONE_GROUP = (tuple(Piece(step, 0, 64) for step in (1, 2, 3)),)
CALLS: dict[str, tuple[Callable[[Log], Call], str]] = {
    "gather": (
        lambda log: a_gather(log, (64, 32), 0, THREE_GROUPS),
        """
        main: stage, 64x32 @ 24, 64x32 @ 48, <- side 5, 32x32 @ 24, 32x32 @ 48, 64x32 @ 24, 64x32 @ 48, <-
            second 7, <- side 6, close_slot
        side: <- main 0, await_all 0, copy 8192, copy 8192, copy 4096, copy 4096
        second: <- main 0, <- side 3, 64x32 @ 24, 64x32 @ 48, <- side 6, 32x32 @ 24, 32x32 @ 48
        """,
    ),
    "gather, inner dimension": (
        lambda log: a_gather(log, (2, 16, 32), 1),
        """
        main: stage, copy 4096, 2x16x32 @ 24, 2x16x32 @ 48, <- side 4, 2x16x32 @ 24, 2x16x32 @ 48, <- second
            7, <- side 5, close_slot
        side: <- main 0, await_all 0, copy 2 x 2048, copy 2 x 2048, copy 2 x 2048
        second: <- main 0, <- side 3, 2x16x32 @ 24, 2x16x32 @ 48, <- side 5, 2x16x32 @ 24, 2x16x32 @ 48
        """,
    ),
    "gather, one at once": (
        lambda log: a_gather(log, (64, 32), 0, THREE_GROUPS, (1,)),
        """
        main: stage, 64x32 @ 24, <- side 5, 32x32 @ 24, 64x32 @ 24, <- main 1, <- side 6, 256x32 @ 48, <-
            second 5, <- side 6, close_slot
        side: <- main 0, await_all 0, copy 8192, copy 8192, copy 4096, copy 4096
        second: <- main 0, <- side 3, 64x32 @ 24, <- side 6, 32x32 @ 24
        """,
    ),
    "gather, inner dimension, one at once": (
        lambda log: a_gather(log, (2, 16, 32), 1, None, (0,)),
        """
        main: stage, copy 4096, 2x16x32 @ 48, <- side 4, 2x16x32 @ 48, <- main 2, <- side 5, 128x32 @ 24, <-
            second 5, <- side 5, close_slot
        side: <- main 0, await_all 0, copy 2 x 2048, copy 2 x 2048, copy 2 x 2048
        second: <- main 0, <- side 3, 2x16x32 @ 48, <- side 5, 2x16x32 @ 48
        """,
    ),
    "scatter": (
        lambda log: a_scatter(log, (256, 32), 0, Reduction(2, ((0, 1), (1, 3), (4, 2)))),
        """
        main: open_slot, 32x32 @ 24, publish_pieces 0 1 2 0, 64x32 @ 24, publish_pieces 4 2 2 0, <- second
            4, <- side 11, reduce_partials 0
        side: <- main 1, <- main 2, await_pieces 0 1 2 0, copy 3072, <- second 2, await_pieces 1 3 2 0, copy
            3072, copy 6144, <- main 4, await_pieces 4 2 2 0, copy 6144
        second: <- main 1, 96x32 @ 24, publish_pieces 1 3 2 0, 64x32 @ 24
        """,
    ),
    "scatter, inner dimension": (
        lambda log: a_scatter(log, (2, 128, 32), 1),
        """
        main: open_slot, 2x32x32 @ 24, publish_pieces 0 1 1 0, 2x32x32 @ 24, publish_pieces 2 1 1 0, <-
            second 4, <- side 10, reduce_partials 0
        side: <- main 1, <- main 2, await_pieces 0 1 1 0, copy 6144, <- second 2, await_pieces 1 1 1 0, copy
            6144, <- main 4, await_pieces 2 1 1 0, copy 6144
        second: <- main 1, 2x32x32 @ 24, publish_pieces 1 1 1 0, 2x32x32 @ 24
        """,
    ),
    "reduce": (
        lambda log: a_reduce(log, 250, 2, ((0, 1), (1, 2))),
        """
        main: open_slot, 32x32 @ 24, publish_pieces 0 1 1 0, 32x32 @ 24, 32x32 @ 24, publish_pieces 1 2 1 0,
            32x32 @ 24, 32x32 @ 24, publish_pieces 0 1 1 1, 26x32 @ 24, 32x32 @ 24, publish_pieces 1 2 1 1,
            32x32 @ 24, <- side 27, close_slot
        side: <- main 1, <- main 2, await_pieces 0 1 1 0, copy 3072, <- main 5, await_pieces 1 2 1 0, copy
            3072, copy 3072, <- main 7, reduce_partials 16, <- main 8, await_pieces 0 1 1 1, copy 3072, <-
            main 11, await_pieces 1 2 1 1, copy 3072, copy 3072, <- main 13, await_all 16, copy 3072, copy
            3072, copy 3072, reduce_partials 17, await_all 17, copy 3072, copy 2496, copy 3072
        """,
    ),
    "reduce, empty runs": (
        lambda log: a_reduce(log, 5, 2, ((0, 3),)),
        """
        main: open_slot, 1x32 @ 24, 1x32 @ 24, 1x32 @ 24, publish_pieces 0 3 1 0, 1x32 @ 24, 1x32 @ 24,
            publish_pieces 0 3 1 1, <- side 18, close_slot
        side: <- main 1, <- main 4, await_pieces 0 3 1 0, copy 96, copy 96, copy 96, <- main 6,
            reduce_partials 16, <- main 7, await_pieces 0 3 1 1, <- main 8, await_all 16, copy 96, copy 96,
            copy 96, reduce_partials 17, await_all 17, copy 96
        """,
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_order_on_every_stream(log: Log, name: str) -> None:
    make, expected = CALLS[name]
    call = make(log)
    # Each slot, and each of them again.
    for _ in range(2 * slot_layout.NUM_SLOTS):
        call()
        assert log.take().split() == expected.split()


@pytest.mark.parametrize("name", CALLS)
def test_a_capture_has_its_own_events_and_no_call_makes_more(log: Log, name: str) -> None:
    make, expected = CALLS[name]
    call = make(log)
    call()
    made = len(log.events)
    call()
    assert len(log.events) == made
    log.capturing = True
    call()
    assert len(log.events) == 2 * made
    log.capturing = False
    log.take()
    call()
    assert len(log.events) == 2 * made and log.take().split() == expected.split()


def test_calls_from_another_stream_come_back_to_it(log: Log) -> None:
    call = a_scatter(log, (256, 32), 0, Reduction(2, ((0, 1), (1, 3), (4, 2))))
    call()
    log.take()
    first = log.main
    log.main = log.current = log.stream("other", 9)
    call()
    text = log.take()
    assert "other: open_slot" in text and "main" not in text
    log.main = log.current = first
    call()
    assert "main: open_slot" in log.take()


class Operators(TorchDispatchMode):
    """Counts what torch runs, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("make", "expected", "switches"),
    [
        # Outputs; one split for each tensor of rows.
        (lambda log: a_gather(log, (64, 32), 0, ONE_GROUP), {"new_empty": 3, "split_with_sizes": 3}, 2),
        # The output and the partials; the rows of a; where the own product goes.
        (lambda log: a_scatter(log, (256, 32), 0), {"new_empty": 2, "split_with_sizes": 1, "slice": 1}, 4),
        (lambda log: a_reduce(log, 256, 1, ((0, 3),)), {"new_empty": 2, "split_with_sizes": 1, "slice": 3}, 0),
    ],
    ids=["gather", "scatter", "reduce"],
)
def test_what_a_call_costs_the_host(
    log: Log, make: Callable[[Log], Call], expected: dict[str, int], switches: int
) -> None:
    call = make(log)
    for _ in range(slot_layout.NUM_SLOTS):
        call()
    log.switches = 0
    with Operators() as operators:
        call()
    assert operators.found == expected and log.switches == switches
