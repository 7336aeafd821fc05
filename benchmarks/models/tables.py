"""The tables of `python -m benchmarks.models`."""

from __future__ import annotations

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


def times_table(rows: Sequence[Row], style: str = "simple") -> str:
    """One line per cell: every contestant in milliseconds, and the best other one's time over Ditron's."""
    cells: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in rows:
        cells.setdefault(row.cell, {})[row.contestant] = row
    lines = []
    for found in cells.values():
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
                *(f"{times[name] / 1e3:.3f}" if name in times else "-" for name in CONTESTANTS),
                gain,
            ]
        )
    headers = ["phase", "model", "form", "tokens", *CONTESTANTS, "best other / ditron"]
    return tabulate(lines, headers, style, disable_numparse=True)
