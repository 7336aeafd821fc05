"""The mutations of `python -m tests.mutations` fit the sources, and the table of the documentation is about them.

Whether their tests notice them takes half an hour, and is seen by that command only.
"""

from __future__ import annotations

import ast
import re

import pytest

from tests.mutations.catalogue import MUTATIONS
from tests.mutations.mutation import (
    BEGIN,
    END,
    KILLED,
    PAGE,
    ROOT,
    Mutation,
    parts,
    table,
    with_table,
    written_results,
)

NAMES = [one.name for one in MUTATIONS]
ONE = Mutation("a wrong sum", "a.py", "x + y", "x - y", "tests/test_a.py::test_sum")


@pytest.mark.parametrize("mutation", MUTATIONS, ids=NAMES)
def test_it_applies(mutation: Mutation) -> None:
    source = (ROOT / mutation.file).read_text()
    changed = ast.parse(mutation.applied(source))
    assert ast.dump(changed) != ast.dump(ast.parse(source))


@pytest.mark.parametrize("test", sorted({one.test for one in MUTATIONS}))
def test_its_test_is_there(test: str) -> None:
    file, _, function = test.partition("::")
    text = (ROOT / file).read_text()
    name = function.partition("[")[0]
    assert re.search(rf"^def {name}\(", text, re.MULTILINE)


def test_names_are_unique_and_fit_a_table() -> None:
    assert len(set(NAMES)) == len(NAMES)
    assert not [name for name in NAMES if set(name) & set("|`\n")]


def test_the_table_of_the_page_is_about_these() -> None:
    page = PAGE.read_text()
    results = written_results(page)
    assert list(results) == NAMES, "run python -m tests.mutations --only <what is new> --write"
    assert table(MUTATIONS, results).strip() == parts(page)[1].strip()
    killed = sum(result == KILLED for result in results.values())
    assert 10 * killed >= 9 * len(MUTATIONS)


def test_a_text_that_does_not_stand_there_once_is_refused() -> None:
    assert ONE.applied("s = x + y\n") == "s = x - y\n"
    for source in ("s = x * y\n", "s = x + y\nt = x + y\n"):
        with pytest.raises(AssertionError, match="a wrong sum"):
            ONE.applied(source)


def test_results_that_were_not_taken_again_are_kept() -> None:
    two = Mutation("another", "b.py", "1", "2", "tests/test_b.py::test_two")
    page = with_table(f"# Page\n\n{BEGIN}{END}\nmore\n", [ONE, two], {})
    assert written_results(page) == {ONE.name: "not run", two.name: "not run"}
    page = with_table(page, [ONE, two], {ONE.name: KILLED})
    page = with_table(page, [ONE, two], {two.name: "survived"})
    assert written_results(page) == {ONE.name: KILLED, two.name: "survived"}
    assert page.startswith("# Page\n\n<!--") and page.endswith("\n\nmore\n") and "1 of 2 are killed, 50 %." in page
