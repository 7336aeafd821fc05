"""The documentation names what exists: every option, every error, every link and every folder."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import ditron_inductor
from ditron_inductor import errors, ops
from ditron_inductor.declared_options import OPTIONS
from ditron_inductor.pipeline import PASSES
from ditron_inductor.report.explained import ExplainedSite
from ditron_inductor.task.nodes import FUSIONS, STRATEGIES
from ditron_inductor.tools import option_table
from tests.test_explain import site

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
KERNELS = DOCS / "kernels"
HEADINGS = [
    "What it computes",
    "Strategies",
    "Signal protocol",
    "When each wins",
    "What was tried and lost",
    "Limits",
]
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def test_the_table_of_options_is_that_of_the_declarations() -> None:
    page = option_table.PAGE.read_text()
    assert option_table.with_table(page) == page, f"run {option_table.COMMAND}"


def test_every_option_is_explained_below_the_table() -> None:
    text = (DOCS / "options.md").read_text()
    assert re.findall(r"^\*\*`ditron\.(\w+)`\*\*", text, re.MULTILINE) == list(OPTIONS)
    for word in (*STRATEGIES, *FUSIONS):
        assert f"`{word}`" in text


def test_every_error_is_documented_and_no_other() -> None:
    classes = {name for name, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, errors.DitronError)}
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \|", (DOCS / "errors.md").read_text(), re.MULTILINE)
    assert {name for name, _ in rows} == classes - {"DitronError"}
    for name, family in rows:
        assert family in {base.__name__ for base in getattr(errors, name).__mro__}


def test_every_column_of_explain_is_documented() -> None:
    text = (DOCS / "explain.md").read_text()
    for column in ExplainedSite("forward", site(), "tile", None, "").row():
        assert f"\n| {column} |" in text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    # What stands between fences is code, or a part of another page.
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)#]+)", text):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_kernel_pages_have_the_same_headings() -> None:
    """One page for each node kind, so that what one tells of its kernel can be looked for in the others."""
    pages = {page.stem: re.findall(r"^## (.*)", page.read_text(), re.MULTILINE) for page in KERNELS.glob("*.md")}
    assert set(pages) == set(FUSIONS)
    assert all(headings == HEADINGS for headings in pages.values())


def test_every_pass_has_its_section() -> None:
    """With the same headings: what it does, the graph before and after, when it fires and when not, when it pays."""
    pages = [(DOCS / name).read_text() for name in ("fusions.md", "attention.md", "experts.md", "algebra.md")]
    sections = [part.split("\n", 1) for page in pages for part in page.split("\n## ")[1:]]
    for name in (one.__name__ for one in PASSES):
        (text,) = [body for heading, body in sections if heading == name]
        for heading in ("What", "Graph", "Fires", "Does not fire", "Pays"):
            assert len(re.findall(rf"\*\*{heading}\.?\*\*", text)) == 1, (name, heading)
        assert re.search(r"\*\*Graph\.\*\*[^*]*\n\n    \S", text), f"{name} draws no graph"
        assert f"[{name}](" in pages[0]


def test_every_page_is_in_the_index() -> None:
    linked = set(re.findall(r"\(([\w/]+\.md)\)", (DOCS / "index.md").read_text()))
    assert linked == {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} - {"index.md"}


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    named = re.findall(r": ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    own = [name for name in named if not name.startswith("repository/")]
    assert sorted(own) == sorted(pages), "name each page once under nav: in mkdocs.yml"


def test_the_reference_has_every_public_function() -> None:
    pages = "\n".join((DOCS / "reference" / name).read_text() for name in ("api.md", "ops.md"))
    named = {path.rpartition(".")[2] for path in re.findall(r"^::: (\S+)$", pages, re.MULTILINE)}
    assert {*ditron_inductor.__all__, *ops.__all__} <= named
