"""No function of the package has more than twelve parameters: what belongs together travels in a structure.

Those that have more stand in `LEFT`, with how many. The list only becomes shorter: a function that is not in it fails,
and so does one in it that has grown, or that is done and has not been taken out.

The kernels in the list are launched by the host. Numbers that must not be specialised on (rank, slot, site, sizes that
change from call to call) have to be parameters of their own, as Triton specialises on every member of a structure. So
do tuples of tensors, since the host takes longer to fill in the addresses of a structure that holds tuples than those
of the tuples. Single tensors do not: they may be members of one structure.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("ditron_inductor", "passes", "lowering")
MOST = 12
LEFT = {
    "lowering/all_gather_attention/tile.py::all_gather_attention_kernel": 15,
    "lowering/all_gather_matmul/tile.py::all_gather_matmul_kernel": 16,
    "lowering/all_reduce_rms_norm/norm_in_band.py::in_band_kernel": 14,
    "lowering/all_reduce_rms_norm/norm_kernel.py::all_reduce_rms_norm_kernel": 14,
    "lowering/matmul_all_reduce/one_shot.py::matmul_all_reduce_kernel": 20,
    "lowering/matmul_all_reduce/two_shot.py::matmul_all_reduce_kernel": 17,
    "lowering/matmul_reduce_scatter/tile.py::matmul_reduce_scatter_kernel": 15,
}
"""By file and name: the number of parameters."""


def functions(source: str) -> Iterator[tuple[str, int]]:
    """(name, number of parameters) of all functions and methods, at any depth."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            given = node.args
            named = len(given.posonlyargs) + len(given.args) + len(given.kwonlyargs)
            yield node.name, named + sum(rest is not None for rest in (given.vararg, given.kwarg))


def too_many() -> dict[str, int]:
    """The functions of the package with more parameters than MOST."""
    found: dict[str, int] = {}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            # The links inside the package lead to the other two folders.
            if path.resolve() != path.absolute():
                continue
            for name, count in functions(path.read_text()):
                if count > MOST:
                    key = f"{path.relative_to(ROOT).as_posix()}::{name}"
                    found[key] = max(count, found.get(key, 0))
    return found


def test_no_function_has_more_parameters_than_a_reader_keeps_apart() -> None:
    found = too_many()
    assert not found.keys() - LEFT.keys(), "put what belongs together into a structure"
    assert not LEFT.keys() - found.keys(), "these are done: take them out of LEFT"
    grown = {name: count for name, count in found.items() if count > LEFT[name]}
    assert not grown, "these have more than they had"


def test_every_kind_of_parameter_counts() -> None:
    source = "class A:\n    def f(self, a, /, b, *c, d=1, **e):\n        def g(): ...\n    async def h(x, *, y): ...\n"
    assert dict(functions(source)) == {"f": 6, "g": 0, "h": 2}
