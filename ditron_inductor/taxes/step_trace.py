"""A trace of one step: what every program of the traced kernels did and when, on all ranks by one clock.

It is written as JSON for https://ui.perfetto.dev or chrome://tracing. Each rank is a process, with one row for the
sites and one row for each program of each SM. Waits are nested in their tiles.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ditron_inductor.core import layout, trace
from ditron_inductor.lowering.host.tracing import TraceBuffer, clock_of, tracing

if TYPE_CHECKING:
    from ditron_inductor.report.timing import Clock

CAPACITY = 1 << 17
"""The most events of one rank, which take 8 MiB."""
NAMES = {
    int(trace.TILE.value): "tile",
    int(trace.WAIT.value): "wait",
    int(trace.CREDITS.value): "wait for credits",
    int(trace.SEND.value): "send",
    int(trace.COPY.value): "copy",
    int(trace.SUM.value): "sum",
    int(trace.END.value): "end",
}
WAITS = (int(trace.WAIT.value), int(trace.CREDITS.value))
DETAILS = {"wait": "chunk", "send": "chunk", "end": "program"}
"""What the detail of an event counts, by the kind of the event; where it is not here, tiles."""
LANES = 16
"""The most rows of one SM. If there are more programs, they share rows."""
PROGRAM_MASK = (1 << layout.EVENT_PROGRAM_BITS.value) - 1
READS = 20
APART_S = 0.05


@dataclass(frozen=True)
class Alignment:
    """Relates the clocks of a rank's device and host: host ns = offset_ns + ticks * ns_per_tick, within error_ns."""

    offset_ns: float = 0.0
    ns_per_tick: float = 1.0
    error_ns: float = 0.0


@dataclass(frozen=True)
class Event:
    """What one program of `programs` did, on the host's clock. use: the site's number and the epoch."""

    kind: int
    use: int
    program: int
    sm: int
    detail: int
    peer: int
    begin_ns: float
    end_ns: float
    programs: int = 1


@dataclass(frozen=True)
class RankTrace:
    """The part of one rank in a trace. sites: texts by number. dropped: events for which the buffer had no place."""

    rank: int
    events: tuple[Event, ...]
    sites: dict[int, str]
    alignment: Alignment
    dropped: int

    def site(self, event: Event) -> str:
        return self.sites.get(event.use >> layout.EPOCH_BITS.value, "?")


@dataclass(frozen=True)
class Trace:
    """The trace of one step on all ranks."""

    ranks: tuple[RankTrace, ...]

    @property
    def dropped(self) -> int:
        return sum(rank.dropped for rank in self.ranks)

    def waited_us(self) -> dict[str, float]:
        """Returns for each site the mean wait of a program, in all calls together; the largest of any rank."""
        found: dict[str, float] = {}
        for rank in self.ranks:
            for site, us in _waited(rank).items():
                found[site] = max(us, found.get(site, 0.0))
        return found

    def json(self) -> dict[str, Any]:
        """Returns the trace in Chrome's format; times are in microseconds since the first event of any rank."""
        begins = [event.begin_ns for rank in self.ranks for event in rank.events]
        first = min(begins, default=0.0)
        rows = [row for rank in self.ranks for row in _rows(rank, first)]
        errors = {str(rank.rank): rank.alignment.error_ns / 1e3 for rank in self.ranks}
        dropped = {str(rank.rank): rank.dropped for rank in self.ranks}
        other = {"ranks are aligned to within us": errors, "events dropped": dropped}
        return {"traceEvents": rows, "displayTimeUnit": "ns", "otherData": other}

    def save(self, path: str | Path) -> None:
        """Writes `json` to a file."""
        Path(path).write_text(json.dumps(self.json()))


def take_trace(clock: Clock, step: Callable[[int], Any], capacity: int = CAPACITY) -> tuple[Trace | None, str]:
    """Returns a trace of one step, or None and why there is none. Collective; the result is equal on all ranks."""
    arch, number = _clock(clock.device)
    unable = [reason for reason in clock.agree("" if number is not None else arch) if reason]
    if unable or number is None:
        return None, f"no trace: kernels on {unable[0]} have no clock that is known here"
    buffer = TraceBuffer(clock.device, capacity)
    with tracing.into(buffer):
        # This step compiles the traced kernels.
        step(0)
        _synchronize(clock.device)
        buffer.clear()
        # The ranks begin together, so that waiting for a rank that is behind does not count as a wait of the step.
        clock.agree(None)
        alignment = _align(clock.device, number)
        clock.largest([0.0])
        step(0)
        _synchronize(clock.device)
        taken, dropped = buffer.take()
    events = tuple(_events(taken.tolist(), alignment))
    mine = RankTrace(torch.distributed.get_rank(clock.group), events, buffer.sites, alignment, dropped)
    return Trace(tuple(clock.agree(mine))), ""


