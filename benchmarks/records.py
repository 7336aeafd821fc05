"""Results as rows: one row per contestant and shape in a long-form CSV, and the table that is printed from them."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from tabulate import tabulate


@dataclass(frozen=True)
class Row:
    """One measurement. Times are microseconds per call, empty (None) where the contestant failed.

    p50_us: the maximum over ranks of each rank's median; p20_us and p80_us: of the rank that has it.
    skew_pct: how far the fastest rank's median is below, in per cent. limit_us: the physical limit, None where unknown.
    """

    bench: str
    op: str
    contestant: str
    shape: str
    dtype: str
    world: int
    graph: int
    p20_us: float | None
    p50_us: float | None
    p80_us: float | None
    skew_pct: float | None
    limit_us: float | None
    gpu: str
    torch: str
    triton: str
    commit: str
    date: str

    @property
    def key(self) -> tuple[str, ...]:
        """What makes a newer row replace an older one."""
        parts = (self.bench, self.op, self.contestant, self.shape, self.dtype, self.world, self.graph, self.gpu)
        return tuple(str(part) for part in parts)


COLUMNS = tuple(field.name for field in fields(Row))
_FLOATS = ("p20_us", "p50_us", "p80_us", "skew_pct", "limit_us")


def read_csv(path: Path) -> list[Row]:
    """The rows of a results file, none if there is no file. ValueError where its columns are not those of `Row`."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise ValueError(f"{path}: columns {reader.fieldnames}, not {COLUMNS}")
        return [_parse(record) for record in reader]


def _parse(record: dict[str, str]) -> Row:
    values: dict[str, object] = dict(record)
    for name in _FLOATS:
        values[name] = float(record[name]) if record[name] else None
    values["world"], values["graph"] = int(record["world"]), int(record["graph"])
    return Row(**values)  # type: ignore[arg-type]


def merge_csv(path: Path, rows: Iterable[Row]) -> None:
    """Write rows into the file, in place of older rows with the same key; all others stay."""
    merged = {row.key: row for row in read_csv(path)}
    for row in rows:
        merged[row.key] = row
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for row in merged.values():
            writer.writerow([_text(value) for value in astuple(row)])


def _text(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def table(rows: Sequence[Row], contestants: Sequence[str], ours: str = "ditron") -> str:
    """One line per shape: p50 of every contestant, then how `ours` compares.

    `vs X` above 1: ours is faster than X. `of limit` is limit / ours, 1 at best.
    """
    cells: dict[tuple[str, str, str, int], dict[str, Row]] = {}
    for row in rows:
        cells.setdefault((row.op, row.shape, row.dtype, row.graph), {})[row.contestant] = row
    shown = [name for name in contestants if any(name in cell for cell in cells.values())]
    rivals = [name for name in shown if not name.startswith("ditron") and name != "gemm"]
    lines = []
    for (op, shape, dtype, graph), cell in cells.items():
        mine = cell[ours].p50_us if ours in cell else None
        limit = next((row.limit_us for row in cell.values() if row.limit_us is not None), None)
        line: list[object] = [op, shape, dtype, graph, limit]
        line += [(cell[name].p50_us or "failed") if name in cell else None for name in shown]
        for name in rivals:
            theirs = cell[name].p50_us if name in cell else None
            line.append(theirs / mine if mine and theirs else None)
        line.append(limit / mine if mine and limit else None)
        lines.append(line)
    headers = ["op", "shape", "dtype", "graph", "limit us", *shown, *(f"vs {name}" for name in rivals), "of limit"]
    widths = ["", "", "", "", ".1f", *[".1f"] * len(shown), *[".2f"] * len(rivals), ".2f"]
    return tabulate(lines, headers=headers, floatfmt=widths)
