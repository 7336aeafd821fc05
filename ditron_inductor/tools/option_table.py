"""`python -m ditron_inductor.tools.option_table`: writes the table of all options into docs/options.md of a checkout.

A test compares the page with the declarations, from which the table is made.
"""

from __future__ import annotations

import sys
from pathlib import Path

from ditron_inductor.declared_options import DECLARED, Option
from ditron_inductor.task.nodes import FUSIONS

PAGE = Path(__file__).parents[2] / "docs" / "options.md"
COMMAND = "python -m ditron_inductor.tools.option_table"
BEGIN, END = f"<!-- begin: {COMMAND} -->", f"<!-- end: {COMMAND} -->"
HEADERS = ("option", "environment", "values", "default", "what it does")


def table_text() -> str:
    rows = [HEADERS, ("---",) * len(HEADERS)]
    for one in DECLARED:
        rows.append((f"`{one.key}`", f"`{one.variable}`", one.values, _default_text(one), one.meaning))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def with_table(page: str) -> str:
    """Returns the page with the table between its two markers. Raises ValueError if they are missing."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE.name} has no part between {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{table_text()}\n\n{END}{after}"


def _default_text(one: Option) -> str:
    if one.default == FUSIONS:
        return "all of them"
    return f"`{one.default}`" if isinstance(one.default, str) else str(one.default)


def main() -> int:
    """Writes the page; returns the exit code."""
    PAGE.write_text(with_table(PAGE.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
