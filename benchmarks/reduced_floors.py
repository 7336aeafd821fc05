"""How much faster the second matmul of experts with its reduction is than the best rival: a table of the kernel's page.

The newest rows of `benchmarks.ops.reduced_experts` on two H200s, beside a floor for each cell of even routing, and
beside the most that anything could gain that multiplies as fast as torch's grouped matmul alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tabulate import tabulate

from benchmarks import sources
from benchmarks.decode_floors import answer
from benchmarks.models.tables import number
from benchmarks.records import MOE, Row, grouped, read_csv, runs, strongest
from ditron_inductor.task.nodes import GroupedMatmulAllReduce, GroupedMatmulReduceScatter

LEAST: Mapping[tuple[str, int], float] = {
    ("mixtral-8x7b", 8192): 1.08,
    ("mixtral-8x7b", 2048): 1.1,
    ("qwen3-30b-a3b", 8192): 1.25,
    ("qwen3-30b-a3b", 2048): 1.3,
    ("qwen3-235b-a22b", 8192): 1.25,
    ("qwen3-235b-a22b", 2048): 1.2,
    ("gpt-oss-120b", 8192): 1.15,
    ("gpt-oss-120b", 2048): 1.15,
}
"""By model and number of tokens, how many times as fast as the best rival the node is to be."""
REDUCTIONS = {GroupedMatmulAllReduce.kind: "all-reduce", GroupedMatmulReduceScatter.kind: "scatter"}
RIVALS = {
    "inductor": "Inductor and NCCL",
    "max_autotune": "max-autotune and NCCL",
    "triton:sorted": "tuned Triton and NCCL",
}
HEADERS = (
    *(
        "experts",
        "tokens",
        "routing",
        "products",
        "reduction",
        "limit",
        "best rival",
        "its us",
        "`library`",
        "`tile`",
        "`auto`",
    ),
    *("best rival / `auto`", "at least", "reached", "best rival / limit", "commit"),
)


def best_rival(cell: Mapping[str, Row], rivals: Iterable[str]) -> Row | None:
    """The fastest of those of the rivals that have a time in a cell, whose rows have the names of contestants."""
    return min((cell[name] for name in rivals if name in cell), key=lambda row: row.p50_us or 0.0, default=None)


def shown(rows: Iterable[Row], rivals: Iterable[str]) -> list[Sequence[Row]]:
    """The run of each cell that a table shows, see `records.strongest`. rows: of all runs."""
    return [strongest(runs(of_cell), "inductor", [*rivals]) for of_cell in grouped(rows).values()]


def line(rows: Iterable[Row]) -> list[str] | None:
    """The line of a cell; None if it has no time of ours or of a rival."""
    cell = {row.contestant: row for row in rows if row.p50_us}
    best = best_rival(cell, RIVALS)
    if best is None or "ditron" not in cell:
        return None
    first = cell["ditron"]
    us, limit, ours = best.p50_us or 0.0, first.limit_us, first.p50_us or 0.0
    sizes, gain = first.sizes, us / ours
    products = sizes.get("products", "1")
    judged = (sizes["routing"], products) == ("uniform", "1")
    least = LEAST.get((sizes["model"], int(sizes["T"]))) if judged else None
    forced = [cell.get(f"ditron:{name}") for name in ("library", "tile")]
    return [
        *(sizes["model"], sizes["T"], sizes["routing"], products, REDUCTIONS[first.op], number(limit, 0)),
        *(RIVALS[best.contestant], f"{us:.0f}"),
        *("-" if one is None else f"{one.p50_us:.0f}" for one in forced),
        *(f"{ours:.0f}", f"{gain:.2f}", "-" if least is None else f"{least:.2f}"),
        *(
            "-" if least is None else answer(round(gain, 2) >= least),
            number(us / limit if limit else None, 2),
            sources.measured(first),
        ),
    ]


def lines(rows: Iterable[Row]) -> list[list[str]]:
    """A line for each cell on two H200s, by products, reductions, routing, models and tokens."""
    cells = [
        found
        for found in shown(rows, RIVALS)
        if found[0].op in REDUCTIONS
        and "H200" in found[0].gpu
        and found[0].world == 2
        and (found[0].sizes["model"], int(found[0].sizes["T"])) in LEAST
    ]

    def place(found: Sequence[Row]) -> tuple[str, int, bool, int]:
        sizes = found[0].sizes
        of_model = list(LEAST).index((sizes["model"], int(sizes["T"])))
        reduction = list(REDUCTIONS).index(found[0].op)
        return sizes.get("products", "1"), reduction, sizes["routing"] != "uniform", of_model

    return [made for found in sorted(cells, key=place) if (made := line(found)) is not None]


def part() -> str:
    """The table."""
    return tabulate(lines(read_csv(MOE)), HEADERS, "github", disable_numparse=True)
