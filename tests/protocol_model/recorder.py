"""What one rank does in Triton's interpreter, as the protocol sees it: its accesses to memory that ranks share.

    with recorded() as events:       # inside a rank process, on the CPU device
        ...                          # calls, resets
    return events                    # plain tuples, to be sent to the test; see traces.py

Accesses are known by their addresses, whoever makes them: below the interpreter's own memory operations stands one that
writes down what it is asked. So nothing has to be told, and nothing is recorded that a kernel only says. Of the host
come the uses of slots, the copies of the second stream, the products that are made in a slot, and the meetings.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch

from ditron_inductor.core import layout as words
from ditron_inductor.device import driver, slot_layout
from ditron_inductor.device.ring import Generation
from ditron_inductor.device.session import Session
from ditron_inductor.device.workspace import SharedWorkspace

Places = Any  # a numpy array of the bytes of a slot or an area


class Event(NamedTuple):
    """One access or act. `name` says which, and which of the fields it has; see the methods of Recorder.

    time: in nanoseconds, of one clock for all ranks of a host; before a store, after a load. group, ring: whose
    words they are. program: (launches of this rank before, number of the program); -1 for the host.
    """

    name: str
    time: int
    group: str
    ring: str
    program: tuple[int, int]
    peer: int = -1
    slot: int = -1
    row: int = -1
    site: int = 0
    epoch: int = 0
    places: Places = None
    text: str = ""


class Ring:
    """Where the memory of a ring lies in this process."""

    def __init__(self, generation: Generation, group: str) -> None:
        self.group = group
        self.name = generation.name
        self.slot_bytes = generation.slot_bytes
        self.bases = [int(address) for address in generation.heap.addresses]
        self.rank = self.bases.index(generation.heap.local.data_ptr())
        self.nbytes = slot_layout.heap_bytes(generation.slot_bytes)
        self.ctl = generation.ctl.data_ptr()


class Recorder:
    """The events of this process."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.rings: dict[str, Ring] = {}
        self.group = ""
        self.ring = ""
        self.launches = 0
        self.in_kernel = False
        self.seen: dict[Any, int] = {}

    def add(self, name: str, ring: str = "", **fields: Any) -> None:
        """An event of a ring, or of the group that meets."""
        group = self.rings[ring].group if ring else self.group
        self.events.append(Event(name, time.perf_counter_ns(), group, ring, (self.launches, self._program()), **fields))

    def know(self, generation: Generation, group: str) -> Ring:
        """The ring of a generation, whose addresses are looked for from now on."""
        ring = self.rings.get(generation.name)
        if ring is None:
            ring = self.rings[generation.name] = Ring(generation, group)
        return ring

    def found(self, addresses: Any) -> Iterator[tuple[Ring, int, Any, Any]]:
        """(ring, rank, which of the addresses, bytes behind the start of its heap) where they are in one; rank -1 for
        the control words."""
        if addresses.size == 0:
            return
        low, high = int(addresses.min()), int(addresses.max())
        for ring in self.rings.values():
            spans = [(ring.ctl, 8 * slot_layout.CTL_WORDS), *((base, ring.nbytes) for base in ring.bases)]
            for rank, (base, nbytes) in enumerate(spans, start=-1):
                if high >= base and low < base + nbytes:
                    inside = (addresses >= base) & (addresses < base + nbytes)
                    if inside.any():
                        yield ring, rank, inside, addresses[inside].astype(np.int64) - base

    # -- what the interpreter is asked for ----------------------------------------------------------------------------

    def loaded(self, addresses: Any, mask: Any, values: Any) -> None:
        """`read` of the data of a slot, `epoch` of a slot, `look` at an area in band, `signed` beside it."""
        flat = addresses[mask]
        for ring, rank, inside, offsets in self.found(flat):
            seen = values[mask][inside]
            if rank < 0:
                for slot in range(slot_layout.NUM_SLOTS):
                    at = offsets == 8 * slot_layout.slot_word(slot, words.EPOCH.value)
                    if at.any():
                        self.add("epoch", ring.name, slot=slot, epoch=int(seen[at][0]))
                continue
            for slot, places in slots_of(ring, offsets, values.dtype.itemsize):
                self.add("read", ring.name, peer=rank, slot=slot, places=places)
            for area, at in areas_of(offsets):
                there = at & (seen != 0)
                self.add("look", ring.name, peer=rank, slot=area, places=offsets[there])
            for (area, source), value in signs_of(offsets, seen):
                if rank == ring.rank and value:
                    self.add("signed", ring.name, peer=source, slot=area, site=value >> 40, epoch=value & EPOCHS)

    def storing(self, addresses: Any, mask: Any, values: Any) -> None:
        """`write` of the data of a slot, `close` of a use, `drop` into an area in band, `clear` of the own one, `sign`,
        and `plain` for a flag or a credit."""
        flat = addresses[mask]
        for ring, rank, inside, offsets in self.found(flat):
            stored = values[mask][inside]
            if rank < 0:
                for slot in range(slot_layout.NUM_SLOTS):
                    at = offsets == 8 * slot_layout.slot_word(slot, words.EPOCH.value)
                    if at.any():
                        self.add("close", ring.name, slot=slot, epoch=int(stored[at][0]))
                continue
            for slot, places in slots_of(ring, offsets, values.dtype.itemsize):
                self.add("write", ring.name, peer=rank, slot=slot, places=places)
            for area, at in areas_of(offsets):
                name = "drop" if rank != ring.rank else "clear"
                self.add(name, ring.name, peer=rank, slot=area, places=offsets[at])
            for (area, _), value in signs_of(offsets, stored):
                self.add("sign", ring.name, peer=rank, slot=area, site=value >> 40, epoch=value & EPOCHS)
            for slot, row, value in flags_of(ring, offsets, stored, ring.rank):
                self.add("plain", ring.name, peer=rank, slot=slot, row=row, site=value >> 40, epoch=value & EPOCHS)

    def updating(self, name: str, addresses: Any, mask: Any, values: Any) -> None:
        """Before an exchange: `publish` of a flag or a credit; name: of the memory order."""
        flat = addresses[mask]
        for ring, rank, inside, offsets in self.found(flat):
            if rank < 0:
                continue
            stored = values[mask][inside]
            kind = "publish" if name == "RELEASE" else "plain"
            for slot, row, value in flags_of(ring, offsets, stored, ring.rank):
                self.add(kind, ring.name, peer=rank, slot=slot, row=row, site=value >> 40, epoch=value & EPOCHS)

    def updated(self, name: str, addresses: Any, mask: Any, values: Any) -> None:
        """After an atomic addition: `await` of a flag, if it acquires, `credit`, `revoked` for the look at that row."""
        flat = addresses[mask]
        for ring, rank, inside, offsets in self.found(flat):
            if rank != ring.rank:
                continue
            seen = values[mask][inside]
            for slot, row, source, value in looks_of(ring, offsets, seen):
                kind = "credit" if row == words.CREDIT_ROW.value else "await" if name == "ACQUIRE" else "peek"
                kind = "revoked" if row == words.REVOKED_ROW.value else kind
                key = ring.name, self.launches, self._program(), slot, row, source
                # Polls: the same again is no news.
                if kind == "peek" or (self.seen.get(key) == value and kind != "revoked"):
                    continue
                self.seen[key] = value
                fields = {"site": value >> 40, "epoch": value & EPOCHS}
                self.add(kind, ring.name, peer=source, slot=slot, row=row, **fields)

    def compared(self, addresses: Any, before: Any, value: Any) -> None:
        """After a compare-and-swap: `fail` where it poisons a healthy workspace."""
        for ring, rank, _, offsets in self.found(addresses):
            if rank < 0 and offsets[0] == 8 * words.POISON.value and int(before[0]) == 0:
                self.add("fail", ring.name, text={1: "timeout", 2: "diverged"}[int(value[0])])

    # -- what the host does -------------------------------------------------------------------------------------------

    def touched(self, name: str, address: int, nbytes: int) -> None:
        """`read` or `write` of so many bytes, where they are in a slot."""
        if nbytes == 0:
            return
        for ring, rank, _, offsets in self.found(np.array([address], np.uint64)):
            if rank >= 0:
                first = int(offsets[0])
                for slot, places in slots_of(ring, np.arange(first, first + nbytes), 1):
                    self.add(name, ring.name, peer=rank, slot=slot, places=places)

    def made(self, out: Any) -> None:
        """A tensor that torch has written."""
        if isinstance(out, torch.Tensor) and out.numel() and out.device.type == "cpu":
            last = sum((size - 1) * stride for size, stride in zip(out.shape, out.stride(), strict=True))
            for _ in self.found(np.array([out.data_ptr()], np.uint64)):
                self.touched("write", out.data_ptr(), (last + 1) * out.element_size())

    def _program(self) -> int:
        from triton.runtime.interpreter import interpreter_builder

        return int(interpreter_builder.grid_idx[0]) if self.in_kernel else -1


