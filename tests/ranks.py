"""Multi-process tests: pools of live rank processes that run module-level functions.

A rank imports torch once (seconds), so pools live as long as the test session and tests submit jobs to them:

    def check(ctx: RankContext, x: int) -> int: ...
    values = pool.run(check, 3)          # one value per rank; raises RanksFailed with every rank's traceback

When a rank does not answer within the limit, its stacks are dumped, the pool is killed, and the next
`RankPools.get` starts a fresh one: a deadlock costs its limit and fails one test. So it does when a job that was to
succeed leaves its ranks out of step, which would fail all later tests. Ranks meet in a file store, are seeded by rank,
and get their environment before any import: `TRITON_INTERPRET=1` acts when kernels are decorated.

The pools of two ranks that most tests share are spawned: each rank has hashes of its own, and what it decides must not
hang on them. Other CPU ranks without an environment of their own are forked from a process that has imported torch.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

from tests.rank_process import Job, Outcome, RankContext, RankError, RankSetup, rank_main

__all__ = ["Outcome", "RankContext", "RankError", "RankPool", "RankPools", "RanksFailed", "run_ranks"]

START_LIMIT_S = 180.0
# A limit finds ranks that hang. The longest job takes 15 s on a quiet machine, and took 83 s on a slow one.
JOB_LIMIT_S = 200.0
# After one rank failed, its peers may still come to an end by themselves; longer than this they are waiting for it.
GRACE_S = 15.0
CONTINUE_EVERY_S = 0.2
# What ranks need before their first launch, or their first compilation, has ended.
PRELOADED = [
    "tests.rank_process",
    "torch.distributed",
    "torch._inductor.compile_fx",
    "ditron_inductor.lowering.register",
    "ditron_inductor.backend",
    "triton.compiler",
]
LOG_TAIL = 6000
GLOO = "(pt_gloo_runloop)"
"""The name of the threads of a group."""
_STARTING = threading.Lock()
OUT_OF_STEP = {"DitronTimeout", "DitronDiverged", "DitronPoisoned"}
"""Errors behind which a group cannot be used before its ranks reset it."""


class RanksFailed(AssertionError):
    """Some ranks raised or did not answer; the message holds every traceback, `outcomes` the parts."""

    def __init__(self, message: str, outcomes: list[Outcome]) -> None:
        super().__init__(message)
        self.outcomes = outcomes


def rank_environment(device_type: str, world_size: int) -> tuple[str, dict[str, str]]:
    """The c10d backend and the environment of rank processes: NCCL needs a GPU per rank, gloo lets ranks share one."""
    env = {
        "OMP_NUM_THREADS": "1",
        # NVLink multicast can take a shared host's GPUs out of service; nothing here may use it.
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "NCCL_NVLS_ENABLE": "0",
        "NVSHMEM_DISABLE_NVLS": "1",
        # Peers of a killed rank report to their test; c10d must not end them first.
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    }
    if device_type == "cpu":
        # Compile in the rank itself: no pool of compile workers beside every rank on a machine with few cores.
        env |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        # Huge pages, which `make test` asks for, make ranks no quicker, and all tests took 15 GB with them, not 11.
        return "gloo", env | {"PYTHONMALLOC": "default", "GLIBC_TUNABLES": ""}
    env["TORCHINDUCTOR_COMPILE_THREADS"] = "4"
    import torch

    if world_size <= torch.cuda.device_count():
        return "nccl", env
    return "gloo", env | {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}


class RankPool:
    """`world_size` rank processes in one process group, serving jobs one after another."""

    def __init__(
        self,
        world_size: int,
        device_type: str = "cpu",
        *,
        env: Mapping[str, str] | None = None,
        group_timeout_s: float = 300.0,
        spawned: bool = False,
    ) -> None:
        self.world_size = world_size
        self.device_type = device_type
        self.broken = ""
        self._folder = tempfile.TemporaryDirectory(prefix="ditron-ranks-")
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        backend, rank_env = rank_environment(device_type, world_size)
        context = multiprocessing.get_context("spawn" if spawned or env or device_type != "cpu" else "forkserver")
        context.set_forkserver_preload(PRELOADED)
        # A spawned child copies it before its first import. Threads that make pools beside each other take turns, or a
        # child begins with an environment that is just being changed back, and ends with code 255.
        with _STARTING, mock.patch.dict(os.environ, rank_env | dict(env or {})):
            for rank in range(world_size):
                setup = RankSetup(
                    rank=rank,
                    world_size=world_size,
                    device_type=device_type,
                    backend=backend,
                    store_path=str(Path(self._folder.name) / "store"),
                    log_path=str(self._log(rank)),
                    group_timeout_s=group_timeout_s,
                )
                ours, theirs = context.Pipe()
                process = context.Process(target=rank_main, args=(setup, theirs), daemon=True, name=f"rank{rank}")
                process.start()
                theirs.close()
                self._processes.append(process)
                self._pipes.append(ours)
        self._raise_failures(self._collect(START_LIMIT_S, "the start of the ranks"), "the start of the ranks")

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = JOB_LIMIT_S, seed: int = 0) -> list[Any]:
        """`fn(ctx, *args)` on every rank; the values in rank order. Raises RanksFailed where a rank raised or hung."""
        outcomes = self.outcomes(fn, *args, timeout=timeout, seed=seed)
        self._raise_failures(outcomes, fn.__name__)
        return [outcome.value for outcome in outcomes]

    def outcomes(
        self,
        fn: Callable[..., Any],
        *args: Any,
        timeout: float = JOB_LIMIT_S,
        seed: int = 0,
        stop: int | None = None,
        grace: float = GRACE_S,
    ) -> list[Outcome]:
        """As `run`, but errors are returned, not raised, for tests of failures.

        `stop` is a rank expected never to answer (it kills or stops itself): once the others have answered, it is
        continued, in case it only stopped, and has `grace` seconds to answer.
        """
        assert not self.broken, f"this pool is broken: {self.broken}"
        payload = pickle.dumps(Job(fn, args, seed))
        for pipe in self._pipes:
            pipe.send_bytes(payload)
        return self._collect(timeout, fn.__name__, stop=stop, grace=grace)

    def log_tail(self, rank: int, length: int = LOG_TAIL) -> str:
        """The end of what a rank wrote: its output, and its stacks where it did not answer or was ended by a signal."""
        log = self._log(rank)
        if not log.exists():
            return ""
        # Behind the stacks faulthandler names each module that the compiler has made, thousands of characters. And each
        # group that a rank ever had keeps two threads, which wait.
        lines = log.read_text(errors="replace").splitlines(keepends=True)
        kept = (line for line in lines if not line.startswith("Extension modules:") and GLOO not in line)
        return "".join(kept)[-length:]

    def close(self) -> None:
        """End every rank; also the way out of a broken pool."""
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            pipe.close()
            if process.is_alive():
                process.kill()
        for process in self._processes:
            process.join(10)
        self.broken = self.broken or "closed"
        self._folder.cleanup()

    def _log(self, rank: int) -> Path:
        return Path(self._folder.name) / f"rank{rank}.log"

    def _collect(self, timeout: float, what: str, stop: int | None = None, grace: float = GRACE_S) -> list[Outcome]:
        deadline = time.monotonic() + timeout
        outcomes: dict[int, Outcome] = {}
        pending = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        continued = False
        while pending:
            patience = deadline - time.monotonic()
            if set(pending.values()) == {stop}:
                if not continued:
                    continued = True
                    deadline = min(deadline, time.monotonic() + grace)
                # Again and again: a rank that has not stopped yet would not notice, and stop later.
                self._continue(stop)
                patience = min(CONTINUE_EVERY_S, deadline - time.monotonic())
            ready = wait(list(pending), timeout=max(0.0, patience))
            if not ready and time.monotonic() < deadline:
                continue
            if not ready:
                self._give_up(set(pending.values()), outcomes, f"no answer to {what} in time")
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = pending.pop(pipe)
                try:
                    outcomes[rank] = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionResetError):
                    self._processes[rank].join(5)
                    outcomes[rank] = Outcome(rank, lost=f"process ended with code {self._processes[rank].exitcode}")
                    self.broken = f"rank {rank} ended during {what}"
                failed = outcomes[rank].error is not None or outcomes[rank].lost
                if failed and stop is None:
                    deadline = min(deadline, time.monotonic() + grace)
        return [outcomes[rank] for rank in range(self.world_size)]

    def _continue(self, rank: int | None) -> None:
        pid = self._processes[rank].pid if rank is not None else None
        if pid is not None and self._processes[rank or 0].is_alive():
            os.kill(pid, signal.SIGCONT)

    def _give_up(self, silent: set[int], outcomes: dict[int, Outcome], why: str) -> None:
        """Ask silent ranks for their stacks, then end the pool: its group can no longer be in a known state."""
        self.broken = why
        for rank in silent:
            process = self._processes[rank]
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, signal.SIGCONT)
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(1.0)
        for rank in silent:
            with self._log(rank).open("a") as log:
                log.write(_thread_states(self._processes[rank].pid))
        for process in self._processes:
            process.kill()
        for rank in silent:
            outcomes[rank] = Outcome(rank, lost=why)

    def _raise_failures(self, outcomes: list[Outcome], what: str) -> None:
        failed = [outcome for outcome in outcomes if outcome.error is not None or outcome.lost]
        if not failed:
            return
        parts = [f"{what} failed on ranks {[outcome.rank for outcome in failed]} of {self.world_size}"]
        for outcome in failed:
            if outcome.error is not None:
                parts.append(f"--- rank {outcome.rank}\n{outcome.error.traceback}")
                if outcome.error.type_name in OUT_OF_STEP:
                    self.broken = self.broken or f"{what} left its ranks out of step"
            if outcome.lost:
                parts.append(f"--- rank {outcome.rank}: {outcome.lost}; end of its log:\n{self.log_tail(outcome.rank)}")
        raise RanksFailed("\n".join(parts), outcomes)


def _thread_states(pid: int | None) -> str:
    """Where the threads of a process are, as the system sees it: one that is inside a driver prints no stack."""
    lines = []
    for task in sorted(Path(f"/proc/{pid}/task").glob("*")):
        with contextlib.suppress(OSError):
            name = (task / "comm").read_text().strip()
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
            lines.append(f"thread {task.name} ({name}): {state}, in {(task / 'wchan').read_text().strip() or '?'}")
    return "\n".join(["", *lines, ""])


class RankPools:
    """The pools of a test session, by device, world size and extra environment; broken ones are replaced."""

    def __init__(self) -> None:
        self._pools: dict[tuple[str, int, str, tuple[tuple[str, str], ...]], RankPool] = {}

    def get(self, device_type: str, world_size: int, env: Mapping[str, str] | None = None, label: str = "") -> RankPool:
        """A live pool: the one of an earlier call, unless that broke. A `label` asks for ranks of one's own."""
        key = (device_type, world_size, label, tuple(sorted((env or {}).items())))
        pool = self._pools.get(key)
        if pool is not None and not pool.broken:
            return pool
        if pool is not None:
            self._pools.pop(key).close()
        self._pools[key] = RankPool(world_size, device_type, env=env, spawned=world_size == 2 and not label)
        return self._pools[key]

    def close(self) -> None:
        """End every pool."""
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    device: str = "cpu",
    env: Mapping[str, str] | None = None,
    timeout: float = JOB_LIMIT_S,
    seed: int = 0,
) -> list[Any]:
    """`fn(ctx, *args)` once, in `world_size` fresh processes; for tests that need a clean process or environment."""
    pool = RankPool(world_size, device, env=env)
    try:
        return pool.run(fn, *args, timeout=timeout, seed=seed)
    finally:
        pool.close()
