"""mm -> all_reduce becomes one `ditron::matmul_all_reduce`, and so does the all-reduce of a sum of matmuls.

Before, with any number of order-keeping views in between:

    a [M, K], b [K, N] -> mm -> reshape [B, S, N] -> .. -> all_reduce -> wait [B, S, N]

After, with the very same view nodes behind the call:

    [a [M, K]], [b [K, N]] -> ditron.matmul_all_reduce -> getitem 0 [M, N] -> reshape [B, S, N] -> ..

Of a sum all products are operands, and a bias; the adds go, and the views on the way from the first product stay:

    add(reshape(mm(a, b)), reshape(mm(c, d))) -> all_reduce  ->  matmul_all_reduce([a, c], [b, d], None) -> reshape
    addmm(row [N], a, b) -> all_reduce                       ->  matmul_all_reduce([a], [b], row)

An all-reduce works on elements, so views of its operand are views of its result; no size has to be known for
that. The call stands where the collective stood, so the order of collectives does not change.

It must not fire when
* the product, or a view between it and the collective, is used otherwise;
* something is added that is neither a product nor a row, see `products` (DTensor's bias, divided by the group size,
  is a row);
* there is a cast, a batched matmul, an op on the elements, another reduction than sum and avg, or a dtype other than
  bfloat16, float16 and float32.

An all-reduce has no sharded dimension, so nothing is padded. The contracted dimension may differ between ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from ditron_inductor.options import Options
from ditron_inductor.passes.graph import proofs, rewriting
from ditron_inductor.passes.graph.collectives import ALL_REDUCE, Collective, read_collective
from ditron_inductor.passes.graph.fusion import Fusion
from ditron_inductor.passes.graph.products import FindProduct, Product, find_product
from ditron_inductor.passes.graph.reasons import ReasonCode, Refused, refused
from ditron_inductor.task.nodes import MatmulAllReduce


@dataclass(frozen=True)
class Match:
    """A product, or a sum of them, and the all-reduce of it."""

    collective: Collective
    product: Product


def find_matmul_all_reduce(node: fx.Node, find: FindProduct | None = None) -> Match | Refused:
    """Proves that the all-reduce `node` reduces matmuls as drawn above, or says why not.

    find: what reads the product, by default `find_product`.
    """
    collective = read_collective(node)
    if isinstance(collective, ReasonCode):
        return collective
    product = (find or find_product)(collective.operand, (collective.node,))
    if refused(product):
        return product.at(proofs.views_up(collective.operand)[-1])
    return Match(collective, product)


def rewrite(graph: fx.Graph, match: Match, options: Options) -> fx.Node:
    """Replaces the match by one op call and returns that call."""
    collective, product, mm = match.collective, match.product, match.product.mm
    assert collective.reduce_op is not None
    task = MatmulAllReduce(
        reduce_op=collective.reduce_op,
        world_size=collective.world_size,
        group_name=collective.group_name,
        site=rewriting.UNNAMED_SITE,
        policy=rewriting.policy(options),
        num_products=len(product.factors),
        has_bias=bool(product.biases),
        num_extras=len(product.epilogue[0]),
        epilogue=product.epilogue[1],
    )
    with graph.inserting_before(collective.node):
        values = (mm.meta["val"], rewriting.new_token(mm.meta["val"]))
        call = rewriting.call_task(
            graph,
            task,
            {
                "a": [factors.lhs for factors in product.factors],
                "b": [factors.rhs for factors in product.factors],
                "bias": rewriting.bias_row(graph, product.biases),
                "extras": product.epilogue[0],
            },
            rewriting.copied_meta(mm),
            values,
        )
        reduced = rewriting.output(graph, call, 0, rewriting.copied_meta(mm))
    result = reduced
    for view in reversed(product.views):
        # What it viewed may be an add.
        view.update_arg(0, result)
        collective.node.prepend(view)
        # What it viewed may have had another dtype too, between two casts.
        value: torch.Tensor = view.meta["val"]
        shape, strides = tuple(value.shape), tuple(value.stride())
        view.meta["val"] = rewriting.fake_like(value, shape, strides, mm.meta["val"].dtype)
        result = view
    collective.wait.replace_all_uses_with(result)
    rewriting.erase_unused(graph, [*product.steps, collective.node, collective.wait])
    return call


matmul_all_reduce = Fusion(MatmulAllReduce, (ALL_REDUCE,), find_matmul_all_reduce, rewrite)
"""Fuses every all-reduce of provable matmuls. The others get a reason."""