EPOCHS = words.EPOCH_MASK.value


def slots_of(ring: Ring, offsets: Any, width: int) -> Iterator[tuple[int, Places]]:
    """(slot, its bytes) of accesses of `width` bytes."""
    for slot in range(slot_layout.NUM_SLOTS):
        first = slot_layout.data_offset(slot, ring.slot_bytes)
        at = offsets[(offsets >= first) & (offsets < first + ring.slot_bytes)] - first
        if at.size:
            yield slot, np.unique((at[:, None] + np.arange(width)).ravel()).astype(np.int32)


def areas_of(offsets: Any) -> Iterator[tuple[int, Any]]:
    """(area, which of the offsets are in it)."""
    for area in range(words.IN_BAND_AREAS.value):
        first = words.IN_BAND_DATA.value + area * words.IN_BAND_BYTES.value
        at = (offsets >= first) & (offsets < first + words.IN_BAND_BYTES.value)
        if at.any():
            yield area, at


def signs_of(offsets: Any, values: Any) -> Iterator[tuple[tuple[int, int], int]]:
    """((area, source), value) of the signs among words."""
    for offset, value in zip(offsets.tolist(), values.tolist(), strict=True):
        word = offset // 8 - words.IN_BAND_SITES.value
        if 0 <= word < words.IN_BAND_AREAS.value * words.MAX_WORLD.value:
            yield divmod(word, words.MAX_WORLD.value), int(value)


