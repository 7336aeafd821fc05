"""Records what one call of an op does.

docs/host_path.md says which calls can be repeated from a record. A `Recorder` watches one call. It sees every op of
torch (`TorchDispatchMode`) but those that take a slot; what launches kernels or takes a slot without torch reports to
`recording.here()`. Anything that no record can hold is the call's `problem`.

The storage object of a tensor tells where the tensor comes from. Operands may share a storage, such as the parts of one
weight, so each operand gets a storage object of its own over the same memory.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
ALLOCATIONS = frozenset(
    {
        aten.empty.memory_format,
        aten.empty_like.default,
        aten.empty_strided.default,
        aten.new_empty.default,
        aten.new_empty_strided.default,
    }
)


@dataclass(frozen=True)
class SlotUse:
    """How `Launch.run` takes its slot: the workspace, and the arguments of `SharedWorkspace.begin`."""

    shared: Any
    begin: tuple[Any, ...]

    def take(self) -> tuple[Any, int, int]:
        """Returns what `SharedWorkspace.begin` does."""
        return self.shared.begin(*self.begin)


@dataclass(frozen=True)
class LaunchMade:
    """A launch of the compiled kernel `ready` of a launcher, under these `settings` of Triton, with its tensors by
    name. slot: the slot that it took, None for a kernel that uses no workspace.
    """

    launcher: Any
    ready: Any
    settings: tuple[Any, ...]
    tensors: dict[str, Any]
    slot: SlotUse | None = None


class Scout:
    """Notes which `Prepared` a call looks up, inside the `with` block and on this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.prepared: Any = None
        self._thread = threading.get_ident()

    def __enter__(self) -> Self:
        assert recording.active is None and recording.lock.locked(), "one watches at a time"
        recording.active = self
        return self

    def __exit__(self, *exc: Any) -> None:
        recording.active = None

    def is_here(self) -> bool:
        """Returns whether the watched call is on this thread."""
        return threading.get_ident() == self._thread

    def found(self, prepared: object, chosen: object) -> None:
        """Called when the call has found `prepared` and runs `chosen`; `chosen` is None if this call prepared it."""
        self.prepared = prepared

    def refuse(self, problem: str) -> None:
        """Called when the call does what a record cannot hold."""

    def take(self, slot: SlotUse) -> tuple[Any, int, int]:
        """Takes the slot of the next launch."""
        return slot.take()

    def launched(self, launch: LaunchMade) -> None:
        """Called when a kernel was launched."""


class Recorder(Scout, TorchDispatchMode):
    """Watches everything that a call does. `operands` have to be used in the block instead of the given ones.
    `allocated` and `launches` are in their order. `prepared` and `chosen` are what the call looked up. `problem` is the
    first thing that a record cannot hold, or ''.
    """

    def __init__(self, operands: Sequence[torch.Tensor]) -> None:
        super().__init__()
        # These own the memory of the operands that are used in the block.
        self._owners = tuple(operands)
        self.operands = [with_own_storage(x) for x in operands]
        self.allocated: list[torch.Tensor] = []
        self.chosen: Any = None
        self.launches: list[LaunchMade] = []
        self.problem = ""
        self._slot: SlotUse | None = None
        self._unseen = False

    def __enter__(self) -> Self:
        Scout.__enter__(self)
        TorchDispatchMode.__enter__(self)
        return self

    def __exit__(self, *exc: Any) -> None:
        TorchDispatchMode.__exit__(self, *exc)
        Scout.__exit__(self)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in ALLOCATIONS and not self._unseen:
            self.allocated.append(out)
        elif not is_view(func) and not self._unseen:
            self.refuse(str(func))
        return out

    def found(self, prepared: object, chosen: object) -> None:
        if self.prepared is not None or chosen is None:
            self.refuse("another lookup than one that finds")
        self.prepared, self.chosen = prepared, chosen

    def refuse(self, problem: str) -> None:
        self.problem = self.problem or problem

    def take(self, slot: SlotUse) -> tuple[Any, int, int]:
        if self._slot is not None or any(launch.slot for launch in self.launches):
            self.refuse("two slots")
        self._slot = slot
        # A repeated call takes its slot itself, and does then what this does, such as setting another limit of waits.
        self._unseen = True
        try:
            return super().take(slot)
        finally:
            self._unseen = False

    def launched(self, launch: LaunchMade) -> None:
        self.launches.append(replace(launch, slot=self._slot))
        self._slot = None


class Recording:
    """The Scout that watches a call in this process, on any thread, if there is one. Whoever watches holds `lock`."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.active: Scout | None = None

    def here(self) -> Scout | None:
        """Returns the Scout that watches this thread, or None."""
        active = self.active
        return active if active is not None and active.is_here() else None

    def records(self) -> bool:
        """Returns whether a Recorder watches this thread, which takes a call much longer."""
        return isinstance(self.here(), Recorder)


recording = Recording()
"""The Recording of this process."""


def refuse_to_record(problem: str) -> None:
    """Says that the present call cannot be recorded, if it is being recorded."""
    here = recording.here()
    if here is not None:
        here.refuse(problem)


def is_view(func: Any) -> bool:
    """Returns whether an op returns only views of its arguments and does not write them."""
    schema = func._schema
    aliases = [returned.alias_info for returned in schema.returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


def with_own_storage(x: torch.Tensor) -> torch.Tensor:
    """Returns x with a storage object of its own over the same memory, which the result does not own."""
    storage = x.untyped_storage()
    alias: Any = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), x.device, storage.nbytes())
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(alias, x.storage_offset(), x.shape, x.stride())
