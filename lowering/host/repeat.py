"""Repeats a recorded call: it allocates new outputs, and makes the launches with the new addresses.

A call is repeated only if it would do the same again: what was prepared still holds and is still the choice here, no
observer and no trace is active, Triton's settings have not changed, and every operand has the same alignment. The
caller (site_call.py) sees to it that the shapes, strides, dtypes and devices of the operands are fixed.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ditron_inductor.device.ring import Generation
from ditron_inductor.device.streams import current_handle
from ditron_inductor.lowering.host.chosen import Chosen
from ditron_inductor.lowering.host.launch import is_tf32_allowed, pointers_of
from ditron_inductor.lowering.host.launcher import internals
from ditron_inductor.lowering.host.prepared import Prepared
from ditron_inductor.lowering.host.recording import LaunchMade, Recorder
from ditron_inductor.lowering.host.tracing import tracing
from ditron_inductor.task.plan import decisions
from ditron_inductor.task.watch import watch

ALIGNMENT = 15
"""Mask of the address bits on which Triton's compiled kernels depend."""
_guards: Any = torch._C._dynamo.guards
ALLOCATE = {"cpu": _guards._empty_strided_cpu, "cuda": _guards._empty_strided_cuda}
"""The functions that allocate memory on the current device in code that Inductor generates."""

Pointer = tuple[int, int]
"""(index among the operands and then the allocations, offset in bytes from its first element)."""


