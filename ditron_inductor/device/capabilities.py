"""The capabilities of a group of ranks: each rank states facts about itself, and one pure function joins them."""

from __future__ import annotations

import importlib.metadata
import os
import re
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ditron_inductor.device import slot_layout

OLDEST_CUDA = (8, 0)
"""The oldest compute capability with bf16 tensor cores and the system-scope acquire loads that Triton emits."""

IN_BAND = "DITRON_IN_BAND"
"""The variable that turns off sending in band (core/in_band.py), for all kernels of a group if any rank has 0."""

SYMM_MEM_BACKEND = "CUDA"
"""torch's own backend of symmetric memory. With others each allocation is a collective call of all ranks."""


@dataclass(frozen=True)
class Capabilities:
    """What all ranks of a group can do. It is equal on every rank, and the weakest rank decides. `arch` is "sm_90",
    "gfx942", "interpreter" or "cpu". `num_sms` is the smallest of the ranks' devices. `peer_access`: every rank can
    load and store the memory of every other. `tile_available`: the `tile` kernels can run, which needs peer access. A
    reason is a sentence without a full stop, empty if the flag beside it is True. `in_band`: kernels may send in band.
    """

    device_type: str
    device_name: str
    arch: str
    num_sms: int
    world_size: int
    peer_access: bool
    peer_reason: str
    tile_available: bool
    tile_reason: str
    in_band: bool = False

    def without_peer_access(self, reason: str) -> Capabilities:
        """Returns these capabilities without peer access: mapping each other's memory failed for `reason`."""
        return replace(self, peer_access=False, peer_reason=reason, tile_available=False, tile_reason=reason)


@dataclass(frozen=True)
class RankFacts:
    """One rank's view of itself and of the devices it sees. `host` is equal for processes that can hand each other
    memory: one machine, one container. `device_id` is the UUID of a GPU, or "cpu". `peers` maps the other devices that
    this process sees to whether it can access their memory. `tile_problem` says why this rank alone could not run a
    `tile` kernel, or is empty. `in_band`: kernels of this rank may send in band.
    """

    host: str
    device_type: str
    device_name: str
    device_id: str
    arch: str
    num_sms: int
    peers: dict[str, bool]
    tile_problem: str
    in_band: bool = False


def probe(device: torch.device) -> RankFacts:
    """Returns the facts of this process about `device`, which it initialises for CUDA. No collective call."""
    return _probe_cuda(device) if device.type == "cuda" else _probe_cpu(device)


def _probe_cuda(device: torch.device) -> RankFacts:
    from torch.distributed import _symmetric_memory as symm_mem

    properties = torch.cuda.get_device_properties(device)
    peers = {
        str(torch.cuda.get_device_properties(other).uuid): torch.cuda.can_device_access_peer(device, other)
        for other in range(torch.cuda.device_count())
        if other != device.index
    }
    problem = ""
    if torch.version.hip is None and (properties.major, properties.minor) < OLDEST_CUDA:
        problem = f"{properties.name} has compute capability {properties.major}.{properties.minor}, 8.0 is needed"
    elif _interpreted():
        problem = "TRITON_INTERPRET=1 is set, and the interpreter cannot reach the memory of a GPU"
    elif symm_mem.get_backend(device) != SYMM_MEM_BACKEND:
        problem = f"torch's symmetric memory uses {symm_mem.get_backend(device)} here, {SYMM_MEM_BACKEND} is needed"
    arch = f"sm_{properties.major}{properties.minor}"
    if torch.version.hip is not None:
        arch = properties.gcnArchName.split(":")[0]
    return RankFacts(
        host=_host(),
        device_type="cuda",
        device_name=properties.name,
        device_id=str(properties.uuid),
        arch=arch,
        num_sms=properties.multi_processor_count,
        peers=peers,
        tile_problem=problem,
        # On other devices it is not known when a peer sees a store without a release.
        in_band=torch.version.hip is None and os.environ.get(IN_BAND) != "0",
    )


