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
from collections.abc import Iterable, Mapping
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
REGISTRY = f"{KERNELS}/register.py"
"""It names every kernel, and is no part of one that has it run."""
GATHERED = ("gather_norm", "swiglu")
"""Ops of benchmarks whose kernels are those of the matmul of a gathered operand."""
OLD, UNKNOWN, CURRENT = "old", "age unknown", ""
ALL = "*"
"""Everything in a module."""


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
    """Returns the fingerprint of the code of a kind's modules, and of the functions, classes and constants that they
    use of `lowering` and `core`, without comments. It does not matter in which module or order these stand.
    """
    open_: list[tuple[Path, str]] = [(path, ALL) for path in sorted((root / KERNELS / kind).glob("*.py"))]
    seen, parts = set[tuple[Path, str]](), set[str]()
    while open_:
        path, name = open_.pop()
        if (path, name) in seen or root / HOST in path.parents or path == root / REGISTRY:
            continue
        seen.add((path, name))
        module = read(path.read_text())
        for statement in module.named(name):
            parts.add(statement.code)
            open_ += module.used(statement, path, root)
        if name in module.imports:
            open_ += places(module.imports[name], (), root)
    return hashlib.sha256(repr(sorted(parts)).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Statement:
    """A statement of a module: the names that it defines, its code, and the names that it uses, each with the
    attributes that are read of it.
    """

    defines: tuple[str, ...]
    code: str
    uses: Mapping[str, frozenset[str]]


@dataclass(frozen=True)
class Module:
    """A module: its statements, the names that they define, and the full name of what it imports by the name that it
    has here.
    """

    statements: tuple[Statement, ...]
    defines: frozenset[str]
    imports: Mapping[str, str]

    def named(self, name: str) -> list[Statement]:
        """The statements that define `name`, and those that define nothing; all of them if it is ALL, or is unknown."""
        if name not in self.defines and name not in self.imports:
            return list(self.statements)
        return [one for one in self.statements if name in one.defines or not one.defines]

    def used(self, statement: Statement, path: Path, root: Path) -> Iterable[tuple[Path, str]]:
        """The places of what a statement of this module uses: files, and names in them."""
        for name, attributes in statement.uses.items():
            if name in self.defines:
                yield path, name
            elif name in self.imports:
                yield from places(self.imports[name], attributes, root)


def places(full_name: str, attributes: Iterable[str], root: Path) -> Iterable[tuple[Path, str]]:
    """The places of what is imported by its full name: a name of a module, or of a module these attributes, or all."""
    if (path := module_path(full_name, root)) is not None:
        yield from ((path, name) for name in attributes or (ALL,))
    elif (path := module_path(full_name.rpartition(".")[0], root)) is not None:
        yield path, full_name.rpartition(".")[2]


@cache
def read(text: str) -> Module:
    """Returns a module. Most modules belong to many kinds."""
    tree = ast.parse(text)
    kept, statements = code(text, tree), []
    for node in tree.body:
        first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", []))])
        lines = [kept[line] for line in range(first, (node.end_lineno or first) + 1) if line in kept]
        # A check of the host, when it imports a module, is no part of a kernel.
        if lines and not isinstance(node, ast.Import | ast.ImportFrom | ast.Assert):
            statements.append(Statement(tuple(defined(node)), "\n".join(lines), used_by(node)))
    names = frozenset(name for one in statements for name in one.defines)
    return Module(tuple(statements), names, dict(imported(tree)))


def code(text: str, tree: ast.Module) -> dict[int, str]:
    """The lines of a module, by number, that are neither empty nor comments nor strings that stand alone, as docstrings
    do.
    """
    strings: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            strings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = {number: line.rstrip() for number, line in enumerate(text.splitlines(), 1) if number not in strings}
    return {number: line for number, line in lines.items() if line and not line.lstrip().startswith("#")}


def defined(node: ast.stmt) -> Iterable[str]:
    """The names that a statement of a module defines; none of what it only does, such as a condition."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        yield from (one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name))


def used_by(node: ast.stmt) -> dict[str, frozenset[str]]:
    """The names that a statement uses, each with the attributes that are read of it."""
    attributes: dict[str, frozenset[str]] = {}
    for one in ast.walk(node):
        if isinstance(one, ast.Name):
            attributes.setdefault(one.id, frozenset())
        elif isinstance(one, ast.Attribute) and isinstance(one.value, ast.Name):
            attributes[one.value.id] = attributes.get(one.value.id, frozenset()) | {one.attr}
    return attributes


def imported(tree: ast.Module) -> Iterable[tuple[str, str]]:
    """(name in this module, full name) of all that a module may import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((one.asname or one.name.partition(".")[0], one.name) for one in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((one.asname or one.name, f"{node.module}.{one.name}") for one in node.names)


def module_path(name: str, root: Path) -> Path | None:
    """The file of a module of `FOLDERS`, None for all others."""
    for package, folder in FOLDERS.items():
        if name.startswith(f"{package}."):
            inside = root / folder / name.removeprefix(f"{package}.").replace(".", "/")
            return next((one for one in (inside.with_suffix(".py"), inside / "__init__.py") if one.is_file()), None)
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
    them; where it is empty, or the op is no kind, any kind may have run.
    """
    if row.op in GATHERED:
        return (matmul_of(GATHERED_OPERAND),)
    known = tuple(today())
    found = re.findall(r"\d+ (\w+)", fused) if row.bench == "models" else [row.op]
    return tuple(kind for kind in found if kind in known) or known


def measured(row: Row) -> str:
    """The commit of a row, and whether the kernels that it has run have changed since."""
    return " ".join(filter(None, (row.commit, age(row.commit, kinds_of(row)))))


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
