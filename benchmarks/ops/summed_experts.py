"""`python -m benchmarks.ops.summed_experts`: the second half of a decode step's experts, inside a CUDA graph.

    normed, total = norm(all_reduce(the weighted sum of hidden[s] @ W[expert of s] for each token) + residual)

hidden [T * k, F / W] is what the first matmuls of the experts return on one of W ranks. The weights of a token's
experts are normalised, as models do it. The routing is that of all ranks. Contestants, interleaved:

    nccl             copies of the weights of each slot and bmm, as `transformers` decodes (`batched_mm`), NCCL's
                     all-reduce, and Inductor's kernels for the rest; gloo without GPUs
    ditron:apart     `expert_projections`, Inductor's sum, and `all_reduce_rms_norm` of the sum
    ditron:tile, ditron:library, ditron     `expert_projections`, and `all_reduce_rms_norm` of the products, forced and
                     as a trial decides

The limit is the time to read the weights of the experts that are taken, at the speed of a copy on this GPU.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as funcol

from benchmarks.ops import command
from benchmarks.ops.chains import copies_of
from benchmarks.ops.contest import library_of
from benchmarks.ops.expert_cells import (
    LIMIT_S,
    MODELS,
    TINY,
    TOLERANCE,
    Experts,
    add_cells,
    bytes_per_s,
    end_cell,
    print_cells,
    routed,
    texts_of,
)
from benchmarks.records import MOE, Row
from benchmarks.session import Session
from benchmarks.timing import interleaved
from benchmarks.tolerances import relative_error
from ditron_inductor.report.timing import GRAPH_CALLS
from ditron_inductor.task import schema
from ditron_inductor.task.nodes import NORM_KINDS, TASKS, ExpertProjections, Norm, Policy

MODULE = "benchmarks.ops.summed_experts"
EPS = 1e-6
OP = "all_reduce_rms_norm_of_experts"
"""What the rows of results name it by: with its products it is another problem than an all_reduce_rms_norm alone."""
OURS = {"ditron:tile": "tile", "ditron:library": "library", "ditron": "auto"}
Layer = Callable[..., tuple[torch.Tensor, ...]]


@dataclass(frozen=True)
class Operands:
    """hidden [S, F], down [E, D, F], experts and weights [T, k], residual [T, D], scale [D]."""

    hidden: torch.Tensor
    down: torch.Tensor
    experts: torch.Tensor
    weights: torch.Tensor
    residual: torch.Tensor
    scale: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.hidden, self.down, self.experts, self.weights, self.residual, self.scale


def drawn(session: Session, sizes: Experts, T: int, routing: str, seed: int) -> Operands:
    """Random operands: the rows and weights of a rank are its own, all else is that of all ranks."""
    device = session.clock.device
    shared = torch.Generator(device=device).manual_seed(seed)
    own = torch.Generator(device=device).manual_seed(100 * seed + session.rank + 1)

    def normal(by: torch.Generator, *shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(std=scale, generator=by)

    weights, experts = routed(T, sizes, routing, device, shared)
    hidden = normal(own, T * sizes.k, sizes.F)
    down = normal(own, sizes.E, sizes.D, sizes.F, scale=sizes.F**-0.5)
    return Operands(hidden, down, experts, weights, normal(shared, T, sizes.D), normal(shared, sizes.D))


def norm_of(total: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    wide = total.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(total.dtype) * scale


def factors_of(weights: torch.Tensor) -> torch.Tensor:
    return weights / weights.sum(-1, keepdim=True)


def library(group_name: str) -> Layer:
    """One matrix for each slot, and the library's all-reduce."""

    def layer(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden, down, experts, weights, residual, scale = given
        products = torch.bmm(down[experts.reshape(-1)], hidden.unsqueeze(-1)).squeeze(-1)
        total = funcol.all_reduce(added_up(products, weights), "sum", group_name) + residual
        return norm_of(total, scale), total

    return layer


def added_up(products: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The weighted sum of the products of each token."""
    terms = products * factors_of(weights).reshape(-1, 1)
    return terms.view(*weights.shape, -1).sum(1).to(products.dtype)


def ours(session: Session, name: str, strategy: str, k: int, apart: bool = False) -> Layer:
    """The reduction by a strategy. apart: the compiler adds up the products."""
    policy = Policy(strategy, 1 << 31, 60.0, strategy == "auto")
    norm = Norm("rms", EPS, round_first=True)
    group = session.world_size, session.group_name
    made: Any = TASKS[NORM_KINDS[0]]
    node = made("sum", norm, ("residual", "weight"), *group, name, policy, top_k=0 if apart else k)
    of_products = ExpertProjections(k, by_token=False, num_weights=1)
    (project, first_text), (reduce, text) = ((schema.overload(one.kind), one.text()) for one in (of_products, node))

    def layer(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden, down, experts, weights, *behind = given
        (products,) = project([hidden, experts.reshape(-1), down.mT], first_text, None)
        if apart:
            return tuple(reduce([added_up(products, weights), *behind], text, None)[:-1])
        return tuple(reduce([products, *behind, factors_of(weights).reshape(-1)], text, None)[:-1])

    return layer


def expected(operands: Operands) -> tuple[torch.Tensor, ...]:
    """Returns the exact results, in fp64."""
    hidden, down, experts, weights, residual, scale = operands.tensors
    T, k = experts.shape
    total = torch.zeros(T, down.shape[1], dtype=torch.float64, device=hidden.device)
    for slot, expert in enumerate(experts.reshape(-1).tolist()):
        product = down[expert].double() @ hidden[slot].double()
        total[slot // k] += factors_of(weights.double()).reshape(-1)[slot] * product
    dist.all_reduce(total)
    total = total + residual.double()
    return norm_of(total, scale.double()).double(), total


def contestants(session: Session, cell: str, k: int, given: Sequence[Operands]) -> dict[str, Callable[[int], object]]:
    """The contestants whose results are right, captured on a GPU."""
    wanted = expected(given[0])
    written: dict[str, Layer] = {
        library_of(session.clock.device): library(session.group_name),
        "ditron:apart": ours(session, f"{cell}/apart", "tile", k, apart=True),
        **{name: ours(session, f"{cell}/{name}", strategy, k) for name, strategy in OURS.items()},
    }
    layers = {name: torch.compile(layer, dynamic=False) for name, layer in written.items()}

    def checked(name: str) -> Callable[[int], object]:
        call = session.after_trial(name, lambda i: layers[name](*given[i % len(given)].tensors))
        for mine, right in zip(call(0), wanted, strict=True):
            error = relative_error(mine, right)
            if not error <= TOLERANCE:
                raise AssertionError(f"{name} is {error:.1e} from fp64")
        return call

    calls = session.right(layers, checked)
    return session.replays(calls, GRAPH_CALLS) if session.clock.device.type == "cuda" else calls


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(prog=f"python -m {MODULE}")
    add_cells(result, models=[*MODELS][:3], tokens=[1, 4, 8, 16, 32])
    command.add_common(result, world=0, limit_s=LIMIT_S)
    return result


def measure(session: Session, options: argparse.Namespace) -> list[Row]:
    """All cells for which there is time; rank 0 writes and prints."""
    rows: list[Row] = []
    lines = []
    device = session.clock.device
    rivals, forced = (library_of(device), "ditron:apart", "ditron"), [name for name in OURS if name != "ditron"]
    rate = bytes_per_s(device)
    for model, T, routing in itertools.product(options.models, options.tokens, options.routing):
        shape = f"model={model};T={T};routing={routing}"
        if session.seconds() > options.budget:
            session.say(f"no time for {shape}")
            continue
        whole = (MODELS | TINY)[model]
        sizes = Experts(whole.D, whole.F // session.world_size, whole.E, whole.k)
        matrix = sizes.F * sizes.D * 2
        copies = copies_of(device, min(sizes.E, T * sizes.k) * matrix)
        given = [drawn(session, sizes, T, routing, seed) for seed in range(copies)]
        calls = contestants(session, shape, sizes.k, given)
        times = interleaved(session.clock, calls, GRAPH_CALLS if device.type == "cuda" else 1, options.rounds)
        taken = sum(int(one.experts.unique().numel()) for one in given) / len(given)
        limit_us = taken * matrix / rate * 1e6
        rows += session.rows_of(
            times, bench="moe", op=OP, shape=shape, graph=device.type == "cuda", limit_us=limit_us,
            commit=options.commit,
        )  # fmt: skip
        compared = {name: each for name, each in times.items() if name in rivals}
        line = [shape, f"{taken:.0f}", f"{limit_us:.1f}", *texts_of(compared, rivals, limit_us)]
        lines.append([*line, *(f"{times[name].p50_us:.1f}" if name in times else "-" for name in forced)])
        session.say("  ".join(lines[-1]))
        del given, calls
        end_cell(session, options, rows)
    heads = ["cell", "experts", "limit", *rivals, "ditron/limit", "best other/ditron", *forced]
    print_cells(session, heads, lines, rate)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    return command.start_on_ranks(MODULE, parser().parse_args(arguments), MOE)


if __name__ == "__main__":
    sys.exit(main())