def _clock(device: torch.device) -> tuple[str, int | None]:
    """Returns (the kind of the device, the clock of its kernels)."""
    from ditron_inductor.device.capabilities import probe

    arch = "interpreter" if device.type == "cpu" else probe(device).arch
    return arch, clock_of(arch)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _align(device: torch.device, number: int) -> Alignment:
    """Returns the clocks' alignment by the quickest of several reads of the device's between two of the host's."""
    if device.type != "cuda":
        return Alignment()
    out = torch.zeros(1, dtype=torch.int64, device=device)

    def quickest() -> tuple[int, int, int]:
        reads = []
        for _ in range(READS):
            torch.cuda.synchronize(device)
            begin = time.perf_counter_ns()
            trace.read_clock[(1,)](out, TRACE=number)
            torch.cuda.synchronize(device)
            end = time.perf_counter_ns()
            reads.append((end - begin, (begin + end) // 2, int(out.item())))
        return min(reads)

    taken, host, ticks = quickest()
    rate = 1.0
    if number == trace.AMD.value:
        time.sleep(APART_S)
        _, later, later_ticks = quickest()
        rate = (later - host) / (later_ticks - ticks)
    return Alignment(host - ticks * rate, rate, taken / 2)


def _events(rows: Sequence[Sequence[int]], alignment: Alignment) -> Iterator[Event]:
    for row in rows:
        begin, end = (
            alignment.offset_ns + row[place.value] * alignment.ns_per_tick
            for place in (layout.EVENT_BEGIN, layout.EVENT_END)
        )
        yield Event(
            kind=row[layout.EVENT_KIND.value],
            use=row[layout.EVENT_USE.value],
            program=row[layout.EVENT_PROGRAM.value] & PROGRAM_MASK,
            sm=row[layout.EVENT_SM.value],
            detail=row[layout.EVENT_DETAIL.value],
            peer=row[layout.EVENT_PEER.value],
            begin_ns=begin,
            end_ns=end,
            programs=row[layout.EVENT_PROGRAM.value] >> layout.EVENT_PROGRAM_BITS.value,
        )


def _waited(rank: RankTrace) -> dict[str, float]:
    """Returns by site the microseconds that a program of each launch waited, on average, all launches together."""
    found: dict[str, float] = {}
    for event in rank.events:
        site = rank.site(event).partition(" ")[0]
        us = (event.end_ns - event.begin_ns) / 1e3 if event.kind in WAITS else 0.0
        found[site] = found.get(site, 0.0) + us / event.programs
    return found


def _rows(rank: RankTrace, first_ns: float) -> Iterator[dict[str, Any]]:
    """Yields the rank's entries in Chrome's format."""
    yield _named("process_name", rank.rank, 0, f"rank {rank.rank}")
    yield _named("thread_name", rank.rank, 0, "sites")
    spans: dict[int, tuple[float, float]] = {}
    lanes = _lanes(rank.events)
    rows = {(event.sm, lanes[_place(event)]) for event in rank.events}
    for sm, lane in sorted(rows):
        name = f"SM {sm}" + (f", program {lane + 1}" if lane else "")
        yield _named("thread_name", rank.rank, 1 + sm * LANES + lane, name)
    for event in rank.events:
        begin, end = spans.get(event.use, (event.begin_ns, event.end_ns))
        spans[event.use] = min(begin, event.begin_ns), max(end, event.end_ns)
        name = NAMES[event.kind]
        yield _span(
            name,
            rank.rank,
            1 + event.sm * LANES + lanes[_place(event)],
            (event.begin_ns - first_ns, event.end_ns - first_ns),
            {
                "site": rank.site(event),
                DETAILS.get(name, "tile"): event.detail,
                "rank": event.peer,
                "program": event.program,
                "epoch": event.use & layout.EPOCH_MASK.value,
            },
        )
    for use, (begin, end) in spans.items():
        text = rank.sites.get(use >> layout.EPOCH_BITS.value, "?")
        epoch = {"epoch": use & layout.EPOCH_MASK.value}
        yield _span(text.partition(" ")[0], rank.rank, 0, (begin - first_ns, end - first_ns), {"site": text, **epoch})


Place = tuple[int, int, tuple[int, int, bool]]


def _place(event: Event) -> Place:
    """Returns (use, SM, what has a row of its own on the SM). The last is a program of a launch, as far as launches of
    one use can be distinguished. A program that only waits runs beside those that tell the peers something.
    """
    waits = event.programs == 1 and event.kind in WAITS
    return event.use, event.sm, (event.program, event.programs, waits)


def _lanes(events: Sequence[Event]) -> dict[Place, int]:
    """Returns for each place its row among those of its SM: programs on one SM run side by side."""
    programs: dict[tuple[int, int], set[tuple[int, int, bool]]] = {}
    for event in events:
        use, sm, program = _place(event)
        programs.setdefault((use, sm), set()).add(program)
    return {
        (use, sm, program): lane % LANES
        for (use, sm), found in programs.items()
        for lane, program in enumerate(sorted(found))
    }


def _named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


def _span(name: str, process: int, thread: int, ns: tuple[float, float], args: dict[str, Any]) -> dict[str, Any]:
    begin, end = ns
    return {
        "ph": "X",
        "name": name,
        "cat": "wait" if name.startswith("wait") else "work",
        "pid": process,
        "tid": thread,
        "ts": begin / 1e3,
        "dur": (end - begin) / 1e3,
        "args": args,
    }
