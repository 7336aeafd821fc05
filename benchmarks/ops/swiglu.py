"""`python -m benchmarks.ops.swiglu`: silu(x @ gate) * (x @ up) of a gathered x, with and without the epilogue.

Contestants, interleaved, eager and inside CUDA graphs: those of `benchmarks.ops.chains`. `ditron:split` stores both
products and leaves silu(..) * .. to Inductor's kernel. `training` returns the products too, for the backward. Rows go
into benchmarks/results/norm.csv, op `swiglu`; N is the width of one of the two products.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks.ops import chains
from benchmarks.ops.chains import TIMEOUT_S, WORKSPACE_LIMIT, Call, Chain
from benchmarks.ops.contest import in_turns
from benchmarks.records import Row
from benchmarks.session import Session
from ditron_inductor.task.nodes import AllGatherMatmul, Policy

MODULE = "benchmarks.ops.swiglu"
EPILOGUES = {
    "inference": "cast(silu(mm0), bf16) * mm1",
    "training": "cast(silu(mm0), bf16) * mm1; mm0; mm1",
}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = chains.parser(MODULE, [2048, 4096, 8192])
    result.add_argument("--kinds", nargs="+", choices=sorted(EPILOGUES), default=["inference"])
    return result


def chain_of(device: torch.device, world: int, group_name: str, kind: str, m: int, width: int, k: int) -> Chain:
    """The contestants on random operands: shard [m / W, k], gate and up [k, width] with contiguous k."""
    copies = chains.copies_of(device, 4 * k * width)

    def draw(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_()

    shards = [draw(m // world, k) for _ in range(copies)]
    weights = [[(draw(width, k) / math.sqrt(k)).t() for _ in range(2)] for _ in range(copies)]
    gathered = draw(m, k)
    pointwise = torch.compile(lambda gate, up: F.silu(gate) * up, dynamic=False) if device.type == "cuda" else None
    finish = pointwise or (lambda gate, up: F.silu(gate) * up)
    saved = kind == "training"
    place = f"swiglu/{m}x{width}x{k}:{kind}"
    given = [{"shard": shard, "weights": pair} for shard, pair in zip(shards, weights, strict=True)]

    def finished(gate: torch.Tensor, up: torch.Tensor) -> list[torch.Tensor]:
        return [finish(gate, up), gate, up] if saved else [finish(gate, up)]

    def gemm(i: int) -> Sequence[torch.Tensor]:
        return [gathered @ weight for weight in weights[i % copies]]

    def library(i: int) -> Sequence[torch.Tensor]:
        dist.all_gather_into_tensor(gathered, shards[i % copies])
        gate, up = gemm(i)
        return finished(gate, up)

    def bound(name: str, strategy: str, epilogue: str) -> Call:
        policy = Policy(strategy, WORKSPACE_LIMIT, TIMEOUT_S, trials=strategy == "auto")
        node = AllGatherMatmul(
            0, world, group_name, False, f"{place}:{name}", policy, num_weights=2, epilogue=epilogue
        )
        return in_turns(node, given, slice(-1))

    def split(i: int) -> Sequence[torch.Tensor]:
        return finished(*apart(i))

    def fused(name: str, strategy: str) -> Call:
        return bound(name, strategy, EPILOGUES[kind])

    apart = bound("split", "auto", "")
    calls = chains.contestants(device, gemm, library, split, fused)
    return Chain("swiglu", f"M={m};N={width};K={k};kind={kind}", m, k, calls, f"{place}:ditron")


def measure(session: Session, options: argparse.Namespace) -> list[Row]:
    """All shapes, on this rank."""

    def found() -> Iterator[Chain]:
        device, world = session.clock.device, session.world_size
        for kind in options.kinds:
            for _, layer, m in chains.layers(options):
                width, k = layer.hidden_dim // world // options.shrink, layer.dim // options.shrink
                yield chain_of(device, world, session.group_name, kind, m, width, k)

    return chains.measure(session, options, found())


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    return chains.start(MODULE, parser().parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
