"""Inputs of a graph that a pass takes to be replicated, which no graph can prove: the ranks compare them at run time.

    w -> ..                      w -> ditron.replicated(w, [w, v]) -> ..        v is compared too
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import fx

from ditron_inductor.passes.graph import proofs, rewriting
from ditron_inductor.passes.graph.culprits import user_line
from ditron_inductor.task import schema


def compare(
    graph: fx.Graph, roots: Sequence[fx.Node], group_name: str, site: str, names: str, constants: str = ""
) -> None:
    """Makes the ranks compare the inputs `roots`, and the lines of `constants`. names: see `places`. The smallest root
    is read behind the comparison; if there is no root, the smallest input. If it is already read behind one, of
    another group perhaps, that one follows; what it compares remain inputs.
    """
    placeholders = list(graph.find_nodes(op="placeholder"))
    users = {source: _readers(source) for source in roots or placeholders if proofs.tensor(source) is not None}
    smallest = min((source for source in users if users[source]), key=_num_elements, default=None)
    if smallest is None:
        return
    args: tuple[Any, ...] = (smallest, list(roots), group_name, site, names, constants)
    if rewriting.is_replayed():
        # Later calls may be those of one rank alone, while the others replay theirs.
        args += (False,)
    with graph.inserting_before(placeholders[-1].next):
        shape = tuple(smallest.meta["val"].shape)
        compared = rewriting.call(graph, schema.overload("replicated"), args, smallest, shape)
    compared.meta["val"] = smallest.meta["val"]
    for user in users[smallest]:
        if user.target is schema.overload("replicated"):
            user.update_arg(0, compared)
        else:
            user.replace_input_with(smallest, compared)


def places(roots: Sequence[fx.Node]) -> str:
    """Returns a line for each input of a graph: where the program reads it, before the graph is changed."""
    return "\n".join(map(_place, roots))


def _num_elements(node: fx.Node) -> float:
    """Returns the number of elements; infinity if a size is dynamic, because comparing the size would specialise it."""
    shape = node.meta["val"].shape
    return math.prod(shape) if all(isinstance(length, int) for length in shape) else math.inf


def _readers(node: fx.Node) -> list[fx.Node]:
    users = [user for user in node.users if user.op == "call_function" and not proofs.writes(user)]
    return [user for user in users if user.target is not schema.overload("replicated") or user.args[0] is node]


def _place(root: fx.Node) -> str:
    """Returns the line of the program that reads an input of the graph, without the folders; "" if it is not known."""
    lines = (user_line(user.meta.get("stack_trace") or "") for user in root.users)
    file, _, rest = next(filter(None, lines), "").partition(":")
    return f"{Path(file).name}:{rest}" if rest else ""
