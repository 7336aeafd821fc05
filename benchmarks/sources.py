"""Which rows are old: the sources of a kind's kernels have changed since the commit that a row names.

`benchmarks/results/sources.csv` has for every commit that the results name, and for every kind of node, a fingerprint
of the kind's kernels as they were at that commit. `python -m benchmarks.report` adds what is missing there, from git.
To read a row's age therefore takes that file and the sources of today, but no history: a shallow clone has both. A
commit that git did not have when the file was written has no fingerprint, and the age of its rows is unknown.
"""

from __future__ import annotations

import ast
import hashlib
import re
import subprocess
import tarfile
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from pathlib import Path

from benchmarks.records import RESULTS, Row, read_lines, write_lines
from ditron_inductor.task.exchange import GATHERED_OPERAND
from ditron_inductor.task.nodes import matmul_of

ROOT = Path(__file__).parents[1]
SOURCES = RESULTS / "sources.csv"
KERNELS = "lowering"
FOLDERS = {"ditron_inductor.lowering": KERNELS, "ditron_inductor.core": "ditron_inductor/core"}
"""What a kernel is made of, by the name that it is imported by. The path of the host is no part of a kernel."""
HOST = f"{KERNELS}/host"
GATHERED = ("gather_norm", "swiglu")
"""Ops of benchmarks whose kernels are those of the matmul of a gathered operand."""
OLD, UNKNOWN, CURRENT = "old", "age unknown", ""


@dataclass(frozen=True)
class Fingerprint:
    """The fingerprint of the kernels of a kind at a commit. It is empty if git had no such commit."""

    commit: str
    kind: str
    sources: str

    @property
    def cell(self) -> tuple[str, ...]:
        return (self.commit,)

    @property
    def contestant(self) -> str:
        return self.kind

    @property
    def date(self) -> str:
        return ""


def kinds(root: Path = ROOT) -> tuple[str, ...]:
    """The kinds of nodes that have kernels: the folders with an __init__.py in `lowering`."""
    folders = (path.parent for path in sorted((root / KERNELS).glob("*/__init__.py")))
    return tuple(folder.name for folder in folders if folder != root / HOST)


def fingerprint(kind: str, root: Path = ROOT) -> str:
    """Returns the fingerprint of the code of a kind's modules and of what they import of `lowering` and `core`, without
    comments.
    """
    open_, seen = sorted((root / KERNELS / kind).glob("*.py")), dict[Path, str]()
    while open_:
        path = open_.pop()
        if path in seen or root / HOST in path.parents:
            continue
        seen[path], names = read(path.read_text())
        open_ += [found for name in names if (found := module_path(name, root)) is not None]
    parts = sorted((str(path.relative_to(root)), text) for path, text in seen.items())
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


@cache
def read(text: str) -> tuple[str, tuple[str, ...]]:
    """Returns the code of a module, and the names of what it imports. Most modules belong to many kinds."""
    tree = ast.parse(text)
    return code(text, tree), tuple(imported(tree))


def code(text: str, tree: ast.Module) -> str:
    """The lines of a module that are neither empty nor comments nor strings that stand alone, as docstrings do."""
    strings: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            strings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = (line.rstrip() for number, line in enumerate(text.splitlines(), 1) if number not in strings)
    return "\n".join(line for line in lines if line and not line.lstrip().startswith("#"))


def imported(tree: ast.Module) -> Iterable[str]:
    """The full names of all modules that a module may import: `from a import b` is `a` and `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{one.name}" for one in node.names)


def module_path(name: str, root: Path) -> Path | None:
    """The file of a module of `FOLDERS`, None for all others."""
    for package, folder in FOLDERS.items():
        if name.startswith(f"{package}."):
            path = root / folder / (name.removeprefix(f"{package}.").replace(".", "/") + ".py")
            return path if path.is_file() else None
    return None


@cache
def today() -> dict[str, str]:
    """Returns the fingerprint of the sources that are here, by kind."""
    return {kind: fingerprint(kind) for kind in kinds()}


@cache
def recorded(path: Path = SOURCES) -> dict[tuple[str, str], str]:
    """Returns the recorded fingerprints, by commit and kind."""
    return {(one.commit, one.kind): one.sources for one in read_lines(path, Fingerprint)}


def age(commit: str, used: Iterable[str]) -> str:
    """OLD if the kernels of any of these kinds have changed since the commit, UNKNOWN if git did not have it. A commit
    that is not in the file yet was measured since the last report.
    """
    known, now = recorded(), today()
    found = {kind: known[commit, kind] for kind in used if kind in now and (commit, kind) in known}
    if any(then and then != now[kind] for kind, then in found.items()):
        return OLD
    return CURRENT if all(found.values()) else UNKNOWN


def kinds_of(row: Row, fused: str = "") -> tuple[str, ...]:
    """The kinds whose kernels a row of Ditron has run. fused: of a whole model, its sites as `models_facts.csv` has
    them; where it is empty, any kind may have run.
    """
    if row.bench == "models":
        known = tuple(today())
        return tuple(kind for kind in re.findall(r"\d+ (\w+)", fused) if kind in known) or known
    return (matmul_of(GATHERED_OPERAND),) if row.op in GATHERED else (row.op,)


def complete(commits: Iterable[str], path: Path = SOURCES) -> bool:
    """Add the fingerprints of commits that the file has not, from git; whether there were any."""
    known = read_lines(path, Fingerprint)
    missing = sorted(set(commits) - {one.commit for one in known})
    cells = {(one.commit,): [found for found in known if found.commit == one.commit] for one in known}
    for commit in missing:
        cells[commit,] = [Fingerprint(commit, kind, sources) for kind, sources in _at(commit).items()]
    if missing:
        write_lines(path, Fingerprint, dict(sorted(cells.items())))
        recorded.cache_clear()
    return bool(missing)


def _at(commit: str) -> dict[str, str]:
    """Returns the fingerprint of the sources of a commit, by kind; empty fingerprints if git has no such commit."""
    command = ["git", "-C", str(ROOT), "archive", commit, *FOLDERS.values()]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        return dict.fromkeys(kinds(), "")
    with tempfile.TemporaryDirectory(prefix="ditron-sources-") as folder:
        with tarfile.open(fileobj=BytesIO(done.stdout)) as files:
            files.extractall(folder, filter="data")
        return {kind: fingerprint(kind, Path(folder)) for kind in kinds()}
