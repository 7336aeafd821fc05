"""No function of the package has more than twelve parameters: what belongs together travels in a structure."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("ditron_inductor", "passes", "lowering")
MOST = 12


def functions(source: str) -> Iterator[tuple[str, int]]:
    """(name, number of parameters) of all functions and methods, at any depth."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            given = node.args
            named = len(given.posonlyargs) + len(given.args) + len(given.kwonlyargs)
            yield node.name, named + sum(rest is not None for rest in (given.vararg, given.kwarg))


def test_no_function_has_more_parameters_than_a_reader_keeps_apart() -> None:
    # The links inside the package lead to the other two folders.
    paths = [path for name in FOLDERS for path in (ROOT / name).rglob("*.py") if path.resolve() == path.absolute()]
    counts = {(str(path), name): count for path in paths for name, count in functions(path.read_text())}
    assert len(counts) > 1000 and not [name for name, count in counts.items() if count > MOST]


def test_every_kind_of_parameter_counts() -> None:
    source = "class A:\n    def f(self, a, /, b, *c, d=1, **e):\n        def g(): ...\n    async def h(x, *, y): ...\n"
    assert dict(functions(source)) == {"f": 6, "g": 0, "h": 2}
