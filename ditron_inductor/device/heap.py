"""Symmetric heaps: one allocation per rank, of equal size, each mapped into every rank's address space.

There are two steps, so that an allocation that fails on one rank leaves no other rank waiting inside the second step.
First each rank makes its heap, and the ranks tell each other that this succeeded. Then they map each other's heaps. The
CPU heap is anonymous memory, which is passed on by file descriptor. It has no name in any file system, is not limited
by the size of /dev/shm, and ends with the last process that maps it, however that process ends.
"""

from __future__ import annotations

import functools
import mmap
import os
import stat
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist

from ditron_inductor.device.groups import Group


class Heap:
    """One rank's part of a symmetric heap, and after `join` its view of all parts."""

    local: torch.Tensor
    """This rank's bytes: uint8 [nbytes], which are zero at first."""

    addresses: tuple[int, ...]
    """The address of each rank's heap in this process; empty before `join`."""

    def offer(self) -> dict[str, Any]:
        """Returns what the other ranks need to map this heap, as JSON."""
        raise NotImplementedError

    def prepare(self, offers: Sequence[dict[str, Any]]) -> None:
        """Does all that has to succeed on every rank before any of them joins. Raises OSError or RuntimeError."""

    def join(self, group: Group, offers: Sequence[dict[str, Any]]) -> None:
        """Maps the heaps of all ranks from `offers`, by group rank. Collective. Raises OSError or RuntimeError."""
        raise NotImplementedError

    def joined(self) -> None:
        """Releases what only the mapping needed; all ranks have mapped this heap."""

    def view(self, rank: int) -> torch.Tensor:
        """The bytes of the heap of `rank`, as this process sees them: uint8 [nbytes]. Only after `join`."""
        raise NotImplementedError


def make_heap(device: torch.device, nbytes: int) -> Heap:
    """Allocates this rank's heap of `nbytes` on `device`. Raises OSError or RuntimeError if there is no memory."""
    return CudaHeap(device, nbytes) if device.type == "cuda" else CpuHeap(nbytes)


class RendezvousCount:
    """The number of rendezvous for our heaps in which this process has taken part. torch numbers the store keys of its
    rendezvous by process, not by group. Ranks with different histories (for example, one is in a further group) would
    wait for keys that the other never writes. So ranks with fewer rendezvous catch up alone.
    """

    def __init__(self) -> None:
        self.done = 0
        self.alone: dist.ProcessGroup | None = None

    def catch_up(self, target: int, device: torch.device) -> None:
        """Takes part in rendezvous of a group of this rank alone, until the count is `target`."""
        from torch._C._distributed_c10d import _SymmetricMemory

        if self.done < target and self.alone is None:
            # The device is synchronised locally, which no other rank has to know.
            self.alone = dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
        while self.done < target:
            assert self.alone is not None
            self.done += 1
            memory, name = private_cuda_bytes(device, 16), self.alone.group_name
            outside_pools(device, functools.partial(_SymmetricMemory.rendezvous, memory, name))


RENDEZVOUS = RendezvousCount()


class CudaHeap(Heap):
    """Symmetric memory of torch, allocated separately rather than from a pool. A heap may be made while a CUDA graph's
    private pool is active, and must not lie in this pool. It starts at offset 0 of its allocation on every rank.
    """

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self.local = private_cuda_bytes(device, nbytes)
        self.addresses: tuple[int, ...] = ()
        self._handle: Any = None

    def offer(self) -> dict[str, Any]:
        return {"rendezvous": RENDEZVOUS.done}

    def prepare(self, offers: Sequence[dict[str, Any]]) -> None:
        RENDEZVOUS.catch_up(max(offer["rendezvous"] for offer in offers), self.local.device)

    def join(self, group: Group, offers: Sequence[dict[str, Any]]) -> None:
        from torch.distributed import _symmetric_memory as symm_mem

        process_group = group.process_group()
        assert process_group is not None
        RENDEZVOUS.done += 1
        handle = outside_pools(self.local.device, functools.partial(symm_mem.rendezvous, self.local, process_group))
        assert handle.rank == group.rank and handle.world_size == group.world_size
        self.addresses = tuple(handle.buffer_ptrs)
        assert self.addresses[group.rank] == self.local.data_ptr()
        self._handle = handle

    def view(self, rank: int) -> torch.Tensor:
        if self.addresses[rank] == self.local.data_ptr():
            return self.local
        peer: torch.Tensor = self._handle.get_buffer(rank, (self.local.numel(),), torch.uint8)
        return peer


