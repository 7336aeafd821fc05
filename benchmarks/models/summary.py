"""The table of whole models for a first page: geometric means, one line per phase, model and number of ranks."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from tabulate import tabulate

from benchmarks.models.zoo import position
from benchmarks.records import Row

OURS = "ditron"
RIVALS = {"eager": "eager", "inductor": "Inductor", "async_tp": "async TP"}
"""By contestant, the name in the header."""


def readme_part(rows: Sequence[Row]) -> str:
    """How many times faster Ditron is than each rival, and the conditions of the measurement, losses included.

    Cells that Ditron has no time of, and rows of a CPU, are left out. The last column is the lowest of the ratios to
    the best rival of a cell.
    """
    groups: dict[tuple[str, str, str], list[dict[str, float]]] = {}
    measured = [row for row in rows if row.gpu != "cpu" and row.p50_us is not None]
    for (op, model, world), times in _cells(measured).items():
        groups.setdefault((op, model, world), []).extend(one for one in times if OURS in one and len(one) > 1)
    lines = [(*group, str(len(cells)), *_ratios(cells)) for group, cells in sorted(groups.items(), key=_place) if cells]
    if not lines:
        return "Nothing has been measured yet."
    over = [f"over {name}" for name in RIVALS.values()]
    headers = ["phase", "model", "GPUs", "cells", *over, "lowest, over the best"]
    return "\n".join(
        [
            tabulate(lines, headers, "github", disable_numparse=True),
            "",
            f"Geometric means of rival / Ditron, median time of a step, slowest rank; {_conditions(measured)}.",
            f"Layers alone, {_layers(measured)} of them, with random weights; NVLink multicast off for everybody.",
            "Cells differ in batch, length, layers, form of parallelism; a rival's mean is over those that it ran in.",
        ]
    )


def _cells(rows: Sequence[Row]) -> Mapping[tuple[str, str, str], list[dict[str, float]]]:
    """By (phase, model, ranks) the times of each cell by contestant."""
    cells: dict[tuple[str, ...], dict[str, float]] = {}
    named: dict[tuple[str, ...], tuple[str, str, str]] = {}
    for row in rows:
        assert row.p50_us is not None
        cells.setdefault(row.cell, {})[row.contestant] = row.p50_us
        phase = f"{row.op}, CUDA graphs" if row.graph else row.op
        named[row.cell] = (phase, row.sizes["model"], f"{row.world}x {row.gpu.removeprefix('NVIDIA ')}")
    found: dict[tuple[str, str, str], list[dict[str, float]]] = {}
    for cell, times in cells.items():
        found.setdefault(named[cell], []).append(times)
    return found


def _place(group: tuple[tuple[str, str, str], object]) -> tuple[str, int]:
    """Phase by phase, models in the order of the zoo."""
    phase, model, _ = group[0]
    return phase, position(model)


def _layers(rows: Sequence[Row]) -> str:
    return " or ".join(sorted({row.sizes["layers"] for row in rows if "layers" in row.sizes}, key=int))


def _ratios(cells: Sequence[Mapping[str, float]]) -> list[str]:
    texts = []
    for name in RIVALS:
        ratios = [times[name] / times[OURS] for times in cells if name in times]
        texts.append(f"{statistics.geometric_mean(ratios):.2f}" if ratios else "-")
    lowest = min(min(us for name, us in times.items() if name != OURS) / times[OURS] for times in cells)
    return [*texts, f"{lowest:.2f}"]


def _conditions(rows: Sequence[Row]) -> str:
    def all_of(column: str) -> str:
        return ", ".join(sorted({str(getattr(row, column)) for row in rows}))

    return f"{all_of('dtype')}, torch {all_of('torch')}, Triton {all_of('triton')}, {all_of('date')}"
