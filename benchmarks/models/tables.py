"""The tables of `python -m benchmarks.models`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from tabulate import tabulate

from benchmarks.models.request import CONTESTANTS
from benchmarks.records import Row


def report(
    rows: Sequence[Row], notes: Sequence[str], facts: Mapping[tuple[str, str], Mapping[str, Any]], phases: str
) -> str:
    """What a run prints at its end. facts: by cell and contestant, seconds of compilation and fused sites."""
    compiled = [
        (cell, name, f"{each['seconds']:.1f}", ", ".join(f"{count} {kind}" for kind, count in each["fused"].items()))
        for (cell, name), each in facts.items()
        if name != "eager"
    ]
    parts = ["milliseconds per step", times_table(rows), ""]
    parts += [tabulate(compiled, ["cell", "contestant", "first call, s", "fused sites"], disable_numparse=True), ""]
    return "\n".join([*parts, *(f"no number: {note}" for note in notes), phases])


def docs_part(rows: Sequence[Row]) -> str:
    """The table for the docs, and the geometric means of Inductor's times over Ditron's, by ranks, phase and model."""
    ratios: dict[str, list[float]] = {}
    for found in _cells(rows):
        first = next(iter(found.values()))
        ours, theirs = (found[name].p50_us if name in found else None for name in ("ditron", "inductor"))
        if ours and theirs:
            model = dict(part.split("=") for part in first.shape.split(";"))["model"]
            ratios.setdefault(f"{first.op}, {model}, {first.world} ranks", []).append(theirs / ours)
    means = [f"* {name}: {statistics.geometric_mean(values):.2f}" for name, values in ratios.items()]
    return "\n".join([times_table(rows, "github"), "", "Inductor / Ditron, geometric means:", "", *means])


def _cells(rows: Sequence[Row]) -> list[dict[str, Row]]:
    cells: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in rows:
        cells.setdefault(row.cell, {})[row.contestant] = row
    return list(cells.values())


def times_table(rows: Sequence[Row], style: str = "simple") -> str:
    """One line per cell: every contestant in milliseconds, and the best other one's time over Ditron's."""
    lines = []
    for found in _cells(rows):
        first = next(iter(found.values()))
        sizes = dict(part.split("=") for part in first.shape.split(";"))
        times = {name: row.p50_us for name, row in found.items() if row.p50_us is not None}
        rivals = [us for name, us in times.items() if name != "ditron"]
        gain = f"{min(rivals) / times['ditron']:.2f}" if rivals and "ditron" in times else "-"
        lines.append(
            [
                first.op,
                f"{sizes['model']} x {sizes['layers']}",
                sizes["form"],
                f"{sizes['batch']} x {sizes['tokens']}",
                str(first.world),
                *(f"{times[name] / 1e3:.3f}" if name in times else "-" for name in CONTESTANTS),
                gain,
            ]
        )
    headers = ["phase", "model", "form", "tokens", "ranks", *CONTESTANTS, "best other / ditron"]
    return tabulate(lines, headers, style, disable_numparse=True)
