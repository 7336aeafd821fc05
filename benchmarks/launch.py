"""Rank processes for a benchmark: started here, or found in the environment that `torch.distributed.run` made."""

from __future__ import annotations

import faulthandler
import importlib
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

from ditron_inductor.tools.processes import Rank, failures_text, run_ranks

# Multicast can take a shared host's GPUs out of service; no contestant uses it, nor NVLS in NCCL.
ENVIRONMENT = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0", "NVSHMEM_DISABLE_NVLS": "1"}
# What a run may take beyond its budget, before its processes are ended.
GRACE_S = 60.0
DUMP_S = 10.0


class Request(Protocol):
    """The request of a benchmark to its ranks. Each benchmark has a dataclass of its own with more fields."""

    @property
    def device(self) -> str: ...
    @property
    def budget_s(self) -> float: ...
    @property
    def out(self) -> str: ...


def main_of(module: str) -> Callable[[Any, Any, float], bool]:
    """`main(request, device, begun)` of a module, imported in a rank only: the starting process needs no torch."""
    main: Callable[[Any, Any, float], bool] = importlib.import_module(module).main
    return main


def rank_process(module: str, request: Request) -> bool:
    """Run `main` of `module` in this process, as the rank that its environment names (RANK, WORLD_SIZE, ...)."""
    begun = time.monotonic()
    os.environ.update(ENVIRONMENT)
    import torch
    import torch.distributed as dist

    device = torch.device("cpu")
    if request.device == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", os.environ["RANK"])))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if request.device == "cuda" else "gloo")
    return main_of(module)(request, device, begun)


def _start(rank: Rank, asked: tuple[str, Request]) -> bool:
    begun = time.monotonic()
    module, request = asked
    # Where a rank that hangs is, before it is ended.
    faulthandler.dump_traceback_later(request.budget_s + GRACE_S - DUMP_S)
    return main_of(module)(request, rank.join(), begun)


def num_ranks(program: str, wanted: int, device_type: str) -> int:
    """Ranks of a run: as many as were asked for, else one for each GPU; 0, with a word on stderr, where that is one."""
    if not wanted:
        import torch

        wanted = torch.cuda.device_count() if device_type == "cuda" else 2
    if wanted < 2:
        print(f"{program} needs at least two ranks: two GPUs, --world, or --device cpu", file=sys.stderr)
        return 0
    return wanted


def command(module: str, request: Request, wanted: int) -> int:
    """The exit code of a benchmark's command: `main` of `module` on ranks, those of the environment or new ones."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        held = rank_process(module, request)
        # Not the interpreter's own end: torch would destroy the process group, which can hang.
        os._exit(0 if held else 1)
    world_size = num_ranks(module.rpartition(".")[0], wanted, request.device)
    if not world_size:
        return 2
    if not request.out:
        print("rows are printed only; --out takes a file for them", file=sys.stderr)
    return start_ranks(module, request, world_size)


def start_ranks(module: str, request: Request, world_size: int) -> int:
    """Run `main` of `module` in new rank processes; the exit code, 1 if one of them failed or the time was over."""
    kept = f"; rows so far are in {request.out}" if request.out else ""
    limit_s = request.budget_s + GRACE_S
    return to_the_end(module, _start, (module, request), world_size, request.device, limit_s, kept)


def measure_on_ranks(module: str, request: Any, world_size: int, device_type: str, limit_s: float) -> int:
    """Run `measure(session, request)` of `module` in new rank processes; the exit code as of `start_ranks`."""
    return to_the_end(module, _measure, (module, request, limit_s), world_size, device_type, limit_s)


def _measure(rank: Rank, asked: tuple[str, Any, float]) -> bool:
    begun = time.monotonic()
    module, request, limit_s = asked
    faulthandler.dump_traceback_later(limit_s - DUMP_S)
    device = rank.join()
    from benchmarks.session import Session

    importlib.import_module(module).measure(Session(device, begun), request)
    return True


def to_the_end(
    program: str,
    target: Callable[[Rank, Any], bool],
    argument: Any,
    world_size: int,
    device_type: str,
    limit_s: float,
    kept: str = "",
) -> int:
    """Run `target(rank, argument)` in new rank processes; the exit code as of `start_ranks`. kept: said on failure."""
    os.environ.update(ENVIRONMENT)
    codes = run_ranks(target, argument, world_size=world_size, device_type=device_type, limit_s=limit_s)
    if any(code != 0 for code in codes):
        print(f"{program}: {failures_text(codes)}{kept}", file=sys.stderr)
        return 1
    return 0
