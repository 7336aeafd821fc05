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
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from benchmarks.launch import to_the_end
from benchmarks.ops.swiglu import LIMIT_S, ROTATED_BYTES, STRATEGIES, TIMEOUT_S, WORKSPACE_LIMIT, table
from ditron_inductor.lowering.register import register
from ditron_inductor.processes import Rank
from ditron_inductor.task import ops
from ditron_inductor.task.nodes import Norm, ShardNorm
from ditron_inductor.task.plan import decisions
from ditron_inductor.timing import GRAPH_CALLS, Clock, captured, interleaved
from ditron_inductor.tune_shapes import MODELS

PROLOGUE = ShardNorm(Norm("rms", 1e-5, round_first=True), ("residual", "weight"))
CHAINS = ("qkv", "gate_up")

Call = Callable[[int], Sequence[object]]


def parser() -> argparse.ArgumentParser:
    """The command line."""
    description = __doc__.partition("\n")[0]
    result = argparse.ArgumentParser(prog="python -m benchmarks.ops.gather_norm", description=description)
    result.add_argument("--m", nargs="+", type=int, default=[2048, 8192], help="rows of all ranks")
    result.add_argument("--models", nargs="+", choices=sorted(MODELS), default=["llama-8b", "llama-70b"])
    result.add_argument("--chains", nargs="+", choices=CHAINS, default=list(CHAINS))
    result.add_argument("--world", type=int, default=2)
    result.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try the program, not speed")
    result.add_argument("--rounds", type=int, default=15)
    result.add_argument("--shrink", type=int, default=1, help="divide all widths by this, to try the program")
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
    for strategy in STRATEGIES if device.type == "cuda" else ("library",):
        calls |= {f"apart:{strategy}": apart(strategy), f"prologue:{strategy}": prologue(strategy)}
    return calls


def run(rank: Rank, options: argparse.Namespace) -> bool:
    """All shapes, on this rank; rank 0 prints. Whether it got to the end."""
    device = rank.join()
    register()
    world = dist.group.WORLD
    assert world is not None
    clock = Clock(device, world)
    for chain in options.chains:
        for model in options.models:
            for m in options.m:
                layer = MODELS[model]
                columns = {"qkv": [layer.query_dim + 2 * layer.key_dim], "gate_up": [layer.hidden_dim] * 2}[chain]
                widths = [one // rank.world_size // options.shrink for one in columns]
                k = layer.dim // options.shrink
                calls = calls_of(device, rank.world_size, world.group_name, chain, m, widths, k)
                wanted = calls["nccl"](0)
                for call in calls.values():
                    for got, want in zip(call(0), wanted, strict=True):
                        assert isinstance(got, torch.Tensor) and isinstance(want, torch.Tensor)
                        # The order of the sums in a norm differs, and then a rounding of its result.
                        torch.testing.assert_close(got, want, rtol=4e-2, atol=4e-2)
                times = interleaved(clock, calls, options.rounds)
                graph: dict[str, float] = {}
                if device.type == "cuda":
                    replays = {name: captured(call) for name, call in calls.items()}
                    graph = {name: us / GRAPH_CALLS for name, us in interleaved(clock, replays, options.rounds).items()}
                if rank.rank == 0:
                    last = decisions.last(world.group_name, f"gather_norm/0:prologue:{chain}:auto")
                    chosen = f", the plan: {last[1].strategy} ({last[1].reason})" if last else ""
                    shape = f"M={m} N={'+'.join(map(str, widths))} K={k}"
                    print(f"\n{chain}, {model}, {shape}, {rank.world_size} ranks{chosen}")
                    print(table(times, graph), flush=True)
                torch.compiler.reset()
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    options = parser().parse_args(arguments)
    return to_the_end("benchmarks.ops.gather_norm", run, options, options.world, options.device, LIMIT_S)


if __name__ == "__main__":
    sys.exit(main())
