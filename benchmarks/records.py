"""Results as rows: one row per contestant and shape in a long-form CSV."""

from __future__ import annotations

import csv
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from ditron_inductor.task.nodes import ULYSSES_KINDS

RESULTS = Path(__file__).parent / "results"
GEMM_COLLECTIVES = RESULTS / "gemm_collectives.csv"
MODELS = RESULTS / "models.csv"
ATTENTION = RESULTS / "attention.csv"
NORM = RESULTS / "norm.csv"


@dataclass(frozen=True)
class Row:
    """One measurement. Times are microseconds per call, empty (None) where the contestant failed.

    p50_us: the maximum over ranks of each rank's median; p20_us and p80_us: of the rank that has it. Of several runs:
    the median of the runs' p50_us, their smallest p20_us and their largest p80_us.
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
    def sizes(self) -> dict[str, str]:
        """What `shape` says, by name."""
        return dict(part.split("=", 1) for part in self.shape.split(";"))

    @property
    def cell(self) -> tuple[str, ...]:
        """What the contestants of one interleaved run have in common."""
        parts = (self.bench, self.op, self.shape, self.dtype, self.world, self.graph, self.gpu)
        return tuple(str(part) for part in parts)


COLUMNS = tuple(field.name for field in fields(Row))
_FLOATS = ("p20_us", "p50_us", "p80_us", "skew_pct", "limit_us")


def results_of(ops: Iterable[str]) -> Path:
    """The file that rows of these ops go to. ValueError where that would be several."""
    paths = {ATTENTION if op in ULYSSES_KINDS else GEMM_COLLECTIVES for op in ops}
    if len(paths) != 1:
        raise ValueError(f"rows of these ops go to {len(paths)} files; give --out, or measure some of them at a time")
    return paths.pop()


def head_commit() -> str:
    """The short hash of HEAD, or `unknown` outside a checkout."""
    if shutil.which("git") is None:
        return "unknown"
    answer = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return answer.stdout.strip() or "unknown"


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


def by_cell(rows: Iterable[Row]) -> list[list[Row]]:
    """The rows of each cell, cells in the order of their first rows."""
    return list(_by_cell(rows).values())


def _by_cell(rows: Iterable[Row]) -> dict[tuple[str, ...], list[Row]]:
    cells: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        cells.setdefault(row.cell, []).append(row)
    return cells


def merge_csv(path: Path, rows: Iterable[Row]) -> None:
    """Write rows into the file. Cells that are measured anew lose all their older rows; other cells stay.

    Rows of two runs never stand in one cell: the chip's clock lies between them. A process that is ended meanwhile
    leaves the file as it was.
    """
    cells = _by_cell(read_csv(path)) | _by_cell(rows)
    lines = [[_text(value) for value in astuple(row)] for cell in cells.values() for row in cell]
    write_csv(path, COLUMNS, lines)


def write_csv(path: Path, columns: Sequence[str], lines: Iterable[Sequence[str]]) -> None:
    """Write a whole file, in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.unfinished")
    with unfinished.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(lines)
    unfinished.replace(path)


def _text(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" if isinstance(value, float) else str(value)
