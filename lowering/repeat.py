"""A recorded call done again: new outputs, their addresses and those of the operands, and the launch.

It is done again only where it would be the same: what was prepared still holds and is still what runs here, nobody
watches or traces, Triton is set as it was, and every operand is aligned as it was. All else about the operands, shapes,
strides, dtypes and device, is fixed by whoever calls (see site_call.py), and with it all that the record has.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ditron_inductor.device.ring import Generation
from ditron_inductor.lowering.launcher import internals
from ditron_inductor.lowering.prepared import Chosen, Prepared
from ditron_inductor.lowering.recording import LaunchMade, Recorder, SlotUse
from ditron_inductor.lowering.tracing import tracing
from ditron_inductor.task.plan import decisions
from ditron_inductor.task.watch import watch

ALIGNMENT = 15
"""Mask of the address bits on which Triton's compiled kernels depend."""
ALLOCATE = {
    "cpu": torch._C._dynamo.guards._empty_strided_cpu,
    "cuda": torch._C._dynamo.guards._empty_strided_cuda,
}
"""New memory on the current device, as code of Inductor gets it."""

Pointer = tuple[int, int]
"""Which of the operands, and then of the allocations, and bytes behind its first element."""


@dataclass(frozen=True)
class Allocation:
    """What torch is asked for."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return (1 + sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True))) * self.dtype.itemsize


@dataclass(frozen=True)
class Record:
    """A call as `Repeated` needs it.

    alignment: of the operands' addresses, the bits ALIGNMENT. pointers: by the position of a parameter of the kernel,
    one or a tuple. results: indices of allocations.
    """

    prepared: Prepared
    chosen: Chosen
    slot: SlotUse
    launch: LaunchMade
    device: torch.device
    precision: str | None
    alignment: tuple[int, ...]
    allocations: tuple[Allocation, ...]
    pointers: tuple[tuple[int, Pointer | tuple[Pointer, ...]], ...]
    results: tuple[int, ...]


def record_of(recorder: Recorder, result: Any) -> Record | None:
    """What the recorder saw of a call that returned `result`; None where that cannot be done again."""
    prepared, chosen, slot, launch = recorder.prepared, recorder.chosen, recorder.slot, recorder.launch
    if recorder.problem or prepared is None or slot is None or launch is None or chosen.choice is None:
        return None
    # There the size of a tensor's memory decides too, and no form knows it.
    if launch.launcher.backend.target.backend != "cuda":
        return None
    operands, allocated = recorder.operands, recorder.allocated
    sources = [*operands, *allocated]
    by_storage = {x.untyped_storage()._cdata: index for index, x in enumerate(sources)}
    allocations = [Allocation(tuple(x.shape), x.stride(), x.dtype) for x in allocated]

    def pointer(x: torch.Tensor) -> Pointer | None:
        index = by_storage.get(x.untyped_storage()._cdata)
        return None if index is None or x.numel() == 0 else (index, x.data_ptr() - sources[index].data_ptr())

    results: list[int] = []
    for x in result:
        found = pointer(x)
        if found is None:
            return None
        index = found[0] - len(operands)
        if index < 0 or index in results or found[1] != 0 or x.dtype != allocated[index].dtype:
            return None
        allocations[index] = Allocation(tuple(x.shape), x.stride(), x.dtype)
        results.append(index)
    for x, allocation in zip(allocated, allocations, strict=True):
        if allocation.nbytes != x.untyped_storage().nbytes() or x.data_ptr() & ALIGNMENT or x.numel() == 0:
            return None
    pointers: list[tuple[int, Any]] = []
    for name, given in launch.tensors.items():
        places = [pointer(x) for x in (given if type(given) is tuple else (given,))]
        if None in places:
            return None
        pointers.append((launch.launcher.positions[name], tuple(places) if type(given) is tuple else places[0]))
    return Record(
        prepared=prepared,
        chosen=chosen,
        slot=slot,
        launch=launch,
        device=operands[0].device,
        precision=precision_of(operands),
        alignment=tuple(x.data_ptr() & ALIGNMENT for x in operands),
        allocations=tuple(allocations),
        pointers=tuple(pointers),
        results=tuple(results),
    )


def precision_of(operands: Sequence[torch.Tensor]) -> str | None:
    """The setting that products of fp32 obey; None where there are none."""
    return torch.get_float32_matmul_precision() if any(x.dtype == torch.float32 for x in operands) else None


class Repeated:
    """Does a recorded call again, for operands of the same form."""

    def __init__(self, record: Record) -> None:
        launch, slot = record.launch, record.slot
        self._prepared = record.prepared
        self._chosen = record.chosen
        self._group_name, self._request, self._choice = record.chosen.choice  # type: ignore[misc]
        self._shared = slot.shared
        self._begin = slot.site_text, slot.nbytes, slot.limit, slot.timeout_s
        self._launcher = launch.launcher
        self._hooks = launch.launcher.kernel.pre_run_hooks
        self._ready = launch.ready
        self._settings = launch.settings
        self._precision = record.precision
        self._alignment = record.alignment
        self._is_aligned = not any(record.alignment)
        self._device = record.device.index if record.device.type == "cuda" else None
        self._allocate = ALLOCATE[record.device.type]
        self._allocations = [(one.size, one.stride, one.dtype) for one in record.allocations]
        self._results = None if record.results == tuple(range(len(record.allocations))) else record.results
        self._plain = [(place, one) for place, (one, shift) in _plain(record) if shift == 0]
        self._shifted = [(place, one, shift) for place, (one, shift) in _plain(record) if shift != 0]
        self._tuples = [(place, given) for place, given in record.pointers if isinstance(given[0], tuple)]
        # Arguments of a launch in each slot of a ring, whose memory they must not keep.
        self._ring: weakref.ref[Generation] | None = None
        self._templates: dict[int, list[Any]] = {}

    def holds(self) -> bool:
        """Whether what was prepared does. Raises as Workspace.is_current."""
        return self._prepared.holds()

    def __call__(self, operands: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """The call's results; None, and nothing done, where the call would not be the recorded one."""
        if watch.observer is not None or tracing.buffer is not None or self._hooks:
            return None
        found = internals()
        if found is None or found.settings() != self._settings:
            return None
        if self._device is not None and torch._C._cuda_getDevice() != self._device:
            return None
        if self._precision is not None and torch.get_float32_matmul_precision() != self._precision:
            return None
        addresses = [x.data_ptr() for x in operands]
        if self._is_aligned:
            bits = 0
            for address in addresses:
                bits |= address
            if bits & ALIGNMENT:
                return None
        elif tuple([address & ALIGNMENT for address in addresses]) != self._alignment:
            return None
        prepared = self._prepared
        if not prepared.holds() or prepared.now() is not self._chosen:
            return None
        decisions.note(self._group_name, self._request, self._choice)
        allocate = self._allocate
        made = [allocate(*one) for one in self._allocations]
        addresses += [x.data_ptr() for x in made]
        self._launch(addresses)
        return made if self._results is None else [made[index] for index in self._results]

    def _launch(self, addresses: list[int]) -> None:
        """As Launch.run."""
        shared = self._shared
        generation, slot, site = shared.begin(*self._begin)
        try:
            if self._ring is None or self._ring() is not generation:
                self._ring, self._templates = weakref.ref(generation), {}
            template = self._templates.get(slot)
            if template is None:
                words = generation.table, generation.ctl, generation.counters
                self._templates[slot] = template = self._launcher.values(self._ready, (slot, site), words)
            values = template.copy()
            for place, index in self._plain:
                values[place] = addresses[index]
            for place, index, shift in self._shifted:
                values[place] = addresses[index] + shift
            for place, given in self._tuples:
                values[place] = tuple([addresses[index] + shift for index, shift in given])
            self._launcher.start(self._ready, shared.order.stream, values)
        except BaseException as exc:
            shared.health.fail(exc)
            raise
        shared.end()


def _plain(record: Record) -> list[tuple[int, Pointer]]:
    """The pointers that are no tuples."""
    return [(place, given) for place, given in record.pointers if isinstance(given[0], int)]  # type: ignore[misc]
