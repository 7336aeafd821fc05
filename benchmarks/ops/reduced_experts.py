"""`python -m benchmarks.ops.reduced_experts`: the second matmul of the experts of a prompt, its sum for each token, and
the reduction: an all-reduce, or with `--scatter` a reduce-scatter of the tokens.

A rank has 1/W of the width of every expert, and all T tokens. The experts of GPT-OSS have biases. Rows are sorted by
expert already. Contestants, interleaved, outside of CUDA graphs:

    gemm               torch's grouped matmul alone: the limit, together with the bytes that have to be received
    inductor           torch's grouped matmul, the sum in Inductor's kernel, and NCCL's reduction
    max_autotune       the same with mode="max-autotune-no-cudagraphs"
    triton:sorted      a tuned Triton kernel over sorted slots, as serving engines have it, which finds rows and leaves
                       results token by token (benchmarks/rivals/fused_experts.py), the sum, and NCCL's reduction
    ditron:library     torch's grouped matmul, our kernel for the sum, and NCCL's reduction
    ditron:tile        all of it in one launch
    ditron             what the plan picks of both, after its trial

With `--second` it is the gradient of rows that two weights multiply, as in the backward of training with gate and up
apart: the products of two grouped matmuls are added, and summed without weights. The limit does not add them, and
`triton:sorted` has both weights as one, and so both products in one loop.

The difference between `inductor` and `ditron:library` is that of a kernel, and between this and `ditron:tile` that of
the overlap.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tabulate import tabulate
from torch.distributed import _functional_collectives as funcol

from benchmarks.ops import command
from benchmarks.ops.chains import copies_of
from benchmarks.ops.expert_cells import (
    BIASED_MODELS,
    BIASED_TINY,
    MODELS,
    TINY,
    TOLERANCE,
    add_cells,
    end_cell,
    routed,
)
from benchmarks.records import MOE, Row
from benchmarks.rivals.fused_experts import rows_of_blocks, sorted_matmul, sorted_slots
from benchmarks.session import Session
from benchmarks.timing import interleaved
from benchmarks.tolerances import relative_error
from ditron_inductor.task import reference, schema
from ditron_inductor.task.nodes import GroupedMatmulAllReduce, GroupedMatmulReduceScatter, Policy, ReducedExperts

MODULE = "benchmarks.ops.reduced_experts"
LIMIT_S = 480.0
LINK_BYTES_PER_US = 450e3
OURS = {"ditron:library": "library", "ditron:tile": "tile", "ditron": "auto"}
RIVALS = ("inductor", "max_autotune", "triton:sorted")
HEADS = ["cell", "limit", *RIVALS, *OURS, "best other/ditron", "overlap: library/tile"]
CHOICES = MODELS | BIASED_MODELS | TINY | BIASED_TINY


@dataclass(frozen=True)
class Operands:
    """x [S, K], weight [E, K, N], ends [E], places [S], scale [S]; with biases [E, N] the expert of each slot, too.
    second_x, second_weight: what another product is of, or None, and then the scale is 1. token_by_token: x and scale
    in the order of the tokens' slots, and `sorted_slots` of these. merged: the weight; with a second product both, one
    behind the other along K, as is x in token_by_token.
    """

    x: torch.Tensor
    weight: torch.Tensor
    ends: torch.Tensor
    places: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor | None
    ids: torch.Tensor
    second_x: torch.Tensor | None
    second_weight: torch.Tensor | None
    token_by_token: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
    merged: torch.Tensor

    def multiplied(self) -> list[torch.Tensor]:
        """What torch's grouped matmuls return: the limit does not add them."""
        return [torch._grouped_mm(x, weight, offs=self.ends) for x, weight in self.factors()]

    def factors(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The operands of each matmul."""
        first = [(self.x, self.weight)]
        return (
            first
            if self.second_x is None or self.second_weight is None
            else [*first, (self.second_x, self.second_weight)]
        )

    def products(self) -> torch.Tensor:
        """What torch's grouped matmul returns, or the sum of what two return."""
        first, *others = self.multiplied()
        return first + others[0] if others else first


def drawn(model: str, T: int, routing: str, session: Session, seed: int, *, second: bool) -> Operands:
    """Random operands: the routing is the same on all ranks, rows and weights are not."""
    whole, device = CHOICES[model], session.clock.device
    shared = torch.Generator(device=device).manual_seed(seed)
    own = torch.Generator(device=device).manual_seed(100 * seed + session.rank + 1)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(std=scale, generator=own)

    weights, experts = routed(T, whole, routing, device, shared)
    ids, order = experts.reshape(-1).sort()
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=device)
    ends = torch.bincount(ids, minlength=whole.E).cumsum(0).int()
    F = whole.F // session.world_size
    # Those of GPT-OSS lie row by row, and so do others in a backward.
    by_rows = whole.biased or second
    lying = [normal(whole.E, *((F, whole.D) if by_rows else (whole.D, F)), scale=F**-0.5) for _ in range(1 + second)]
    factors = [(normal(T * whole.k, F), weight if by_rows else weight.mT) for weight in lying]
    bias = normal(whole.E, whole.D, scale=0.1) if whole.biased else None
    blocks = sorted_slots(experts.reshape(-1), whole.E, rows_of_blocks(len(order), whole.E))
    scale = torch.ones_like(weights).reshape(-1) if second else weights.reshape(-1)
    (x, weight), *others = factors
    rows, merged = (torch.cat(parts, dim=1) for parts in zip(*factors, strict=True)) if second else (x, weight)
    by_token = rows[places], scale, *blocks
    more = others[0] if second else (None, None)
    return Operands(x, weight, ends, places, scale[order], bias, ids, *more, by_token, merged)


