"""`python -m benchmarks.figures`: pictures of the results, one file per op, and one per phase of whole models.

For every pair (N, K) of an op that was measured at three or more M: above, how many times faster than NCCL + cuBLAS,
and below, limit / time, both over M. Full lines are inside CUDA graphs, dashed ones in eager mode. Needs matplotlib
(`pip install 'ditron-inductor[bench]'`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.comparison import BASELINES, OURS, RIVALS, TITLES, Comparison, comparisons
from benchmarks.models import charts
from benchmarks.records import GEMM_COLLECTIVES, MODELS, read_csv
from benchmarks.trying import UNTABLED
from ditron_inductor.task.nodes import KINDS

NAMES = tuple(name for name in (*RIVALS, *OURS) if name not in BASELINES)
COLOURS = {
    "registered": "#1f78b4",
    "max_autotune": "#e7298a",
    "async_tp": "#d95f02",
    "symm_mem:one_shot": "#e6ab02",
    "symm_mem:two_shot": "#a6761d",
    "ditron": "#000000",
    UNTABLED: "#9ecae1",
    "ditron:planned": "#b2abd2",
    "ditron:tile": "#1b9e77",
    "ditron:chunked": "#7570b3",
    "ditron:library": "#999999",
    "nccl": "#66a61e",
}
MIN_POINTS = 3
MAX_COLUMNS = 6


@dataclass(frozen=True)
class Line:
    """The values of one contestant in one mode, by M."""

    contestant: str
    graph: int
    M: tuple[int, ...]
    values: tuple[float, ...]


@dataclass(frozen=True)
class Panel:
    """The lines of both pictures for one world size, N and K."""

    op: str
    world: int
    N: int
    K: int
    gpu: str
    speed_up: tuple[Line, ...]
    of_limit: tuple[Line, ...]

    @property
    def title(self) -> str:
        return f"N={self.N}, K={self.K}, {self.world} ranks"


def panels(cells: Sequence[Comparison], op: str) -> list[Panel]:
    """Returns the panels of an op that have at least MIN_POINTS different M, in the order of the tables."""
    groups: dict[tuple[str, int, int, int, str], list[Comparison]] = {}
    for cell in cells:
        if cell.op == op:
            groups.setdefault((cell.gpu, cell.world, cell.N, cell.K, cell.dtype), []).append(cell)
    found = []
    for (gpu, world, N, K, _), members in groups.items():
        if len({cell.M for cell in members}) >= MIN_POINTS:
            members.sort(key=lambda cell: cell.M)
            speed_up = _lines(members, NAMES, lambda cell, name: cell.ratio(BASELINES, name))
            of_limit = _lines(members, ("nccl", *NAMES), lambda cell, name: cell.ratio("limit", name))
            found.append(Panel(op, world, N, K, gpu, speed_up, of_limit))
    return found


def _lines(
    members: Sequence[Comparison], names: Sequence[str], value: Callable[[Comparison, str], float | None]
) -> tuple[Line, ...]:
    lines = []
    for name in names:
        for graph in (0, 1):
            points = [(cell.M, value(cell, name)) for cell in members if cell.graph == graph]
            known = [(M, one) for M, one in points if one is not None]
            if known:
                lines.append(Line(name, graph, tuple(M for M, _ in known), tuple(one for _, one in known)))
    return tuple(lines)


def draw(op: str, drawn: Sequence[Panel], path: Path, note: str) -> None:
    """Write one picture. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.lines import Line2D

    size = (4.2 * len(drawn) + 0.4, 6.8)
    figure, axes = pyplot.subplots(2, len(drawn), figsize=size, squeeze=False, sharex="col", sharey="row")
    seen = set()
    for column, panel in enumerate(drawn):
        for row, lines in enumerate((panel.speed_up, panel.of_limit)):
            axis = axes[row][column]
            for line in lines:
                axis.plot(
                    line.M,
                    line.values,
                    color=COLOURS[line.contestant],
                    linestyle="-" if line.graph else "--",
                    marker="o",
                    markersize=4,
                    markerfacecolor=COLOURS[line.contestant] if line.graph else "white",
                    linewidth=2.0 if line.contestant == "ditron" else 1.2,
                )
                seen.add(line.contestant)
            axis.axhline(1.0, color="#bbbbbb", linewidth=0.8, zorder=0)
            axis.set_xscale("log", base=2)
            axis.xaxis.set_major_formatter("{x:.0f}")
            axis.tick_params(axis="x", labelrotation=45)
            axis.grid(alpha=0.25)
        axes[0][column].set_title(panel.title, fontsize=10)
        axes[1][column].set_xlabel("M (rows over all ranks)")
    axes[0][0].set_ylabel("times faster than NCCL + cuBLAS")
    axes[1][0].set_ylabel("limit / time")
    figure.suptitle(f"{op} on {drawn[0].gpu}", fontsize=12)
    handles = [Line2D([], [], color=COLOURS[name], label=TITLES[name]) for name in COLOURS if name in seen]
    figure.legend(handles=handles, loc="lower center", ncols=4, bbox_to_anchor=(0.5, 0.03), fontsize=9)
    figure.text(0.5, 0.01, note, ha="center", fontsize=8, color="#555555")
    figure.tight_layout(rect=(0, 0.12, 1, 1))
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


def picture_path(results: Path, op: str) -> Path:
    """Beside the CSV: `gemm_collectives_<op>.png`."""
    return results.with_name(f"{results.stem}_{op}.png")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.figures", description=__doc__.partition("\n")[0])
    parser.add_argument("--results", type=Path, default=GEMM_COLLECTIVES, help="the CSV; pictures go beside it")
    parser.add_argument("--models", type=Path, default=MODELS, help="the CSV of whole models; likewise")
    options = parser.parse_args(arguments)
    results: Path = options.results
    cells = comparisons(read_csv(results))
    for op in KINDS:
        drawn = panels(cells, op)[:MAX_COLUMNS]
        if not drawn:
            print(f"{op}: no (N, K) with {MIN_POINTS} different M", file=sys.stderr)
            continue
        path = picture_path(results, op)
        draw(op, drawn, path, "full: inside CUDA graphs; dashed: eager; bf16, NVLink multicast off for everybody")
        print(path)
    for chart in charts.charts(read_csv(options.models)):
        path = charts.png_path(options.models, chart)
        charts.png(chart, path)
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
