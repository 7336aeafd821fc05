"""The rank processes that a command starts for itself on one machine: one per GPU, or processes on the CPU with the
interpreter.

The parent never imports Triton. The environment variables of the ranks have to be set before their first import.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ditron_inductor.core.quick_interpreter import make_quick

if TYPE_CHECKING:
    import torch

# After one rank failed, its peers may still say what they have to say; longer than this they only wait for it.
GRACE_S = 10.0


@dataclass(frozen=True)
class Rank:
    """One rank process. `limit_s` bounds every collective of its default group."""

    rank: int
    world_size: int
    device_type: str
    store_path: str
    limit_s: float

    def join(self) -> torch.device:
        """Sets this process's device, makes the default group with NCCL or gloo, and returns the device."""
        import torch
        import torch.distributed as dist

        make_quick()
        # Libraries take their GPU from it, as `torch.distributed.run` sets it.
        os.environ["LOCAL_RANK"] = str(self.rank)
        device, backend = torch.device("cpu"), "gloo"
        if self.device_type == "cuda":
            device, backend = torch.device("cuda", self.rank), "nccl"
            torch.cuda.set_device(device)
        torch.set_num_threads(1)
        dist.init_process_group(
            backend,
            store=dist.FileStore(self.store_path, self.world_size),
            rank=self.rank,
            world_size=self.world_size,
            timeout=timedelta(seconds=self.limit_s),
        )
        return device


def run_ranks(
    target: Callable[[Rank, Any], bool], argument: Any, *, world_size: int, device_type: str, limit_s: float
) -> list[int | None]:
    """Runs `target(rank, argument)`, a module-level function, in `world_size` new processes. Returns their exit codes:
    0 if it returned True, 1 if it returned False or raised (the traceback is on stderr), None if it was still running
    after `limit_s` seconds. After a failure the other ranks are soon ended.
    """
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="ditron-ranks-") as folder, _environment(rank_environment(device_type)):
        store_path = str(Path(folder) / "store")
        ranks = [Rank(number, world_size, device_type, store_path, limit_s) for number in range(world_size)]
        processes: list[BaseProcess] = [
            spawn.Process(target=_rank_main, args=(target, rank, argument)) for rank in ranks
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + limit_s
        while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
            time.sleep(0.1)
            if any(process.exitcode not in (None, 0) for process in processes):
                deadline = min(deadline, time.monotonic() + GRACE_S)
        codes = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
            process.join()
    return codes


def rank_environment(device_type: str) -> dict[str, str]:
    """Returns the environment variables that a rank needs before its first import."""
    # Ranks end without cleaning up (see _rank_main), so warnings about Inductor's compile workers are expected.
    environment = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore:resource_tracker"}
    if device_type == "cpu":
        environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    return environment


def device_for(ranks: int, wanted: str) -> tuple[str, str]:
    """Returns the device type for `ranks` processes, or why there is none. wanted: `cuda`, `cpu`, or `auto`."""
    import torch

    gpus = torch.cuda.device_count()
    device_type = ("cuda" if gpus >= ranks else "cpu") if wanted == "auto" else wanted
    if ranks < 2:
        return device_type, "--ranks has to be at least 2"
    if device_type == "cuda" and gpus < ranks:
        return device_type, f"{ranks} ranks need as many GPUs, {gpus} found; use --device cpu"
    return device_type, ""


def failures_text(codes: list[int | None]) -> str:
    """Returns the ranks that did not end with 0, as `rank 1 (exit code 1), rank 2 (ended by signal 9)`."""
    return ", ".join(f"rank {rank} ({_exit_text(code)})" for rank, code in enumerate(codes) if code != 0)


def exit_code(command: str, codes: list[int | None], advice: str = "") -> int:
    """Returns the exit code of a command whose ranks ended with these codes, and prints which ranks failed.

    advice: what else helps to find the cause.
    """
    if all(code == 0 for code in codes):
        return 0
    print(
        f"{command}: failed on {failures_text(codes)}. The first error above says what went wrong; "
        f"`python -m ditron_inductor doctor` shows what can run on this machine{advice}.",
        file=sys.stderr,
    )
    return 1


def _exit_text(code: int | None) -> str:
    if code is None:
        return "still running at the limit"
    return f"ended by signal {-code}" if code < 0 else f"exit code {code}"


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Sets `values` in the environment of this process while children start, which copy it."""
    before = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key)
            else:
                os.environ[key] = value


def _rank_main(target: Callable[[Rank, Any], bool], rank: Rank, argument: Any) -> None:
    try:
        held = target(rank, argument)
    except Exception:
        # One write, so that the tracebacks of two ranks do not mix.
        sys.stderr.write(f"[rank {rank.rank}] {traceback.format_exc()}\n")
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    sys.stderr.flush()
    # destroy_process_group can hang on NCCL groups, and the process ends anyway.
    os._exit(0 if held else 1)
