"""NCCL with registered buffers: memory of NCCL's own allocator, in a pool that the communicator knows.

NCCL then reads and writes the buffers themselves, where it would else copy through its own. What is allocated in the
pool after it was registered, is registered too. A CUDA graph has memory of its own, and what NCCL is captured with is
registered by NCCL (`NCCL_GRAPH_REGISTER`, on by default), so there is nothing to add inside graphs.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

IN_GRAPHS = "NCCL registers the buffers of a CUDA graph by itself: inside graphs every contestant has them"


def refusal(group: dist.ProcessGroup, device: torch.device) -> str:
    """Why buffers cannot be registered here, empty where they can."""
    if device.type != "cuda":
        return "registered buffers are NCCL's, which needs GPUs"
    backend = group._get_backend(device)
    if not hasattr(backend, "register_mem_pool") or not hasattr(backend, "mem_allocator"):
        return f"torch {torch.__version__} cannot register a memory pool with NCCL"
    return ""


class RegisteredPool:
    """A memory pool that the communicator of a group knows. Collective. RuntimeError where there can be none."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        problem = refusal(group, device)
        if problem:
            raise RuntimeError(problem)
        # The communicator exists from the first collective on.
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        backend: Any = group._get_backend(device)
        self.pool = torch.cuda.MemPool(backend.mem_allocator)
        backend.register_mem_pool(self.pool)
        self._device = device

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """What is allocated inside comes from the pool."""
        with torch.cuda.use_mem_pool(self.pool, self._device):
            yield

    def calling(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the call, made so that its memory comes from the pool."""

        def inside(*operands: Any, **named: Any) -> Any:
            with self.used():
                return call(*operands, **named)

        return inside


@functools.cache
def of_world(device: torch.device) -> RegisteredPool:
    """That of the default group, which is made once in a process: collective then."""
    assert dist.group.WORLD is not None
    return RegisteredPool(dist.group.WORLD, device)
