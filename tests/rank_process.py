"""What runs inside a rank process: join the group once, then serve jobs from the pool until the pipe closes."""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any


@dataclass(frozen=True)
class RankSetup:
    """How one rank process starts. `backend` is the c10d backend, `log_path` takes its stdout, stderr and stacks."""

    rank: int
    world_size: int
    device_type: str
    backend: str
    store_path: str
    log_path: str
    group_timeout_s: float


@dataclass(frozen=True)
class Job:
    """One function call on a rank; `fn` is a module-level function `fn(ctx, *args)`."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    seed: int


@dataclass(frozen=True)
class RankError:
    """An exception of a rank, as text: exceptions of torch do not all survive pickling."""

    type_name: str
    classes: tuple[str, ...]
    message: str
    traceback: str


@dataclass(frozen=True)
class Outcome:
    """What one rank answered: a value or an error. `lost` says why a rank gave no answer at all."""

    rank: int
    value: Any = None
    error: RankError | None = None
    lost: str = ""


@dataclass
class RankContext:
    """What a job knows about itself. `shared` lives as long as the process, for state kept between jobs."""

    rank: int
    world_size: int
    device: Any  # torch.device; torch is imported only after the environment is right
    seed: int
    shared: dict[str, Any] = field(default_factory=dict)

    @property
    def group_name(self) -> str:
        """The name of the default group, as the ops take it."""
        import torch.distributed as dist

        assert dist.group.WORLD is not None
        return dist.group.WORLD.group_name


def _join(setup: RankSetup) -> RankContext:
    import torch
    import torch.distributed as dist

    device = torch.device("cpu")
    if setup.device_type == "cuda":
        device = torch.device("cuda", setup.rank % torch.cuda.device_count())
        # As torchrun does: libraries look it up.
        os.environ["LOCAL_RANK"] = str(device.index)
        torch.cuda.set_device(device)
        if setup.backend == "gloo":
            from tests.shared_gpu import stage_collectives

            stage_collectives()
    torch.set_num_threads(1)
    store = dist.FileStore(setup.store_path, setup.world_size)
    dist.init_process_group(
        setup.backend,
        store=store,
        rank=setup.rank,
        world_size=setup.world_size,
        timeout=timedelta(seconds=setup.group_timeout_s),
    )
    # The first collective makes the connections; done here, a slow start is not charged to the first test's limit.
    dist.barrier(device_ids=[device.index] if setup.backend == "nccl" else None)
    return RankContext(setup.rank, setup.world_size, device, seed=0)


def rarely_collect() -> None:
    """Let Python look for cycles less often: compilers make many objects, and what tests make is soon gone."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def _fail_early() -> None:
    """Let first calls give up as early as later ones: tests wait for what they make fail, and no rank is late for long
    that they do not stop.
    """
    from ditron_inductor.device import workspaces

    workspaces.first_timeout_s = 0.0


def _error(exc: BaseException) -> RankError:
    classes = tuple(cls.__name__ for cls in type(exc).__mro__)
    return RankError(type(exc).__name__, classes, str(exc), "".join(traceback.format_exception(exc)))


def _run(ctx: RankContext, job: Job) -> Outcome:
    import torch

    ctx.seed = job.seed
    torch.manual_seed(1009 * job.seed + ctx.rank)
    try:
        value = job.fn(ctx, *job.args)
        if ctx.device.type == "cuda":
            torch.cuda.synchronize()
    except Exception as exc:
        return Outcome(ctx.rank, error=_error(exc))
    return Outcome(ctx.rank, value=value)


def rank_main(setup: RankSetup, pipe: Connection) -> None:
    """Serve jobs until the pipe closes. The first message back tells whether this rank joined its group."""
    log = os.open(setup.log_path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable(file=sys.stderr)
    # The pool asks for stacks of ranks that did not answer in time.
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    from ditron_inductor.core.quick_interpreter import make_quick
    from tests.quick_torch import make_torch_quick
    from tests.quick_triton import make_triton_quick

    rarely_collect()
    try:
        make_quick()
        make_torch_quick()
        if os.environ.get("TRITON_INTERPRET") == "1":
            make_triton_quick()
        ctx = _join(setup)
        _fail_early()
    except Exception as exc:
        pipe.send_bytes(pickle.dumps(Outcome(setup.rank, error=_error(exc))))
        os._exit(1)
    pipe.send_bytes(pickle.dumps(Outcome(setup.rank)))
    while True:
        try:
            job: Job | None = pickle.loads(pipe.recv_bytes())
        except EOFError:
            job = None
        if job is None:
            # destroy_process_group can hang on groups with captured graphs, and nothing here needs it.
            os._exit(0)
        outcome = _run(ctx, job)
        try:
            payload = pickle.dumps(outcome)
        except Exception as exc:
            payload = pickle.dumps(Outcome(setup.rank, error=_error(exc)))
        sys.stdout.flush()
        sys.stderr.flush()
        pipe.send_bytes(payload)
