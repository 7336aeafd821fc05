"""`python -m benchmarks.ops.unaligned`: matmuls whose rows do not begin on 16 bytes, as they are and padded.

It needs one GPU.

Contestants, interleaved, eager:

    eager       torch.mm alone
    aligned     torch.mm alone, of the next aligned sizes: what padding could reach if it cost nothing
    pitched     torch.mm alone, of the sizes as they are, with rows of operands and result that begin on 16 bytes:
                whether longer pitches alone would do, as for rows that a site gathers into memory of ours
    unpadded    silu(relu(x) @ w) by Inductor without padding; with `around=none` x @ w
    inductor    the same with Inductor's `shape_padding`, which measures both and keeps the faster one
    padded      the same with `pad_products` by a rule that pads wherever it can

The pipeline does what `unpadded` or what `padded` does, by the rule in `ditron_inductor/task/alignment.py`; the column
`rule` says which. The next one is the time of its choice over the better one of both (what a wrong choice costs), the
last one Inductor's time over that of the choice (above 1: ours is faster). A second table has what the rule's constants
should be, and what part of the aligned speed `pitched` reaches.

Layouts: `nn` x [M, K] @ w [K, N]; `nt` w [N, K] as `nn.Linear` holds it; `tn` x [K, M], as in a weight's gradient.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import fx
from torch._inductor.compile_fx import compile_fx

from benchmarks.ops import command
from benchmarks.ops.chains import copies_of
from benchmarks.records import UNALIGNED, Row, merge_csv
from benchmarks.session import Session
from benchmarks.timing import interleaved
from ditron_inductor.options import Options
from ditron_inductor.passes.finish.pad_products import find_unaligned, pad_by
from ditron_inductor.pipeline import DitronPipeline
from ditron_inductor.report.explain import without_caches
from ditron_inductor.task import alignment
from ditron_inductor.task.alignment import RULE, ProductWork, Rule

MODULE = "benchmarks.ops.unaligned"
BUDGET_S, LIMIT_S = 75.0, 240.0
ALWAYS = Rule(margin=0.0)
TOLERANCE = 4e-2
CONTESTANTS = ("eager", "aligned", "pitched", "unpadded", "inductor", "padded")
HEADS = ["cell", *CONTESTANTS, "rule", "chosen/best", "inductor/chosen"]
DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    alignment.TENSOR_FLOAT_32: torch.float32,
}

Call = Callable[[int], torch.Tensor]
Operands = Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Cell:
    """One product. dtype: a key of `DTYPES`. around: `both` (relu in front, silu behind) or `none`. batch: 0 for mm."""

    m: int
    n: int
    k: int
    layout: str = "nt"
    dtype: str = "bf16"
    around: str = "both"
    batch: int = 0

    @property
    def shape(self) -> str:
        """The shape as it stands in the results."""
        batch = f";batch={self.batch}" if self.batch else ""
        return f"M={self.m};N={self.n};K={self.k};layout={self.layout};around={self.around}{batch}"

    def aligned(self) -> Cell:
        """Returns the cell of the next aligned sizes."""
        step = alignment.multiple(DTYPES[self.dtype])
        m, n, k = (math.ceil(size / step) * step for size in (self.m, self.n, self.k))
        return Cell(m, n, k, self.layout, self.dtype, self.around, self.batch)

    def operands(self, device: torch.device, step: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Random x [.., M, K] and w [.., K, N], which lie as the layout says, and an empty result by rows.

        step: what the distance of rows in memory is a multiple of.
        """
        batch = (self.batch,) if self.batch else ()

        def draw(rows: int, columns: int, across: bool, scale: float) -> torch.Tensor:
            apart, length = (columns, rows) if across else (rows, columns)
            shape = (*batch, apart, math.ceil(length / step) * step)
            drawn = torch.empty(shape, dtype=DTYPES[self.dtype], device=device).normal_(std=scale)
            drawn = drawn.narrow(-1, 0, length)
            return drawn.mT if across else drawn

        x = draw(self.m, self.k, self.layout[0] == "t", 1.0)
        w = draw(self.k, self.n, self.layout[1] == "t", self.k**-0.5)
        return x, w, draw(self.m, self.n, False, 1.0)


