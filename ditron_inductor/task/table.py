"""Measured times of the strategies, as a table that people can read and ranks can exchange as text.

A table is a CSV with one line per matmul and mode, columns `COLUMNS`; lines that begin with `#` are comments. `gpu`:
the driver's name of the GPU. `m`, `n`, `k`: one rank's matmul [m, k] @ [k, n] as in a `PlanRequest`; k is 1 if nothing
is multiplied. `graph`: 1 if it was timed inside a CUDA graph. Times are microseconds of one call, the maximum over
ranks of each rank's median; they are empty if a strategy could not run. All times of a line come from one interleaved
run, and only their ratios are used. `slices`: how many slices the gathered or scattered dimension lies inside, as in a
`Problem`; the column is missing where all lines have one.

`Table.lookup` finds a shape that was measured, else one close to it, as docs/tuning.md says. Rows fall into buckets of
half-octaves, m into bucket round(2 log2 m). The weights are the nearest ones within a factor of sqrt(2).

Everything is computed from integers and IEEE sums and products, so that ranks on different hosts agree.
"""

from __future__ import annotations

import csv
import functools
import io
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

from ditron_inductor.errors import InvalidTable
from ditron_inductor.task.nodes import DELETED_KINDS, NODES, PLANNED_KINDS

MEASURED = ("library", "chunked", "tile")
LAST_BUCKET = 28
INTERPOLATED_BUCKETS = 4
BRIDGED_BUCKETS = 8
OUTER_BUCKETS = 2
LEAST_US, MOST_US = 0.01, 1e12
"""The bounds of the times in a table, which have two decimals, and whose ratios have to be finite."""
MOST_WHOLE = 1 << 62
SHOWN = 80
"""The most characters of a cell that an error shows."""
FOLDER = Path(__file__).parent / "tables"
"""The tables that ship with the package: one file per GPU."""


