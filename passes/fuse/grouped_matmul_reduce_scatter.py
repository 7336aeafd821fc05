"""The second matmul of a mixture's experts -> weighted sum for each token -> reduce_scatter becomes one node.

    _grouped_mm(x, weight, ends) -> the sum of combine_experts.py, in either form [T, N] -> views -> (split, cat)
    -> reduce_scatter -> wait
    =>  x, weight, ends, places, scale, [absent], [added] -> ditron.grouped_matmul_reduce_scatter
    -> getitem 0 [T / W, N] -> views

It is matched as matmul_reduce_scatter.py matches a product: split and cat scatter an inner dimension, such as that of
the sequences of a batch. So a rank's tokens are `outer` runs, which is the product of the dimensions in front.

It must not fire when
* grouped_matmul_all_reduce.py would not fire on the sum, for the same reasons;
* the last dimension is scattered, or the tokens do not divide over the ranks;
* the chunks are not all of the W equal chunks of the scattered dimension, once, in order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import fx

from ditron_inductor.options import Options
from ditron_inductor.passes.fuse import grouped_matmul_all_reduce as whole
from ditron_inductor.passes.fuse.matmul_reduce_scatter import scattered_chunks
from ditron_inductor.passes.graph import proofs
from ditron_inductor.passes.graph.collectives import REDUCE_SCATTER, read_collective
from ditron_inductor.passes.graph.fusion import Fusion
from ditron_inductor.passes.graph.reasons import ReasonCode, Refused, leave_unless_known, refused
from ditron_inductor.task.nodes import GroupedMatmulReduceScatter, ReducedExperts


@dataclass(frozen=True)
class ScatteredSums:
    """A reduction of what experts return, and the runs that a rank's tokens are."""

    sums: whole.Match
    outer: int


def find_grouped_matmul_reduce_scatter(node: fx.Node) -> ScatteredSums | Refused:
    """Proves that the reduce-scatter `node` reduces what experts return as drawn above, or says why not."""
    collective = read_collective(node)
    if isinstance(collective, ReasonCode):
        return collective
    chain = proofs.views_up(collective.operand)
    full, scatter_dim = collective.operand, 0
    between: tuple[fx.Node, ...] = ()
    if chain[-1].target is whole.aten.cat.default:
        chunks = scattered_chunks(chain, collective)
        if refused(chunks):
            return chunks.at(chain[-1])
        scatter_dim, full, between = chunks.split_dim, chunks.source, (*chain, *chunks.between)
    found = whole.find_sums(collective, full, between)
    if refused(found):
        return found
    shape = proofs.fake(full).shape
    outer = math.prod(shape[:scatter_dim])
    tokens = math.prod(shape[:-1])
    if scatter_dim == len(shape) - 1 or not isinstance(outer, int):
        # The columns are scattered.
        return ReasonCode.EXPERTS_SUM.at(chain[-1])
    divides = isinstance(tokens, int) and tokens % (outer * collective.world_size) == 0
    return ScatteredSums(found, outer) if divides else ReasonCode.SHAPE_UNPROVEN.at(full)


def rewrite(graph: fx.Graph, match: ScatteredSums, options: Options) -> fx.Node:
    """Replaces the match by one op call and returns that call."""
    task: ReducedExperts = GroupedMatmulReduceScatter(outer=match.outer, **whole.fields_of(match.sums, options))
    return whole.replaced(graph, match.sums, task)


grouped_matmul_reduce_scatter = Fusion(
    GroupedMatmulReduceScatter,
    (REDUCE_SCATTER,),
    find_grouped_matmul_reduce_scatter,
    rewrite,
    leave_unless_known,
)
"""Fuses every reduce-scatter of what experts return. The others keep the reason of the fusion of sums."""
