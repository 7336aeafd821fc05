"""The tables of `python -m benchmarks.models`: times, what belongs to them, means, and the targets."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tabulate import tabulate

from benchmarks import sources
from benchmarks.comparison import NOISE, overlap
from benchmarks.models.facts import ALL, Fact, reasons
from benchmarks.models.request import CONTESTANTS, LIMIT, OURS, TITLES, WITHOUT_COPIES
from benchmarks.models.zoo import MODELS, position
from benchmarks.records import Row, by_cell, grouped, newest, runs, strongest

RIVALS = ("inductor", "async_tp")
SAME_COMPILER = (OURS, ("inductor", "registered"))
"""Contestants that are compiled in the same way: Ditron's, and Inductor's."""
"""What speed-ups are over: eager is shown, but nobody has to be faster than that alone."""


MOST_PLACES = 3


@dataclass(frozen=True)
class Contest:
    """The rows of one cell."""

    rows: tuple[Row, ...]

    @property
    def phase(self) -> str:
        return phase_of(self.rows[0])

    @property
    def sizes(self) -> dict[str, str]:
        return self.rows[0].sizes

    @property
    def model(self) -> str:
        return self.sizes["model"]

    @property
    def routed(self) -> bool:
        """Whether it is a mixture of experts, of which rivals may copy weights."""
        return self.model in MODELS and MODELS[self.model].experts > 0

    @property
    def only_copies(self) -> bool:
        """Whether all rivals of a decode step copy experts' weights for each token, which nobody does who serves."""
        return self.routed and self.phase == "decode" and not any(map(self.us, WITHOUT_COPIES))

    @property
    def where(self) -> tuple[str, int]:
        return self.rows[0].gpu, self.rows[0].world

    @property
    def tokens(self) -> str:
        return tokens_text(self.sizes)

    @property
    def label(self) -> str:
        return f"{self.model}, {self.sizes['form']}, {self.tokens}"

    def row(self, name: str) -> Row | None:
        return next((row for row in self.rows if row.contestant == name), None)

    def us(self, name: str) -> float | None:
        row = self.row(name)
        return row.p50_us if row else None

    def gain(self, over: str) -> float | None:
        """How many times as fast as `over` Ditron is."""
        theirs, ours = self.us(over), self.us("ditron")
        return theirs / ours if theirs and ours else None

    @property
    def limit_us(self) -> float | None:
        """The time of a rank's share alone."""
        return self.rows[0].limit_us

    @property
    def most_gain(self) -> float | None:
        """How many times as fast as Inductor the limit is."""
        theirs = self.us("inductor")
        return theirs / self.limit_us if theirs and self.limit_us else None

    @property
    def best_other(self) -> Row | None:
        """The row of the fastest of all others, eager too."""
        rows = [row for name in CONTESTANTS if name not in OURS and (row := self.row(name)) and row.p50_us]
        return min(rows, key=lambda row: row.p50_us or 0.0, default=None)

    @property
    def best_gain(self) -> float | None:
        """Over the fastest of all others."""
        best = self.best_other
        return self.gain(best.contestant) if best else None

    @property
    def unclear(self) -> bool:
        """Whether the samples of Ditron and of the fastest other overlap, from the 20th to the 80th percentile."""
        ours, best = self.row("ditron"), self.best_other
        return ours is not None and best is not None and overlap(ours, best)

    @property
    def spread_pct(self) -> float | None:
        """Between the 20th and 80th percentile, of the contestant with the widest."""
        spreads = [
            100.0 * (row.p80_us - row.p20_us) / row.p50_us
            for row in self.rows
            if row.p50_us and row.p20_us is not None and row.p80_us is not None
        ]
        return max(spreads, default=None)


def aged(one: Contest, facts: Sequence[Fact]) -> str:
    """Whether the kernels of a cell have changed since it was measured, see `sources.age`."""
    row = one.rows[0]
    of_cell = [fact for fact in facts if fact.shape == row.shape and fact.cell == row.cell]
    fused = [fact.fused for fact in newest(of_cell) if fact.contestant == "ditron"]
    return sources.age(row.commit, sources.kinds_of(row, *fused))


