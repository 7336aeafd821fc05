"""`python -m benchmarks.ops.grouped_projections`: the first matmul of the experts of a prompt, one rank's share.

It needs one GPU: nothing is communicated. A call takes x [T, D] and the slots of all tokens, sorted by expert, and
returns silu(gate) * up of all slots. The rank has 1/W of the width of every expert. Contestants, interleaved:

    gemm              torch's grouped matmul alone, of rows that have been copied before: part of the limit
    inductor          a copy of the rows, torch's grouped matmul, and Inductor's kernel behind it; max_autotune too
    ditron            `grouped_projections` with the epilogue
    ditron:product    `grouped_projections` of both halves as one product, and Inductor's kernel behind it

With --graph all of them are captured.
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
from benchmarks.ops.expert_cells import (
    LIMIT_S,
    MODELS,
    TINY,
    TOLERANCE,
    Experts,
    add_cells,
    bytes_per_s,
    end_cell,
    exactly_activated,
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
from ditron_inductor.task.nodes import GroupedProjections

MODULE = "benchmarks.ops.grouped_projections"
SHOWN = ("gemm", "inductor", "max_autotune", "ditron:product", "ditron")
Layer = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Operands:
    """x [T, D], rows [S], ends [E], the weight of gate and up [E, 2 F, D]."""

    x: torch.Tensor
    rows: torch.Tensor
    ends: torch.Tensor
    gate_up: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.x, self.rows, self.ends, self.gate_up


def drawn(sizes: Experts, T: int, routing: str, device: torch.device) -> Operands:
    """Random operands."""
    generator = torch.Generator(device=device).manual_seed(0)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(std=scale, generator=generator)

    _, experts = routed(T, sizes, routing, device, generator)
    ids, order = experts.reshape(-1).sort(stable=True)
    ends = torch.bincount(ids, minlength=sizes.E).cumsum(0).to(torch.int32)
    gate_up = normal(sizes.E, 2 * sizes.F, sizes.D, scale=sizes.D**-0.5)
    return Operands(normal(T, sizes.D), order // sizes.k, ends, gate_up)


def copied(x: torch.Tensor, rows: torch.Tensor, ends: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    """A row for each slot."""
    return activated(torch._grouped_mm(x[rows], gate_up.mT, offs=ends), False)


def ours(together: bool) -> Layer:
    """One launch; not together: and Inductor's kernel for silu(gate) * up."""
    text = GroupedProjections(2, epilogue="cast(silu(mm0), bf16) * mm1").text() if together else ""
    op, product = schema.overload(GroupedProjections.kind), GroupedProjections(1).text()

    def layer(x: torch.Tensor, rows: torch.Tensor, ends: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
        weight, F = gate_up.mT, gate_up.shape[1] // 2
        if together:
            (out,) = op([x, rows, ends, weight[..., :F], weight[..., F:]], text, None)
            return out
        (both,) = op([x, rows, ends, weight], product, None)
        return activated(both, False)

    return layer


def contestants(session: Session, given: Operands, graph: bool) -> dict[str, Callable[[int], object]]:
    """The contestants whose results are right, captured if `graph`."""
    rows = given.x[given.rows]
    wanted = exactly_activated(rows, given.ends, given.gate_up.mT)
    tuned = {"mode": "max-autotune-no-cudagraphs"} if session.clock.device.type == "cuda" else {}
    layers: dict[str, Layer] = {
        "gemm": lambda x, taken, ends, gate_up: torch._grouped_mm(rows, gate_up.mT, offs=ends),
        "inductor": torch.compile(copied, dynamic=False),
        "max_autotune": torch.compile(copied, dynamic=False, **tuned),
        "ditron": torch.compile(ours(True), dynamic=False),
        "ditron:product": torch.compile(ours(False), dynamic=False),
    }

    def checked(name: str) -> Callable[[int], object]:
        result = layers[name](*given.tensors)
        error = relative_error(activated(result, False) if name == "gemm" else result, wanted)
        if not error <= TOLERANCE:
            raise AssertionError(f"{name} is {error:.1e} from fp64")
        return lambda i: layers[name](*given.tensors)

    calls = session.right(layers, checked)
    return session.replays(calls, GRAPH_CALLS) if graph else calls


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(prog=f"python -m {MODULE}")
    add_cells(result, models=[*MODELS][:3], tokens=[8192, 2048, 512, 128])
    result.add_argument("--ranks", nargs="+", type=int, default=[2], help="of how many ranks the share is one")
    result.add_argument("--graph", action="store_true", help="inside CUDA graphs")
    command.add_common(result, world=1, limit_s=LIMIT_S)
    result.set_defaults(rounds=9)
    return result


def measure(session: Session, options: argparse.Namespace) -> list[Row]:
    """All cells for which there is time; rank 0 writes and prints."""
    rows: list[Row] = []
    lines = []
    device = session.clock.device
    graph = options.graph and device.type == "cuda"
    for model, W, T, routing in itertools.product(options.models, options.ranks, options.tokens, options.routing):
        shape = f"model={model};T={T};W={W};routing={routing}"
        if session.seconds() > options.budget:
            session.say(f"no time for {shape}")
            continue
        whole = (MODELS | TINY)[model]
        given = drawn(Experts(whole.D, whole.F // W, whole.E, whole.k), T, routing, device)
        calls = contestants(session, given, graph)
        times = interleaved(session.clock, calls, GRAPH_CALLS if graph else 1, options.rounds)
        limit_us = times["gemm"].p50_us if "gemm" in times else None
        rows += session.rows_of(
            times, bench="moe", op=GroupedProjections.kind, shape=shape, graph=graph,
            limit_us=limit_us, commit=options.commit,
        )  # fmt: skip
        compared = {name: each for name, each in times.items() if name != "gemm"}
        alone_us = float("nan") if limit_us is None else limit_us
        lines.append([shape, f"{alone_us:.1f}", *texts_of(compared, SHOWN[1:], alone_us)])
        session.say("  ".join(lines[-1]))
        del given, calls
        end_cell(session, options, rows)
    print_cells(session, ["cell", *SHOWN, "ditron/gemm", "best other/ditron"], lines, bytes_per_s(device))
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    return command.start_alone(MODULE, parser().parse_args(arguments), MOE)


if __name__ == "__main__":
    sys.exit(main())
