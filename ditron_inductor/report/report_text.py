"""A report of `explain` as text for a terminal: a table with a row for equal sites, and below it what is long."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ditron_inductor.report.explained import ExplainedSite, equal_sites
from ditron_inductor.task.site_records import SiteRecord, stopped_text

WIDTH = 120
"""The most columns of a line."""
WIDTHS = {
    "sites\ngraph": 8,
    "collective\npattern": 26,
    "operands\ndtype": 17,
    "moved\ngroup": 12,
    "runs by\ndecided by": 12,
    "predicted": 13,
    "measured": 13,
    "why": 5,
}
"""The columns of the table, and the most characters of a cell of each. With two blanks between them they are WIDTH."""
WIDER = {"collective\npattern": 34, "operands\ndtype": 24}
"""The columns that are wider in a table without measured times."""


def report_text(sites: Sequence[ExplainedSite], conclusion: str) -> str:
    """Returns the table, the reasons, what was left alone or stayed outside of a node, and the conclusion."""
    groups = equal_sites(sites)
    reasons = numbered_reasons(groups)
    notes = dict.fromkeys(note for site in sites if site.measured for note in site.measured.notes)
    parts = [
        _table(groups, reasons),
        *_section("why:", (f"[{number}] {why}" for why, number in reasons.items()), 4),
        *_section("no time:", notes, 4),
        *_section("left alone:", alone_lines(site.record for site in sites if not site.record.matched), 6),
        *_section("stayed outside of a node:", _outside_lines(groups), 6),
        *_section("", [conclusion], 2),
    ]
    return "\n".join(parts)


def numbered_reasons(groups: Iterable[Sequence[ExplainedSite]]) -> dict[str, int]:
    """The numbers by which the rows of equal sites name their reasons."""
    reasons = dict.fromkeys(group[0].reason for group in groups if group[0].reason)
    return {reason: number for number, reason in enumerate(reasons, 1)}


def alone_lines(records: Iterable[SiteRecord]) -> Iterator[str]:
    """Two lines for each line of the program whose collectives were left alone because of the same line and op."""
    equal: dict[object, list[SiteRecord]] = {}
    for record in records:
        culprit = record.culprit
        cause = None if culprit is None else (culprit.op, culprit.value, culprit.line)
        equal.setdefault((record.kind, record.line, record.reason_code, cause), []).append(record)
    for first, *others in equal.values():
        names = first.node + (f" and {len(others)} more" if others else "")
        own = first.culprit if first.culprit is None or first.culprit.name != first.node else None
        yield from stopped_text(names, first.line, first.reason_code, own).splitlines()


def _table(groups: Sequence[Sequence[ExplainedSite]], reasons: Mapping[str, int]) -> str:
    from tabulate import SEPARATING_LINE, tabulate

    timed = any(site.measured or site.tried_us for group in groups for site in group)
    widths = WIDTHS if timed else {name: width for name, width in (WIDTHS | WIDER).items() if name != "measured"}
    rows = [[_cell(group, column, width, reasons) for column, width in widths.items()] for group in groups]
    lines = [line for row in rows for line in (SEPARATING_LINE, row)][1:]
    return tabulate(lines, headers=list(widths), disable_numparse=True)


def _cell(group: Sequence[ExplainedSite], column: str, width: int, reasons: Mapping[str, int]) -> str:
    """The lines of a cell: a text for each line of the column's head, equal ones once, and each wrapped."""
    row = group[0].row()
    if column == "why":
        return f"[{reasons[row['why']]}]" if row["why"] else ""
    cells = {**row, "sites": str(len(group))}
    parts: Iterable[str] = dict.fromkeys(cells[part] for part in column.split("\n"))
    if column in ("predicted", "measured"):
        parts = row[column].split(", ")
    return "\n".join(textwrap.fill(part, width, break_on_hyphens=False) for part in parts)


def _outside_lines(groups: Sequence[Sequence[ExplainedSite]]) -> Iterator[str]:
    for group in groups:
        for one in group[0].record.outside:
            yield f"  {len(group)} {group[0].record.kind}, {one.what} ({one.code}): {one.text}"
            yield f"    {one.node.text()}" + (f", {one.node.line}" if one.node.line else "")


def _section(title: str, lines: Iterable[str], indent: int) -> list[str]:
    """The title and the lines, each wrapped; nothing if there are no lines."""
    wrapped = [
        textwrap.fill(
            line.strip(),
            WIDTH,
            initial_indent=" " * (len(line) - len(line.lstrip())),
            subsequent_indent=" " * indent,
            break_on_hyphens=False,
        )
        for line in lines
    ]
    return ([title] if title and wrapped else []) + wrapped
