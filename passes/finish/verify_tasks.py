"""Checks the legality of all Task nodes of a graph; rewrites nothing.

It runs last. A mistake of a pass becomes an error at compile time that names the node, and not a wrong result or a
hang.
"""

from __future__ import annotations

from torch import fx

from ditron_inductor.options import Options
from ditron_inductor.task.verify import verify_graph


def verify_tasks(graph: fx.Graph, *, options: Options) -> int:
    """Raises InvalidTaskNode or GraphVerificationError if the graph is not legal. Returns 0."""
    verify_graph(graph)
    return 0
