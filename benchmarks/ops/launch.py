"""Rank processes for a benchmark: started here, or found in the environment that `torch.distributed.run` made."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import sys
import time

# Multicast can take a shared host's GPUs out of service; no contestant uses it, nor NVLS in NCCL.
ENVIRONMENT = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0", "NVSHMEM_DISABLE_NVLS": "1"}
# What a run may take beyond its budget, before its processes are ended.
GRACE_S = 60.0


def rank_process(options: argparse.Namespace) -> None:
    """Run this process as the rank that its environment names."""
    from benchmarks.ops.run import Request, main

    main(
        Request(
            ops=tuple(options.ops),
            shapes=options.shapes,
            world_size=int(os.environ["WORLD_SIZE"]),
            device=options.device,
            only=tuple(options.only),
            graph=options.graph,
            budget_s=options.budget,
            rounds=options.rounds,
            out=options.out,
            commit=options.commit,
        )
    )


def start_ranks(options: argparse.Namespace) -> int:
    """Start the ranks and wait for them; the exit code, 1 as soon as one of them fails or the time is over."""
    world_size = options.world
    if not world_size:
        import torch

        world_size = torch.cuda.device_count() if options.device == "cuda" else 2
    if world_size < 2:
        print("benchmarks.ops needs at least two ranks: two GPUs, or --device cpu", file=sys.stderr)
        return 2
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = ENVIRONMENT | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world_size)}
    if options.device == "cpu":
        common |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    spawn = multiprocessing.get_context("spawn")
    processes = []
    for rank in range(world_size):
        os.environ.update(common | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        processes.append(spawn.Process(target=rank_process, args=(options,), daemon=True))
        processes[-1].start()
    deadline = time.monotonic() + options.budget + GRACE_S
    while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
        if any(process.exitcode for process in processes):
            # The others would wait for the one that failed.
            break
        time.sleep(0.1)
    for rank, process in enumerate(processes):
        if process.is_alive():
            process.join(2)
        if process.is_alive():
            print(f"rank {rank} did not come to an end; results so far are in {options.out}", file=sys.stderr)
            process.kill()
        process.join()
    return int(any(process.exitcode for process in processes))