def commit_of(one: Contest, facts: Sequence[Fact]) -> str:
    """The commit at which a cell was measured, and whether its kernels have changed since."""
    return " ".join(filter(None, (one.rows[0].commit, aged(one, facts))))


def phase_of(row: Row | Fact) -> str:
    """`prefill`, or `prefill in CUDA graphs`; decode is always inside those."""
    return f"{row.op} in CUDA graphs" if row.graph and row.op != "decode" else row.op


def tokens_text(sizes: dict[str, str]) -> str:
    """`2 x 4096`, or `1 x 1, cache 65536`."""
    cache = f", cache {sizes['cache']}" if "cache" in sizes else ""
    return f"{sizes['batch']} x {sizes['tokens']}{cache}"


def contests(rows: Iterable[Row]) -> list[Contest]:
    """One for each cell, of the run that `shown` picks."""
    return [Contest(tuple(shown(runs(lines)))) for lines in grouped(rows).values()]


def newest_contests(rows: Iterable[Row]) -> list[Contest]:
    """One for each cell, of its newest run, whatever rivals that has."""
    return [Contest(tuple(found)) for found in by_cell(rows)]


def newest_shown(rows: Iterable[Row]) -> list[Row]:
    """The rows of the runs that `contests` takes."""
    return [row for one in contests(rows) for row in one.rows]


def shown(found: Sequence[Sequence[Row]]) -> Sequence[Row]:
    """Returns the run of a cell that reports show, see `strongest`. found: the cell's runs, the oldest first."""
    return strongest(found, "inductor", [name for name in CONTESTANTS if name not in OURS])


def number(value: float | None, digits: int, missing: str = "-") -> str:
    return missing if value is None else f"{value:.{digits}f}"


def contestants_of(cells: Iterable[Contest]) -> list[str]:
    """Returns the contestants that some cell has, in the order of the tables."""
    found = {row.contestant for one in cells for row in one.rows}
    return [name for name in CONTESTANTS if name in found]


def times_table(rows: Sequence[Row], facts: Sequence[Fact] = (), style: str = "simple") -> str:
    """One line per cell: every contestant in milliseconds, the best other one's time over Ditron's, and the commit."""
    lines, known = [], newest(facts)
    cells = contests(rows)
    names = contestants_of(cells)
    for one in cells:
        times = [number(us / 1e3, 3) if (us := one.us(name)) else "failed" if one.row(name) else "-" for name in names]
        layers, form = one.sizes["layers"], one.sizes["form"]
        place = [one.phase, f"{one.model} x {layers}", form, one.tokens, str(one.where[1])]
        place.append(number(one.best_gain, 2) + f" {NOISE}" * one.unclear)
        limit = number(one.limit_us and one.limit_us / 1e3, 3)
        commit = commit_of(one, known)
        lines.append([*place, *times, limit, number(one.spread_pct, 1), commit])
    headers = ["phase", "model", "form", "tokens", "ranks", "best other / ditron", *names, LIMIT, "spread %", "commit"]
    return tabulate(lines, headers, style, disable_numparse=True)


FACT_HEADERS = (
    *("phase", "model", "form", "tokens", "contestant"),
    *("first call, s", "peak, MiB", "workspace, MiB", "fused"),
)


def fact_lines(facts: Sequence[Fact], missing: str = "-") -> list[tuple[str, ...]]:
    """Compile time, memory and fused sites of every contestant that was compiled, under FACT_HEADERS."""
    return [
        (
            *(phase_of(fact), fact.sizes["model"], fact.sizes["form"], tokens_text(fact.sizes), fact.contestant),
            *(number(value, 1, missing) for value in (fact.compile_s, fact.peak_mib, fact.workspace_mib)),
            fact.fused,
        )
        for fact in facts
        if fact.compile_s is not None or fact.peak_mib is not None
    ]


