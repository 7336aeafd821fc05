"""`python -m benchmarks.ops.swiglu`: silu(x @ gate) * (x @ up) of a gathered x, with and without the epilogue.

Contestants, interleaved: `nccl`, an all-gather, two matmuls and Inductor's pointwise kernel; `apart:S`, the fused op by
strategy S and the same pointwise kernel behind it; `epilogue:S`, the op with the epilogue. `auto` is what the plan
picks. Times are in microseconds, the largest median of any rank, also inside CUDA graphs; every result is checked
against `nccl`'s first. The table goes to stdout.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tabulate import tabulate

from benchmarks.launch import to_the_end
from ditron_inductor.lowering.register import register
from ditron_inductor.processes import Rank
from ditron_inductor.task import ops
from ditron_inductor.task.plan import decisions
from ditron_inductor.timing import GRAPH_CALLS, Clock, captured, interleaved
from ditron_inductor.tune_shapes import MODELS

LIMIT_S = 480.0
WORKSPACE_LIMIT = 1 << 30
TIMEOUT_S = 30.0
ROTATED_BYTES = 400 << 20
"""So many bytes of weights are used in turns, so that none stay in the cache."""
STRATEGIES = ("auto", "tile", "chunked", "library")
EPILOGUES = {
    "inference": "cast(silu(mm0), bf16) * mm1",
    "training": "cast(silu(mm0), bf16) * mm1; mm0; mm1",
}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(prog="python -m benchmarks.ops.swiglu", description=__doc__.partition("\n")[0])
    result.add_argument("--m", nargs="+", type=int, default=[2048, 4096, 8192], help="rows of all ranks")
    result.add_argument("--models", nargs="+", choices=sorted(MODELS), default=["llama-8b", "llama-70b"])
    result.add_argument("--kinds", nargs="+", choices=sorted(EPILOGUES), default=["inference"])
    result.add_argument("--world", type=int, default=2)
    result.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try the program, not speed")
    result.add_argument("--rounds", type=int, default=15)
    result.add_argument("--shrink", type=int, default=1, help="divide all widths by this, to try the program")
    return result


def calls_of(
    device: torch.device, world: int, group_name: str, kind: str, m: int, width: int, k: int
) -> dict[str, Callable[[int], Sequence[object]]]:
    """The contestants on random operands: shard [m / W, k], gate and up [k, width] with contiguous k."""
    copies = max(1, min(8, math.ceil(ROTATED_BYTES / (4 * k * width)))) if device.type == "cuda" else 1

    def draw(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_()

    shards = [draw(m // world, k) for _ in range(copies)]
    weights = [[(draw(width, k) / math.sqrt(k)).t() for _ in range(2)] for _ in range(copies)]
    gathered = draw(m, k)
    pointwise = torch.compile(lambda gate, up: F.silu(gate) * up, dynamic=False) if device.type == "cuda" else None
    finish = pointwise or (lambda gate, up: F.silu(gate) * up)
    saved = kind == "training"
    op = ops.overload("all_gather_matmul")

    def nccl(i: int) -> Sequence[object]:
        dist.all_gather_into_tensor(gathered, shards[i % copies])
        gate, up = (gathered @ weight for weight in weights[i % copies])
        return [finish(gate, up), gate, up] if saved else [finish(gate, up)]

    def site(name: str, strategy: str) -> tuple[object, ...]:
        return world, group_name, f"swiglu/0:{name}:{strategy}", strategy, WORKSPACE_LIMIT, TIMEOUT_S

    def apart(strategy: str) -> Callable[[int], Sequence[object]]:
        fixed = site("apart", strategy)

        def call(i: int) -> Sequence[object]:
            gate, up, _ = op(shards[i % copies], weights[i % copies], None, 0, False, *fixed)
            return [finish(gate, up), gate, up] if saved else [finish(gate, up)]

        return call

    def epilogue(strategy: str) -> Callable[[int], Sequence[object]]:
        fixed = site(kind, strategy)
        return lambda i: op(
            shards[i % copies], weights[i % copies], None, 0, False, *fixed, [], EPILOGUES[kind]
        )[:-1]  # fmt: skip

    calls: dict[str, Callable[[int], Sequence[object]]] = {"nccl": nccl}
    for strategy in STRATEGIES if device.type == "cuda" else ("library",):
        calls |= {f"apart:{strategy}": apart(strategy), f"epilogue:{strategy}": epilogue(strategy)}
    return calls


def run(rank: Rank, options: argparse.Namespace) -> bool:
    """All shapes, on this rank; rank 0 prints. Whether it got to the end."""
    device = rank.join()
    register()
    world = dist.group.WORLD
    assert world is not None
    clock = Clock(device, world)
    for kind in options.kinds:
        for model in options.models:
            for m in options.m:
                layer = MODELS[model]
                width, k = layer.hidden_dim // rank.world_size // options.shrink, layer.dim // options.shrink
                calls = calls_of(device, rank.world_size, world.group_name, kind, m, width, k)
                wanted = calls["nccl"](0)
                for call in calls.values():
                    for got, want in zip(call(0), wanted, strict=True):
                        assert isinstance(got, torch.Tensor) and isinstance(want, torch.Tensor)
                        # Inductor does not round the activation; a few roundings apart.
                        torch.testing.assert_close(got, want, rtol=4e-2, atol=4e-2)
                times = interleaved(clock, calls, options.rounds)
                graph: dict[str, float] = {}
                if device.type == "cuda":
                    replays = {name: captured(call) for name, call in calls.items()}
                    graph = {name: us / GRAPH_CALLS for name, us in interleaved(clock, replays, options.rounds).items()}
                if rank.rank == 0:
                    last = decisions.last(world.group_name, f"swiglu/0:{kind}:auto")
                    chosen = f", the plan: {last[1].strategy} ({last[1].reason})" if last else ""
                    print(f"\n{kind}, {model}, M={m} N=2x{width} K={k}, {rank.world_size} ranks{chosen}")
                    print(table(times, graph), flush=True)
                torch.compiler.reset()
    return True


def table(times: dict[str, float], graph: dict[str, float]) -> str:
    """Microseconds of every contestant and how many times as fast as `nccl` it is, eager and inside CUDA graphs."""
    rows = [
        (name, us, times["nccl"] / us, *((graph[name], graph["nccl"] / graph[name]) if graph else ()))
        for name, us in times.items()
    ]
    return tabulate(rows, ["contestant", "eager us", "x", "graph us", "x"][: 5 if graph else 3], floatfmt=".2f")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    options = parser().parse_args(arguments)
    return to_the_end("benchmarks.ops.swiglu", run, options, options.world, options.device, LIMIT_S)


if __name__ == "__main__":
    sys.exit(main())
