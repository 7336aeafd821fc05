"""What the rows of one cell say together: who is faster by how much, and how near to the physical limit."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tabulate import tabulate

from benchmarks import sources
from benchmarks.records import Row, grouped, runs, strongest
from benchmarks.trying import UNTABLED
from ditron_inductor.task.exchange import EXCHANGED_PRODUCT, GATHERED_OPERAND, GATHERED_PRODUCT
from ditron_inductor.task.nodes import DELETED_KINDS, KINDS, TASKS, ULYSSES_KINDS

OPS = (*KINDS, *ULYSSES_KINDS)
WIDE_INPUT = (GATHERED_OPERAND, GATHERED_PRODUCT, EXCHANGED_PRODUCT)
"""Those whose matmul has the hidden size as its K."""
MEASURED_OPS = (*OPS, *DELETED_KINDS)
"""Those that there may be rows of."""
BASELINES = ("nccl", "gloo")
RIVALS = (*BASELINES, "registered", "max_autotune", "async_tp", "symm_mem:one_shot", "symm_mem:two_shot")
"""Everybody else's contestants, in the order of the tables."""
OURS = ("ditron", UNTABLED, "ditron:planned", "ditron:tile", "ditron:chunked", "ditron:library")
COMMIT = "commit"
"""The header of the column that says which commit a row was measured at, and whether it is old."""
TITLES = {
    "gemm": "cuBLAS alone",
    "nccl": "NCCL + cuBLAS",
    "gloo": "gloo",
    "registered": "NCCL, registered",
    "max_autotune": "NCCL + max-autotune",
    "async_tp": "async TP",
    "symm_mem:one_shot": "one-shot",
    "symm_mem:two_shot": "two-shot",
    "ditron": "auto",
    UNTABLED: "auto, no table",
    "ditron:planned": "auto, no trials",
    "ditron:tile": "tile",
    "ditron:chunked": "chunked",
    "ditron:library": "library",
}


CLOSE = 0.98
"""Below this a ratio of two contestants says more than that the clocks of GPUs vary."""
NOISE = "~"
"""Stands behind a ratio of two contestants whose samples overlap."""


def overlap(one: Row, other: Row) -> bool:
    """Whether the 20th to 80th percentiles of two rows have a time in common."""
    bounds = [(row.p20_us, row.p80_us) for row in (one, other)]
    if any(low is None or high is None for low, high in bounds):
        return False
    (low, high), (other_low, other_high) = bounds
    return bool(low <= other_high and other_low <= high)  # type: ignore[operator]


def fastest_ratio(run: Iterable[Row], above: Sequence[str], below: Sequence[str]) -> float | None:
    """Time of the fastest of the contestants `above` / that of the fastest of `below`, in one run of a cell; None where
    one side has no time. A name that ends in a colon stands for all that begin with it.
    """
    us = {row.contestant: row.p50_us for row in run if row.p50_us}

    def times(names: Sequence[str]) -> list[float]:
        groups = tuple(name for name in names if name[-1] == ":")
        return [us[one] for one in us if one in names or one.startswith(groups)]

    top, bottom = times(above), times(below)
    return min(top) / min(bottom) if top and bottom else None


@dataclass(frozen=True)
class Comparison:
    """The rows of one cell, by contestant: an op on [M, K] x [K, N]."""

    op: str
    M: int
    N: int
    K: int
    dtype: str
    world: int
    graph: int
    gpu: str
    rows: Mapping[str, Row]
    products: int = 1

    @property
    def hidden(self) -> int:
        """The width that the ranks have in common: what the layer's input or output is wide."""
        return self.K if self.op not in DELETED_KINDS and TASKS[self.op].exchange in WIDE_INPUT else self.N

    @property
    def shape(self) -> str:
        return f"{self.M} x {self.N} x {self.K}" + (f" in {self.products}" if self.products > 1 else "")

    def us(self, name: str) -> float | None:
        """Microseconds of a contestant, None if it has none."""
        return self.rows[name].p50_us if name in self.rows else None

    @property
    def measured(self) -> str:
        """The commit of the rows, and their age."""
        return sources.measured(next(iter(self.rows.values())))

    @property
    def limit_us(self) -> float | None:
        """The larger of the matmul alone and the link's time."""
        return next((row.limit_us for row in self.rows.values() if row.limit_us is not None), None)

    def ratio(self, above: str | tuple[str, ...], below: str | tuple[str, ...]) -> float | None:
        """Time of `above` / time of `below`, of the fastest where there are several; `limit` stands for the limit."""
        top, bottom = self._fastest(above), self._fastest(below)
        return top / bottom if top and bottom else None

    def ratio_text(self, rival: str) -> str:
        """Time of a rival / time of `auto`, with a mark where their samples overlap; `-` where one has no time."""
        ratio = self.ratio(rival, "ditron")
        unclear = ratio is not None and overlap(self.rows[rival], self.rows["ditron"])
        return _number(ratio, 2) + f" {NOISE}" * unclear

    @property
    def is_lost(self) -> bool:
        """Whether `auto` is slower than the best rival by more than CLOSE allows, and outside of noise."""
        ratio = self.ratio(self.best_rival, "ditron")
        return ratio is not None and ratio < CLOSE and not overlap(self.rows[self.best_rival], self.rows["ditron"])

    @property
    def best_rival(self) -> str:
        """The fastest of all others, empty if none has a time."""
        timed = {name: us for name in RIVALS if (us := self.us(name))}
        return min(timed, key=lambda name: timed[name], default="")

    def _fastest(self, names: str | tuple[str, ...]) -> float | None:
        if names == "limit":
            return self.limit_us
        times = [self.us(name) for name in ((names,) if isinstance(names, str) else names)]
        return min((one for one in times if one), default=None)