@dataclass(frozen=True)
class Allocation:
    """A tensor that the call allocates."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return (1 + sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True))) * self.dtype.itemsize


class Step:
    """One launch of a recorded call. pointers: (position of a parameter, its Pointer or a tuple of them)."""

    def __init__(self, launch: LaunchMade, pointers: Sequence[tuple[int, Pointer | tuple[Pointer, ...]]]) -> None:
        self.launcher = launch.launcher
        self._ready = launch.ready
        slot = launch.slot
        self._shared = None if slot is None else slot.shared
        self._begin = () if slot is None else slot.begin
        self._plain: list[tuple[int, int]] = []
        self._shifted: list[tuple[int, int, int]] = []
        self._tuples: list[tuple[int, Sequence[Pointer]]] = []
        # Tuples of several addresses without offsets are gathered by one function of operator.
        self._gathered: list[tuple[int, Callable[[Sequence[int]], tuple[int, ...]]]] = []
        for place, given in pointers:
            match given:
                case (int() as index, int() as shift):
                    if shift == 0:
                        self._plain.append((place, index))
                    else:
                        self._shifted.append((place, index, shift))
                case _:
                    members: Any = given
                    if len(members) > 1 and all(shift == 0 for _, shift in members):
                        self._gathered.append((place, operator.itemgetter(*[index for index, _ in members])))
                    else:
                        self._tuples.append((place, members))
        # The arguments of a launch for each slot of a ring, whose memory they must not keep alive; a launch without a
        # slot has the key 0. Both parts are replaced together, because threads take turns.
        self._ring: tuple[weakref.ref[Generation] | None, dict[int, list[Any]]] = (None, {})

    def __call__(self, addresses: Sequence[int], device: int | None) -> None:
        """Launches with these addresses of operands and allocations, on the current stream of the device."""
        shared = self._shared
        if shared is None:
            templates = self._ring[1]
            values = self._values(templates.get(0) or self._fill(templates, 0, ()), addresses)
            self.launcher.start(self._ready, 0 if device is None else current_handle(device), values)
            return
        # This does what Launch.run does.
        generation, slot, site = shared.begin(*self._begin)
        try:
            ring, templates = self._ring
            if ring is None or ring() is not generation:
                self._ring = _, templates = weakref.ref(generation), {}
            template = templates.get(slot)
            if template is None:
                words = (pointers_of(generation, slot, site),)
                template = self._fill(templates, slot, words)
            self.launcher.start(self._ready, shared.order.stream, self._values(template, addresses))
        except BaseException as exc:
            shared.fail(exc)
            raise
        shared.end()

    def _fill(self, templates: dict[int, list[Any]], slot: int, words: tuple[Any, ...]) -> list[Any]:
        templates[slot] = template = self.launcher.values(self._ready, (), words)
        return template

    def _values(self, template: list[Any], addresses: Sequence[int]) -> list[Any]:
        values = template.copy()
        for place, index in self._plain:
            values[place] = addresses[index]
        for place, index, shift in self._shifted:
            values[place] = addresses[index] + shift
        for place, gather in self._gathered:
            values[place] = gather(addresses)
        for place, given in self._tuples:
            values[place] = tuple([addresses[index] + shift for index, shift in given])
        return values


@dataclass(frozen=True)
class Record:
    """A call as `Repeated` needs it. settings: those of Triton. precision: see `precision_of`. alignment: the bits
    ALIGNMENT of the operands' addresses. results: the index of the allocation that each result is.
    """

    prepared: Prepared
    chosen: Chosen
    settings: tuple[Any, ...]
    device: torch.device
    precision: bool | None
    alignment: tuple[int, ...]
    allocations: tuple[Allocation, ...]
    steps: tuple[Step, ...]
    results: tuple[int, ...]


def record_of(recorder: Recorder, result: Any) -> Record | str:
    """Returns the Record of a call that returned `result`, or a text why it cannot be repeated."""
    prepared, chosen, launches = recorder.prepared, recorder.chosen, recorder.launches
    if recorder.problem or prepared is None or sum(launch.slot is not None for launch in launches) != 1:
        return recorder.problem or "no lookup, or no launch in a slot"
    # On AMD GPUs the kernel also depends on the size of a tensor's memory, which is not part of a form.
    if any(launch.launcher.backend.target.backend != "cuda" for launch in launches):
        return "Triton's compiler for AMD"
    if len({launch.settings for launch in launches}) > 1:
        return "settings of Triton that change"
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
        index = -1 if found is None else found[0] - len(operands)
        if found is None or index < 0 or index in results or found[1] != 0 or x.dtype != allocated[index].dtype:
            return "a result that is no allocation of its own"
        allocations[index] = Allocation(tuple(x.shape), x.stride(), x.dtype)
        results.append(index)
    for x, allocation in zip(allocated, allocations, strict=True):
        if allocation.nbytes != x.untyped_storage().nbytes() or x.data_ptr() & ALIGNMENT or x.numel() == 0:
            return "an allocation that is empty, not aligned, or larger than what is returned of it"
    steps: list[Step] = []
    for launch in launches:
        pointers: list[tuple[int, Any]] = []
        for name, given in launch.tensors.items():
            places = [pointer(x) for x in (given if isinstance(given, tuple) else (given,))]
            if None in places:
                return f"{name} is neither an operand nor an allocation, or empty"
            pointers.append((launch.launcher.positions[name], tuple(places) if isinstance(given, tuple) else places[0]))
        steps.append(Step(launch, pointers))
    return Record(
        prepared=prepared,
        chosen=chosen,
        settings=launches[0].settings,
        device=operands[0].device,
        precision=precision_of(operands),
        alignment=tuple(x.data_ptr() & ALIGNMENT for x in operands),
        allocations=tuple(allocations),
        steps=tuple(steps),
        results=tuple(results),
    )


def precision_of(operands: Sequence[torch.Tensor]) -> bool | None:
    """Returns whether products of fp32 may use TF32; None if no operand is fp32."""
    return is_tf32_allowed() if any(x.dtype == torch.float32 for x in operands) else None


class Repeated:
    """Repeats a recorded call for operands of the same form."""

    def __init__(self, record: Record) -> None:
        self._prepared = record.prepared
        self._chosen = record.chosen
        self._group_name, self._request, self._choice = record.chosen.choice  # type: ignore[misc]
        self._hooks = [step.launcher.kernel.pre_run_hooks for step in record.steps]
        self._settings = record.settings
        self._precision = record.precision
        self._alignment = record.alignment
        self._is_aligned = not any(record.alignment)
        self._device = record.device.index if record.device.type == "cuda" else None
        self._allocate = ALLOCATE[record.device.type]
        self._allocations = [(new.size, new.stride, new.dtype) for new in record.allocations]
        self._results = None if record.results == tuple(range(len(record.allocations))) else record.results
        self._steps = record.steps

    def __call__(self, operands: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """Returns the results; returns None, and does nothing, if the call would differ from the recorded one."""
        addresses = self.addresses(operands)
        if addresses is None:
            return None
        prepared = self._prepared
        if not prepared.holds() or prepared.now() is not self._chosen:
            return None
        decisions.note(self._group_name, self._request, self._choice)
        return self.start(addresses)

    def addresses(self, operands: Sequence[torch.Tensor]) -> list[int] | None:
        """Returns the addresses of the operands, or None if something else than what runs the call would differ."""
        if watch.observer is not None or tracing.buffer is not None or any(self._hooks):
            return None
        found = internals()
        if found is None or found.settings() != self._settings:
            return None
        if self._device is not None and torch._C._cuda_getDevice() != self._device:
            return None
        if self._precision is not None and is_tf32_allowed() != self._precision:
            return None
        addresses = [x.data_ptr() for x in operands]
        # A tensor subclass may have no memory.
        if 0 in addresses:
            return None
        if self._is_aligned:
            bits = 0
            for address in addresses:
                bits |= address
            if bits & ALIGNMENT:
                return None
        elif tuple([address & ALIGNMENT for address in addresses]) != self._alignment:
            return None
        return addresses

    def start(self, addresses: list[int]) -> list[torch.Tensor]:
        """Allocates, launches and returns the results. addresses: what `addresses` returned, which this extends."""
        allocate = self._allocate
        made = [allocate(*allocation) for allocation in self._allocations]
        addresses += [x.data_ptr() for x in made]
        for step in self._steps:
            step(addresses, self._device)
        return made if self._results is None else [made[index] for index in self._results]
