"""Ditron with and without the tables that ship with it, in one run: a table of the page on tuning."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tabulate import tabulate

from benchmarks.decode_floors import short_name
from benchmarks.models.facts import Fact, path_of, read_facts
from benchmarks.models.request import TITLES
from benchmarks.models.tables import Contest, commit_of, number
from benchmarks.records import MODELS, Row, grouped, newest, read_csv, runs
from benchmarks.trying import UNTABLED

HEADERS = (
    *("GPUs", "phase", "layers", "form", "tokens", "with the table", "without", "without / with"),
    *("best rival", "its ms", "commit"),
)


def line(one: Contest, facts: Sequence[Fact]) -> list[str]:
    """The line of a cell, in milliseconds."""
    sizes, ours, alone, best = one.sizes, one.us("ditron") or 0.0, one.us(UNTABLED) or 0.0, one.best_other
    ratio = f"{alone / ours:.3f}" if ours else "-"
    return [
        *(f"{one.where[1]}x {short_name(one)}", one.phase, f"{sizes['model']} x {sizes['layers']}", sizes["form"]),
        *(f"{sizes['batch']} x {sizes['tokens']}", number(ours / 1e3, 2), number(alone / 1e3, 2), ratio),
        *("-" if best is None else TITLES[best.contestant], number(None if best is None else best.p50_us / 1e3, 2)),
        commit_of(one, facts),
    ]


def lines(rows: Iterable[Row], facts: Sequence[Fact] = ()) -> list[list[str]]:
    """A line for each cell that has a run with both, of the newest one."""
    every = [[Contest(tuple(run)) for run in runs(of_cell)] for of_cell in grouped(rows).values()]
    both = [[one for one in found if one.us("ditron") and one.us(UNTABLED)] for found in every]
    return [line(found[-1], facts) for found in both if found]


def part() -> str:
    """The table."""
    found = lines(read_csv(MODELS), newest(read_facts(path_of(MODELS))))
    return tabulate(found, HEADERS, "github", disable_numparse=True)