def looks_of(ring: Ring, offsets: Any, values: Any) -> Iterator[tuple[int, int, int, int]]:
    """(slot, row, source, value) of the flags and credits among words."""
    for offset, value in zip(offsets.tolist(), values.tolist(), strict=True):
        slot, word = divmod(offset // 8, words.SLOT_WORDS.value)
        if slot < slot_layout.NUM_SLOTS:
            yield slot, word // words.MAX_WORLD.value, word % words.MAX_WORLD.value, int(value)


def flags_of(ring: Ring, offsets: Any, values: Any, source: int) -> Iterator[tuple[int, int, int]]:
    """(slot, row, value) of the flags and credits of `source` among words; AssertionError where they are another's."""
    for slot, row, writer, value in looks_of(ring, offsets, values):
        assert writer == source, f"rank {source} writes a word of rank {writer}"
        yield slot, row, value


def _arrays(*given: Any) -> list[Any]:
    """What the interpreter holds as arrays or as views of them, flat."""
    return [np.asarray(one).ravel() for one in given]


def _masked(pointers: Any, mask: Any, values: Any) -> list[Any]:
    """The same of an access, with the mask as one: it may be numbers."""
    addresses, mask, values = _arrays(pointers, mask, values)
    return [addresses, mask.astype(bool), values]


class Memory:
    """The interpreter's memory operations, with a recorder in front of them."""

    def __init__(self, inner: Any, recorder: Recorder) -> None:
        self._inner, self._recorder = inner, recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def load(self, pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        values = self._inner.load(pointers, mask, other, dtype)
        self._recorder.loaded(*_masked(pointers, mask, values))
        return values

    def store(self, pointers: Any, values: Any, mask: Any) -> Any:
        self._recorder.storing(*_masked(pointers, mask, values))
        return self._inner.store(pointers, values, mask)

    def atomic_rmw(self, op: Any, pointers: Any, values: Any, mask: Any, order: Any) -> Any:
        exchanges = op == self._inner.RMW_OP.XCHG
        if exchanges:
            self._recorder.updating(order.name, *_masked(pointers, mask, values))
        before = self._inner.atomic_rmw(op, pointers, values, mask, order)
        if not exchanges:
            self._recorder.updated(order.name, *_masked(pointers, mask, before))
        return before

    def atomic_cas(self, pointers: Any, expected: Any, values: Any, order: Any) -> Any:
        before = self._inner.atomic_cas(pointers, expected, values, order)
        self._recorder.compared(*_arrays(pointers, before, values))
        return before


@contextmanager
def recorded() -> Iterator[list[Event]]:
    """The events of this process while the block runs."""
    from triton.runtime import interpreter

    module: Any = interpreter
    recorder = Recorder()
    patches = [
        mock.patch.object(module, "_interpreter", Memory(module._interpreter, recorder)),
        mock.patch.object(module.GridExecutor, "__call__", _launched(module.GridExecutor.__call__, recorder)),
        mock.patch.object(SharedWorkspace, "begin", _begun(SharedWorkspace.begin, recorder)),
        mock.patch.object(SharedWorkspace, "end", _ended(SharedWorkspace.end, recorder)),
        mock.patch.object(Session, "all_gather", _gathered(Session.all_gather, recorder)),
        mock.patch.object(Generation, "zero", _zeroed(Generation.zero, recorder)),
        mock.patch.object(driver, "host_copy", _copied(driver.host_copy, recorder)),
        mock.patch.object(torch.Tensor, "copy_", _made(torch.Tensor.copy_, recorder)),
        *(mock.patch.object(torch, name, _made(getattr(torch, name), recorder)) for name in PRODUCTS),
    ]
    for patch in patches:
        patch.start()
    try:
        yield recorder.events
    finally:
        for patch in reversed(patches):
            patch.stop()


PRODUCTS = ("mm", "bmm", "addmm", "baddbmm")


def _launched(launch: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    @functools.wraps(launch)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorder.launches += 1
        recorder.add("kernel", recorder.ring, text=f"{self.fn.__module__}.{self.fn.__name__}")
        recorder.in_kernel = True
        try:
            return launch(self, *args, **kwargs)
        finally:
            recorder.in_kernel = False

    return run


def _begun(begin: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    @functools.wraps(begin)
    def run(self: SharedWorkspace, site: str, *args: Any) -> Any:
        generation, slot, number = begin(self, site, *args)
        ring = recorder.know(generation, self.group.name)
        recorder.ring = ring.name
        poison = int(generation.ctl[words.POISON.value])
        recorder.add("begin", ring.name, peer=ring.rank, slot=slot, site=number, epoch=poison, text=site)
        return generation, slot, number

    return run


def _ended(end: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    @functools.wraps(end)
    def run(self: SharedWorkspace) -> None:
        recorder.add("end", self.generations[-1].name)
        end(self)

    return run


def _gathered(gather: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    @functools.wraps(gather)
    def run(self: Session, purpose: str, value: Any, timeout_s: float) -> Any:
        recorder.group = self.group.name
        recorder.add("come", text=purpose)
        values = gather(self, purpose, value, timeout_s)
        recorder.group = self.group.name
        recorder.add("met", text=purpose)
        return values

    return run


def _zeroed(zero: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    @functools.wraps(zero)
    def run(self: Generation, record: Any) -> None:
        ring = recorder.know(self, recorder.group).name
        zero(self, record)
        recorder.add("zero", ring, text=", ".join(kept_by(self)))

    return run


def kept_by(generation: Generation) -> list[str]:
    """What a zeroed ring still has of its uses."""
    kept = {
        "counters": bool(generation.counters.any()),
        "flags": bool(generation.heap.local[: slot_layout.HEADER_BYTES].any()),
        "poison": bool(generation.ctl[words.POISON.value]),
        "due credits": bool(generation.ctl[words.DUE.value]),
    }
    return [name for name, is_there in kept.items() if is_there]


def _copied(copy: driver.Copy, recorder: Recorder) -> driver.Copy:
    def run(target: int, source: int, nbytes: int, stream: int, runs: int = 1, pitch: int = 0) -> None:
        copy(target, source, nbytes, stream, runs, pitch)
        recorder.touched("read", source, runs * nbytes)

    return run


def _made(function: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        out = kwargs.get("out", args[0] if function.__name__ == "copy_" else None)
        recorder.made(out)
        return function(*args, **kwargs)

    return run
