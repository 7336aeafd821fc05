"""`python -m benchmarks.ops.gathered_experts`: from a rank's own tokens to the first matmul of the experts of a prompt.

With sequence parallelism a rank has [B, S / W, D] of the tokens. They are gathered, routed, sorted by expert, and
multiplied with gate and up of 1/W of the width of every expert. Those of GPT-OSS have biases. Contestants, interleaved:

    gemm              torch's grouped matmul alone, of rows that have been gathered, routed and copied before
    inductor          NCCL's all-gather, and Inductor's code for the rest
    overlap           the same with `reorder_for_compute_comm_overlap`
    max_autotune      the same with mode="max-autotune-no-cudagraphs"
    ditron            Ditron

A contestant's slots are its own, as near scores may be chosen otherwise. They are checked against fp64.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.models.experts import activated
from benchmarks.ops import command
from benchmarks.ops.expert_cells import (
    BIASED_MODELS,
    BIASED_TINY,
    LIMIT_S,
    MODELS,
    SKEW,
    TINY,
    TOLERANCE,
    Experts,
    add_cells,
    bytes_per_s,
    end_cell,
    exactly_activated,
    print_cells,
    texts_of,
)
from benchmarks.records import MOE, Row
from benchmarks.session import Session
from benchmarks.timing import interleaved
from benchmarks.tolerances import relative_error
from ditron_inductor.backend import ditron
from ditron_inductor.report.timing import GRAPH_CALLS

MODULE = "benchmarks.ops.gathered_experts"
OP = "gathered_experts"
CHOICES = MODELS | BIASED_MODELS | TINY | BIASED_TINY
LOST_SCORE = 1e-3
"""Of the sum of the best scores: so much less may those of the chosen experts be."""
SHOWN = ("inductor", "overlap", "max_autotune", "ditron")
functional = torch.ops._c10d_functional
Layer = Callable[..., tuple[torch.Tensor, ...]]


@dataclass(frozen=True)
class Operands:
    """shard [B, S / W, D], router [E, D], gate_up [E, D, 2 F / W] as it is multiplied, bias [E, 2 F / W] or None."""

    shard: torch.Tensor
    router: torch.Tensor
    gate_up: torch.Tensor
    bias: torch.Tensor | None

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        return self.shard, self.router, self.gate_up, self.bias


def drawn(sizes: Experts, B: int, T: int, session: Session, routing: str) -> Operands:
    """Random operands: the router is the same on all ranks. If the routing is skewed, the first element of all tokens
    is 1, and the router has the liking for each expert there.
    """
    device, W = session.clock.device, session.world_size
    shared = torch.Generator(device=device).manual_seed(1)
    own = torch.Generator(device=device).manual_seed(2 + session.rank)

    def normal(*shape: int, scale: float, generator: torch.Generator) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(std=scale, generator=generator)

    shard = normal(B, T // B // W, sizes.D, scale=1.0, generator=own)
    router = normal(sizes.E, sizes.D, scale=sizes.D**-0.5, generator=shared)
    if routing == "skewed":
        shard[..., 0] = 1.0
        router[:, 0] = normal(sizes.E, scale=SKEW, generator=shared)
    width, scale = 2 * sizes.F // W, sizes.D**-0.5
    if sizes.biased:
        gate_up = normal(sizes.E, sizes.D, width, scale=scale, generator=own)
        return Operands(shard, router, gate_up, normal(sizes.E, width, scale=0.1, generator=own))
    return Operands(shard, router, normal(sizes.E, width, sizes.D, scale=scale, generator=own).mT, None)


def gathered(shard: torch.Tensor, W: int, group_name: str) -> torch.Tensor:
    """All tokens [B * S, D], as DTensor gathers them along the sequence."""
    chunks = functional.wait_tensor(functional.all_gather_into_tensor(shard, W, group_name)).chunk(W)
    return torch.cat(chunks, 1).flatten(0, 1)


def written(W: int, group_name: str, top_k: int) -> Layer:
    """The program that is compiled, as `transformers` writes it. It returns the activated gate and up of all slots, the
    slots in the order of their experts, and where the slots of each expert end.
    """

    def layer(
        shard: torch.Tensor, router: torch.Tensor, gate_up: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        x, E = gathered(shard, W, group_name), router.shape[0]
        _, chosen = torch.softmax((x @ router.mT).float(), -1).topk(top_k)
        ids, order = chosen.flatten().sort()
        # A histogram on the CPU takes floating-point numbers only.
        counted = ids.float() if ids.device.type == "cpu" else ids.int()
        ends = torch.histc(counted, bins=E, min=0, max=E - 1).cumsum(0, dtype=torch.int32)
        both = torch._grouped_mm(x[order // top_k], gate_up, offs=ends)
        return activated(both if bias is None else both + bias[ids], bias is not None), order, ends

    return layer


def check(name: str, given: Operands, x: torch.Tensor, top_k: int, found: tuple[torch.Tensor, ...]) -> None:
    """AssertionError if the slots are not those of the best experts, or the products are not those of the slots."""
    out, order, ends = found
    S = order.numel()
    assert torch.equal(order.sort()[0], torch.arange(S, device=order.device)), f"{name}: a slot is missing"
    experts = torch.searchsorted(ends, torch.arange(S, device=order.device), right=True)
    scores = x.double() @ given.router.double().mT
    best = scores.topk(top_k)[0].sum()
    lost = (best - scores[order // top_k, experts].sum()).abs() / best.abs()
    error = relative_error(out, exactly_activated(x[order // top_k], ends, given.gate_up, given.bias))
    if not (lost <= LOST_SCORE and error <= TOLERANCE):
        raise AssertionError(f"{name}: scores {lost:.1e} and products {error:.1e} from fp64")


def contestants(session: Session, given: Operands, top_k: int) -> dict[str, Callable[[int], object]]:
    """The contestants whose results are right."""
    layer, device = written(session.world_size, session.group_name, top_k), session.clock.device
    tuned: dict[str, dict[str, Any]] = {
        "overlap": {"options": {"reorder_for_compute_comm_overlap": True}},
        "max_autotune": {"mode": "max-autotune-no-cudagraphs"},
    }
    ways: dict[str, dict[str, Any]] = {
        "inductor": {},
        **(tuned if device.type == "cuda" else {}),
        "ditron": {"backend": ditron},
    }
    x = gathered(given.shard, session.world_size, session.group_name)

    def checked(name: str) -> Callable[[int], object]:
        torch._dynamo.reset()
        # A function of its own: what is compiled for one is not looked up for another.
        made = written(session.world_size, session.group_name, top_k)
        compiled = torch.compile(made, fullgraph=True, dynamic=False, **ways[name])
        call = session.after_trial(name.partition(":")[0], lambda i: compiled(*given.tensors))
        check(name, given, x, top_k, call(0))
        return call

    with torch.no_grad():
        calls = session.right(ways, checked)
        _, order, ends = layer(*given.tensors)
        rows = x[order // top_k]
        calls["gemm"] = lambda i: torch._grouped_mm(rows, given.gate_up, offs=ends)
    return calls


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(prog=f"python -m {MODULE}")
    models = [*[*MODELS][1:3], *BIASED_MODELS, [*MODELS][0]]
    add_cells(result, models=models, tokens=[8192, 2048], choices=CHOICES)
    result.add_argument("--batches", nargs="+", type=int, default=[2, 1], help="sequences that the tokens are of")
    command.add_common(result, world=0, limit_s=LIMIT_S)
    command.add_graph(result, "both")
    return result


def measure(session: Session, options: argparse.Namespace) -> list[Row]:
    """All cells for which there is time; rank 0 writes and prints."""
    rows: list[Row] = []
    lines = []
    modes = command.modes(options)
    for model, T, B, routing in itertools.product(options.models, options.tokens, options.batches, options.routing):
        shape = f"model={model};T={T};B={B}" + f";routing={routing}" * (routing == "skewed")
        if session.seconds() > options.budget:
            session.say(f"no time for {shape}")
            continue
        sizes = CHOICES[model]
        given = drawn(sizes, B, T, session, routing)
        eager = contestants(session, given, sizes.k)
        for graph in modes:
            with torch.no_grad():
                calls = session.replays(eager, GRAPH_CALLS) if graph else eager
                times = interleaved(session.clock, calls, GRAPH_CALLS if graph else 1, options.rounds)
            limit_us = times["gemm"].p50_us
            rows += session.rows_of(
                times, bench="moe", op=OP, shape=shape, graph=graph, limit_us=limit_us, commit=options.commit
            )
            compared = {name: each for name, each in times.items() if name != "gemm"}
            mode = "graph" if graph else "eager"
            lines.append([shape, mode, f"{limit_us:.1f}", *texts_of(compared, SHOWN, limit_us)])
            session.say("  ".join(lines[-1]))
        del given, eager
        end_cell(session, options, rows)
    heads = ["cell", "mode", "gemm", *SHOWN, "ditron/gemm", "best other/ditron"]
    print_cells(session, heads, lines, bytes_per_s(session.clock.device))
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    return command.start_on_ranks(MODULE, parser().parse_args(arguments), MOE)


if __name__ == "__main__":
    sys.exit(main())
