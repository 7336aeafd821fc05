"""One rank of a group that is not there, on streams that only write down what is queued on them.

Calls of `chunked` run with the real lane and workspace code, on CPU tensors; kernels, products and copies do nothing
but leave a line. A line names what was queued; `<- stream n` says that the stream waits for an event that was recorded
behind the first n lines of another one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ditron_inductor.core import layout as words
from ditron_inductor.device import driver, slot_layout
from ditron_inductor.device.handshake import AgreedOptions
from ditron_inductor.device.ring import Generation
from ditron_inductor.device.workspace import Workspace
from ditron_inductor.lowering.host.launch import Launch
from ditron_inductor.lowering.host.launcher import Bound

WORLD = 4
RANK = 1
SLOT_BYTES = 1 << 20
MAIN = 7
"""Handle of the stream on which calls are made."""


@dataclass(eq=False)
class FakeStream:
    log: Log
    name: str
    cuda_stream: int
    priority: int = 0
    lines: list[str] = field(default_factory=list)

    device_index = 0
    device_type = 1

    @property
    def stream_id(self) -> int:
        return self.cuda_stream

    def wait_event(self, event: FakeEvent) -> None:
        event.wait(self)


@dataclass(eq=False)
class FakeEvent:
    recorded: str = ""

    def record(self, stream: FakeStream) -> None:
        self.recorded = f"{stream.name} {len(stream.lines)}"

    def wait(self, stream: FakeStream) -> None:
        stream.lines.append(f"<- {self.recorded}")


class Log:
    """What was queued on the streams `main`, `side` and `second`. capturing: whether `main` is part of a capture."""

    def __init__(self) -> None:
        self.streams: dict[int, FakeStream] = {}
        self.main = self.current = self.stream("main", MAIN)
        self.capturing = False
        self.events: list[FakeEvent] = []
        self.switches = 0

    def stream(self, name: str, handle: int) -> FakeStream:
        self.streams[handle] = FakeStream(self, name, handle)
        return self.streams[handle]

    def new_stream(self, device: Any, priority: int = 0) -> FakeStream:
        return self.stream("side" if priority else "second", 100 + len(self.streams))

    def new_event(self) -> FakeEvent:
        self.events.append(FakeEvent())
        return self.events[-1]

    def set_stream(self, *, stream_id: int, device_index: int, device_type: int) -> None:
        self.switches += 1
        self.current = self.streams[stream_id]

    def take(self) -> str:
        """The lines since the last time, by stream."""
        assert self.current is self.main, "the caller's stream is the current one again"
        taken = [f"{stream.name}: {', '.join(stream.lines)}" for stream in self.streams.values() if stream.lines]
        for stream in self.streams.values():
            stream.lines = []
        return "\n".join(taken)


def make_launch(lane: Any, order: Any, world_size: int = WORLD, rank: int = RANK) -> Launch:
    """A site of a workspace whose peers are not there."""
    heaps = [torch.zeros(slot_layout.heap_bytes(SLOT_BYTES), dtype=torch.uint8) for _ in range(world_size)]
    generation = Generation(
        "fake",
        SimpleNamespace(view=lambda rank: heaps[rank], local=heaps[rank]),  # type: ignore[arg-type]
        SLOT_BYTES,
        torch.zeros(world_size, dtype=torch.int64),
        torch.zeros(words.RECORD.value + 64, dtype=torch.int64),
        torch.zeros(64, dtype=torch.int32),
    )
    shared = SimpleNamespace(
        device=torch.device("cpu"),
        group=SimpleNamespace(rank=rank, world_size=world_size),
        capabilities=SimpleNamespace(num_sms=132, arch="sm_90"),
        lane=lane,
        order=order,
        scratch=None,
        calls=0,
        fail=lambda error: None,
        end=lambda: None,
    )

    def begin(
        site: str, nbytes: int, limit: int, timeout_s: float, first_timeout_s: float, turn: int | None = None
    ) -> tuple[Generation, int, int]:
        assert nbytes <= SLOT_BYTES
        order.enter()
        shared.calls += 1
        return generation, (shared.calls - 1) % slot_layout.NUM_SLOTS, 4242

    shared.begin = begin
    return Launch(Workspace(shared, AgreedOptions("chunked", 1 << 30, 30.0), 30.0), "fake site")  # type: ignore[arg-type]


class FakeOrder:
    def __init__(self, log: Log) -> None:
        self._log = log
        self.stream = MAIN
        self.capturing = False

    def enter(self) -> bool:
        self.stream, self.capturing = self._log.current.cuda_stream, self._log.capturing
        return self.capturing


def record(monkeypatch: pytest.MonkeyPatch) -> Log:
    """From now on everything that is queued goes to this log."""
    log = Log()
    monkeypatch.setattr(torch.cuda, "Stream", log.new_stream)
    monkeypatch.setattr(torch.cuda, "Event", log.new_event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: log.current)
    monkeypatch.setattr(torch._C, "_cuda_setStream", log.set_stream, raising=False)

    def launched(self: Bound, stream: int, *tensors: Any) -> None:
        assert len(tensors) == len(self._names)
        name = getattr(self.kernel, "__name__", None) or self.kernel.fn.__name__
        log.streams[stream].lines.append(" ".join([name, *map(str, self._numbers)]))

    def product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        assert out.shape == (*a.shape[:-1], b.shape[-1])
        log.current.lines.append(f"{'x'.join(map(str, a.shape))} @ {b.shape[-1]}")

    def copied(target: torch.Tensor, source: torch.Tensor) -> None:
        log.current.lines.append(f"copy {source.numel() * source.element_size()}")

    def copy(target: int, source: int, nbytes: int, stream: int, runs: int = 1, pitch: int = 0) -> None:
        log.streams[stream].lines.append(f"copy {f'{runs} x ' * (runs > 1)}{nbytes}")

    monkeypatch.setattr(Bound, "__call__", launched)
    monkeypatch.setattr(torch, "mm", product)
    monkeypatch.setattr(torch, "bmm", product)
    monkeypatch.setattr(torch.Tensor, "copy_", copied)
    monkeypatch.setattr(driver, "device_copy", lambda: copy)
    return log
