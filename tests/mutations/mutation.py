"""What a mutation is, and the table of the results."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "mutations.md"
BEGIN, END = "<!-- begin: python -m tests.mutations --write -->\n", "<!-- end -->\n"
KILLED, SURVIVED, NOT_RUN = "killed", "survived", "not run"
ROW = re.compile(r"^\| (?P<name>.+?) \| `[^`]+` \| `[^`]+` \| (?P<result>[a-z ]+) \|$", re.MULTILINE)


@dataclass(frozen=True)
class Mutation:
    """One fault: `old`, which stands once in `file`, gives way to `new`, and then `test` must fail.

    name: what is wrong then, in words, unique. file: from the repository's root. test: the node id of a test of the
    default suite, a function with all its parameters or one set of them.
    """

    name: str
    file: str
    old: str
    new: str
    test: str

    def applied(self, source: str) -> str:
        """The file's text with the fault in it; AssertionError if `old` does not stand there exactly once."""
        assert self.old != self.new
        count = source.count(self.old)
        assert count == 1, f"'{self.name}': the text to replace stands {count} times in {self.file}, not once"
        return source.replace(self.old, self.new)


def table(mutations: Sequence[Mutation], results: Mapping[str, str]) -> str:
    """The table of the page, with what is killed of all."""
    killed = sum(results.get(one.name) == KILLED for one in mutations)
    lines = [
        f"{killed} of {len(mutations)} are killed, {100 * killed // max(1, len(mutations))} %.",
        "",
        "| mutation | file | test that must fail | result |",
        "|---|---|---|---|",
    ]
    for one in mutations:
        lines.append(f"| {one.name} | `{one.file}` | `{one.test}` | {results.get(one.name, NOT_RUN)} |")
    return "\n".join(lines) + "\n"


def parts(page: str) -> tuple[str, str, str]:
    """What stands before the table, the table, and what stands behind it, with the marks in neither."""
    before, rest = page.split(BEGIN)
    inside, behind = rest.split(END)
    return before, inside, behind


def written_results(page: str) -> dict[str, str]:
    """The results in the table of the page, by name, in its order."""
    return {row["name"]: row["result"] for row in ROW.finditer(parts(page)[1])}


def with_table(page: str, mutations: Sequence[Mutation], results: Mapping[str, str]) -> str:
    """The page with a new table; what was not run now keeps the result that stands there."""
    before, _, behind = parts(page)
    return before + BEGIN + "\n" + table(mutations, {**written_results(page), **results}) + "\n" + END + behind