SETS: dict[str, tuple[Cell, ...]] = {
    # The operands alone, and by how much they are off: what the constants `operand` are fitted to.
    "operand": (
        Cell(8191, 4096, 4097),
        Cell(4095, 4096, 4098),
        Cell(4095, 4096, 4100),
        Cell(2047, 4096, 4097, around="none"),
        Cell(777, 4096, 4097),
        Cell(191, 4096, 4097),
    ),
    # The result alone: `result`.
    "result": (
        Cell(4095, 4097, 4096),
        Cell(2047, 50257, 1024, around="none"),
        Cell(4095, 4098, 4096),
        Cell(4095, 4100, 4096),
    ),
    # Weights with rows of N elements, gradients, and all at once.
    "both": (
        Cell(8191, 11007, 4097, "nn"),
        Cell(2047, 1023, 596, "nn"),
        Cell(512, 4097, 1024, "nn"),
        Cell(4097, 1023, 2047, "tn"),
        Cell(192, 596, 191, "nn"),
    ),
    # Few rows: reading the weight is all that counts, and a copy of it is a loss.
    "few": (Cell(17, 50257, 4096), Cell(17, 4096, 4097)),
    "float32": (Cell(2047, 4097, 4095, "nn", "tf32"), Cell(2047, 4097, 4095, "nn", "fp32")),
    "batched": (Cell(777, 777, 64, "nt", batch=64), Cell(777, 64, 777, "nn", batch=64)),
    "tiny": (Cell(33, 19, 17, "nn", "fp32"),),
}


@dataclass(frozen=True)
class Measured:
    """A cell, what its padding works with, and microseconds by contestant."""

    cell: Cell
    work: ProductWork
    us: dict[str, float]

    @property
    def pads(self) -> bool:
        """Whether the rule pads the product."""
        return RULE.pays(self.work)

    @property
    def chosen_us(self) -> float:
        """The time of what the rule says."""
        return self.us["padded" if self.pads else "unpadded"]


def parser() -> argparse.ArgumentParser:
    """The command line."""
    chosen = [name for name in SETS if name != "tiny"]
    result = command.parser(MODULE, SETS, chosen, world=1, limit_s=LIMIT_S)
    result.set_defaults(rounds=9)
    result.add_argument("--budget", type=float, default=BUDGET_S, help="seconds, after which no cell is begun")
    return result


