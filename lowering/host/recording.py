"""What one call of an op does, written down.

Most that a call by `tile` costs the host is finding out again what the call before it found out: which tensors are
allocated, which address goes where. A `Recorder` watches one call and says whether that was all: tensors allocated,
views taken of them and of the operands, and launches, one of them in a slot of the workspace. It sees every op of torch
(`TorchDispatchMode`), and what starts kernels or takes a slot without torch reports to `recording.active`. Whatever
else a call does is its `problem`, and such a call is never repeated from its record.

Where a tensor comes from is told by its storage object. Operands may share theirs (the parts of one weight), so each
gets an object of its own over the same memory.
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
    """How `Launch.run` took its slot: the arguments of SharedWorkspace.begin."""

    shared: Any
    site_text: str
    nbytes: int
    limit: int
    timeout_s: float
    first_timeout_s: float


@dataclass(frozen=True)
class LaunchMade:
    """A launch of a compiled kernel, `ready` of its launcher, under these `settings` of Triton; the tensors by name.

    slot: what it took for itself, None for a kernel that uses no workspace.
    """

    launcher: Any
    ready: Any
    settings: tuple[Any, ...]
    tensors: dict[str, Any]
    slot: SlotUse | None = None


class Scout:
    """Notes what a call inside its `with` block, on this thread, looks up: `prepared`."""

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
        """Whether this thread is the watched one."""
        return threading.get_ident() == self._thread

    def found(self, prepared: object, chosen: object) -> None:
        """The call runs what was `chosen` when it was `prepared`; None for what is prepared in this call."""
        self.prepared = prepared

    def refuse(self, problem: str) -> None:
        """The call does what a record cannot hold."""

    def took(self, slot: SlotUse) -> None:
        """A slot was taken for the next launch."""

    def launched(self, launch: LaunchMade) -> None:
        """A kernel was launched."""


class Recorder(Scout, TorchDispatchMode):
    """Watches all that a call does.

    operands: to be used in the block instead of those given. allocated, launches: in their order. prepared, chosen:
    what was looked up. problem: the first thing that a record cannot hold, or empty.
    """

    def __init__(self, operands: Sequence[torch.Tensor]) -> None:
        super().__init__()
        # Who owns the memory of those to be used.
        self._owners = tuple(operands)
        self.operands = [with_own_storage(x) for x in operands]
        self.allocated: list[torch.Tensor] = []
        self.chosen: Any = None
        self.launches: list[LaunchMade] = []
        self.problem = ""
        self._slot: SlotUse | None = None

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
        if func in ALLOCATIONS:
            self.allocated.append(out)
        elif not is_view(func):
            self.refuse(str(func))
        return out

    def found(self, prepared: object, chosen: object) -> None:
        if self.prepared is not None or chosen is None:
            self.refuse("another lookup than one that finds")
        self.prepared, self.chosen = prepared, chosen

    def refuse(self, problem: str) -> None:
        self.problem = self.problem or problem

    def took(self, slot: SlotUse) -> None:
        if self._slot is not None or any(launch.slot for launch in self.launches):
            self.refuse("two slots")
        self._slot = slot

    def launched(self, launch: LaunchMade) -> None:
        self.launches.append(replace(launch, slot=self._slot))
        self._slot = None


class Recording:
    """Who watches a call in this process, if somebody does, on whichever thread. lock: held by who watches."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.active: Scout | None = None

    def here(self) -> Scout | None:
        """That of this thread."""
        active = self.active
        return active if active is not None and active.is_here() else None


recording = Recording()
"""That of this process."""


def refuse_to_record(problem: str) -> None:
    """What the present call does cannot be recorded, if it is being recorded."""
    here = recording.here()
    if here is not None:
        here.refuse(problem)


def is_view(func: Any) -> bool:
    """Whether all that an op returns is views of what it gets, which it does not write."""
    schema = func._schema
    aliases = [returned.alias_info for returned in schema.returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


def with_own_storage(x: torch.Tensor) -> torch.Tensor:
    """x with a storage object that no other tensor has; the same memory, which it does not own."""
    storage = x.untyped_storage()
    alias: Any = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), x.device, storage.nbytes())
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(alias, x.storage_offset(), x.shape, x.stride())
