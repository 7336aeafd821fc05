"""Process groups by name: rank, size, store, timeout, and whether another group has taken the name."""

from __future__ import annotations

import hashlib
import weakref
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d


@dataclass(frozen=True, eq=False)
class Group:
    """One process group as the Device level sees it. `rank` and `world_size` count inside the group. `global_ranks` are
    its members' ranks in the default group. `store` is the group's c10d store under a prefix of ours. `timeout_s` is
    the time that its own collectives may take. Two groups are the same only if they are the same object: if a group was
    destroyed and made again under the same name, its peers have kept nothing of the old group.
    """

    name: str
    rank: int
    world_size: int
    global_ranks: tuple[int, ...]
    store: dist.Store
    timeout_s: float
    process_group: weakref.ref[dist.ProcessGroup]

    def is_current(self) -> bool:
        """Returns whether the group's name still resolves to it. Raises RuntimeError when it resolves to none."""
        return distributed_c10d._resolve_process_group(self.name) is self.process_group()  # type: ignore[arg-type]


def store_of_job(name: str) -> dist.Store | None:
    """Returns Ditron's own part, of this name, of the store that all groups of a job share; None if there is no default
    group.
    """
    shared = distributed_c10d._get_default_store() if dist.is_initialized() else None
    return None if shared is None else dist.PrefixStore(f"ditron/{name}", shared)


def find(group: str | dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Returns a group by itself, by its name, or the default one for None. Raises RuntimeError or ValueError."""
    if group is None:
        return distributed_c10d._get_default_group()
    if isinstance(group, str):
        return distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
    return group


def resolve(group: str | dist.ProcessGroup | None, device: torch.device | None = None) -> Group:
    """Returns the `Group` of a process group, which is given as to `find`. The timeout is that of the backend for
    tensors on `device`, by default that of the group's first backend.
    """
    process_group = find(group)
    global_ranks = tuple(distributed_c10d.get_process_group_ranks(process_group))
    # Subgroups with different members may share a name and a store.
    members = hashlib.blake2b(repr(global_ranks).encode(), digest_size=8).hexdigest()
    return Group(
        name=process_group.group_name,
        rank=process_group.rank(),
        world_size=process_group.size(),
        global_ranks=global_ranks,
        store=dist.PrefixStore(f"ditron/{members}", process_group.get_group_store()),
        timeout_s=_timeout_s(process_group, device or process_group._device_types[0]),
        process_group=weakref.ref(process_group),
    )


def _timeout_s(process_group: dist.ProcessGroup, device: torch.device) -> float:
    backend = process_group._get_backend(device)
    wrapped = getattr(backend, "wrapped_pg", None)  # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps the backend
    seconds: float = (backend if wrapped is None else wrapped).options._timeout.total_seconds()
    return seconds
