"""Marks what sorts return in joint graphs, so that a backward knows what its inputs are.

In a mixture of experts the forward sorts the slots of the tokens by their experts, and the backward adds the gradients
of the slots to the rows of their tokens. It gets `order`, the indices of the sort, and perhaps `order // k` from the
forward, as inputs of which its graph says nothing. But an input has the name and the metadata of the node of the joint
graph that it stands for. So both say what it is. The metadata say it to the passes. The names are part of the code of
the backward, by which Inductor finds compiled graphs in its cache: a backward that is alike, but whose input is no
`order`, has other names.
"""

from __future__ import annotations

from torch import fx

from ditron_inductor.options import Options
from ditron_inductor.passes.graph.sorts import QUOTIENT, SORTED, is_order, quotient


def mark_sorts(graph: fx.Graph, *, options: Options) -> int:
    """Marks the indices of all sorts of one dimension, and their quotients. Returns how many it marked."""
    marked = 0
    for node in graph.nodes:
        if is_order(node):
            node._rename(f"{SORTED}_{node.name}")
            node.meta[SORTED] = node.name
            marked += 1
        elif (parts := quotient(node)) is not None and is_order(parts[0]):
            node._rename(f"{QUOTIENT}_{parts[1]}_of_{parts[0].name}_")
            node.meta[QUOTIENT] = node.name, parts[0].name, parts[1]
            marked += 1
    return marked