@dataclass(frozen=True, order=True)
class Entry:
    """One line of a table (see the module). Raises ValueError, which names the field that is out of range."""

    gpu: str
    world: int
    dtype: str
    op: str
    m: int
    n: int
    k: int
    graph: int
    library_us: float
    chunked_us: float | None
    tile_us: float | None
    commit: str
    date: str
    slices: int = 1

    def __post_init__(self) -> None:
        if not self.gpu:
            raise ValueError("gpu is empty")
        if self.op not in PLANNED_KINDS:
            raise ValueError(f"op is '{_shown(self.op)}', not one of {', '.join(PLANNED_KINDS)}")
        if self.world < 2:
            raise ValueError(f"world is {_shown(str(self.world))}, less than 2")
        if self.graph not in (0, 1):
            raise ValueError(f"graph is {_shown(str(self.graph))}, neither 0 nor 1")
        for name in ("m", "n", "k", "slices"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {_shown(str(getattr(self, name)))}, less than 1")
        for name in ("world", "m", "n", "k", "slices"):
            if getattr(self, name) > MOST_WHOLE:
                raise ValueError(f"{name} is more than {MOST_WHOLE}")
        for name, us in self.us.items():
            if not LEAST_US <= us <= MOST_US:
                raise ValueError(f"{name}_us is {us}, not a time between {LEAST_US} and {MOST_US} microseconds")

    @property
    def us(self) -> dict[str, float]:
        """The microseconds by strategy, for those that ran."""
        times = {"library": self.library_us, "chunked": self.chunked_us, "tile": self.tile_us}
        return {name: us for name, us in times.items() if us is not None}

    @property
    def family(self) -> tuple[str, int, str, str, int]:
        """The values that have to be equal for this entry to say anything about a call."""
        return self.gpu, self.world, self.dtype, self.op, self.slices

    @property
    def key(self) -> tuple[str, int, str, str, int, int, int, int, int]:
        """The values by which a newer entry replaces an older one."""
        return *self.family, self.m, self.n, self.k, self.graph


COLUMNS = tuple(field.name for field in fields(Entry))
PLAIN_COLUMNS = COLUMNS[:-1]
"""The columns of a table in which every line has one slice."""
_INTEGERS = ("world", "m", "n", "k", "graph", "slices")
_TIMES = tuple(f"{name}_us" for name in MEASURED)


@dataclass(frozen=True)
class Measured:
    """What a table says about a shape. ratio: the time of each strategy divided by that of `library`. library_us: the
    time of `library` if this shape itself was measured (`exact`), and None if only a neighbour was. text: what was
    measured, for people. slices: of the calls that were measured, those that were asked for or 1.
    """

    ratio: Mapping[str, float]
    library_us: float | None
    text: str
    slices: int = 1

    @property
    def exact(self) -> bool:
        return self.library_us is not None


class Table:
    """Entries with distinct keys, in order. unused: kinds and strategies in its text that do not exist, with counts."""

    def __init__(self, entries: Iterable[Entry] = (), unused: Mapping[str, int] | None = None) -> None:
        self.unused: Mapping[str, int] = {} if unused is None else unused
        newest = {entry.key: entry for entry in entries}
        self.entries = tuple(newest[key] for key in sorted(newest))
        self._families: dict[tuple[str, int, str, str, int], dict[tuple[int, int], list[Entry]]] = {}
        for entry in self.entries:
            self._families.setdefault(entry.family, {}).setdefault((entry.n, entry.k), []).append(entry)

    @staticmethod
    def parse(text: str, source: str = "the table") -> Table:
        """Returns the table that `text` holds. Of two lines with one key the later one counts. Lines of deleted kinds
        are left out, and so are times of strategies that a kind does not have. Raises InvalidTable, which names
        `source`, the line and what is wrong there.
        """
        entries = []
        unused: Counter[str] = Counter()
        header: list[str] | None = None
        # Lines end in any of the three ways, as in a file that is read as text.
        reader = csv.reader(io.StringIO(text, newline=None))
        try:
            for cells in reader:
                if not cells or cells[0].startswith("#"):
                    continue
                if header is not None:
                    values = _values(header, cells)
                    op = str(values["op"])
                    if op in DELETED_KINDS:
                        unused[op] += 1
                        continue
                    for strategy in MEASURED if op in NODES else ():
                        if strategy not in NODES[op].strategies and values[f"{strategy}_us"] is not None:
                            unused[f"{op} by {strategy}"] += 1
                            values[f"{strategy}_us"] = None
                    entries.append(Entry(**values))  # type: ignore[arg-type]
                    continue
                header = cells
                if tuple(header) not in (COLUMNS, PLAIN_COLUMNS):
                    raise ValueError(f"the columns are {_shown(','.join(header))}, not {','.join(PLAIN_COLUMNS)}")
        except (ValueError, csv.Error) as error:
            raise InvalidTable(source=source, line=reader.line_num, problem=str(error)) from error
        return Table(entries, unused)

    def text(self) -> str:
        """The table as CSV, one line per entry, sorted; `parse` reads it back."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        columns = COLUMNS if any(entry.slices > 1 for entry in self.entries) else PLAIN_COLUMNS
        writer.writerow(columns)
        for entry in self.entries:
            writer.writerow([_cell(getattr(entry, name)) for name in columns])
        return out.getvalue()

    def merged(self, newer: Iterable[Entry]) -> Table:
        """This table with `newer` entries in place of those with the same key."""
        return Table([*self.entries, *newer])

    def lookup(
        self, *, gpu: str, world: int, dtype: str, op: str, m: int, n: int, k: int, graph: bool, slices: int = 1
    ) -> Measured | None:
        """Returns what is known about a matmul of these sizes (all at least 1); None if nothing close was measured.
        graph: inside CUDA graphs. Times of the other mode count only if there are none of this mode. slices: calls of
        one slice count only if there are none of so many.
        """
        for measured_slices in dict.fromkeys((slices, 1)):
            weights = self._families.get((gpu, world, dtype, op, measured_slices), {})
            found = _lookup(weights, m, n, k, graph)
            if found is not None:
                return replace(found, slices=measured_slices)
        return None


def _lookup(weights: Mapping[tuple[int, int], list[Entry]], m: int, n: int, k: int, graph: bool) -> Measured | None:
    """`Table.lookup` among the entries of one family, by (n, k)."""
    for entry in _of_mode([entry for entry in weights.get((n, k), []) if entry.m == m], graph):
        ratio = {name: us / entry.library_us for name, us in entry.us.items()}
        times = ", ".join(f"{name} {us:.0f} us" for name, us in entry.us.items())
        return Measured(ratio, entry.library_us, f"{times} in a CUDA graph" if entry.graph else times)
    near = [(_apart(n, wide) * _apart(k, deep), wide, deep) for wide, deep in weights if _near(n, k, wide, deep)]
    for _, wide, deep in sorted(near):
        found = _curves(_of_mode(weights[wide, deep], graph), bucket(m))
        if found:
            return Measured(found, None, f"near n={wide}, k={deep}: {_ratios_text(found)}")
    return None


def bucket(m: int) -> int:
    """The half-octave that m rows (at least 1) fall into: round(2 log2 m), at most LAST_BUCKET. Exact in integers."""
    return min(LAST_BUCKET, ((2 * m**4).bit_length() - 1) // 2)


@functools.cache
def shipped() -> Table:
    """Returns all tables that ship with the package."""
    return Table(
        entry for path in sorted(FOLDER.glob("*.csv")) for entry in Table.parse(path.read_text(), path.name).entries
    )


@functools.lru_cache(maxsize=16)
def parsed(text: str) -> Table:
    """`Table.parse`, remembered: the plan asks for the same text again and again."""
    return Table.parse(text)


def _apart(asked: int, measured: int) -> float:
    return max(asked, measured) / min(asked, measured)


def _near(n: int, k: int, wide: int, deep: int) -> bool:
    return all(max(pair) ** 2 <= 2 * min(pair) ** 2 for pair in ((n, wide), (k, deep)))


def _of_mode(entries: list[Entry], graph: bool) -> list[Entry]:
    return [entry for entry in entries if entry.graph == graph] or entries


def _curves(entries: list[Entry], asked: int) -> dict[str, float]:
    """Ratios to `library` at bucket `asked`, by strategy. entries: of one mode."""
    points: dict[str, dict[int, float]] = {}
    for entry in entries:
        for name, us in entry.us.items():
            curve = points.setdefault(name, {})
            curve[bucket(entry.m)] = max(us / entry.library_us, curve.get(bucket(entry.m), 0.0))
    found = {name: _at(curve, asked) for name, curve in points.items()}
    return {name: ratio for name, ratio in found.items() if ratio is not None}


def _at(curve: Mapping[int, float], asked: int) -> float | None:
    if asked in curve:
        return curve[asked]
    below = max((size for size in curve if size < asked), default=None)
    above = min((size for size in curve if size > asked), default=None)
    if below is None or above is None:
        end = above if below is None else below
        return curve[end] if end is not None and abs(asked - end) <= OUTER_BUCKETS else None
    if above - below <= INTERPOLATED_BUCKETS:
        return curve[below] + (curve[above] - curve[below]) * (asked - below) / (above - below)
    if above - below <= BRIDGED_BUCKETS:
        return max(curve[below], curve[above])
    return None


def _ratios_text(ratios: Mapping[str, float]) -> str:
    ours = {name: ratio for name, ratio in ratios.items() if name != "library"}
    return ", ".join(f"{name} {ratio:.2f} of library" for name, ratio in ours.items()) or "library alone"


def _values(header: list[str], cells: list[str]) -> dict[str, object]:
    if len(cells) != len(header):
        raise ValueError(f"it has {len(cells)} fields, not {len(header)}")
    values: dict[str, object] = {}
    for name, cell in zip(header, cells, strict=True):
        if name in _INTEGERS:
            values[name] = _number(int, name, cell, "a whole number")
        elif name in _TIMES:
            values[name] = _number(float, name, cell, "microseconds") if cell or name == _TIMES[0] else None
        else:
            values[name] = cell
    return values


def _number(kind: type[int] | type[float], name: str, cell: str, expected: str) -> int | float:
    try:
        return kind(cell)
    except ValueError:
        raise ValueError(f"{name} is '{_shown(cell)}', not {expected}") from None


def _shown(cell: str) -> str:
    return cell if len(cell) <= SHOWN else f"{cell[:SHOWN]}.."


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" if isinstance(value, float) else str(value)
