"""Zeros to which rows are added are made again in the backward, and are not saved for it.

    zeros [T, N] -> scatter_add(zeros, 0, rows, terms) -> reduce_scatter           in the forward
            \\----> index_put(zeros, [rows], gradients, accumulate) -> reduce_scatter   in the backward

A mixture of experts adds up what its experts return for a token, and its backward adds up the gradients of a token's
slots. Both begin with zeros of the same shape, which are one node of the joint graph. The partitioner saves it for the
backward, as it saves every tensor that an op reads which is not pointwise. In the backward graph it would be an input,
of which nothing is known, and [T, N] of memory would be kept for each layer. So it is marked, as activation
checkpointing marks a node.

It must not fire in a graph without collectives, which is left to Inductor.
"""

from __future__ import annotations

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from ditron_inductor.options import Options
from ditron_inductor.passes.graph import proofs
from ditron_inductor.passes.graph.launches import launches_collective
from ditron_inductor.passes.graph.rewriting import RECOMPUTE

aten = torch.ops.aten
ADDING = (aten.index_put.default, aten.scatter_add.default, aten.index_add.default)


def recompute_zeros(graph: fx.Graph, *, options: Options) -> int:
    """Marks all zeros to which an op adds rows; returns how many."""
    if not any(launches_collective(node) for node in graph.nodes):
        return 0
    found = [
        node
        for node in graph.nodes
        if proofs.is_full(node, 0) and any(user.target in ADDING and user.args[0] is node for user in node.users)
    ]
    for node in found:
        # A mark that the user's own checkpointing has put on a node stays.
        node.meta.setdefault(RECOMPUTE, CheckpointPolicy.MUST_RECOMPUTE)
    return len(found)
