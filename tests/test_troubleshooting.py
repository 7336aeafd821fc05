"""The page on troubleshooting knows every reason that `explain` can show, and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from ditron_inductor.passes.finish.outside import TEXTS
from ditron_inductor.passes.graph.reasons import ReasonCode

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
# The functions that say why a strategy cannot run, or why one was chosen.
DECIDERS = {
    "ditron_inductor/task/plan.py": {"choose", "_obstacle"},
    "ditron_inductor/task/trial.py": {"decided", "running"},
    "ditron_inductor/device/capabilities.py": {
        *("_probe_cuda", "_probe_cpu", "interpreter_problem", "combine", "_peer_problem")
    },
}
NAMES = {"problem", "reason", "tile_reason", "tile_problem"}


def section(heading: str) -> str:
    (found,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    return found


def rows(text: str) -> dict[str, list[str]]:
    """The lines of a table by the code in their first cell."""
    lines = re.findall(r"^\| `([^`]+)` \|(.*)\|$", text, re.MULTILINE)
    assert len(dict(lines)) == len(lines), "a code has two lines"
    return {code: [cell.strip() for cell in rest.split(" | ")] for code, rest in lines}


def test_every_reason_code_has_its_cause_and_what_to_do() -> None:
    changeable, others = rows(section("Left alone: a change helps")), rows(section("Left alone: nothing to change"))
    assert set(changeable) == {code.value for code in ReasonCode if code.changeable}
    assert set(others) == {code.value for code in ReasonCode if not code.changeable}
    for code, cells in (changeable | others).items():
        assert len(cells) == 2 and all(len(cell) > 10 for cell in cells), code


def template(node: ast.expr) -> str:
    """A text of the source, with a star for each value in it; empty for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "*" for part in node.values)  # type: ignore
    return ""


def texts(node: ast.expr | None) -> Iterator[str]:
    """The texts that an expression may have as its value, or as the first of several."""
    if isinstance(node, ast.IfExp):
        yield from (*texts(node.body), *texts(node.orelse))
    elif isinstance(node, ast.BoolOp):
        for value in node.values:
            yield from texts(value)
    elif isinstance(node, ast.Tuple) and node.elts:
        yield from texts(node.elts[0])
    elif node is not None and len(template(node)) > 8:
        yield template(node)


def reasons_in(function: ast.FunctionDef) -> Iterator[str]:
    """What it returns, assigns to a reason, or gives to a `Choice`."""
    for node in ast.walk(function):
        if isinstance(node, ast.Return):
            yield from texts(node.value)
        elif isinstance(node, ast.Assign):
            if NAMES & {one.id for one in node.targets if isinstance(one, ast.Name)}:
                yield from texts(node.value)
        elif isinstance(node, ast.Call):
            for keyword in node.keywords:
                if keyword.arg in NAMES:
                    yield from texts(keyword.value)
            if isinstance(node.func, ast.Name) and node.func.id == "Choice":
                yield from texts(node.args[1])


def reasons_of_strategies() -> set[str]:
    found: set[str] = set()
    wanted = dict.fromkeys((str(path.relative_to(ROOT)) for path in (ROOT / "lowering").rglob("*.py")), {"obstacle"})
    wanted["lowering/flash_decode/local_decode.py"] = {"shape_of"}
    for path, names in (wanted | DECIDERS).items():
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            if isinstance(node, ast.FunctionDef) and node.name in names:
                found.update(reasons_in(node))
    return {one.replace("`", "") for one in found}


def test_every_reason_of_a_strategy_is_explained() -> None:
    known = rows(section("Fused, and by another strategy than expected"))
    assert set(known) == reasons_of_strategies()
    for reason, cells in known.items():
        assert len(cells) == 2 and all(len(cell) > 10 for cell in cells), reason


def test_every_code_of_what_stayed_outside_is_explained() -> None:
    known = rows(section("Outside of a node"))
    assert set(known) == set(TEXTS)
    for code, cells in known.items():
        assert len(cells) == 2 and all(len(cell) > 10 for cell in cells), code
