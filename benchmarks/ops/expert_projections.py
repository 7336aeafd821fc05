"""`python -m benchmarks.ops.expert_projections`: the experts of a decode step, one rank's share, inside a CUDA graph.

It needs one GPU: nothing is communicated. A call takes x [T, D], the k experts of each token and their weights, and
returns what the rank would reduce, the sum over the experts of each token. The rank has 1/W of the width of every
expert. Contestants, interleaved:

    inductor:batched   copies of the weights of each slot and bmm, as `transformers` decodes (`batched_mm`)
    inductor:grouped   a sort by expert and torch's grouped matmul (`grouped_mm`)
    triton:sorted      a Triton kernel over slots sorted by expert, as serving engines have it, its tiles tuned here for
                       each cell (benchmarks/rivals/fused_experts.py)
    ditron             two calls of `expert_projections`, and Inductor's sum

The limit is the time to read the weights of the experts that are taken, at the speed of a copy on this GPU, which is
measured first. Routing is uniform, or skewed: a few experts are taken by most tokens.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from benchmarks.models.experts import activated
from benchmarks.ops import command
from benchmarks.ops.chains import copies_of
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
from benchmarks.rivals.fused_experts import fused_experts
from benchmarks.session import Session
from benchmarks.timing import interleaved
from benchmarks.tolerances import relative_error
from ditron_inductor.report.timing import GRAPH_CALLS
from ditron_inductor.task import schema
from ditron_inductor.task.nodes import ExpertProjections

MODULE = "benchmarks.ops.expert_projections"
HEADS = ["cell", "experts", "limit", "batched", "grouped", "sorted", "ditron", "ditron/limit", "best other/ditron"]


@dataclass(frozen=True)
class Cell:
    """T tokens of a model of which a rank has 1/W of each expert."""

    model: str
    T: int
    W: int
    routing: str

    @property
    def sizes(self) -> Experts:
        """The experts on one rank."""
        whole = (MODELS | TINY)[self.model]
        return Experts(whole.D, whole.F // self.W, whole.E, whole.k)

    @property
    def shape(self) -> str:
        """The cell as the results name it."""
        return f"model={self.model};T={self.T};W={self.W};routing={self.routing}"


@dataclass(frozen=True)
class Operands:
    """x [T, D], experts and scale [T, k], gate_up [E, 2F, D], down [E, D, F]."""

    x: torch.Tensor
    experts: torch.Tensor
    scale: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.x, self.experts, self.scale, self.gate_up, self.down


Layer = Callable[..., torch.Tensor]


def drawn(cell: Cell, device: torch.device, seed: int) -> Operands:
    """Random operands."""
    sizes, generator = cell.sizes, torch.Generator(device=device).manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(std=scale, generator=generator)

    weights, experts = routed(cell.T, sizes, cell.routing, device, generator)
    gate_up = normal(sizes.E, 2 * sizes.F, sizes.D, scale=sizes.D**-0.5)
    down = normal(sizes.E, sizes.D, sizes.F, scale=sizes.F**-0.5)
    scale = (weights / weights.sum(-1, keepdim=True)).bfloat16()
    return Operands(normal(cell.T, sizes.D), experts, scale, gate_up, down)


def batched(
    x: torch.Tensor, experts: torch.Tensor, scale: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """One matrix for each slot."""
    T, k = experts.shape
    ids = experts.reshape(-1)
    rows = x.repeat_interleave(k, 0)
    gate, up = torch.bmm(gate_up[ids], rows.unsqueeze(-1)).squeeze(-1).chunk(2, -1)
    hidden = torch.nn.functional.silu(gate) * up
    out = torch.bmm(down[ids], hidden.unsqueeze(-1)).squeeze(-1)
    return (out * scale.reshape(-1, 1)).view(T, k, -1).sum(1)


def grouped(
    x: torch.Tensor, experts: torch.Tensor, scale: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Slots sorted by expert."""
    T, k = experts.shape
    ids, order = experts.reshape(-1).sort()
    ends = torch.histc(ids.float(), gate_up.shape[0], 0, gate_up.shape[0] - 1).cumsum(0, dtype=torch.int32)
    gate, up = torch._grouped_mm(x[order // k], gate_up.mT, ends).chunk(2, -1)
    hidden = torch.nn.functional.silu(gate) * up
    out = torch._grouped_mm(hidden, down.mT, ends) * scale.reshape(-1)[order].unsqueeze(-1)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    return out[inverse].view(T, k, -1).sum(1)


def ours(k: int) -> Layer:
    """Two launches, and the sum, for k experts of each token."""
    texts = [
        ExpertProjections(k, True, 2, epilogue="cast(silu(mm0), bf16) * mm1").text(),
        ExpertProjections(k, False, 1).text(),
    ]
    op = schema.overload(ExpertProjections.kind)

    def fused(
        x: torch.Tensor, experts: torch.Tensor, scale: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
    ) -> torch.Tensor:
        ids, weight, F = experts.reshape(-1), gate_up.mT, down.shape[2]
        (hidden,) = op([x, ids, weight[..., :F], weight[..., F:]], texts[0], None)
        (out,) = op([hidden, ids, down.mT], texts[1], None)
        return (out * scale.reshape(-1, 1)).view(-1, k, out.shape[1]).sum(1)

    return fused


def reference(operands: Operands) -> torch.Tensor:
    """Returns the exact result, in fp64."""
    x, scale = operands.x.double(), operands.scale.double()
    out = torch.zeros_like(x)
    for token, rank in itertools.product(range(x.shape[0]), range(scale.shape[1])):
        expert = int(operands.experts[token, rank])
        gate, up = (operands.gate_up[expert].double() @ x[token]).chunk(2)
        hidden = torch.nn.functional.silu(gate) * up
        out[token] += scale[token, rank] * (operands.down[expert].double() @ hidden)
    return out


def in_triton(
    x: torch.Tensor, experts: torch.Tensor, scale: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Slots sorted by expert, by one kernel for both matmuls."""
    return fused_experts(x, experts, scale, gate_up.mT, down.mT, lambda both: activated(both, biased=False))


def _turns(layer: Layer, given: Sequence[Operands]) -> Callable[[int], torch.Tensor]:
    return lambda i: layer(*given[i % len(given)].tensors)


def contestants(session: Session, cell: Cell, given: Sequence[Operands]) -> dict[str, Callable[[int], torch.Tensor]]:
    """The contestants whose results are right, captured on a GPU."""
    wanted = reference(given[0])
    compiled = {name: torch.compile(fn, dynamic=False) for name, fn in (("batched", batched), ("grouped", grouped))}
    layers: dict[str, Layer] = {f"inductor:{name}": fn for name, fn in compiled.items()}
    on_gpu = session.clock.device.type == "cuda"
    if on_gpu:
        layers["triton:sorted"] = torch.compile(in_triton, dynamic=False)
    layers["ditron"] = torch.compile(ours(cell.sizes.k), dynamic=False)

    def checked(name: str) -> Callable[[int], torch.Tensor]:
        error = relative_error(layers[name](*given[0].tensors), wanted)
        if not error <= TOLERANCE:
            raise AssertionError(f"{name} is {error:.1e} from fp64")
        return _turns(layers[name], given)

    calls = session.right(layers, checked)
    return session.replays(calls, GRAPH_CALLS) if on_gpu else calls


def active(operands: Operands) -> int:
    """The number of experts that some token takes."""
    return int(operands.experts.unique().numel())


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(prog=f"python -m {MODULE}")
    add_cells(result, models=list(MODELS), tokens=[1, 8, 32])
    result.add_argument("--ranks", nargs="+", type=int, default=[2], help="of how many ranks the share is one")
    command.add_common(result, world=1, limit_s=LIMIT_S)
    result.set_defaults(rounds=9)
    return result


def measure(session: Session, options: argparse.Namespace) -> list[Row]:
    """All cells for which there is time; rank 0 writes and prints."""
    rows: list[Row] = []
    lines = []
    device = session.clock.device
    rate = bytes_per_s(device)
    for model, W, T, routing in itertools.product(options.models, options.ranks, options.tokens, options.routing):
        cell = Cell(model, T, W, routing)
        if session.seconds() > options.budget:
            session.say(f"no time for {cell.shape}")
            continue
        sizes = cell.sizes
        nbytes = min(sizes.E, T * sizes.k) * 3 * sizes.F * sizes.D * 2
        given = [drawn(cell, device, seed) for seed in range(copies_of(device, nbytes))]
        calls = contestants(session, cell, given)
        times = interleaved(session.clock, calls, GRAPH_CALLS if device.type == "cuda" else 1, options.rounds)
        taken = sum(map(active, given)) / len(given)
        limit_us = taken * 3 * sizes.F * sizes.D * 2 / rate * 1e6
        rows += session.rows_of(
            times,
            bench="moe",
            op=ExpertProjections.kind,
            shape=cell.shape,
            graph=device.type == "cuda",
            limit_us=limit_us,
            commit=options.commit,
        )
        names = ("inductor:batched", "inductor:grouped", "triton:sorted", "ditron")
        lines.append([cell.shape, f"{taken:.0f}", f"{limit_us:.1f}", *texts_of(times, names, limit_us)])
        del given, calls
        end_cell(session, options, rows)
    print_cells(session, HEADS, lines, rate)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    return command.start_alone(MODULE, parser().parse_args(arguments), MOE)


if __name__ == "__main__":
    sys.exit(main())
