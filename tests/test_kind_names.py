"""Who knows a node kind by name: its own files, and a few others, of which none asks what it could be told.

What differs between kinds is a field or a method of their declarations, so a new kind is an edit of few files. Its own
are its folder of `lowering/`, its pass, its benchmark, and the file of its declaration.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from ditron_inductor.task.nodes import NODES

ROOT = Path(__file__).parent.parent
FOLDERS = ("ditron_inductor", "passes", "lowering", "benchmarks")
CLAIMS = Path("benchmarks", "prose")
"""The sentences of docs pages that hold figures: as the pages do, they name the kinds that they are about."""
MOST = 8
NAMES = {name: kind for kind, node in NODES.items() for name in (kind, node.__name__)}
"""The kinds by what they are called: by themselves, and by the class of their declaration."""
NAME = re.compile(rf"(?<!\w)({'|'.join(NAMES)})(?!\w)")
"""A whole name: one kind's may be a part of another's."""


def texts(source: str) -> Iterator[str]:
    """The names and the strings of a source file, without comments, and without strings that stand alone."""
    tree = ast.parse(source)
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if id(node) not in alone:
                yield text
            case ast.Name(id=text) | ast.Attribute(attr=text) | ast.arg(arg=text) | ast.keyword(arg=str(text)):
                yield text
            case ast.FunctionDef(name=text) | ast.AsyncFunctionDef(name=text) | ast.ClassDef(name=text):
                yield text
            case ast.ImportFrom(module=str(module)):
                yield module
                yield from (one for alias in node.names for one in (alias.name, alias.asname or ""))
            case ast.Import():
                yield from (one for alias in node.names for one in (alias.name, alias.asname or ""))


def is_own(kind: str, path: Path) -> bool:
    """Whether a file, by its place in the repository, is one of the kind's own."""
    declared = Path(*NODES[kind].__module__.split(".")).with_suffix(".py")
    folder, *_ = path.parts
    return (
        path in (declared, Path("benchmarks", "ops", f"{kind}.py"))
        or path.is_relative_to(Path("lowering", kind))
        or (folder == "passes" and path.stem == kind)
    )


def files_by_kind() -> dict[str, list[str]]:
    """By kind, the files that name it and are not its own."""
    found = defaultdict(list)
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            # The links inside the package lead to the other two folders.
            if path.resolve() != path.absolute():
                continue
            place = path.relative_to(ROOT)
            if place.is_relative_to(CLAIMS):
                continue
            source = path.read_text()
            # Most files have no name at all.
            named = texts(source) if NAME.search(source) else ()
            kinds = {NAMES[name] for text in named for name in NAME.findall(text)}
            for kind in kinds:
                if not is_own(kind, place):
                    found[kind].append(place.as_posix())
    return found


def test_what_counts() -> None:
    lines = ('"""all_gather_matmul"""', "x = matmul_all_reduce_rms_norm  # projections", 'f("a matmul_all_gather")')
    source = "\n".join(lines)
    found = [name for text in texts(source) for name in NAME.findall(text)]
    assert sorted(found) == ["matmul_all_gather", "matmul_all_reduce_rms_norm"]
    imports = "import a.matmul_all_reduce.op\nfrom b.projections import c\nfrom d import FlashDecode as e"
    assert {NAMES[name] for text in texts(imports) for name in NAME.findall(text)} == {
        "matmul_all_reduce",
        "projections",
        "flash_decode",
    }


def test_few_files_name_a_kind() -> None:
    found = files_by_kind()
    for kind in NODES:
        assert "ditron_inductor/task/nodes.py" in found[kind], "the search finds what is there"
    assert not {kind: files for kind, files in found.items() if len(files) > MOST}
