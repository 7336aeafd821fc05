"""all_reduce(x) + residual and its RMS norm in one launch, as serving engines fuse them.

    total  = sum over ranks of x, rounded, + residual
    normed = total / rms(total) * weight

Every rank's x [M, N] lies in memory that all ranks can read. A program takes rows: it tells the same program of every
rank that its x is there, waits for theirs, reads a row of all ranks, adds it up in fp32 in rank order, and normalises
it. Before it ends it tells them that it has read, and waits until they have, so that x may be written again.

A flag is 0 or 1. Its sender sets it when it is 0, its reader clears it when it is 1, so a replayed CUDA graph needs no
count of its calls. Nothing here is Ditron's but the memory: signals, epochs and queues are not used.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from ditron_inductor.device.groups import resolve
from ditron_inductor.device.heap import make_heap

MOST_PROGRAMS = 128
MOST_BYTES = 8 << 20
"""Every rank reads the whole tensors of all ranks, which does not pay for more."""
MOST_COLUMNS = 16384
STAGES = 2
ALIGNMENT = 128


@triton.jit
def _meet(flags, stage, rank, WORLD: tl.constexpr):
    """Waits until the same program of every rank is at the same stage. Stores before it are visible behind it."""
    place = (tl.program_id(0) * 2 + stage) * WORLD
    # All threads have stored and read what comes before.
    tl.debug_barrier()
    for peer in tl.static_range(WORLD):
        theirs = tl.load(flags + peer).to(tl.pointer_type(tl.int32))
        while tl.atomic_cas(theirs + place + rank, 0, 1, sem="release", scope="sys") != 0:
            pass
    mine = tl.load(flags + rank).to(tl.pointer_type(tl.int32))
    for peer in tl.static_range(WORLD):
        while tl.atomic_cas(mine + place + peer, 1, 0, sem="acquire", scope="sys") != 1:
            pass


@triton.jit
def _one_shot_norm(
    data, flags, residual, weight, total, normed, M, N, rank, EPS: tl.constexpr, WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """data, flags: int64 [WORLD], the addresses of each rank's x and flags."""
    _meet(flags, 0, rank, WORLD)
    columns = tl.arange(0, BLOCK)
    inside = columns < N
    scale = tl.load(weight + columns, mask=inside, other=0.0)
    for row in range(tl.program_id(0), M, tl.num_programs(0)):
        place = row * N + columns
        summed = tl.zeros((BLOCK,), dtype=tl.float32)
        for peer in tl.static_range(WORLD):
            theirs = tl.load(data + peer).to(tl.pointer_type(residual.dtype.element_ty))
            summed += tl.load(theirs + place, mask=inside, other=0.0).to(tl.float32)
        before = tl.load(residual + place, mask=inside, other=0.0)
        rounded = (summed.to(before.dtype).to(tl.float32) + before.to(tl.float32)).to(before.dtype)
        tl.store(total + place, rounded, mask=inside)
        wide = rounded.to(tl.float32)
        inverse = tl.rsqrt(tl.sum(wide * wide, 0) / N + EPS)
        scaled = (wide * inverse).to(before.dtype).to(tl.float32) * scale.to(tl.float32)
        tl.store(normed + place, scaled.to(before.dtype), mask=inside)
    _meet(flags, 1, rank, WORLD)


class OneShotNorm:
    """The memory of a group for calls of up to `MOST_BYTES`. Making one is collective."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, nbytes: int = MOST_BYTES) -> None:
        self._group = resolve(group, device)
        world_size = self._group.world_size
        flags = MOST_PROGRAMS * STAGES * world_size * 4
        self._first = math.ceil(flags / ALIGNMENT) * ALIGNMENT
        self._heap = make_heap(device, self._first + nbytes)
        offers: list[Any] = [None] * world_size
        dist.all_gather_object(offers, self._heap.offer(), group=group)
        self._heap.prepare(offers)
        self._heap.join(self._group, offers)
        dist.barrier(group=group)
        self._heap.joined()
        addresses = self._heap.addresses
        self._flags = torch.tensor(addresses, dtype=torch.int64, device=device)
        self._data = self._flags + self._first

    @staticmethod
    def refusal(rows: int, columns: int, itemsize: int) -> str:
        """Why these sizes are not for this kernel, empty where they are."""
        if rows * columns * itemsize > MOST_BYTES:
            return f"reads every peer's whole tensor: not for more than {MOST_BYTES >> 20} MiB"
        if columns > MOST_COLUMNS:
            return f"a program holds a row: not for more than {MOST_COLUMNS} columns"
        return ""

    def operand(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """x, which lies in this memory."""
        nbytes = math.prod(shape) * dtype.itemsize
        return self._heap.local[self._first : self._first + nbytes].view(dtype).view(shape)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(normed, total) of contiguous x and residual [.., N], x as `operand` returns it. Collective."""
        assert x.data_ptr() == self._heap.local.data_ptr() + self._first, "x lies elsewhere"
        columns = x.shape[-1]
        rows = x.numel() // columns
        assert not self.refusal(rows, columns, x.element_size()), self.refusal(rows, columns, x.element_size())
        total, normed = torch.empty_like(residual), torch.empty_like(residual)
        block = triton.next_power_of_2(columns)
        _one_shot_norm[(min(rows, MOST_PROGRAMS),)](
            data=self._data,
            flags=self._flags,
            residual=residual,
            weight=weight,
            total=total,
            normed=normed,
            M=rows,
            N=columns,
            rank=self._group.rank,
            EPS=eps,
            WORLD=self._group.world_size,
            BLOCK=block,
            num_warps=max(4, min(16, block // 512)),
        )
        return normed, total


@functools.cache
def of_world(device: torch.device) -> OneShotNorm:
    """That of the default group, which is made once in a process: collective then."""
    assert dist.group.WORLD is not None
    return OneShotNorm(dist.group.WORLD, device)
