"""Bars of how many times as fast as the best rival Inductor and Ditron are, one chart per phase and machine: as SVG
text, and as PNG.

The SVG is written by hand because `models.html` is one file whose bars say their contestant and value under the
pointer, and which every run writes, and the tests compare, where there is no matplotlib; the PNG is matplotlib's.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.models.request import TITLES
from benchmarks.models.tables import contests
from benchmarks.models.zoo import PHASES, position
from benchmarks.records import Row

COLOURS = {"inductor": "#bbbbbb", "ditron": "#1b6f8a"}
"""The best rival is the line at 1, and Inductor where no other one is faster."""
NOTE = "layers with random weights; of each rank the median, of ranks the slowest; NVLink multicast off for everybody"
WIDTH, LABEL_WIDTH, BAR, GAP = 980, 330, 13, 12


@dataclass(frozen=True)
class Bars:
    """The bars of one cell: whose they are, and how many times as fast as the best rival each of them is."""

    label: str
    values: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Chart:
    """One phase on one machine. place: the number of ranks and the GPU, as in `2xH100`."""

    phase: str
    place: str
    title: str
    bars: tuple[Bars, ...]

    @property
    def most(self) -> float:
        """The right end of the axis."""
        return max([1.25, *(value for one in self.bars for _, value in one.values)]) * 1.08


def charts(rows: Sequence[Row]) -> list[Chart]:
    """By phase and machine; cells without rivals have no bars."""
    groups: dict[tuple[str, str, int], list[Bars]] = {}
    for one in sorted(contests(rows), key=lambda one: position(one.model)):
        best = one.best_other
        if best is None or best.p50_us is None:
            continue
        values = tuple((name, best.p50_us / us) for name in COLOURS if (us := one.us(name)))
        groups.setdefault((one.phase, *one.where), []).append(Bars(one.label, values))
    ordered = sorted(groups.items(), key=lambda item: (PHASES.index(item[0][0].partition(" ")[0]), item[0]))
    return [
        Chart(phase, f"{world}x{gpu.removeprefix('NVIDIA ').split()[0]}", _title(phase, world, gpu), tuple(bars))
        for (phase, gpu, world), bars in ordered
        if any(one.values for one in bars)
    ]


def _title(phase: str, world: int, gpu: str) -> str:
    where = "the CPU device, which says nothing about speed" if gpu == "cpu" else gpu
    return f"{phase}, {world} ranks, {where}: times as fast as the best rival"


def svg(chart: Chart) -> str:
    """An `<svg>` element."""
    scale = (WIDTH - LABEL_WIDTH - 60) / chart.most
    parts: list[str] = []
    y = 34.0
    for one in chart.bars:
        height = BAR * max(1, len(one.values))
        middle = y + height / 2 + 4
        parts.append(f'<text x="{LABEL_WIDTH - 8}" y="{middle:.0f}" text-anchor="end">{html.escape(one.label)}</text>')
        for place, (name, value) in enumerate(one.values):
            top = y + place * BAR
            parts.append(
                f'<rect x="{LABEL_WIDTH}" y="{top:.0f}" width="{value * scale:.1f}" height="{BAR - 2}" '
                f'fill="{COLOURS[name]}"><title>{TITLES[name]}: {value:.2f}</title></rect>'
                f'<text x="{LABEL_WIDTH + value * scale + 4:.1f}" y="{top + BAR - 3:.0f}" class="value">'
                f"{value:.2f}</text>"
            )
        y += height + GAP
    line = LABEL_WIDTH + scale
    legend = "".join(
        f'<rect x="{LABEL_WIDTH + 150 * place}" y="4" width="11" height="11" fill="{colour}"/>'
        f'<text x="{LABEL_WIDTH + 150 * place + 16}" y="14">{TITLES[name]}</text>'
        for place, (name, colour) in enumerate(COLOURS.items())
    )
    axis = f'<line x1="{line:.1f}" x2="{line:.1f}" y1="24" y2="{y:.0f}" stroke="#444" stroke-dasharray="4 3"/>'
    under = f'<text x="{line:.1f}" y="{y + 12:.0f}" text-anchor="middle">best rival</text>'
    return (
        f'<svg viewBox="0 0 {WIDTH} {y + 18:.0f}" role="img" aria-label="{html.escape(chart.title)}">'
        f"{legend}{axis}{''.join(parts)}{under}</svg>"
    )


def png_path(results: Path, chart: Chart) -> Path:
    """Beside the CSV."""
    phase = chart.phase.lower().replace(" ", "_")
    return results.with_name(f"{results.stem}_{phase}_{chart.place}.png")


def png(chart: Chart, path: Path) -> None:
    """Write one picture. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [name for name in COLOURS if any(name in dict(one.values) for one in chart.bars)]
    height = 0.8 / max(1, len(names))
    figure, axis = pyplot.subplots(figsize=(9, 1.2 + 0.2 * (1 + len(names)) * len(chart.bars)))
    for place, name in enumerate(names):
        for row, one in enumerate(chart.bars):
            value = dict(one.values).get(name)
            if value is not None:
                label = TITLES[name] if TITLES[name] not in axis.get_legend_handles_labels()[1] else None
                y = row + (place - (len(names) - 1) / 2) * height
                axis.barh(y, value, height * 0.9, color=COLOURS[name], label=label)
                axis.text(value, y, f" {value:.2f}", va="center", fontsize=7)
    axis.axvline(1.0, color="#444444", linestyle="--", linewidth=1)
    axis.set_xlim(0, chart.most)
    axis.set_yticks(range(len(chart.bars)), [one.label for one in chart.bars], fontsize=8)
    axis.invert_yaxis()
    axis.set_title(chart.title, fontsize=10)
    handles, labels = axis.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    figure.legend(unique.values(), unique.keys(), loc="lower center", ncols=3, fontsize=8, bbox_to_anchor=(0.5, 0.02))
    figure.text(0.99, 0.003, NOTE, ha="right", fontsize=6, color="#555555")
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)