def reduced(terms: torch.Tensor, group_name: str, top_k: int, scatters: bool) -> torch.Tensor:
    """The reduced sums of the terms [S, N] of each token."""
    total = terms.view(-1, top_k, terms.shape[1]).sum(1).bfloat16()
    if scatters:
        return funcol.reduce_scatter_tensor(total, "sum", 0, group_name)
    return funcol.all_reduce(total, "sum", group_name)


def eager(group_name: str, top_k: int, scatters: bool) -> Callable[[Operands], torch.Tensor]:
    """The graph that the pass takes, with the sum as `transformers` writes it."""

    def layer(given: Operands) -> torch.Tensor:
        products = given.products()
        if given.bias is not None:
            products = products + given.bias[given.ids]
        terms = products * given.scale.unsqueeze(-1) if given.second_x is None else products
        return reduced(terms[given.places], group_name, top_k, scatters)

    return layer


def in_triton(group_name: str, top_k: int, scatters: bool) -> Callable[[Operands], torch.Tensor]:
    """Returns what computes the results of `eager` by the kernel of serving engines."""

    def layer(given: Operands) -> torch.Tensor:
        rows, scale, order, blocks = given.token_by_token
        terms = sorted_matmul(rows, given.merged, given.bias, scale, order, blocks, rows.shape[0])
        return reduced(terms, group_name, top_k, scatters)

    return layer


def ours(
    session: Session, kind: type[ReducedExperts], strategy: str, top_k: int, first: Operands, site: str
) -> Callable[[Operands], torch.Tensor]:
    """The op by a strategy."""
    policy = Policy(strategy, 1 << 31, 60.0, strategy == "auto")
    made: Any = kind
    has = {"has_bias": first.bias is not None, "has_second": first.second_x is not None}
    node = made("sum", top_k, session.world_size, session.group_name, site, policy, **has)
    names = [name for name, _ in node.slots()]

    def layer(given: Operands) -> torch.Tensor:
        out: torch.Tensor = schema.call(node, **{name: getattr(given, name) for name in names})[0]
        return out

    return layer