def facts_table(facts: Sequence[Fact], style: str = "simple") -> str:
    """`fact_lines` as a table."""
    return tabulate(fact_lines(facts), FACT_HEADERS, style, disable_numparse=True)


def reason_lines(facts: Sequence[Fact], rows: Sequence[Row]) -> list[str]:
    """Why something has no number; of one contestant what holds for many cells, once."""
    groups: dict[tuple[str, str], list[str]] = {}
    for fact in reasons(facts, rows):
        name = ALL if fact.contestant == ALL else TITLES[fact.contestant]
        place = f"{phase_of(fact)} {fact.sizes['model']}, {fact.sizes['form']}, {tokens_text(fact.sizes)}"
        groups.setdefault((name, fact.why), []).append(place)
    lines = []
    for (name, why), places in groups.items():
        if name != ALL and len(places) > MOST_PLACES:
            places = [f"{len(places)} cells"]
        lines += [f"{place}: {name}: {why}" for place in places]
    return lines


def mean(values: Iterable[float | None]) -> float | None:
    """Geometric, of those that there are."""
    known = [value for value in values if value]
    return statistics.geometric_mean(known) if known else None


Place = tuple[str, str, int]
"""(phase, model, ranks)."""


def _by_place(rows: Sequence[Row]) -> dict[Place, list[Contest]]:
    """The cells that Inductor and Ditron have a time of."""
    groups: dict[Place, list[Contest]] = {}
    for one in contests(rows):
        if one.gain("inductor"):
            groups.setdefault((one.phase, one.model, one.where[1]), []).append(one)
    return groups


def mean_lines(rows: Sequence[Row]) -> list[tuple[str, str, int, int, float | None, float | None]]:
    """(phase, model, ranks, cells, geometric means of Inductor's and of async TP's times over Ditron's)."""
    return [
        (*key, len(found), mean(one.gain("inductor") for one in found), mean(one.gain("async_tp") for one in found))
        for key, found in _by_place(rows).items()
    ]


def limit_lines(rows: Sequence[Row]) -> list[tuple[str, str, int, int, float | None, float | None, float | None]]:
    """Returns, for cells whose limit is known, (phase, model, ranks, cells, geometric means of Inductor's time over
    Ditron's, of Inductor's over the limit, and of the limit over Ditron's).
    """
    lines = []
    for key, found in _by_place([row for row in rows if row.limit_us]).items():
        gained, most = mean(one.gain("inductor") for one in found), mean(one.most_gain for one in found)
        lines.append((*key, len(found), gained, most, gained / most if gained and most else None))
    return lines


@dataclass(frozen=True)
class Target:
    """What is to be reached on 4 H200s, and what was; None where nothing was measured for it."""

    text: str
    bound: float
    value: float | None
    at_most: bool = False

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "not measured"
        holds = self.value <= self.bound if self.at_most else self.value >= self.bound
        return f"{'PASS' if holds else 'FAIL'} {self.value:.3f}"


def targets(rows: Sequence[Row], facts: Sequence[Fact]) -> list[Target]:
    """Returns the targets, and whether the rows of one machine reach them."""
    found = contests(rows)
    prefill = [one for one in found if one.phase == "prefill"]
    graphs = [one for one in found if one.phase == "prefill in CUDA graphs"]
    decode = {name: [one for one in found if one.phase == "decode" and name in one.model] for name in ("8b", "70b")}
    # Also where only one of the two is there: then nothing is slower than the other.
    better = [min(gains) for one in found if (gains := [gain for gain in map(one.gain, RIVALS) if gain])]
    return [
        Target("prefill, Inductor / Ditron, mean >= 1.20", 1.20, mean(one.gain("inductor") for one in prefill)),
        Target("the same in CUDA graphs, mean >= 1.20", 1.20, mean(one.gain("inductor") for one in graphs)),
        Target("prefill, async TP / Ditron, mean >= 1.10", 1.10, mean(one.gain("async_tp") for one in prefill)),
        Target("the same in CUDA graphs, mean >= 1.10", 1.10, mean(one.gain("async_tp") for one in graphs)),
        Target("decode of 8B, Inductor / Ditron, mean >= 1.35", 1.35, mean(o.gain("inductor") for o in decode["8b"])),
        Target("decode of 70B, Inductor / Ditron, mean >= 1.15", 1.15, mean(o.gain("inductor") for o in decode["70b"])),
        Target("better of Inductor and async TP / Ditron, every cell >= 0.98", 0.98, min(better, default=None)),
        Target("first call, Ditron / Inductor, mean <= 1.25", 1.25, mean(compile_ratios(facts)), at_most=True),
    ]