def private_cuda_bytes(device: torch.device, nbytes: int) -> torch.Tensor:
    """Zeroed device memory outside the caching allocator and so outside every CUDA graph's pool: uint8 [nbytes]."""
    from torch._C._distributed_c10d import _SymmetricMemory

    memory: torch.Tensor = _SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, device)
    memory.zero_()
    torch.cuda.synchronize(device)
    return memory


def outside_pools(device: torch.device, act: Callable[[], Any]) -> Any:
    """Runs `act` on a thread of its own, with `device` as its current device, and returns the result. Memory that a
    thread allocates while it warms up a CUDA graph goes into the graph's pool, where nothing may stay. But torch's
    rendezvous keeps two small tables for good.
    """

    def run() -> Any:
        with torch.cuda.device(device):
            return act()

    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(run).result()


class CpuHeap(Heap):
    """Memory shared between processes of one machine and one user, through /proc/<pid>/fd."""

    def __init__(self, nbytes: int) -> None:
        self._fd = -1
        self._fd = os.memfd_create("ditron-heap", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, nbytes)
        self._status = os.fstat(self._fd)
        self._nbytes = nbytes
        self._maps: list[torch.Tensor] = []
        self.local = self._map(self._fd)
        self.addresses: tuple[int, ...] = ()

    def __del__(self) -> None:
        self.joined()

    def offer(self) -> dict[str, Any]:
        return {"pid": os.getpid(), "fd": self._fd, "device": self._status.st_dev, "inode": self._status.st_ino}

    def join(self, group: Group, offers: Sequence[dict[str, Any]]) -> None:
        self._maps = [self.local if rank == group.rank else self._map_peer(offer) for rank, offer in enumerate(offers)]
        self.addresses = tuple(view.data_ptr() for view in self._maps)

    def joined(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def view(self, rank: int) -> torch.Tensor:
        return self._maps[rank]

    def _map_peer(self, offer: dict[str, Any]) -> torch.Tensor:
        """Maps what a rank offered. The offer came through a store to which others may write, so anything but a heap
        like ours raises OSError. Memory without a name has a device number of its own, so no file of any file system is
        accepted as a heap.
        """
        pid, number, device, inode = (_whole_number(offer, name) for name in ("pid", "fd", "device", "inode"))
        # With O_NONBLOCK, a pipe or a device cannot block this process before it is refused.
        fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        try:
            found, own = os.fstat(fd), self._status
            ours = (found.st_dev, found.st_ino) == (device, inode) and device == own.st_dev
            if not ours or not stat.S_ISREG(found.st_mode) or found.st_size != self._nbytes:
                raise OSError(f"file {number} of process {pid} is not the heap that the rank offered")
            return self._map(fd)
        finally:
            os.close(fd)

    def _map(self, fd: int) -> torch.Tensor:
        # The tensor holds the mapping, which ends with the last view of it.
        return torch.frombuffer(mmap.mmap(fd, self._nbytes), dtype=torch.uint8)


def _whole_number(offer: dict[str, Any], name: str) -> int:
    """Returns a number of an offer. Raises OSError for anything else, because the number becomes a part of a path."""
    value = offer.get(name) if isinstance(offer, dict) else None
    if type(value) is not int or not 0 <= value < 1 << 64:
        raise OSError(f"a rank offered its heap with {name} {value!r}, which is not a whole number")
    return value
