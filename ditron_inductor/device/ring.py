"""The memory of one workspace: a ring of equal slots in symmetric memory, with the words that govern their use.

A `Generation` is one such ring. When a call needs larger slots, the ranks make the next generation together. Each
generation has its own words (table, epochs, tickets, flags). So a CUDA graph that was captured on an old generation
stays right beside calls on the new one. Such a generation is kept as long as the workspace.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from ditron_inductor.core import layout as words
from ditron_inductor.device import slot_layout
from ditron_inductor.device.heap import Heap, make_heap, private_cuda_bytes
from ditron_inductor.device.session import Session
from ditron_inductor.errors import WorkspaceError

T = TypeVar("T")

FIRST_SLOT_BYTES = 1 << 19
PAGE = 4096

MOST_KEPT = 8192
"""The most objects that callers keep with a ring, which only dynamic shapes reach. Then all are forgotten."""


@dataclass(eq=False)
class Generation:
    """One ring of NUM_SLOTS slots of `slot_bytes` each. Its `name` is the same on all ranks and used only once. table:
    int64 [world_size], the address in this process of every rank's heap. ctl: int64 [CTL_WORDS]. counters: int32
    [COUNTERS]. `captured`: a CUDA graph holds these addresses. `timeout_s`: the time limit for which `ctl` has a poll
    limit, as far as the host knows. `views`: the tensors that `data` has made so far. `kept`: what callers have
    computed from its addresses, which must not outlive it.
    """

    name: str
    heap: Heap
    slot_bytes: int
    table: torch.Tensor
    ctl: torch.Tensor
    counters: torch.Tensor
    captured: bool = False
    timeout_s: float = 0.0
    views: dict[tuple[int, int, torch.dtype], torch.Tensor] = field(default_factory=dict)
    kept: dict[Hashable, Any] = field(default_factory=dict)

    def data(self, slot: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
        """The data of `slot` in the heap of `rank`, flat, as elements of `dtype`."""
        found = self.views.get((slot, rank, dtype))
        if found is None:
            # The tensor is made once and used in any mode, like the ring itself.
            with torch.inference_mode(False), torch.no_grad():
                first = slot_layout.data_offset(slot, self.slot_bytes)
                found = self.heap.view(rank)[first : first + self.slot_bytes].view(dtype)
            self.views[slot, rank, dtype] = found
        return found

    def credits(self, slot: int) -> torch.Tensor:
        """The credits of `slot` that the ranks have given to this one: int64 [MAX_WORLD]."""
        header = self.heap.local[: slot_layout.HEADER_BYTES].view(torch.int64)
        first = slot * words.SLOT_WORDS.value + words.CREDIT_ROW.value * slot_layout.MAX_WORLD
        return header[first : first + slot_layout.MAX_WORLD]

    def keep(self, key: Hashable, value: T) -> T:
        if len(self.kept) >= MOST_KEPT:
            self.kept.clear()
        self.kept[key] = value
        return value

    def zero(self, record: torch.Tensor) -> None:
        """Restores a new ring's state, without a poll limit. No kernel of any rank may be using the ring."""
        words_of_ctl = [0] * slot_layout.CTL_WORDS
        words_of_ctl[words.RECORD.value] = record.data_ptr()
        for slot in range(slot_layout.NUM_SLOTS):
            word = slot_layout.slot_word(slot, words.DATA_OFFSET.value)
            words_of_ctl[word] = slot_layout.data_offset(slot, self.slot_bytes)
        self.ctl.copy_(torch.tensor(words_of_ctl, dtype=torch.int64, device="cpu"))
        self.counters.zero_()
        self.heap.local[: slot_layout.HEADER_BYTES].zero_()
        self.timeout_s = 0.0

    def set_poll_limit(self, limit: int, timeout_s: float) -> None:
        """Sets the limit of every wait that follows on the current stream."""
        self.ctl[words.POLL_LIMIT.value].fill_(limit)
        self.timeout_s = timeout_s


