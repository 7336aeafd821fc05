"""Marks the all-to-alls of a joint graph that send gradients of tokens, so that their backward knows what they send.

    forward    all_to_all [i, o] -> wait, searchsorted(counts, rows)     sends tokens to their experts
    backward   tangents -> all_to_all [o, i] -> wait                     marked: sends the tokens' gradients back

Where the program asks the device for sizes, a graph ends behind the exchange, and its backward may have nothing else.
The joint graph has both, and torch numbers the ops of a function and of its gradient alike. If several exchanges of the
forward have the number and the sizes, all of them have to send tokens. As with `mark_sorts`, the name says it too,
because by the code, and not by metadata, Inductor finds graphs in its cache.
"""

from __future__ import annotations

from torch import fx

from ditron_inductor.options import Options
from ditron_inductor.passes.graph import proofs
from ditron_inductor.passes.graph.collectives import ALL_TO_ALL, collectives
from ditron_inductor.passes.graph.token_exchanges import TOKENS, may_be_gradient, shows_tokens


def mark_exchanges(graph: fx.Graph, *, options: Options) -> int:
    """Marks the gradients of all exchanges of tokens. Returns how many it marked."""
    tangents = proofs.tangents(graph)
    exchanges = list(collectives(graph, ALL_TO_ALL)) if tangents else []
    backward = [one for one in exchanges if proofs.depends_on(one, tangents)]
    forward = [one for one in exchanges if one not in backward]
    marked = 0
    for node in backward:
        functions = [one for one in forward if may_be_gradient(node, one)]
        if functions and all(shows_tokens(one) is not None for one in functions):
            node._rename(f"{TOKENS}_{node.name}")
            node.meta[TOKENS] = node.name
            marked += 1
    return marked
