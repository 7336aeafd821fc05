"""What the site adds to mkdocs: links that leave docs/, lists in docstrings, and a look for other hosts."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

ROOT = Path(__file__).parent.parent
pytest.importorskip("mkdocs", reason="the site needs the extra 'docs'")
pytest.importorskip("griffe", reason="the site needs the extra 'docs'")
CONFIG = SimpleNamespace(docs_dir=str(ROOT / "docs"), site_dir="")


def module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / ".ci" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def rewritten(source: str, text: str) -> str:
    page = SimpleNamespace(file=SimpleNamespace(src_uri=source))
    return module("site_hooks").on_page_markdown(text, page=page, config=CONFIG)


def test_links_out_of_the_folder_lead_into_the_site() -> None:
    assert rewritten("kernels/x.md", "[`a`](../../benchmarks/results/norm.csv) [b](../protocol.md#c) [d](#e)") == (
        "[`a`](../repository/benchmarks/results/norm.csv) [b](../protocol.md#c) [d](#e)"
    )
    assert rewritten("x.md", "![p](../a/b.png) [s](../a/b.py) [h](https://c.d/e.md)") == (
        "![p](repository/a/b.png) [s](repository/a/b.py.txt) [h](https://c.d/e.md)"
    )
    assert rewritten("repository/benchmarks/README.md", "[r](results/norm.csv) [d](../docs/models.md#x)") == (
        "[r](results/norm.csv) [d](../../models.md#x)"
    )
    assert rewritten("x.md", "```text\n[a](../b.csv)\n```\n") == "```text\n[a](../b.csv)\n```\n"


def test_pages_that_load_from_elsewhere_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "good.html").write_text('<a href="https://a.b/"><script src="x.js"></script><img src="../y.png">')
    (tmp_path / "bad.html").write_text('<link rel="stylesheet" href="https://fonts.c/d.css">')
    with caplog.at_level(logging.WARNING):
        module("site_hooks").on_post_build(config=SimpleNamespace(site_dir=str(tmp_path)))
    assert [record.getMessage().split()[0] for record in caplog.records] == ["bad.html"]


def test_lines_that_explain_names_become_a_list() -> None:
    text = "What it does.\n\nx: the one,\nand more of it. y, z: others.\ny: another\nRaises ValueError."
    assert module("site_docstrings").as_list(text, {"x", "y", "z"}) == (
        "What it does.\n\n\n* `x`: the one,\n    and more of it. y, z: others.\n* `y`: another\n\nRaises ValueError."
    )
    assert module("site_docstrings").as_list(text, set()) == text