def slot_size(nbytes: int, limit: int) -> int | None:
    """Returns the bytes of a slot for calls of `nbytes`, or None if slots of `nbytes` together take more than `limit`.
    Sizes are rounded up to a quarter of a power of two. So growing sizes need only few generations, and at most a
    quarter is wasted.
    """
    needed = _pages(nbytes)
    step = max(PAGE, 1 << max(0, needed.bit_length() - 3))
    rounded = -(-needed // step) * step
    most = (limit - slot_layout.HEADER_BYTES) // slot_layout.NUM_SLOTS // PAGE * PAGE
    if needed > most:
        return None
    return min(rounded, most)


def ring_bytes(nbytes: int) -> int:
    """Returns the bytes of the smallest ring for calls of `nbytes`. A limit of at least this allows a slot size."""
    return slot_layout.heap_bytes(_pages(nbytes))


def _pages(nbytes: int) -> int:
    return max(PAGE, -(-nbytes // PAGE) * PAGE)


def make_generation(session: Session, device: torch.device, slot_bytes: int, timeout_s: float, why: str) -> Generation:
    """Makes the next ring. Collective, after a device synchronisation: it returns when no rank uses an older ring any
    more. Raises WorkspaceError, on all ranks alike, when a rank asks for another size, cannot allocate its heap or
    cannot map the others'; DitronHandshakeError and DitronDiverged when the ranks do not all come here.
    """
    group = session.group
    name = session.next_place()
    heap, problem = _attempt(lambda: make_heap(device, slot_layout.heap_bytes(slot_bytes)))
    offer = {"slot_bytes": slot_bytes, "problem": problem, "heap": heap.offer() if heap is not None else None}
    offers = session.all_gather(f"make room for {why}", offer, timeout_s)
    sizes = [offer["slot_bytes"] for offer in offers]
    if len(set(sizes)) > 1:
        raise WorkspaceError(
            group_name=group.name,
            problem=f"would have slots of different sizes at {why}: {sizes} bytes, by rank",
            remedy="The shapes of a site have to be the same on all ranks",
        )
    _raise_problems(group.name, "cannot be allocated", [offer["problem"] for offer in offers])
    assert heap is not None
    _, problem = _attempt(lambda: heap.prepare([offer["heap"] for offer in offers]))
    problems = session.all_gather(f"begin to map the memory for {why}", problem, timeout_s)
    _raise_problems(group.name, "cannot be mapped by all ranks", problems)
    _, problem = _attempt(lambda: heap.join(group, [offer["heap"] for offer in offers]))
    problems = session.all_gather(f"map the memory for {why}", problem, timeout_s)
    heap.joined()
    _raise_problems(group.name, "cannot be mapped by all ranks", problems)
    table, ctl, counters = _private_words(device, heap.addresses)
    return Generation(name, heap, slot_bytes, table, ctl, counters)


def _attempt(step: Callable[[], T]) -> tuple[T | None, str]:
    """Returns the step's value, or what went wrong, so that the other ranks are told and do not wait."""
    try:
        return step(), ""
    except (OSError, RuntimeError, MemoryError) as exc:
        return None, f"{type(exc).__name__}: {str(exc).splitlines()[0] if str(exc) else 'no details'}"


def _raise_problems(group_name: str, what: str, problems: list[str]) -> None:
    found = [f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem]
    if found:
        raise WorkspaceError(
            group_name=group_name,
            problem=f"{what} ({'; '.join(found)})",
            remedy="Lower the option 'ditron.workspace_limit', or set 'ditron.strategy' to 'library'",
        )


def _private_words(device: torch.device, addresses: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the words that this rank alone uses; on CUDA outside the caching allocator, which graphs reuse."""
    table_bytes, ctl_bytes = 8 * slot_layout.MAX_WORLD, 8 * slot_layout.CTL_WORDS
    nbytes = table_bytes + ctl_bytes + 4 * slot_layout.COUNTERS
    if device.type == "cuda":
        memory = private_cuda_bytes(device, nbytes)
    else:
        memory = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    table = memory[: 8 * len(addresses)].view(torch.int64)
    table.copy_(torch.tensor(addresses, dtype=torch.int64, device="cpu"))
    ctl = memory[table_bytes : table_bytes + ctl_bytes].view(torch.int64)
    return table, ctl, memory[table_bytes + ctl_bytes :].view(torch.int32)
