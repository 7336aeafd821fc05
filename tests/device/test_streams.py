"""Which events a call waits for, with streams and events that only write down what was asked of them.

What the driver does with them is tested on GPUs, in test_cuda_workspace.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from ditron_inductor.device import streams
from ditron_inductor.device.streams import StreamOrder


@dataclass(eq=False)
class FakeEvent:
    recorded_on: str = ""
    capture: int = 0

    def record(self, stream: FakeStream) -> None:
        self.recorded_on, self.capture = stream.name, stream.capture


@dataclass(eq=False)
class FakeStream:
    """`capture`: the graph being captured from the stream, 0 for none."""

    name: str
    capture: int = 0
    waits: list[str] = field(default_factory=list)

    def wait_event(self, event: FakeEvent) -> None:
        assert event.capture == self.capture, "the driver would refuse an event of another capture"
        self.waits.append(event.recorded_on)


@dataclass
class Gpu:
    current: FakeStream


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    state = Gpu(FakeStream("none"))
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
