"""The structure of the sources, read from their imports: layers, circles, and names that stand for one thing each.

An import inside a function, and one for type checkers alone, counts as any other: it may be late, but not upward.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from ditron_inductor.task.nodes import NODES, STRATEGIES

ROOT = Path(__file__).parent.parent
PACKAGE = "ditron_inductor"
LAYERS = (
    "version",
    "errors",
    "dtensor_parts",
    "core",
    "device",
    "task",
    "declared_options",
    "config",
    "options",
    "user_table",
    "summary",
    "lowering",
    "runtime",
    "passes.graph",
    "passes.normalize",
    "passes.fuse",
    "passes.attention",
    "passes.absorb",
    "passes.forms",
    "passes.finish",
    "codegen",
    "debug_folder",
    "pipeline",
    "recompilations",
    "backend",
    "expert_parallel",
    "torchtitan",
    "ops",
    "graph_meeting",
    "report",
    "tools",
    "taxes",
    "tune",
    "__main__",
)
"""The modules and folders of the package, lowest first. A module imports its own folder and what stands below it."""
ROLES = {
    "Match": "passes",
    **dict.fromkeys(("Geometry", "How", "Sizes", "Tensors", "Ends", "_Plan"), "lowering"),
}
"""Classes that each file of a folder may have, by the order that all its files keep."""
SHARED_STEMS = {*NODES, *STRATEGIES, "op", "config", "__init__"}
"""Names of files that stand for the same thing in every folder: a node kind, its strategies, how it runs, and settings.
"""


def module_of(path: Path) -> str:
    """The name that a source file is imported by, without the package's: `passes.fuse.projections`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[1:] if parts[0] == PACKAGE else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def sources() -> Iterator[Path]:
    """The files of the package; the linked folders by where they stand."""
    for folder in (PACKAGE, "passes", "lowering"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.relative_to(ROOT).parts[:2] not in ((PACKAGE, "passes"), (PACKAGE, "lowering")):
                yield path


MODULES = {module_of(path): path for path in sources()}


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text())


def imported(tree: ast.Module, package: str = PACKAGE) -> Iterator[str]:
    """The names of modules of the package, or of what they hold, that a file imports anywhere."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            assert node.level == 0, "an import that is not absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name.partition(".")[2] for name in names if name.partition(".")[0] == package)


def imports_of(module: str) -> set[str]:
    """The modules of the package that a module imports."""
    found = set()
    for name in imported(tree_of(module)):
        while name not in MODULES:
            name = name.rpartition(".")[0]
        found.add(name)
    return found - {module}


def layer_of(module: str) -> int:
    """Its place in LAYERS; the package's own `__init__`, which stands above all others, is the last."""
    if not module:
        return len(LAYERS)
    (layer,) = [index for index, name in enumerate(LAYERS) if module == name or module.startswith(f"{name}.")]
    return layer


def test_every_source_is_looked_at() -> None:
    assert {"pipeline", "passes.fuse.projections", "lowering.host.launch", "core.signals", ""} <= set(MODULES)
    assert len(MODULES) > 200


@pytest.mark.parametrize("module", [name for name in MODULES if name not in ("passes", "lowering")])
def test_imports_go_downward(module: str) -> None:
    upward = [
        name for name in imports_of(module) if name not in ("passes", "lowering") and layer_of(name) > layer_of(module)
    ]
    assert upward == []


def test_modules_import_each_other_in_no_circle() -> None:
    try:
        TopologicalSorter({module: imports_of(module) for module in MODULES}).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' -> '.join(error.args[1])}")


def test_no_two_modules_have_one_name() -> None:
    by_stem = defaultdict(list)
    for path in sources():
        by_stem[path.stem].append(module_of(path))
    assert {stem: found for stem, found in by_stem.items() if len(found) > 1 and stem not in SHARED_STEMS} == {}


def test_no_two_classes_have_one_name() -> None:
    by_name = defaultdict(list)
    for module in MODULES:
        for node in tree_of(module).body:
            if isinstance(node, ast.ClassDef) and not module.startswith(f"{ROLES.get(node.name, 'none')}."):
                by_name[node.name].append(module)
    assert {name: found for name, found in by_name.items() if len(found) > 1} == {}


@pytest.mark.parametrize("folder", [PACKAGE, "passes", "lowering", "benchmarks"])
def test_nothing_but_tests_imports_tests(folder: str) -> None:
    users = [
        str(path.relative_to(ROOT))
        for path in (ROOT / folder).rglob("*.py")
        if any(imported(ast.parse(path.read_text()), "tests"))
    ]
    assert users == []
