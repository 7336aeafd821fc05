"""Which events a call waits for, with streams and events that only write down what was asked of them.

What the driver does with them is tested on GPUs, in test_cuda_workspace.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from ditron_inductor.device import streams
from ditron_inductor.device.streams import StreamOrder
from ditron_inductor.errors import DitronCaptureError


@dataclass(eq=False)
class FakeEvent:
    """What it stands for: all that had been put on a stream when it was recorded."""

    recorded_on: str = ""
    capture: int = 0
    covers: int = 0

    def record(self, stream: FakeStream) -> None:
        assert not stream.destroyed, "the driver does not know this stream any more"
        self.recorded_on, self.capture, self.covers = stream.name, stream.capture, stream.calls
        stream.records += 1


@dataclass(eq=False)
class FakeStream:
    """`capture`: the graph being captured from the stream, 0 for none. `calls`: how many were put on it."""

    name: str
    capture: int = 0
    foreign: bool = False
    destroyed: bool = False
    calls: int = 0
    records: int = 0
    waits: list[str] = field(default_factory=list)
    covered: int = 0

    @property
    def cuda_stream(self) -> int:
        return 1000 * ord(self.name[0])

    @property
    def stream_id(self) -> int:
        return self.cuda_stream if self.foreign else ord(self.name[0])

    def wait_event(self, event: FakeEvent) -> None:
        assert event.capture == self.capture, "the driver would refuse an event of another capture"
        self.waits.append(event.recorded_on)
        self.covered = event.covers


@dataclass
class Gpu:
    current: FakeStream


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    state = Gpu(FakeStream("none"))
    monkeypatch.setattr(streams, "current_handle", lambda index: state.current.cuda_stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: state.current)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.current.capture != 0)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(streams, "capture_id", lambda stream: stream.capture)
    return state


def call(order: StreamOrder, gpu: Gpu, stream: FakeStream) -> list[str]:
    """One call on `stream`; the streams whose calls it waited for. Nested calls do not exist."""
    before = len(stream.waits)
    gpu.current = stream
    assert order.enter() == (stream.capture != 0)
    assert order.stream == stream.cuda_stream
    stream.calls += 1
    order.leave()
    return stream.waits[before:]


def test_one_stream_waits_for_nothing(gpu: Gpu) -> None:
    order, a = StreamOrder(torch.device("cuda:0")), FakeStream("a")
    assert [call(order, gpu, a) for _ in range(3)] == [[], [], []]


def test_another_stream_waits_for_the_last_call(gpu: Gpu) -> None:
    order, a, b, c = StreamOrder(torch.device("cuda:0")), FakeStream("a"), FakeStream("b"), FakeStream("c")
    assert [call(order, gpu, s) for s in (a, b, b, a, c)] == [[], ["a"], [], ["b"], ["a"]]


def test_a_capture_waits_for_no_event_from_outside(gpu: Gpu) -> None:
    order, a, g = StreamOrder(torch.device("cuda:0")), FakeStream("a"), FakeStream("g", capture=1)
    call(order, gpu, a)
    assert call(order, gpu, g) == []


def test_inside_one_capture_streams_wait_for_each_other(gpu: Gpu) -> None:
    order, g, h = StreamOrder(torch.device("cuda:0")), FakeStream("g", capture=1), FakeStream("h", capture=1)
    assert [call(order, gpu, s) for s in (g, h, g, g)] == [[], ["g"], ["h"], []]


def test_an_event_of_an_earlier_capture_is_stale_even_while_its_stream_captures_again(gpu: Gpu) -> None:
    order, g, h = StreamOrder(torch.device("cuda:0")), FakeStream("g", capture=1), FakeStream("h", capture=2)
    call(order, gpu, g)
    g.capture = 2
    assert call(order, gpu, h) == []
    assert call(order, gpu, g) == ["h"]


def test_after_a_capture_the_last_call_outside_still_counts(gpu: Gpu) -> None:
    order, a, b, g = StreamOrder(torch.device("cuda:0")), FakeStream("a"), FakeStream("b"), FakeStream("g", capture=1)
    call(order, gpu, a)
    call(order, gpu, g)
    g.capture = 0
    assert call(order, gpu, b) == ["a"]
    assert call(order, gpu, g) == ["b"]


def test_nothing_is_recorded_until_the_stream_changes(gpu: Gpu) -> None:
    order, a, b = StreamOrder(torch.device("cuda:0")), FakeStream("a"), FakeStream("b")
    for _ in range(3):
        call(order, gpu, a)
    assert a.records == 0
    assert call(order, gpu, b) == ["a"]
    assert a.records == 1 and b.covered == 3, "the event is behind all calls of the old stream"


def test_a_stream_that_may_be_destroyed_is_recorded_after_every_call(gpu: Gpu) -> None:
    order, foreign, b = StreamOrder(torch.device("cuda:0")), FakeStream("f", foreign=True), FakeStream("b")
    for _ in range(3):
        call(order, gpu, foreign)
    assert foreign.records == 3
    foreign.destroyed = True
    assert call(order, gpu, b) == ["f"] and b.covered == 3
    call(order, gpu, b)
    assert b.records == 0


def test_the_default_stream_is_not_foreign(gpu: Gpu) -> None:
    default = FakeStream("\0")
    assert default.cuda_stream == 0 and not streams.is_foreign(default)  # type: ignore[arg-type]


def test_no_event_is_recorded_into_the_users_capture(gpu: Gpu) -> None:
    order, a, b = StreamOrder(torch.device("cuda:0")), FakeStream("a"), FakeStream("b")
    call(order, gpu, a)
    a.capture = 1
    with pytest.raises(DitronCaptureError, match="stream of the last call"):
        call(order, gpu, b)
    assert a.records == 0 and b.waits == []
    a.capture = 0
    assert call(order, gpu, b) == ["a"]


def test_a_call_that_fails_on_a_new_stream_has_still_waited(gpu: Gpu) -> None:
    order, a, b, c = StreamOrder(torch.device("cuda:0")), FakeStream("a"), FakeStream("b"), FakeStream("c")
    call(order, gpu, a)
    gpu.current = b
    order.enter()
    assert b.waits == ["a"]
    assert call(order, gpu, c) == ["b"], "b has waited for a, so c is ordered after both"
