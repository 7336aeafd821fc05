"""`python -m benchmarks.ops.projections`: Q, K and V, or gate and up, of few rows, one rank's share.

It needs one GPU: nothing is communicated. Contestants, interleaved, inside CUDA graphs:

    inductor            one product for each weight, and Inductor's kernel for silu(gate) * up; max_autotune too
    concatenated        one product of all weights in one tensor, which needs a model that stores them so
    ditron              one launch

The limit is the time to read the weights at the speed of a copy on this GPU, which is measured first.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import silu

from benchmarks.ops import command
from benchmarks.ops.chains import copies_of
from benchmarks.ops.expert_cells import BUDGET_S, LIMIT_S, TOLERANCE, bytes_per_s, end_cell, print_cells, texts_of
from benchmarks.records import RESULTS, Row
from benchmarks.session import Session
from benchmarks.timing import interleaved
from benchmarks.tolerances import relative_error
from ditron_inductor.report.matmul_shapes import MODELS, PARTS, LayerWidths
from ditron_inductor.report.timing import GRAPH_CALLS
from ditron_inductor.task import schema
from ditron_inductor.task.nodes import Projections

MODULE = "benchmarks.ops.projections"
RECORDED = RESULTS / "projections.csv"
OUTPUT = "output"
"""The output projection of attention, a weight alone; with `--ranks 1` whole, as beside a divided cache."""
SHOWN = ("inductor", "max_autotune", "concatenated", "ditron")
TINY = {"tiny": LayerWidths(64, 64, 32, 96, 128)}
Layer = Callable[..., Sequence[torch.Tensor]]


@dataclass(frozen=True)
class Operands:
    """x [rows, K] and the weights [N_i, K] as `nn.Linear` holds them, which are also parts of one tensor."""

    x: torch.Tensor
    whole: torch.Tensor
    columns: tuple[int, ...]

    @property
    def weights(self) -> Sequence[torch.Tensor]:
        return self.whole.split(self.columns)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(prog=f"python -m {MODULE}")
    models = MODELS | TINY
    result.add_argument("--models", nargs="+", choices=sorted(models), default=["llama-8b", "llama-70b", "qwen3-32b"])
    result.add_argument("--parts", nargs="+", choices=[*PARTS, OUTPUT], default=list(PARTS))
    result.add_argument("--rows", nargs="+", type=int, default=[1, 16, 64, 128])
    result.add_argument("--ranks", nargs="+", type=int, default=[2, 4], help="of how many ranks the share is one")
    result.add_argument("--budget", type=float, default=BUDGET_S, help="seconds, after which no cell is begun")
    command.add_common(result, world=1, limit_s=LIMIT_S)
    return result


def widths_of(layer: LayerWidths, part: str, ranks: int) -> tuple[int, tuple[int, ...]]:
    """(K, the columns) of one rank's weights."""
    if part == OUTPUT:
        return layer.query_dim // ranks, (layer.dim,)
    if part == "mlp":
        return layer.dim, (layer.hidden_dim // ranks,) * 2
    return layer.dim, (layer.query_dim // ranks, layer.key_dim // ranks, layer.key_dim // ranks)


def finished(products: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """silu(gate) * up of two products; three stay as they are."""
    return [silu(products[0]) * products[1]] if len(products) == 2 else products


def one_by_one(x: torch.Tensor, _: torch.Tensor, *weights: torch.Tensor) -> Sequence[torch.Tensor]:
    return finished([x @ weight.t() for weight in weights])


def concatenated(x: torch.Tensor, whole: torch.Tensor, *weights: torch.Tensor) -> Sequence[torch.Tensor]:
    return finished((x @ whole.t()).split([weight.shape[0] for weight in weights], -1))


def ours(x: torch.Tensor, _: torch.Tensor, *weights: torch.Tensor) -> Sequence[torch.Tensor]:
    node = Projections(len(weights), epilogue="cast(silu(mm0), bf16) * mm1" if len(weights) == 2 else "")
    op = schema.overload(Projections.kind)
    return list(op([x, *[weight.t() for weight in weights]], node.text(), None))


def contestants(session: Session, given: Sequence[Operands]) -> dict[str, Callable[[int], object]]:
    """The contestants whose results are right, captured where there is a GPU. given: what calls use in turns."""
    on_gpu = session.clock.device.type == "cuda"
    tuned = {"mode": "max-autotune-no-cudagraphs"} if on_gpu else {}
    layers: dict[str, Layer] = {
        "inductor": torch.compile(one_by_one, dynamic=False),
        "max_autotune": torch.compile(one_by_one, dynamic=False, **tuned),
        "concatenated": torch.compile(concatenated, dynamic=False),
        "ditron": ours,
    }
    first = given[0]
    wanted = finished([first.x.double() @ weight.double().t() for weight in first.weights])

    def checked(name: str) -> Callable[[int], object]:
        def call(i: int) -> Sequence[torch.Tensor]:
            chosen = given[i % len(given)]
            return layers[name](chosen.x, chosen.whole, *chosen.weights)

        for got, exact in zip(call(0), wanted, strict=True):
            error = relative_error(got, exact.float())
            if not error <= TOLERANCE:
                raise AssertionError(f"{name} is {error:.1e} from fp64")
        return call

    calls = session.right(layers, checked)
    return session.replays(calls, GRAPH_CALLS) if on_gpu else calls


def drawn(rows: int, k: int, columns: tuple[int, ...], device: torch.device) -> list[Operands]:
    """Random operands; of small weights so many that no call finds them in the cache."""
    generator = torch.Generator(device=device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(generator=generator)

    x, nbytes = normal(rows, k), 2 * k * sum(columns)
    return [Operands(x, normal(sum(columns), k) / math.sqrt(k), columns) for _ in range(copies_of(device, nbytes))]


def measure(session: Session, options: argparse.Namespace) -> list[Row]:
    """All cells for which there is time; rank 0 writes and prints."""
    rows: list[Row] = []
    lines = []
    device = session.clock.device
    rate, on_gpu = bytes_per_s(device), device.type == "cuda"
    for model, ranks, part, m in itertools.product(options.models, options.ranks, options.parts, options.rows):
        layer = (MODELS | TINY)[model]
        k, columns = widths_of(layer, part, ranks)
        shape = f"M={m};N={'+'.join(map(str, columns))};K={k}"
        if session.seconds() > options.budget:
            session.say(f"no time for {shape}")
            continue
        given = drawn(m, k, columns, device)
        times = interleaved(session.clock, contestants(session, given), GRAPH_CALLS if on_gpu else 1, options.rounds)
        limit_us = given[0].whole.nbytes / rate * 1e6
        rows += session.rows_of(
            times, bench="projections", op=Projections.kind, shape=shape, graph=on_gpu,
            limit_us=limit_us, commit=options.commit,
        )  # fmt: skip
        lines.append([f"{model}, {part}", shape, f"{limit_us:.1f}", *texts_of(times, SHOWN, limit_us)])
        session.say("  ".join(lines[-1]))
        del given
        end_cell(session, options, rows)
    print_cells(session, ["layer", "cell", "limit", *SHOWN, "ditron/limit", "best other/ditron"], lines, rate)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    return command.start_alone(MODULE, parser().parse_args(arguments), RECORDED)


if __name__ == "__main__":
    sys.exit(main())