def contestants(
    session: Session, kind: type[ReducedExperts], cell: str, top_k: int, given: Sequence[Operands]
) -> dict[str, Callable[[int], object]]:
    """The contestants whose results are right."""
    scatters = kind is GroupedMatmulReduceScatter
    written = eager(session.group_name, top_k, scatters)
    tuned = {"mode": "max-autotune-no-cudagraphs"} if session.clock.device.type == "cuda" else {}
    layers: dict[str, Callable[[Operands], torch.Tensor]] = {
        "inductor": torch.compile(written, dynamic=False),
        "max_autotune": torch.compile(written, dynamic=False, **tuned),
        "triton:sorted": torch.compile(in_triton(session.group_name, top_k, scatters), dynamic=False),
    }
    first = given[0]
    for name, strategy in OURS.items():
        layers[name] = ours(session, kind, strategy, top_k, first, f"{cell}:{strategy}")
    wanted = reference.combined(top_k, first.products(), first.places, first.scale, None, None, first.bias, first.ids)
    torch.distributed.all_reduce(wanted)
    if scatters:
        wanted = wanted.chunk(session.world_size)[session.rank]

    def checked(name: str) -> Callable[[int], object]:
        call = session.after_trial(name, lambda i: layers[name](given[i % len(given)]))
        error = relative_error(call(0), wanted)
        if not error <= TOLERANCE:
            raise AssertionError(f"{name} is {error:.1e} from the sums in fp32")
        return call

    calls = session.right(layers, checked)
    return {"gemm": lambda i: given[i % len(given)].multiplied(), **calls}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(prog=f"python -m {MODULE}")
    add_cells(result, models=[*MODELS][:3] + [*BIASED_MODELS], tokens=[8192, 2048], choices=CHOICES)
    result.add_argument("--scatter", action="store_true", help="a reduce-scatter of the tokens")
    result.add_argument("--second", action="store_true", help="two products, as in the backward of two weights")
    command.add_common(result, world=0, limit_s=LIMIT_S)
    return result


def measure(session: Session, options: argparse.Namespace) -> list[Row]:
    """All cells for which there is time; rank 0 writes and prints."""
    kind: type[ReducedExperts] = GroupedMatmulReduceScatter if options.scatter else GroupedMatmulAllReduce
    rounds = 1 if options.scatter else 2
    rows: list[Row] = []
    lines = []
    for model, T, routing in itertools.product(options.models, options.tokens, options.routing):
        shape = f"model={model};T={T};routing={routing}" + ";products=2" * options.second
        if session.seconds() > options.budget:
            session.say(f"no time for {shape}")
            continue
        whole = CHOICES[model]
        nbytes = (1 + options.second) * whole.E * whole.F // session.world_size * whole.D * 2
        copies = range(copies_of(session.clock.device, nbytes))
        given = [drawn(model, T, routing, session, seed, second=options.second) for seed in copies]
        calls = contestants(session, kind, shape, whole.k, given)
        times = interleaved(session.clock, calls, rounds=options.rounds)
        received = rounds * T * whole.D * 2 * (session.world_size - 1) / session.world_size
        limit_us = max(times["gemm"].p50_us, received / LINK_BYTES_PER_US)
        rows += session.rows_of(
            times, bench="moe", op=kind.kind, shape=shape, graph=False, limit_us=limit_us,
            commit=options.commit,
        )  # fmt: skip
        us = {name: each.p50_us for name, each in times.items()}
        texts = [f"{us[name]:.0f}" if name in us else "-" for name in (*RIVALS, *OURS)]
        best = min((name for name in RIVALS if name in us), key=lambda name: us[name], default="inductor")
        ratios = [(best, "ditron"), ("ditron:library", "ditron:tile")]
        texts += [f"{us[one] / us[other]:.2f}" if {one, other} <= set(us) else "-" for one, other in ratios]
        lines.append([shape, f"{limit_us:.0f}", *texts])
        session.say("  ".join(lines[-1]))
        del given, calls
        end_cell(session, options, rows)
    if session.rank == 0 and lines:
        print(tabulate(lines, HEADS, disable_numparse=True), flush=True)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    return command.start_on_ranks(MODULE, parser().parse_args(arguments), MOE)


if __name__ == "__main__":
    sys.exit(main())
