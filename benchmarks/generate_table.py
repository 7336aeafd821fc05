"""How long a token of `generate` of `transformers` takes: the table of the guide on serving.

The newest run of each model and batch size with a static cache, whatever the number of tokens of its calls.
"""

from __future__ import annotations

from tabulate import tabulate

from benchmarks import sources
from benchmarks.comparison import NOISE, overlap
from benchmarks.models.request import TITLES
from benchmarks.records import GENERATION, Row, read_csv, runs

OP = "transformers_generate"
OWN = "ditron"
NAMES = TITLES | {"grouped_mm": "Inductor, grouped_mm"}
HEADERS = ("GPUs", "layers of", "sequences", "cache", "best rival", "its us", "Ditron, us", "rival / Ditron", "commit")


def line(rows: dict[str, Row]) -> list[str]:
    """The line of a run. rows: by contestant."""
    own = rows[OWN]
    rival = min((row for name, row in rows.items() if name != OWN), key=lambda row: row.p50_us)
    mark = NOISE if overlap(rival, own) else ""
    sizes = (f"{own.sizes['model']} x {own.sizes['layers']}", own.sizes["batch"], own.sizes["cache"])
    times = (f"{rival.p50_us:.0f}", f"{own.p50_us:.0f}", f"{rival.p50_us / own.p50_us:.2f}{mark}")
    return [f"{own.world} x {own.gpu.split()[1]}", *sizes, NAMES[rival.contestant], *times, sources.measured(own)]


def part() -> str:
    """What stands between the markers."""
    cells: dict[tuple[str, ...], list[Row]] = {}
    for row in read_csv(GENERATION):
        if row.op == OP and row.gpu != "cpu":
            named = tuple(row.sizes[name] for name in ("model", "layers", "batch", "cache"))
            cells.setdefault((row.gpu, str(row.world), *named), []).append(row)
    newest = [{row.contestant: row for row in runs(rows)[-1]} for rows in cells.values()]
    shown = [rows for rows in newest if OWN in rows and len(rows) > 1]
    models = [rows[OWN].sizes["model"] for rows in shown]
    shown.sort(key=lambda rows: (models.index(rows[OWN].sizes["model"]), -int(rows[OWN].sizes["layers"])))
    lines = [line(rows) for rows in shown]
    table = tabulate(lines, HEADERS, "github", disable_numparse=True)
    return f"`{NOISE}`: the samples of both overlap, from the 20th to the 80th percentile.\n\n{table}"