def _probe_cpu(device: torch.device) -> RankFacts:
    problem = interpreter_problem()
    return RankFacts(
        host=_host(),
        device_type=device.type,
        device_name=device.type,
        device_id=device.type,
        arch="cpu" if problem else "interpreter",
        num_sms=1,
        peers={},
        tile_problem=problem or ("" if sys.platform == "linux" else "memory shared by file descriptor needs Linux"),
        in_band=True,
    )


def interpreter_problem() -> str:
    """Returns why Triton's interpreter cannot run our kernels in this process; empty if it can."""
    if not _interpreted():
        return "TRITON_INTERPRET=1 was not set before Triton was imported"
    # Without numpy the kernels could not even have been decorated.
    triton, numpy = _version("triton"), _version("numpy")
    if triton < (3, 8) and numpy >= (2, 4):
        return f"the interpreter of Triton {triton[0]}.{triton[1]} needs numpy < 2.4 (or take Triton 3.8)"
    return ""


def _interpreted() -> bool:
    from triton.runtime.jit import JITFunction

    from ditron_inductor.core import signals

    # The value of TRITON_INTERPRET when the kernels were decorated counts, and this shows which value that was.
    return not isinstance(signals.wait, JITFunction)


def _version(distribution: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", importlib.metadata.version(distribution))[:2])


def _host() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id")
    processes = Path("/proc/self/ns/pid")
    parts = [socket.gethostname()]
    parts += [boot.read_text().strip()] if boot.exists() else []
    parts += [os.readlink(processes)] if processes.exists() else []
    return "/".join(parts)


def combine(ranks: Sequence[RankFacts]) -> Capabilities:
    """Returns the capabilities of a group from its ranks' facts, by group rank: a pure function, so all agree."""
    peer_reason = _peer_problem(ranks)
    tile_reason = next((f"{_on(rank, ranks)}{f.tile_problem}" for rank, f in enumerate(ranks) if f.tile_problem), "")
    names = sorted({facts.device_name for facts in ranks})
    archs = sorted({facts.arch for facts in ranks})
    if not tile_reason and len(archs) > 1:
        tile_reason = f"the ranks have different devices: {', '.join(archs)}"
    if not tile_reason and len(ranks) > slot_layout.MAX_WORLD:
        tile_reason = f"groups of more than {slot_layout.MAX_WORLD} ranks are not supported by the tile kernels"
    return Capabilities(
        device_type=ranks[0].device_type,
        device_name=" | ".join(names),
        arch=archs[0] if len(archs) == 1 else "mixed",
        num_sms=min(facts.num_sms for facts in ranks),
        world_size=len(ranks),
        peer_access=not peer_reason,
        peer_reason=peer_reason,
        tile_available=not (tile_reason or peer_reason),
        tile_reason=tile_reason or peer_reason,
        in_band=all(facts.in_band for facts in ranks),
    )


def _on(rank: int, ranks: Sequence[RankFacts]) -> str:
    everywhere = len({facts.tile_problem for facts in ranks}) == 1
    return "" if everywhere else f"on rank {rank}: "


def _peer_problem(ranks: Sequence[RankFacts]) -> str:
    first = ranks[0]
    for rank, facts in enumerate(ranks):
        if facts.device_type != first.device_type:
            return f"rank {rank} uses {facts.device_type} and rank 0 {first.device_type}"
        if facts.host != first.host:
            return f"rank {rank} runs on {_short(facts.host)} and rank 0 on {_short(first.host)}: not one host"
    for rank, facts in enumerate(ranks):
        for peer, other in enumerate(ranks):
            # A device that this process does not see may still be mapped: the mapping itself is tried next.
            if not facts.peers.get(other.device_id, True):
                return f"the GPU of rank {rank} cannot access the memory of the GPU of rank {peer}"
    return ""


def _short(host: str) -> str:
    return "/".join(part[:24] for part in host.split("/"))