def compile_ratios(facts: Sequence[Fact]) -> list[float]:
    """In every cell in which both were compiled, the time of Ditron's first call over Inductor's. Contestants of one
    compiler share what the first of them has compiled, so the longest of their first calls counts.
    """
    ratios = []
    for found in by_cell(facts):
        seconds = {fact.contestant: fact.compile_s for fact in found if not fact.why and fact.compile_s}
        ours, theirs = (
            max((seconds[name] for name in names if name in seconds), default=None) for names in SAME_COMPILER
        )
        if ours and theirs:
            ratios.append(ours / theirs)
    return ratios


def docs_part(rows: Sequence[Row], facts: Sequence[Fact] = ()) -> str:
    """The table of all cells for the docs, and the geometric means of Inductor's times over Ditron's, by ranks, phase
    and model.
    """
    means = [
        f"* {phase}, {model}, {world} ranks: {number(inductor, 2)} ({cells} row{'s' * (cells > 1)})"
        for phase, model, world, cells, inductor, _ in mean_lines(rows)
    ]
    ordered = sorted(rows, key=_place)
    notes = [
        f"`{NOISE}`: the samples of Ditron and of the best other overlap, from the 20th to the 80th percentile.",
        "`old`: a kernel that the cell runs has changed since that commit.",
    ]
    parts = [times_table(ordered, facts, "github"), "", *notes]
    return "\n".join([*parts, "", "Inductor / Ditron, geometric means:", "", *sorted(means)])


def limits_part(every: Sequence[Row]) -> str:
    """How much of what there is to gain is gained, for the docs. every: the rows of all runs, with some limits."""
    rows = limited(every)
    limits = sorted(
        (phase, model, str(world), str(cells), *(number(value, 2) for value in values))
        for phase, model, world, cells, *values in limit_lines(rows)
    )
    headers = ["phase", "model", "ranks", "cells", "Inductor / Ditron", "Inductor / limit", "limit / Ditron"]
    commits = sorted({row.commit for row in rows})
    text = (
        "How much of what there is to gain, geometric means over the newest runs in which the limit was measured. They "
        f"may be older than those of the other tables (commits {', '.join(commits)}):"
    )
    return "\n".join([text, "", tabulate(limits, headers, "github", disable_numparse=True)])


def limited(every: Iterable[Row]) -> list[Row]:
    """The rows of the newest run of each cell whose limit was measured."""
    known = [[run for run in runs(lines) if any(row.limit_us for row in run)] for lines in grouped(every).values()]
    return [row for found in known if found for row in found[-1]]


def _place(row: Row) -> tuple[str, int, str, list[int]]:
    """Returns the place of a cell in the docs: phases and forms by name, models as in the zoo, small sizes first."""
    numbers = [int(row.sizes.get(name, 0)) for name in ("layers", "batch", "tokens", "cache")]
    return phase_of(row), position(row.sizes["model"]), row.sizes["form"], numbers


def report(rows: Sequence[Row], facts: Sequence[Fact]) -> str:
    """What a run prints at its end."""
    parts = ["milliseconds per step", times_table(rows, facts), "", facts_table(facts), ""]
    if any(row.gpu != "cpu" for row in rows):
        parts += [f"{one.verdict:16} {one.text} (on 4 H200s)" for one in targets(rows, facts)]
    else:
        parts += ["on a CPU device with the interpreter: that it works, nothing about speed"]
    return "\n".join([*parts, *(f"no number: {line}" for line in reason_lines(facts, rows))])
