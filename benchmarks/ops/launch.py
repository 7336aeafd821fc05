"""Rank processes for a benchmark: started here, or found in the environment that `torch.distributed.run` made."""

from __future__ import annotations

import faulthandler
import os
import sys
import time

from benchmarks.ops.request import Request
from ditron_inductor.processes import Rank, failures_text, run_ranks

# Multicast can take a shared host's GPUs out of service; no contestant uses it, nor NVLS in NCCL.
ENVIRONMENT = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0", "NVSHMEM_DISABLE_NVLS": "1"}
# What a run may take beyond its budget, before its processes are ended.
GRACE_S = 60.0
DUMP_S = 10.0


def rank_process(request: Request) -> bool:
    """Run this process as the rank that its environment names (RANK, WORLD_SIZE, MASTER_ADDR, ...)."""
    begun = time.monotonic()
    os.environ.update(ENVIRONMENT)
    import torch
    import torch.distributed as dist

    from benchmarks.ops.run import main

    device = torch.device("cpu")
    if request.device == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", os.environ["RANK"])))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if request.device == "cuda" else "gloo")
    return main(request, device, begun)


def _start(rank: Rank, request: Request) -> bool:
    begun = time.monotonic()
    # Where a rank that hangs is, before it is ended.
    faulthandler.dump_traceback_later(request.budget_s + GRACE_S - DUMP_S)
    from benchmarks.ops.run import main

    return main(request, rank.join(), begun)


def start_ranks(request: Request, world_size: int) -> int:
    """Start the ranks and wait for them; the exit code, 1 if one of them failed or the time was over."""
    os.environ.update(ENVIRONMENT)
    limit_s = request.budget_s + GRACE_S
    codes = run_ranks(_start, request, world_size=world_size, device_type=request.device, limit_s=limit_s)
    if any(code != 0 for code in codes):
        kept = f"; rows so far are in {request.out}" if request.out else ""
        print(f"benchmarks.ops: {failures_text(codes)}{kept}", file=sys.stderr)
        return 1
    return 0
