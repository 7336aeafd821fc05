"""mm -> all_reduce becomes one `ditron::matmul_all_reduce`, and so does the all-reduce of a sum of matmuls.

`whole_sums` draws the rewrite, which keeps any number of order-keeping views between product and collective.

All products of a sum are operands of the node, and so is a bias. The adds are removed, and the views on the way from
the first product stay:

    add(reshape(mm(a, b)), reshape(mm(c, d))) -> all_reduce  ->  matmul_all_reduce([a, c], [b, d], None) -> reshape
    addmm(row [N], a, b) -> all_reduce                       ->  matmul_all_reduce([a], [b], row)

The call stands where the collective stood, so the order of collectives does not change.

It must not fire when
* the product, or a view between it and the collective, is used elsewhere;
* something is added that is neither a product nor a row, see `products` (DTensor's bias, divided by the group size, is
  a row);
* there is a cast, a batched matmul, an elementwise op, another reduction than sum and avg, or a dtype other than
  bfloat16, float16 and float32.

An all-reduce has no sharded dimension, so nothing is padded. The contracted dimension may differ between ranks.
"""

from __future__ import annotations

from torch import fx

from ditron_inductor.options import Options
from ditron_inductor.passes.graph import rewriting
from ditron_inductor.passes.graph.collectives import ALL_REDUCE
from ditron_inductor.passes.graph.fusion import Fusion
from ditron_inductor.passes.graph.products import FindProduct
from ditron_inductor.passes.graph.reasons import Refused
from ditron_inductor.passes.graph.whole_sums import Match, find_whole_sum, replace_whole_sum
from ditron_inductor.task.nodes import MatmulAllReduce


def find_matmul_all_reduce(node: fx.Node, find: FindProduct | None = None) -> Match | Refused:
    """Proves that the all-reduce `node` reduces matmuls as drawn above, or says why not. find: the function that reads
    the product, by default `find_product`.
    """
    return find_whole_sum(node, find)


def rewrite(graph: fx.Graph, match: Match, options: Options) -> fx.Node:
    """Replaces the match by one op call and returns that call."""
    collective = match.collective
    assert collective.reduce_op is not None
    task = MatmulAllReduce(
        reduce_op=collective.reduce_op,
        **rewriting.site_fields(collective.world_size, collective.group_name, options),
        **match.product.counts,
        **match.product.epilogue_fields,
    )
    return replace_whole_sum(graph, match, task)


matmul_all_reduce = Fusion(MatmulAllReduce, (ALL_REDUCE,), find_matmul_all_reduce, rewrite)
"""Fuses every all-reduce of provable matmuls. The others get a reason."""
