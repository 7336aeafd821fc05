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
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks.ops import chains
from benchmarks.ops.chains import ROTATED_BYTES, TIMEOUT_S, WORKSPACE_LIMIT, Call
from benchmarks.session import Session
from ditron_inductor.task import ops

MODULE = "benchmarks.ops.swiglu"
EPILOGUES = {
    "inference": "cast(silu(mm0), bf16) * mm1",
    "training": "cast(silu(mm0), bf16) * mm1; mm0; mm1",
}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = chains.parser(MODULE, __doc__, [2048, 4096, 8192])
    result.add_argument("--kinds", nargs="+", choices=sorted(EPILOGUES), default=["inference"])
    return result


def calls_of(
    device: torch.device, world: int, group_name: str, kind: str, m: int, width: int, k: int
) -> dict[str, Call]:
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

    def apart(strategy: str) -> Call:
        fixed = site("apart", strategy)

        def call(i: int) -> Sequence[object]:
            gate, up, _ = op(shards[i % copies], weights[i % copies], None, 0, False, *fixed)
            return [finish(gate, up), gate, up] if saved else [finish(gate, up)]

        return call

    def epilogue(strategy: str) -> Call:
        fixed = site(kind, strategy)
        return lambda i: op(
            shards[i % copies], weights[i % copies], None, 0, False, *fixed, [], EPILOGUES[kind]
        )[:-1]  # fmt: skip

    calls: dict[str, Call] = {"nccl": nccl}
    for strategy in chains.strategies(device):
        calls |= {f"apart:{strategy}": apart(strategy), f"epilogue:{strategy}": epilogue(strategy)}
    return calls


def measure(session: Session, options: argparse.Namespace) -> list[dict[str, float]]:
    """All shapes, on this rank; rank 0 prints."""
    found, device, world = [], session.clock.device, session.world_size
    for kind in options.kinds:
        for model, layer, m in chains.layers(options):
            width, k = layer.hidden_dim // world // options.shrink, layer.dim // options.shrink
            calls = calls_of(device, world, session.group_name, kind, m, width, k)
            title = f"{kind}, {model}, M={m} N=2x{width} K={k}"
            found.append(chains.contest(session, calls, options.rounds, title, f"swiglu/0:{kind}:auto"))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    return chains.start(MODULE, parser().parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
