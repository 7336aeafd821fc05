"""`python -m benchmarks.ops.gather_norm`: a residual sum, an RMS norm, a gather and its matmuls.

The chain in front of attention (`qkv`) and of the MLP (`gate_up`) in a sequence-parallel layer. Contestants,
interleaved: `nccl`, Inductor's kernel for sum and norm, an all-gather and matmuls; `apart:S`, the same kernel and the
fused op by strategy S; `prologue:S`, the op with the norm. `auto` is what the plan picks. Times are in microseconds,
the largest median of any rank, also inside CUDA graphs; every result is checked against `nccl`'s first. The table goes
to stdout.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist

from benchmarks.ops import chains
from benchmarks.ops.chains import ROTATED_BYTES, TIMEOUT_S, WORKSPACE_LIMIT, Call
from benchmarks.session import Session
from ditron_inductor.task import ops
from ditron_inductor.task.nodes import Norm, ShardNorm

PROLOGUE = ShardNorm(Norm("rms", 1e-5, round_first=True), ("residual", "weight"))
CHAINS = ("qkv", "gate_up")
MODULE = "benchmarks.ops.gather_norm"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = chains.parser(MODULE, __doc__, [2048, 8192])
    result.add_argument("--chains", nargs="+", choices=CHAINS, default=list(CHAINS))
    return result


def add_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm(x + residual), x + residual), as Llama writes it."""
    total = x + residual
    wide = total.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + PROLOGUE.norm.eps)
    return weight * scaled.to(total.dtype), total


def calls_of(
    device: torch.device, world: int, group_name: str, chain: str, m: int, widths: Sequence[int], k: int
) -> dict[str, Call]:
    """The contestants on random operands: x and residual [m / W, k], weights [k, width] with contiguous k."""
    nbytes = 2 * k * (sum(widths) + 2 * m // world)
    copies = max(1, min(8, math.ceil(ROTATED_BYTES / nbytes))) if device.type == "cuda" else 1

    def draw(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_()

    rows = [(draw(m // world, k), draw(m // world, k)) for _ in range(copies)]
    weights = [[(draw(width, k) / math.sqrt(k)).t() for width in widths] for _ in range(copies)]
    scale, gathered = draw(k), draw(m, k)
    normalise = torch.compile(add_norm, dynamic=False) if device.type == "cuda" else add_norm
    op = ops.overload("all_gather_matmul")

    def site(name: str, strategy: str) -> tuple[object, ...]:
        name = f"gather_norm/0:{name}:{chain}:{strategy}"
        return None, 0, False, world, group_name, name, strategy, WORKSPACE_LIMIT, TIMEOUT_S

    def nccl(i: int) -> Sequence[object]:
        shard, total = normalise(*rows[i % copies], scale)
        dist.all_gather_into_tensor(gathered, shard)
        return [*(gathered @ weight for weight in weights[i % copies]), total]

    def apart(strategy: str) -> Call:
        fixed = site("apart", strategy)

        def call(i: int) -> Sequence[object]:
            shard, total = normalise(*rows[i % copies], scale)
            return [*op(shard, weights[i % copies], *fixed)[:-1], total]

        return call

    def prologue(strategy: str) -> Call:
        fixed, norm = site("prologue", strategy), ops.shard_norm_args(PROLOGUE)

        def call(i: int) -> Sequence[object]:
            x, residual = rows[i % copies]
            outputs: list[torch.Tensor] = op(x, weights[i % copies], *fixed, [], "", residual, scale, None, *norm)
            return outputs[:-1]

        return call

    calls: dict[str, Call] = {"nccl": nccl}
    for strategy in chains.strategies(device):
        calls |= {f"apart:{strategy}": apart(strategy), f"prologue:{strategy}": prologue(strategy)}
    return calls


def measure(session: Session, options: argparse.Namespace) -> list[dict[str, float]]:
    """All shapes, on this rank; rank 0 prints."""
    found, device, world = [], session.clock.device, session.world_size
    for chain in options.chains:
        for model, layer, m in chains.layers(options):
            columns = {"qkv": [layer.query_dim + 2 * layer.key_dim], "gate_up": [layer.hidden_dim] * 2}[chain]
            widths = [one // world // options.shrink for one in columns]
            k = layer.dim // options.shrink
            calls = calls_of(device, world, session.group_name, chain, m, widths, k)
            title = f"{chain}, {model}, M={m} N={'+'.join(map(str, widths))} K={k}"
            site = f"gather_norm/0:prologue:{chain}:auto"
            found.append(chains.contest(session, calls, options.rounds, title, site))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    return chains.start(MODULE, parser().parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
