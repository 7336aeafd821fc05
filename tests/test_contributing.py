"""The pages on contributing, followed to the letter: files and changes, made in a copy, and their tests, run there."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest

import ditron_inductor.lowering
import ditron_inductor.passes
import ditron_inductor.passes.normalize
import tests.lowering
import tests.passes
from ditron_inductor.task.nodes import KINDS, ULYSSES_KINDS
from tests import test_docs
from tests.passes.graphs import fake_group
from tests.ranks import RankContext, RankPools

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "contributing.md"
PAGE_ON_KINDS = ROOT / "docs" / "node_kinds.md"
BLOCK = re.compile(r'^```(python|diff|md) title="([^"]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)
PLACE = re.compile(r"`([a-z_]+/[\w/<>]+\.(?:py|md))`")
COMMANDS = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PACKAGES: dict[str, ModuleType] = {
    "passes/normalize": ditron_inductor.passes.normalize,
    "lowering": ditron_inductor.lowering,
    "tests/passes": tests.passes,
    "tests/lowering": tests.lowering,
}
"""By folder of the repository."""


def part(heading: str) -> str:
    """From a heading of the page to the next one. Those in a block of changes have a sign or a blank in front."""
    (found,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return found


def follow(text: str, copy: Path, steps: int = 5) -> list[Path]:
    """Makes the files and changes of a text in so many steps in `copy`; returns the Python files that are new."""
    assert [int(step) for step in re.findall(r"^\*\*(\d)\. ", text, re.MULTILINE)] == [*range(1, steps + 1)]
    made = {}
    for kind, name, body in BLOCK.findall(text):
        path = copy / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if kind == "diff":
            if not path.exists():
                shutil.copy(ROOT / name, path)
            path.write_text(changed(path.read_text(), body))
        else:
            # A second block of one file goes on behind the first.
            assert name in made or not (ROOT / name).exists(), f"{name} is there already"
            path.write_text(f"{made[name]}\n\n{body}" if name in made else body)
            made[name] = path.read_text()
    return [copy / name for name in made if name.endswith(".py")]


def changed(text: str, change: str) -> str:
    """The text with a change: the lines with a blank or minus in front give way to those with a blank or plus."""
    lines = change.splitlines(keepends=True)
    before = "".join(line[1:] or "\n" for line in lines if line[0] in " -")
    after = "".join(line[1:] for line in lines if line[0] in " +")
    assert text.count(before) == 1, f"these lines have to stand there once:\n{before}"
    return text.replace(before, after)


@contextlib.contextmanager
def importable(copy: Path) -> Iterator[None]:
    """Modules of `copy` are part of our packages."""
    known = set(sys.modules)
    for folder, package in PACKAGES.items():
        package.__path__.append(str(copy / folder))
    try:
        yield
    finally:
        for folder, package in PACKAGES.items():
            package.__path__.remove(str(copy / folder))
        for name in set(sys.modules) - known:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(str(copy)):
                del sys.modules[name]


def lint(files: list[Path]) -> None:
    """As `make lint` does, with the repository's settings."""
    if importlib.util.find_spec("ruff") is None:
        return
    settings = ["check", "--no-cache", "--config", str(ROOT / "pyproject.toml")]
    line = [sys.executable, "-m", "ruff", *settings, *map(str, files)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def checks_of(text: str, copy: Path) -> dict[str, Any]:
    """The test functions of the file that step 5 runs first."""
    (commands,) = COMMANDS.findall(text)
    path = re.search(r"pytest -q (\S+)\.py", commands)
    assert path is not None and (copy / f"{path[1]}.py").exists()
    module = importlib.import_module(path[1].replace("/", "."))
    return {name: one for name, one in inspect.getmembers(module, inspect.isfunction) if name.startswith("test_")}


def test_add_a_pass(tmp_path: Path) -> None:
    text = part("Add a pass in 5 steps")
    files = follow(text, tmp_path)
    lint([*files, tmp_path / "ditron_inductor" / "pipeline.py"])
    with importable(tmp_path):
        checks = checks_of(text, tmp_path)
        assert len(checks) == 3
        with fake_group():
            for check in checks.values():
                check()
        spec = importlib.util.spec_from_file_location("pipeline_of_the_page", tmp_path / "ditron_inductor/pipeline.py")
        assert spec is not None and spec.loader is not None
        pipeline = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(pipeline)
        assert "drop_repeated_maximum" in [one.__name__ for one in pipeline.PASSES]
        for page in ("attention.md", "experts.md", "algebra.md"):
            shutil.copy(ROOT / "docs" / page, tmp_path / "docs" / page)
        with mock.patch.multiple(test_docs, DOCS=tmp_path / "docs", PASSES=pipeline.PASSES):
            test_docs.test_every_pass_has_its_section()


def test_a_node_kind_is_where_the_page_says() -> None:
    places = PLACE.findall(PAGE_ON_KINDS.read_text())
    of_kinds = [place for place in places if "<kind>" in place]
    assert len(of_kinds) == 6 and len(places) > 10
    for place in places:
        names = [place.replace("<kind>", kind) for kind in (*KINDS, *ULYSSES_KINDS)]
        assert all((ROOT / name).exists() for name in names), names


def _know(ctx: RankContext, copy: str, known: bool) -> None:
    """A rank finds the modules of the copy, or no longer."""
    for folder, package in PACKAGES.items():
        path = str(Path(copy) / folder)
        package.__path__.append(path) if known else package.__path__.remove(path)


@pytest.mark.timeout(200)
def test_add_a_kernel(tmp_path: Path, rank_pools: RankPools) -> None:
    text = part("Add a kernel in 5 steps")
    lint(follow(text, tmp_path))
    pool = rank_pools.get("cpu", 2)
    pool.run(_know, str(tmp_path), True)
    try:
        with importable(tmp_path):
            checks = checks_of(text, tmp_path)
            assert len(checks) == 2
            for check in checks.values():
                check(**({"rank_pools": rank_pools} if "rank_pools" in inspect.signature(check).parameters else {}))
    finally:
        if not pool.broken:
            pool.run(_know, str(tmp_path), False)


def with_another_kind(copy: Path) -> str:
    """Makes a copy of everything, since all of it imports a declaration, or what stands in the pipeline. Returns the
    page that it followed.
    """
    text = PAGE_ON_KINDS.read_text()
    ignored = shutil.ignore_patterns(".*", "site")
    shutil.copytree(ROOT, copy, symlinks=True, ignore=ignored)
    lint(follow(text, copy, steps=6))
    return text


def test_add_a_node_kind(tmp_path: Path) -> None:
    with_another_kind(tmp_path / "ditron")


@pytest.mark.all_cases
@pytest.mark.timeout(300)
def test_another_node_kind_works(tmp_path: Path) -> None:
    (commands,) = COMMANDS.findall(with_another_kind(copy := tmp_path / "ditron"))
    for line in commands.splitlines():
        # What `make lint` runs is above, but for mypy, which reads all sources.
        if line.startswith("python "):
            done = subprocess.run(
                [sys.executable, *shlex.split(line)[1:]],
                cwd=copy,
                env=os.environ | {"PYTHONPATH": str(copy)},
                capture_output=True,
                text=True,
                timeout=200,
            )
            assert done.returncode == 0, done.stdout + done.stderr
