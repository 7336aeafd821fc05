"""What the benchmarks of a gather with what stands around it have in common: options, check, times, table.

Contestants of a chain are calls that return the same tensors; `nccl` is the first. `auto` is what the plan picks.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence

import torch
from tabulate import tabulate

from benchmarks.launch import measure_on_ranks
from benchmarks.session import Session
from ditron_inductor.task.plan import decisions
from ditron_inductor.timing import GRAPH_CALLS, captured, interleaved
from ditron_inductor.tune_shapes import MODELS, Layer

LIMIT_S = 480.0
WORKSPACE_LIMIT = 1 << 30
TIMEOUT_S = 30.0
ROTATED_BYTES = 400 << 20
"""So many bytes of weights are used in turns, so that none stay in the cache."""
STRATEGIES = ("auto", "tile", "chunked", "library")
TOLERANCE = 4e-2
"""A few roundings apart: Inductor does not round what it holds in registers, and sums of a norm have another order."""

Call = Callable[[int], Sequence[object]]


def parser(module: str, description: str | None, rows: Sequence[int]) -> argparse.ArgumentParser:
    """The command line of a chain's benchmark. rows: measured by default."""
    text = (description or "").partition("\n")[0]
    result = argparse.ArgumentParser(prog=f"python -m {module}", description=text)
    result.add_argument("--m", nargs="+", type=int, default=list(rows), help="rows of all ranks")
    result.add_argument("--models", nargs="+", choices=sorted(MODELS), default=["llama-8b", "llama-70b"])
    result.add_argument("--world", type=int, default=2)
    result.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try the program, not speed")
    result.add_argument("--rounds", type=int, default=15)
    result.add_argument("--shrink", type=int, default=1, help="divide all widths by this, to try the program")
    return result


def layers(options: argparse.Namespace) -> list[tuple[str, Layer, int]]:
    """(name of a model, its layer, rows) of a run."""
    return [(name, MODELS[name], m) for name in options.models for m in options.m]


def strategies(device: torch.device) -> tuple[str, ...]:
    """Those of our contestants."""
    return STRATEGIES if device.type == "cuda" else ("library",)


def contest(session: Session, calls: Mapping[str, Call], rounds: int, title: str, site: str) -> dict[str, float]:
    """Check all against `nccl`, time them, print a table on rank 0; the eager times. site: of `auto`, for the title."""
    wanted = calls["nccl"](0)
    for name, call in calls.items():
        for got, want in zip(call(0), wanted, strict=True):
            assert isinstance(got, torch.Tensor) and isinstance(want, torch.Tensor)
            torch.testing.assert_close(
                got, want, rtol=TOLERANCE, atol=TOLERANCE, msg=lambda text, name=name: f"{name}: {text}"
            )
    times = interleaved(session.clock, calls, rounds)
    graph: dict[str, float] = {}
    if session.clock.device.type == "cuda":
        replays = {name: captured(call) for name, call in calls.items()}
        graph = {name: us / GRAPH_CALLS for name, us in interleaved(session.clock, replays, rounds).items()}
    last = decisions.last(session.group_name, site)
    chosen = f", the plan: {last[1].strategy} ({last[1].reason})" if last else ""
    if session.rank == 0:
        print(f"\n{title}, {session.world_size} ranks{chosen}\n{table(times, graph)}", flush=True)
    torch.compiler.reset()
    return times


def table(times: Mapping[str, float], graph: Mapping[str, float]) -> str:
    """Microseconds of every contestant and how many times as fast as `nccl` it is, eager and inside CUDA graphs."""
    rows = [
        (name, us, times["nccl"] / us, *((graph[name], graph["nccl"] / graph[name]) if graph else ()))
        for name, us in times.items()
    ]
    return tabulate(rows, ["contestant", "eager us", "x", "graph us", "x"][: 5 if graph else 3], floatfmt=".2f")


def start(module: str, options: argparse.Namespace) -> int:
    """The exit code of a chain's command."""
    return measure_on_ranks(module, options, options.world, options.device, LIMIT_S)
