"""Results as rows: one row per contestant and shape in a long-form CSV."""

from __future__ import annotations

import csv
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Protocol, TypeVar

from ditron_inductor.task.nodes import ULYSSES_KINDS

RESULTS = Path(__file__).parent / "results"
GEMM_COLLECTIVES = RESULTS / "gemm_collectives.csv"
MODELS = RESULTS / "models.csv"
ATTENTION = RESULTS / "attention.csv"
NORM = RESULTS / "norm.csv"
UNALIGNED = RESULTS / "unaligned.csv"


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
    return read_lines(path, Row)


def merge_csv(path: Path, rows: Iterable[Row]) -> None:
    """Write rows into the file. Cells that are measured anew lose all their older rows; other cells stay.

    Rows of two runs never stand in one cell: the chip's clock lies between them.
    """
    write_lines(path, Row, grouped(read_csv(path)) | grouped(rows))


class OfCell(Protocol):
    """A line of a file of results."""

    @property
    def cell(self) -> tuple[str, ...]: ...


T = TypeVar("T", bound=OfCell)


def grouped(rows: Iterable[T]) -> dict[tuple[str, ...], list[T]]:
    """By cell, in the order of the cells' first rows."""
    cells: dict[tuple[str, ...], list[T]] = {}
    for row in rows:
        cells.setdefault(row.cell, []).append(row)
    return cells


def by_cell(rows: Iterable[T]) -> list[list[T]]:
    """The rows of each cell."""
    return list(grouped(rows).values())


def read_lines(path: Path, kind: type[T]) -> list[T]:
    """Lines of a file as a dataclass. ValueError where its columns are not the fields of `kind`."""
    if not path.exists():
        return []
    columns = {field.name: str(field.type) for field in fields(kind)}  # type: ignore[arg-type]
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != tuple(columns):
            raise ValueError(f"{path}: columns {reader.fieldnames}, not {tuple(columns)}")
        return [kind(**{name: _parse(text, columns[name]) for name, text in record.items()}) for record in reader]


def _parse(text: str, kind: str) -> object:
    if kind == "int":
        return int(text)
    if kind == "float | None":
        return float(text) if text else None
    return text


def write_lines(path: Path, kind: type[T], cells: Mapping[tuple[str, ...], Iterable[T]]) -> None:
    """Write a whole file, in one step: a process that is ended meanwhile leaves it as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.unfinished")
    with unfinished.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(field.name for field in fields(kind))  # type: ignore[arg-type]
        for lines in cells.values():
            writer.writerows([_text(value) for value in astuple(line)] for line in lines)  # type: ignore[call-overload]
    unfinished.replace(path)


def _text(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" if isinstance(value, float) else str(value)
