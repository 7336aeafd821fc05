"""How much faster the way from a rank's own tokens to the first matmul of experts is than the best rival: a table of
the kernel's page.

The newest rows of `benchmarks.ops.gathered_experts` on two H200s and on two H100s, beside a floor for each cell of even
routing, and beside the most that anything could gain that multiplies as fast as torch's grouped matmul alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tabulate import tabulate

from benchmarks import sources
from benchmarks.decode_floors import BYTES_PER_US, answer
from benchmarks.deleted import ROUTED
from benchmarks.models.tables import number
from benchmarks.records import MOE, Row, read_csv
from benchmarks.reduced_floors import LEAST as REDUCED
from benchmarks.reduced_floors import best_rival, shown

OP = "gathered_experts"
LEAST: Mapping[tuple[str, int], float] = {
    ("mixtral-8x7b", 8192): 1.03,
    ("qwen3-30b-a3b", 8192): 1.1,
    ("qwen3-235b-a22b", 8192): 1.1,
    ("gpt-oss-120b", 8192): 1.1,
}
"""By model and number of tokens, how many times as fast as the best rival it is to be."""
RIVALS = {"inductor": "Inductor", "overlap": "Inductor, reordered", "max_autotune": "max-autotune"}
HEADERS = (
    *("GPU", "experts", "tokens", "sequences", "routing", "CUDA graphs", "limit", "best rival", "its us", "ours"),
    *("best rival / ours", "at least", "reached", "best rival / limit", "commit"),
)


def line(rows: Iterable[Row]) -> list[str] | None:
    """The line of a cell; None if it has no time of ours or of a rival."""
    cell = {row.contestant: row for row in rows if row.p50_us}
    best = best_rival(cell, RIVALS)
    if best is None or "ditron" not in cell:
        return None
    ours = cell["ditron"]
    sizes, routing = ours.sizes, routing_of(ours)
    us, limit, gain = best.p50_us or 0.0, ours.limit_us, (best.p50_us or 0.0) / (ours.p50_us or 0.0)
    least = LEAST.get((sizes["model"], int(sizes["T"]))) if routing == "uniform" else None
    return [
        *(ours.gpu.split()[1], sizes["model"], sizes["T"], sizes["B"], routing, answer(bool(ours.graph))),
        *(number(limit, 0), RIVALS[best.contestant], f"{us:.0f}", f"{ours.p50_us:.0f}", f"{gain:.2f}"),
        *(number(least, 2), "-" if least is None else answer(round(gain, 2) >= least)),
        *(number(us / limit if limit else None, 2), sources.measured(ours)),
    ]


def routing_of(row: Row) -> str:
    """How tokens choose experts; rows of even routing do not say so."""
    return row.sizes.get("routing", "uniform")


def lines(rows: Iterable[Row]) -> list[list[str]]:
    """A line for each cell on two GPUs, by these, CUDA graphs, routing, models, tokens and sequences."""
    # In the run of that commit `ditron` was a rewrite that is deleted.
    kept = (row for row in rows if row.op == OP and row.commit != ROUTED)
    cells = [
        found
        for found in shown(kept, RIVALS)
        if found[0].world == 2
        and found[0].gpu in BYTES_PER_US
        and (found[0].sizes["model"], int(found[0].sizes["T"])) in REDUCED
    ]

    def place(found: Sequence[Row]) -> tuple[int, bool, bool, int, int]:
        row, sizes = found[0], found[0].sizes
        of_model = list(REDUCED).index((sizes["model"], int(sizes["T"])))
        gpu = list(BYTES_PER_US).index(row.gpu)
        return gpu, not row.graph, routing_of(row) != "uniform", of_model, -int(sizes["B"])

    return [made for found in sorted(cells, key=place) if (made := line(found)) is not None]


def part() -> str:
    """The table."""
    return tabulate(lines(read_csv(MOE)), HEADERS, "github", disable_numparse=True)
