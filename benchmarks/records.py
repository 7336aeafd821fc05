"""Results as rows: one row per contestant, shape and run in a long-form CSV.

A row is never removed from a file of results. A *run* is what one interleaved measurement of a cell found: one row of
each of its contestants. A newer run of a cell stands behind the older ones, and reports read the newest run of each
cell (`by_cell`), all of its contestants together, because times of different runs do not compare.
"""

from __future__ import annotations

import csv
import io
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Protocol, TypeVar

from ditron_inductor.task.nodes import ULYSSES_KINDS

RESULTS = Path(__file__).parent / "results"
GEMM_COLLECTIVES = RESULTS / "gemm_collectives.csv"
MODELS = RESULTS / "models.csv"
ATTENTION = RESULTS / "attention.csv"
NORM = RESULTS / "norm.csv"
UNALIGNED = RESULTS / "unaligned.csv"
MOE = RESULTS / "moe.csv"
GENERATION = RESULTS / "generation.csv"


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
        """The sizes of `shape`, by name."""
        return dict(part.split("=", 1) for part in self.shape.split(";"))

    @property
    def cell(self) -> tuple[str, ...]:
        """The facts that the contestants of one interleaved run have in common."""
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
    """Write rows into the file, behind the older rows of their cells. Runs that the file has already are left out."""
    write_lines(path, Row, merged(read_csv(path), rows))


class OfCell(Protocol):
    """A line of a file of results."""

    @property
    def cell(self) -> tuple[str, ...]: ...

    @property
    def contestant(self) -> str: ...

    @property
    def commit(self) -> str: ...

    @property
    def date(self) -> str: ...


T = TypeVar("T", bound=OfCell)


def merged(older: Iterable[T], newer: Iterable[T]) -> dict[tuple[str, ...], list[T]]:
    """Returns, cell by cell, all older lines, followed by the newer runs that are not among them."""
    cells = grouped(older)
    for cell, lines in grouped(newer).items():
        for run in runs(lines):
            known = runs(cells.get(cell, []))
            if sorted(_texts(run)) not in [sorted(_texts(one)) for one in known]:
                # A contestant that comes again is what tells `runs` where this one begins.
                before = {line.contestant for line in known[-1]} if known else set()
                ordered = sorted(run, key=lambda line: line.contestant not in before)
                cells[cell] = [*cells.get(cell, []), *ordered]
    return cells


def runs(lines: Iterable[T]) -> list[list[T]]:
    """The runs of one cell, the oldest first: a contestant that comes again, or another commit or date, begins one."""
    found: list[list[T]] = []
    for line in lines:
        last = found[-1] if found else []
        same = bool(last) and (last[0].commit, last[0].date) == (line.commit, line.date)
        if not same or any(one.contestant == line.contestant for one in last):
            found.append([])
        found[-1].append(line)
    return found


def strongest(found: Sequence[Sequence[Row]], over: str, rivals: Sequence[str]) -> Sequence[Row]:
    """Returns the run of a cell that reports show: the newest one, unless it lacks a rival that was the best one of an
    earlier run, and by more over contestant `over` than the best rival of the newest run. Then it is the newest run
    with that rival, so that a gain never grows because a rival was left out. found: the cell's runs, the oldest first.
    """

    def best(run: Sequence[Row]) -> tuple[float, str, dict[str, float]]:
        """(how many times as fast as `over` the best rival is, 0 if that is not known; its name; all times)"""
        us = {row.contestant: row.p50_us for row in run if row.p50_us}
        name = min((name for name in rivals if name in us), key=us.__getitem__, default="")
        return us[over] / us[name] if name and over in us else 0.0, name, us

    gain, _, last = best(found[-1])
    for run in reversed(found[:-1]):
        earlier, name, us = best(run)
        if gain and earlier > gain and name not in last and "ditron" in us:
            return run
    return found[-1]


def newest(lines: Iterable[T]) -> list[T]:
    """The lines of the newest run of every cell."""
    return [line for found in by_cell(lines) for line in found]


def grouped(rows: Iterable[T]) -> dict[tuple[str, ...], list[T]]:
    """Returns the rows of each cell, in the order of the cells' first rows."""
    cells: dict[tuple[str, ...], list[T]] = {}
    for row in rows:
        cells.setdefault(row.cell, []).append(row)
    return cells


def by_cell(rows: Iterable[T]) -> list[list[T]]:
    """The rows of the newest run of each cell."""
    return [runs(lines)[-1] for lines in grouped(rows).values()]


def read_lines(path: Path, kind: type[T]) -> list[T]:
    """Lines of a file as a dataclass. ValueError where its columns are not the fields of `kind`."""
    return list(_lines_of(path, path.read_bytes(), kind)) if path.exists() else []


@lru_cache(maxsize=32)
def _lines_of(path: Path, text: bytes, kind: type[T]) -> tuple[T, ...]:
    """The lines of a file that holds `text`: a report asks for the same ones many times."""
    columns = {field.name: str(field.type) for field in fields(kind)}  # type: ignore[arg-type]
    header, *records = [*csv.reader(io.StringIO(text.decode(), newline=""))] or [[]]
    if header != list(columns):
        raise ValueError(f"{path}: columns {header}, not {tuple(columns)}")
    kinds = list(columns.values())
    return tuple(kind(*(_parse(*pair) for pair in zip(record, kinds, strict=True))) for record in records if record)


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
            writer.writerows(_texts(lines))
    unfinished.replace(path)


def _texts(lines: Iterable[object]) -> list[list[str]]:
    """Returns the values of lines as they stand in a file."""
    return [[_text(value) for value in astuple(line)] for line in lines]  # type: ignore[call-overload]


def _text(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" if isinstance(value, float) else str(value)