def shown_runs(rows: Iterable[Row]) -> list[Sequence[Row]]:
    """The run of each cell that reports show, see `records.strongest`. rows: of all runs."""
    return [strongest(runs(of_cell), "nccl", RIVALS) for of_cell in grouped(rows).values()]


def comparisons(rows: Iterable[Row]) -> list[Comparison]:
    """Returns a comparison for each cell, of the run that `shown_runs` picks, in order: by GPU, number of ranks and op,
    then eager before graph, wide before narrow, and by falling M.
    """
    found = []
    for of_cell in shown_runs(rows):
        row = of_cell[0]
        cell = {one.contestant: one for one in of_cell}
        sizes = {name: int(value) for name, value in row.sizes.items()}
        M, N, K, products = sizes["M"], sizes["N"], sizes["K"], sizes.get("products", 1)
        found.append(Comparison(row.op, M, N, K, row.dtype, row.world, row.graph, row.gpu, cell, products))
    return sorted(
        found, key=lambda c: (c.gpu, -c.world, MEASURED_OPS.index(c.op), c.graph, -c.hidden, -c.N * c.K, -c.M, c.dtype)
    )


def geometric_mean(values: Iterable[float | None]) -> float | None:
    """None if there are no values, or if one of them is missing."""
    found = list(values)
    known = [value for value in found if value is not None]
    return statistics.geometric_mean(known) if known and len(known) == len(found) else None


def shown(cells: Sequence[Comparison]) -> list[str]:
    """The contestants that any of the cells has, in the order of the tables."""
    return [name for name in ("gemm", *RIVALS, *OURS) if any(name in cell.rows for cell in cells)]


def mode(cell: Comparison) -> str:
    """`graph` or `eager`."""
    return "graph" if cell.graph else "eager"


def times_table(cells: Sequence[Comparison], style: str = "simple") -> str:
    """Returns a table with a line for each cell: the limit and the times of all contestants, in microseconds."""
    names = shown(cells)
    lines = []
    for cell in cells:
        times = [_number(cell.us(name), 1, "failed" if name in cell.rows else "-") for name in names]
        lines.append([cell.op, cell.shape, mode(cell), _number(cell.limit_us, 1), *times, cell.measured])
    return _table(["op", "M x N x K", "mode", "limit", *(TITLES[name] for name in names), COMMIT], lines, style)


def ratios_table(
    cells: Sequence[Comparison], targets: Mapping[int, tuple[str, str]] | None = None, style: str = "simple"
) -> str:
    """Returns a table with a line for each cell: how many times as fast as each rival `auto` is, the limit over the
    time of `auto`, and the skew of `auto`.

    targets: by position in `cells`, the target and whether it holds.
    """
    names = shown(cells)
    rivals = [name for name in names if name in RIVALS]
    ours = [name for name in names if name in OURS]
    lines = []
    for place, cell in enumerate(cells):
        line = [cell.op, cell.shape, mode(cell)]
        line += [cell.ratio_text(name) for name in rivals]
        line += [_number(cell.ratio("limit", name), 2) for name in ours]
        line.append(_number(cell.rows["ditron"].skew_pct, 1) if "ditron" in cell.rows else "-")
        if targets:
            line += targets.get(place, ("", ""))
        lines.append(line)
    headers = ["op", "M x N x K", "mode", *(f"{TITLES[name]} / auto" for name in rivals)]
    headers += [*(f"limit / {TITLES[name]}" for name in ours), "skew %", *(["target", "holds"] if targets else [])]
    return _table(headers, lines, style)


def losses_table(cells: Sequence[Comparison], style: str = "simple") -> str:
    """Returns a table with a line for each cell that is lost: the best rival's time over those of `auto` and of the
    fastest strategy, whichever was chosen.
    """
    lines = [
        [
            f"{cell.world}x {cell.gpu.removeprefix('NVIDIA ')}", cell.op, cell.shape, mode(cell),
            TITLES[cell.best_rival], _number(cell.ratio(cell.best_rival, "ditron"), 2),
            _number(cell.ratio(cell.best_rival, OURS), 2), cell.measured,
        ]
        for cell in cells
        if cell.is_lost
    ]  # fmt: skip
    headers = ["GPUs", "op", "M x N x K", "mode", "best rival", "rival / auto", "rival / best strategy", COMMIT]
    return _table(headers, lines, style)


def _number(value: float | None, digits: int, missing: str = "-") -> str:
    return missing if value is None else f"{value:.{digits}f}"


def _table(headers: Sequence[str], lines: Sequence[Sequence[str]], style: str) -> str:
    words = {"op", "M x N x K", "mode", "target", "holds", "GPUs", "best rival", COMMIT}
    sides = ["left" if header in words else "right" for header in headers]
    # What is formatted already must not be parsed again.
    return tabulate(lines, headers, style, colalign=sides if lines else None, disable_numparse=True)


def means(cells: Sequence[Comparison]) -> list[tuple[str, str, int, float]]:
    """(op, rival, number of cells, geometric mean of rival / auto) over all cells in which both have a time."""
    found = []
    for op in MEASURED_OPS:
        of_op = [cell for cell in cells if cell.op == op]
        for name in RIVALS:
            values = [ratio for ratio in (cell.ratio(name, "ditron") for cell in of_op) if ratio is not None]
            if values:
                found.append((op, name, len(values), statistics.geometric_mean(values)))
    return found
