"""`python -m benchmarks.ops.gather_norm`: a residual sum, an RMS norm, a gather and its matmuls.

The chain in front of attention (`qkv`) and of the MLP (`gate_up`) in a sequence-parallel layer. Contestants,
interleaved, eager and inside CUDA graphs: those of `benchmarks.ops.chains`. Inductor's kernel, that of `nccl` and
`ditron:split`, is for sum and norm. Rows go into benchmarks/results/norm.csv, op `gather_norm`; N is the width of all
products together.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from benchmarks.ops import chains
from benchmarks.ops.chains import TIMEOUT_S, WORKSPACE_LIMIT, Call, Chain
from benchmarks.ops.contest import in_turns
from benchmarks.records import Row
from benchmarks.session import Session
from ditron_inductor.task import schema
from ditron_inductor.task.nodes import AllGatherMatmul, Norm, Policy, ShardNorm

PROLOGUE = ShardNorm(Norm("rms", 1e-5, round_first=True), ("residual", "weight"))
CHAINS = ("qkv", "gate_up")
MODULE = "benchmarks.ops.gather_norm"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = chains.parser(MODULE, [2048, 8192])
    result.add_argument("--chains", nargs="+", choices=CHAINS, default=list(CHAINS))
    return result


def add_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm(x + residual), x + residual), as Llama writes it."""
    total = x + residual
    wide = total.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + PROLOGUE.norm.eps)
    return weight * scaled.to(total.dtype), total


def chain_of(
    device: torch.device, world: int, group_name: str, chain: str, m: int, widths: Sequence[int], k: int
) -> Chain:
    """The contestants on random operands: x and residual [m / W, k], weights [k, width] with contiguous k."""
    copies = chains.copies_of(device, 2 * k * (sum(widths) + 2 * m // world))

    def draw(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_()

    rows = [(draw(m // world, k), draw(m // world, k)) for _ in range(copies)]
    weights = [[(draw(width, k) / math.sqrt(k)).t() for width in widths] for _ in range(copies)]
    scale, gathered = draw(k), draw(m, k)
    normalise = torch.compile(add_norm, dynamic=False) if device.type == "cuda" else add_norm
    place = f"gather_norm/{m}x{sum(widths)}x{k}:{chain}"

    def node(name: str, strategy: str, prologue: ShardNorm | None) -> AllGatherMatmul:
        policy = Policy(strategy, WORKSPACE_LIMIT, TIMEOUT_S, trials=strategy == "auto")
        return AllGatherMatmul(
            0, world, group_name, False, f"{place}:{name}", policy, len(widths), prologue=prologue
        )

    def gemm(i: int) -> Sequence[torch.Tensor]:
        return [gathered @ weight for weight in weights[i % copies]]

    def library(i: int) -> Sequence[torch.Tensor]:
        shard, total = normalise(*rows[i % copies], scale)
        dist.all_gather_into_tensor(gathered, shard)
        return [*gemm(i), total]

    def split(i: int) -> Sequence[torch.Tensor]:
        shard, total = normalise(*rows[i % copies], scale)
        return [*op([shard, *weights[i % copies]], *apart)[:-1], total]

    def fused(name: str, strategy: str) -> Call:
        given = [
            {"shard": x, "residual": residual, "weight": scale, "weights": of_rows}
            for (x, residual), of_rows in zip(rows, weights, strict=True)
        ]
        return in_turns(node(name, strategy, PROLOGUE), given, slice(-1))

    # Its shard is new in every call.
    op, apart = schema.overload(AllGatherMatmul.kind), (node("split", "auto", None).text(), None)
    calls = chains.contestants(device, gemm, library, split, fused)
    return Chain("gather_norm", f"M={m};N={sum(widths)};K={k};chain={chain}", m, k, calls, f"{place}:ditron")


def measure(session: Session, options: argparse.Namespace) -> list[Row]:
    """All shapes, on this rank."""

    def found() -> Iterator[Chain]:
        device, world = session.clock.device, session.world_size
        for chain in options.chains:
            for _, layer, m in chains.layers(options):
                columns = {"qkv": [layer.query_dim + 2 * layer.key_dim], "gate_up": [layer.hidden_dim] * 2}[chain]
                widths = [one // world // options.shrink for one in columns]
                yield chain_of(device, world, session.group_name, chain, m, widths, layer.dim // options.shrink)

    return chains.measure(session, options, found())


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    return chains.start(MODULE, parser().parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
