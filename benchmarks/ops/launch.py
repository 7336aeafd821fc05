"""Rank processes for a benchmark: started here, or found in the environment that `torch.distributed.run` made."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import time

from benchmarks.ops.request import Request

# Multicast can take a shared host's GPUs out of service; no contestant uses it, nor NVLS in NCCL.
ENVIRONMENT = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0", "NVSHMEM_DISABLE_NVLS": "1"}
# What a run may take beyond its budget, before its processes are ended.
GRACE_S = 60.0


def rank_process(request: Request) -> None:
    """Run this process as the rank that its environment names."""
    begun = time.monotonic()
    from benchmarks.ops.run import main

    main(request, begun)


def start_ranks(request: Request, world_size: int) -> int:
    """Start the ranks and wait for them; the exit code, 1 as soon as one of them fails or the time is over."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = ENVIRONMENT | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world_size)}
    if request.device == "cpu":
        common |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    spawn = multiprocessing.get_context("spawn")
    processes = []
    for rank in range(world_size):
        os.environ.update(common | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        processes.append(spawn.Process(target=rank_process, args=(request,), daemon=True))
        processes[-1].start()
    deadline = time.monotonic() + request.budget_s + GRACE_S
    while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
        if any(process.exitcode for process in processes):
            # The others would wait for the one that failed.
            break
        time.sleep(0.1)
    for rank, process in enumerate(processes):
        if process.is_alive():
            process.join(2)
        if process.is_alive():
            print(f"rank {rank} did not come to an end; results so far are in {request.out}", file=sys.stderr)
            process.kill()
        process.join()
    return int(any(process.exitcode for process in processes))
