"""What Ditron was to reach on four GPUs, and what was measured there: the table of docs/four_gpus.md."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from tabulate import tabulate

from benchmarks.comparison import comparisons, fastest_ratio
from benchmarks.models.request import CONTESTANTS, OURS
from benchmarks.ops import targets
from benchmarks.records import ATTENTION, GEMM_COLLECTIVES, MODELS, Row, by_cell, read_csv
from ditron_inductor.task.exchange import GATHERED_OPERAND, SCATTERED_PRODUCT
from ditron_inductor.task.nodes import matmul_of

WORLD = 4
FASTEST = "the best rival"
CAUSAL = "causal_offset"
REDUCE = "matmul_all_reduce"
OF_MODELS = tuple(name for name in CONTESTANTS if name not in OURS)
OF_ATTENTION = ("inductor", "ring", "sdpa", "sdpa:blocks", "nccl", "nccl:flash", "nccl:cudnn")


@dataclass(frozen=True)
class Floor:
    """`what` is to be `bound` times as fast as `over`: the geometric mean of all cells, or `every` one of them. rivals:
    the contestants that this means, of which the fastest counts. of_cell: whether a cell is one of these.
    """

    what: str
    over: str
    bound: float
    rivals: tuple[str, ...]
    of_cell: Callable[[Row], bool]
    results: Path = GEMM_COLLECTIVES
    every: bool = False

    def lines(self, rows: Iterable[Row]) -> list[list[str]]:
        """A line of the table for each GPU that it was measured on."""
        gains: dict[str, list[float]] = {}
        dates: dict[str, set[str]] = {}
        for cell in by_cell(row for row in rows if row.world == WORLD and row.gpu != "cpu" and self.of_cell(row)):
            gain = fastest_ratio(cell, self.rivals, ("ditron",))
            if gain is not None:
                gains.setdefault(cell[0].gpu, []).append(gain)
                dates.setdefault(cell[0].gpu, set()).add(cell[0].date)
        found = []
        for gpu, known in sorted(gains.items()):
            mean, least = statistics.geometric_mean(known), min(known)
            reached = round(least if self.every else mean, 2) >= self.bound
            bound = f"{self.bound:.2f}, {'each' if self.every else 'mean'}"
            numbers = [f"{mean:.2f}", f"{least:.2f}", str(len(known)), "yes" if reached else "no"]
            found.append([self.what, self.over, gpu.removeprefix("NVIDIA "), bound, *numbers, max(dates[gpu])])
        return found


def _anchors(op: str = "", *, graph: int | None = None, rows: range = range(1, 1 << 30)) -> Callable[[Row], bool]:
    """The rows that kernels are judged by (`ops/targets.py`), of an op if it is given, with so many rows."""

    def of_cell(row: Row) -> bool:
        if op not in ("", row.op) or graph not in (None, row.graph):
            return False
        (cell,) = comparisons([row])
        return targets.is_anchor(cell) and cell.M in rows

    return of_cell


def _model(phase: str = "", model: str = "") -> Callable[[Row], bool]:
    return lambda row: phase in ("", row.op) and model in ("", row.sizes["model"])


def _attention(begins: str, **sizes: str) -> Callable[[Row], bool]:
    """Causal attention over all tokens, of the op whose name begins so, with these sizes."""

    def of_cell(row: Row) -> bool:
        plain = not {"window", "softcap"} & set(row.sizes) and row.sizes.get("mask", CAUSAL) == CAUSAL
        return (
            row.op.startswith(begins) and plain and all(row.sizes.get(name) == value for name, value in sizes.items())
        )

    return of_cell


GATHER, SCATTER = matmul_of(GATHERED_OPERAND), matmul_of(SCATTERED_PRODUCT)
NCCL, SYMM_MEM = ("nccl",), targets.SYMM_MEM
CUBLAS, TORCHS = "NCCL + cuBLAS", "torch's symmetric memory"
FEW, SOME = _anchors(REDUCE, graph=1, rows=range(1, 17)), _anchors(REDUCE, graph=1, rows=range(64, 257))
PREFILL, DECODE = _model("prefill"), _model("decode", "llama3-8b")
SHORT, LONG = (_attention("all_gather", tokens=tokens) for tokens in ("8192", "16384"))
FLOORS = (
    Floor(f"`{GATHER}`", CUBLAS, 1.15, NCCL, _anchors(GATHER, graph=0)),
    Floor(f"`{SCATTER}`", CUBLAS, 1.25, NCCL, _anchors(SCATTER, graph=0)),
    Floor(f"`{REDUCE}`, up to 16 rows", CUBLAS, 1.18, NCCL, FEW, every=True),
    Floor(f"`{REDUCE}`, 64 to 256 rows", CUBLAS, 1.25, NCCL, SOME, every=True),
    Floor(f"`{REDUCE}`, up to 256 rows", TORCHS, 1.09, SYMM_MEM, _anchors(REDUCE, graph=1), every=True),
    Floor("these three, all anchors", FASTEST, 0.98, (*targets.MEASURED, *SYMM_MEM), _anchors(), every=True),
    Floor("prefill of whole models", "Inductor", 1.15, ("inductor",), PREFILL, MODELS),
    Floor("decode of Llama 8B", FASTEST, 1.45, OF_MODELS, DECODE, MODELS),
    Floor("whole models", FASTEST, 0.98, OF_MODELS, _model(), MODELS, every=True),
    Floor("causal attention, 8192 tokens", FASTEST, 1.15, OF_ATTENTION, SHORT, ATTENTION),
    Floor("causal attention, 16384 tokens", FASTEST, 1.08, OF_ATTENTION, LONG, ATTENTION),
    Floor("decode attention, 65536 tokens", FASTEST, 1.40, OF_ATTENTION, _attention("flash", T="65536"), ATTENTION),
)


def part() -> str:
    """The table."""
    known = {path: read_csv(path) for path in {floor.results for floor in FLOORS}}
    lines = [line for floor in FLOORS for line in floor.lines(known[floor.results])]
    headers = ["what", "times as fast as", "4x", "floor", "mean", "least", "cells", "reached", "newest"]
    return tabulate(lines, headers, "github", disable_numparse=True)
