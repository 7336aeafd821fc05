"""Tables of geometric means over whole models: one line per phase and machine, and on a page of details per model.

Mixtures of experts have lines of their own: where their rivals copy the experts' weights, ratios are many times those
of other models.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence

from tabulate import tabulate

from benchmarks import sources
from benchmarks.models.facts import Fact
from benchmarks.models.request import OURS, TITLES, WITHOUT_COPIES
from benchmarks.models.tables import NOISE, Contest, aged, contestants_of, contests, number
from benchmarks.models.zoo import position
from benchmarks.records import Row

RATIOS = ("over the best rival", "over Inductor", "lowest, over the best")
NOTHING = "Nothing has been measured yet."


def measured_cells(rows: Sequence[Row]) -> list[Contest]:
    """Without cells that Ditron or every rival has no time of, and without rows of a CPU; with losses."""
    return [one for one in contests(rows) if one.rows[0].gpu != "cpu" and one.best_gain]


def means_table(rows: Sequence[Row], by_model: bool) -> str:
    """How many times faster Ditron is than the best rival of each cell."""
    return _table(measured_cells(rows), by_model)


def _table(cells: Iterable[Contest], by_model: bool, by_mode: bool = True) -> str:
    groups: dict[tuple[str, ...], list[Contest]] = {}
    for one in cells:
        phase = f"{one.rows[0].op}, CUDA graphs" if by_mode and one.rows[0].graph else one.rows[0].op
        if one.routed and not by_model:
            phase = f"{phase}, experts"
        gpu, world = one.where
        place = (phase, f"{world}x {gpu.removeprefix('NVIDIA ')}", *([one.model] if by_model else []))
        groups.setdefault(place, []).append(one)
    if not groups:
        return NOTHING
    ordered = sorted(groups.items(), key=lambda item: (item[0][0], *map(position, item[0][2:]), item[0][1]))
    lines = [(*place, *_ratios(cells)) for place, cells in ordered]
    headers = ["phase", "GPUs", *(["model"] if by_model else []), *RATIOS, "cells", "within noise"]
    return tabulate(lines, headers, "github", disable_numparse=True)


def readme_part(rows: Sequence[Row], facts: Sequence[Fact]) -> str:
    """The short table, a line for each phase and machine, and how it was measured."""
    measured = measured_cells(rows)
    captured = Counter(one.rows[0].op for one in measured if one.rows[0].graph)
    modes = ", ".join(f"{number} of {phase}" for phase, number in sorted(captured.items())) or "none"
    return _with_caption(measured, facts, by_mode=False) + f"\nInside CUDA graphs: {modes}." * bool(measured)


def phases_part(rows: Sequence[Row], facts: Sequence[Fact]) -> str:
    """A line per phase, inside CUDA graphs and not, and machine, with the conditions."""
    return _with_caption(measured_cells(rows), facts, by_mode=True)


def _with_caption(cells: Sequence[Contest], facts: Sequence[Fact], *, by_mode: bool) -> str:
    table = _table(cells, by_model=False, by_mode=by_mode)
    return "\n".join([table, "", *_caption(cells, facts)]) if cells else NOTHING


def _caption(cells: Sequence[Contest], facts: Sequence[Fact]) -> list[str]:
    unclear = sum(one.unclear for one in cells)
    return [
        f"Geometric means of rival / Ditron, median time of a step, slowest rank; {_conditions(cells)}.",
        f"The best rival of a cell is the fastest of those that ran beside Ditron in it: {_rivals(cells)}. A cell "
        "shows its newest run; if that lacks a rival that was the best before, it shows the newest run that has it.",
        *_copies(cells),
        f"A cell is within noise (`{NOISE}`) if the samples of Ditron and of its best rival overlap, from the 20th to "
        f"the 80th percentile: this holds for {unclear} of {len(cells)} cells. {_old(cells, facts)}",
        f"Layers alone, {_layers(cells)} of them, with random weights. "
        "NVLink multicast is off for everybody. Rivals that use it are faster than shown.",
    ]


def _ratios(cells: Sequence[Contest]) -> list[str]:
    best = [gain for one in cells if (gain := one.best_gain) and not one.only_copies]
    least = min(cells, key=lambda one: one.best_gain or math.inf)
    inductor = [gain for one in cells if (gain := one.gain("inductor"))]
    means = [f"{statistics.geometric_mean(gains):.2f}" if gains else "-" for gains in (best, inductor)]
    lowest = number(least.best_gain, 2) + f" {NOISE}" * least.unclear
    return [*means, lowest, str(len(cells)), str(sum(one.unclear for one in cells))]


def _copies(cells: Sequence[Contest]) -> list[str]:
    """Which cells have no rival that is worth a mean, in a sentence."""
    count = sum(one.only_copies for one in cells)
    if not count:
        return []
    beside = "; ".join(TITLES[name] for name in WITHOUT_COPIES)
    return [
        f"In {count} decode cell{'s' * (count > 1)} of experts no rival ran that takes their weights without a copy "
        f"for each token ({beside}): they are not in the means over the best rival."
    ]


def _rivals(cells: Sequence[Contest]) -> str:
    """Each rival, and in how many cells it ran, if not in all."""
    counts = {
        name: sum(one.us(name) is not None for one in cells) for name in contestants_of(cells) if name not in OURS
    }
    texts = [TITLES[name] + f" (in {count})" * (count < len(cells)) for name, count in counts.items()]
    return ", ".join(texts)


def _old(cells: Sequence[Contest], facts: Sequence[Fact]) -> str:
    """How many of the cells are old, in a sentence."""
    old = sum(aged(one, facts) == sources.OLD for one in cells)
    return f"{old} of {len(cells)} cells are old: a kernel that they run has changed since."


def _layers(cells: Iterable[Contest]) -> str:
    return " or ".join(sorted({one.sizes["layers"] for one in cells}, key=int))


def _conditions(cells: Sequence[Contest]) -> str:
    def all_of(column: str) -> str:
        return ", ".join(sorted({str(getattr(one.rows[0], column)) for one in cells}))

    return f"{all_of('dtype')}, torch {all_of('torch')}, Triton {all_of('triton')}, {all_of('date')}"
