"""Ranks as threads of one process over a HashStore: enough for the host-side meetings, and fast."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch.distributed as dist

from ditron_inductor.device.groups import Group


class Anchor:
    """Stands in for the process group object that a Group refers to."""


def make_group(store: dist.Store, rank: int, world_size: int, first_global_rank: int = 0) -> Group:
    """The Group of one rank; the weak reference is dead from the start."""
    return Group(
        name="test",
        rank=rank,
        world_size=world_size,
        global_ranks=tuple(range(first_global_rank, first_global_rank + world_size)),
        store=store,
        timeout_s=5.0,
        process_group=weakref.ref(Anchor()),  # type: ignore[arg-type]
    )


def on_ranks(world_size: int, fn: Callable[[Group], Any], store: dist.Store | None = None, **kwargs: Any) -> list[Any]:
    """`fn(group)` on every rank at once; what each returned, or the exception that it raised."""
    store = store or dist.HashStore()

    def run(rank: int) -> Any:
        try:
            return fn(make_group(store, rank, world_size, **kwargs))
        except Exception as exc:
            return exc

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(run, range(world_size)))