def compiled(cell: Cell, device: torch.device, patches: dict[str, Any]) -> Callable[..., torch.Tensor]:
    """The product with what is around it, by Inductor with these entries of its config."""

    def both(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(x.relu() @ w)

    def none(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x @ w

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        return compile_fx(gm, inputs, config_patches=patches)

    fn: Callable[..., torch.Tensor] = torch.compile(
        both if cell.around == "both" else none, backend=backend, dynamic=False
    )
    return fn


def contestants(cell: Cell, device: torch.device) -> tuple[dict[str, Call], ProductWork]:
    """All contestants, of operands that are used in turns, and what padding this product works with."""
    nbytes = DTYPES[cell.dtype].itemsize * max(cell.batch, 1) * cell.k * (cell.m + cell.n)
    step = alignment.multiple(DTYPES[cell.dtype])
    own, aligned, pitched = (
        [one.operands(device, apart) for _ in range(copies_of(device, nbytes))]
        for one, apart in ((cell, 1), (cell.aligned(), 1), (cell, step))
    )
    works: list[ProductWork] = []
    devices = (device.type,)

    def pad_all(graph: fx.Graph, *, options: Options) -> int:
        works.extend(match.work for match in (find_unaligned(node, devices) for node in graph.nodes) if match)
        return pad_by(graph, ALWAYS, devices)

    ours = DitronPipeline(Options(), passes=(pad_all,))
    patches: dict[str, dict[str, Any]] = {
        "unpadded": {"shape_padding": False},
        "inductor": {"shape_padding": True},
        "padded": {"shape_padding": False, "post_grad_custom_pre_pass": ours},
    }

    def of(fn: Callable[..., torch.Tensor], operands: Operands) -> Call:
        return lambda i: fn(*operands[i % len(operands)][:2])

    def into(operands: Operands) -> Call:
        def call(i: int) -> torch.Tensor:
            x, w, out = operands[i % len(operands)]
            return torch.matmul(x, w, out=out)

        return call

    calls = {"eager": of(torch.matmul, own), "aligned": of(torch.matmul, aligned), "pitched": into(pitched)}
    with without_caches():
        for name, entries in patches.items():
            calls[name] = of(compiled(cell, device, entries), own)
            got, wanted = calls[name](0), calls["eager" if name == "unpadded" else "unpadded"](0)
            if name != "unpadded" or cell.around == "none":
                torch.testing.assert_close(got, wanted, rtol=TOLERANCE, atol=TOLERANCE)
    (work,) = works
    return calls, work


def measure(session: Session, options: argparse.Namespace) -> list[Row]:
    """All cells for which there is time, on this rank; rank 0 writes and prints."""
    rows: list[Row] = []
    found: list[Measured] = []
    cells = [cell for name in options.shapes for cell in SETS[name]]
    for place, cell in enumerate(cells):
        if session.seconds() > options.budget:
            session.say(f"no time for {len(cells) - place} of {len(cells)} cells; --budget and --shapes say for which")
            break
        torch.set_float32_matmul_precision("high" if cell.dtype == alignment.TENSOR_FLOAT_32 else "highest")
        ready = session.tried(cell.shape, lambda cell=cell: contestants(cell, session.clock.device))
        if ready is None:
            continue
        calls, work = ready
        times = interleaved(session.clock, calls, rounds=options.rounds)
        rows += session.rows_of(
            times,
            bench="unaligned",
            op="bmm" if cell.batch else "mm",
            shape=cell.shape,
            graph=False,
            limit_us=None,
            commit=options.commit,
            dtype=cell.dtype,
        )
        found.append(Measured(cell, work, {name: each.p50_us for name, each in times.items()}))
        torch.compiler.reset()
        if session.rank == 0 and options.out:
            merge_csv(Path(options.out), rows)
    if session.rank == 0 and found:
        print(table(found))
        print(fitted(found), flush=True)
    return rows


def table(found: Sequence[Measured]) -> str:
    """Microseconds, and how good the rule's choice is."""
    lines = []
    for one in found:
        times = [f"{one.us[name]:.1f}" for name in CONTESTANTS]
        best = min(one.us["padded"], one.us["unpadded"])
        ratios = [f"{one.chosen_us / best:.2f}", f"{one.us['inductor'] / one.chosen_us:.2f}"]
        lines.append([f"{one.cell.dtype} {one.cell.shape}", *times, "pad" if one.pads else "-", *ratios])
    return tabulate(lines, HEADS, disable_numparse=True)


def fitted(found: Sequence[Measured]) -> str:
    """The constants of the rule beside what these cells say they should be, medians."""
    seen: dict[tuple[str, float], list[float]] = {}
    for one in found:
        work, alone = one.work, one.us["aligned"]
        speed = {str(dtype): dtype for dtype in RULE.flops_per_s}[str(work.speed)]
        rate = work.flops / alone * 1e6
        compute_bound = rate > RULE.flops_per_s[speed] / 3
        if compute_bound:
            seen.setdefault((f"flops_per_s[{speed}] (largest)", RULE.flops_per_s[speed]), []).append(rate)
            seen.setdefault((f"pitched[{min(work.operand_bytes, work.result_bytes)}]", 1.0), []).append(
                alone / one.us["pitched"]
            )
        reached = alone / one.us["eager"]
        if work.speed == torch.float32:
            seen.setdefault(("plain", RULE.plain), []).append(reached)
        elif compute_bound and work.operand_bytes < alignment.ALIGNED_BYTES:
            seen.setdefault((f"operand[{work.operand_bytes}]", RULE.operand[work.operand_bytes]), []).append(reached)
        elif compute_bound and work.result_bytes < alignment.ALIGNED_BYTES:
            seen.setdefault((f"result[{work.result_bytes}]", RULE.result[work.result_bytes]), []).append(reached)
        copies = work.copied_bytes / RULE.bytes_per_s + work.launches * RULE.launch_s
        measured_us = one.us["padded"] - one.us["unpadded"] + one.us["eager"] - alone
        if copies:
            seen.setdefault(("copies: measured over predicted", 1.0), []).append(measured_us / copies / 1e6)
    lines = []
    for (name, now), values in seen.items():
        value = max(values) if "largest" in name else statistics.median(values)
        digits = "{:.2e}" if now > 1e3 else "{:.2f}"
        lines.append([name, digits.format(now), digits.format(value), len(values)])
    return tabulate(sorted(lines), ["constant", "now", "measured", "cells"], disable_numparse=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    return command.start_alone(MODULE, parser().parse_args(arguments), UNALIGNED)


if __name__ == "__main__":
    sys.exit(main())
