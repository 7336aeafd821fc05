"""What passes insert reaches Inductor as it is: nothing is decomposed behind them."""

from __future__ import annotations

import ast
from pathlib import Path

import torch
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.lowering import lowerings

PASSES = Path(__file__).parent.parent.parent / "passes"
INSERTING = ("computed", "call", "call_function")
"""Functions of graph/rewriting.py, and of a graph, that insert a call of an op."""
NAMESPACES = {"aten": torch.ops.aten, "prims": torch.ops.prims, "torch": torch}


def inserted() -> dict[str, set[str]]:
    """The ops that are named where passes insert a call, with the files."""
    found: dict[str, set[str]] = {}
    for path in PASSES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in INSERTING:
                for argument in node.args:
                    name = ast.unparse(argument)
                    if name.startswith(("aten.", "prims.", "torch.ops.")) and "(" not in name:
                        found.setdefault(name, set()).add(path.name)
    return found


def test_inductor_has_a_lowering_for_every_op() -> None:
    """It refuses an op with a decomposition and no lowering, and calls one with neither as it is."""
    decomposed, names = select_decomp_table(), inserted()
    assert "aten.clamp_min.default" in names and len(names) > 20
    without = {
        name: files
        for name, files in names.items()
        if (op := eval(name, dict(NAMESPACES))) in decomposed and op not in lowerings
    }
    assert not without
