"""Benchmark results as a table of measured choices.

`benchmarks/results/gemm_collectives.csv` has one row per contestant and shape. The strategies of a shape are its
contestants `ditron:library`, `ditron:chunked` and `ditron:tile`. If `ditron:library` did not take part, `nccl` replaces
it, which makes the same library calls. The rows of the plan itself and of other libraries are for people.
`attention.csv` has the two kinds around an attention, whose M counts the tokens of all ranks.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping

from ditron_inductor.errors import InvalidTable
from ditron_inductor.task.nodes import NODES, PLANNED_KINDS, ULYSSES_KINDS
from ditron_inductor.task.table import Entry

NEEDED = ("op", "contestant", "shape", "dtype", "world", "graph", "p50_us", "gpu", "commit", "date")
_PREFIX = "ditron:"
_BASELINE = "nccl"
_SIZES = {"M", "N", "K"}


def read_results(text: str, source: str = "the results") -> list[Entry]:
    """Returns the entries of a results file: the shapes at which `library` and another strategy were measured. Only
    times of the last run that measured `library` are used, because times of different runs cannot be compared. Rows
    whose `shape` has more keys than M, N and K are variants that a plan cannot distinguish; they are left out. Raises
    InvalidTable, which names `source`, the line and what is wrong there.
    """
    reader = csv.DictReader(io.StringIO(text, newline=None), restval="")
    shapes: dict[tuple[str, ...], dict[str, tuple[int, Mapping[str, str]]]] = {}
    try:
        missing = [name for name in NEEDED if name not in (reader.fieldnames or ())]
        rows = [(reader.line_num, row) for row in reader] if not missing else []
    except csv.Error as error:
        raise InvalidTable(source=source, line=reader.line_num, problem=str(error)) from error
    if missing:
        raise InvalidTable(source=source, line=1, problem=f"the columns {', '.join(missing)} are missing")
    for line, row in rows:
        name = row["contestant"]
        strategy = name.removeprefix(_PREFIX)
        planned = row["op"] in PLANNED_KINDS
        ours = planned and name.startswith(_PREFIX) and strategy in NODES[row["op"]].strategies
        if (ours or (planned and name == _BASELINE)) and row["p50_us"]:
            key = (row["gpu"], row["world"], row["dtype"], row["op"], row["shape"], row["graph"])
            shapes.setdefault(key, {})[strategy] = (line, row)
    return sorted(_entries(shapes.values(), source))


def _entries(shapes: Iterable[Mapping[str, tuple[int, Mapping[str, str]]]], source: str) -> Iterable[Entry]:
    for contestants in shapes:
        rows = dict(contestants)
        baseline = rows.pop(_BASELINE, None)
        if "library" not in rows:
            if baseline is None:
                continue
            rows["library"] = baseline
        line, library = rows["library"]
        run = (library["commit"], library["date"])
        try:
            times = {
                strategy: float(row["p50_us"])
                for strategy, (line, row) in rows.items()
                if (row["commit"], row["date"]) == run
            }
            sizes = dict(part.split("=", 1) for part in library["shape"].split(";"))
            if NODES[library["op"]].computes == "norm":
                # Of rows [M, N] that nobody multiplies.
                sizes.setdefault("K", "1")
            if len(times) < 2 or set(sizes) != _SIZES:
                continue
            world, op = int(library["world"]), library["op"]
            yield Entry(
                gpu=library["gpu"],
                world=world,
                dtype=library["dtype"],
                op=op,
                # A rank multiplies its own tokens only.
                m=int(sizes["M"]) // (world if op in ULYSSES_KINDS else 1),
                n=int(sizes["N"]),
                k=int(sizes["K"]),
                graph=int(library["graph"]),
                library_us=times["library"],
                chunked_us=times.get("chunked"),
                tile_us=times.get("tile"),
                commit=library["commit"],
                date=library["date"],
            )
        except (ValueError, ZeroDivisionError) as error:
            raise InvalidTable(source=source, line=line, problem=str(error)) from error
