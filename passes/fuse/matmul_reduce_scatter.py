"""mm -> reduce_scatter becomes one `ditron::matmul_reduce_scatter`, and so does the reduce-scatter of a sum of matmuls.

Before, for a scatter along dimension 0, or along an inner one (`split`, `getitem` and `cat` move the chunks to
dimension 0):

    a [B, W*S, K] -> reshape [B*W*S, K] -> mm(reshape, b [K, N]) -> reshape [B, W*S, N]
      -> split -> getitem x W -> cat [W*B, S, N] -> reduce_scatter_tensor -> wait [B, S, N]

After:

    [a [B, W*S, K]], [b [K, N]] -> ditron.matmul_reduce_scatter -> getitem 0 [B, S, N]

All products of a sum are operands of the node, and so is a bias, which is a row:

    reshape(mm(dq, wq)) + reshape(mm(dk, wk)) -> split, cat -> reduce_scatter_tensor -> wait
    [dq, dk], [wq, wk] -> ditron.matmul_reduce_scatter -> getitem 0

`a` is the tensor that the graph already has in the shape of the product; where there is none, one new reshape makes it
from sizes that stand in the graph. The call stands where the collective stood, so the order of collectives does not
change.

A scatter along the last dimension is fused as the transposed problem, in two dimensions:

    permute(b) [N, K], permute(a) [K, M] -> ditron.matmul_reduce_scatter -> getitem 0 [N/W, M]
      -> permute [M, N/W] -> reshape [B, S, N/W]

and a bias is a column [N, 1] there.

It must not fire when
* the chunks are not all of the W equal chunks of the scattered dimension, once, in order (a permuted `cat` sends every
  chunk to another rank);
* a view changes the last dimension in between;
* the product, or anything between it and the collective, is used elsewhere, so it has to be computed as a whole;
* something is added that is neither a product nor a row, see `products`;
* there is a cast, a batched matmul, an elementwise op, another reduction than sum and avg, or a dtype other than
  bfloat16, float16 and float32;
* the chunks are padded (DTensor, where the dimension does not divide): only the last rank cuts its result, but the pad
  stands on every rank. Nothing here looks at what follows the collective, so all ranks leave such a site alone
  together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from ditron_inductor.options import Options
from ditron_inductor.passes.graph import proofs, rewriting
from ditron_inductor.passes.graph.collectives import REDUCE_SCATTER, Collective, read_collective
from ditron_inductor.passes.graph.fusion import Fusion
from ditron_inductor.passes.graph.products import (
    FindProduct,
    Left,
    Product,
    classify,
    find_product,
    lefts_in_shape,
    sizes_in_graph,
)
from ditron_inductor.passes.graph.reasons import ReasonCode, Refused, refused
from ditron_inductor.task.nodes import MatmulReduceScatter


@dataclass(frozen=True)
class Match:
    """A product, or a sum of them, and the reduce-scatter of it. `lefts` are the first operands. Where the product's
    columns are scattered, `column_sizes` are the result's sizes, and there are no `lefts`. `steps` are the nodes from
    the products to the result, all included.
    """

    collective: Collective
    product: Product
    scatter_dim: int
    lefts: tuple[Left, ...]
    column_sizes: tuple[Any, ...] | None
    steps: tuple[fx.Node, ...]


def find_matmul_reduce_scatter(node: fx.Node, find: FindProduct | None = None) -> Match | Refused:
    """Proves that the reduce-scatter `node` reduces matmuls as drawn above, or says why not. find: the function that
    reads the product, by default `find_product`.
    """
    collective = read_collective(node)
    if isinstance(collective, ReasonCode):
        return collective
    chain = proofs.views_up(collective.operand)
    scatter_dim, full = 0, collective.operand
    between: tuple[fx.Node, ...] = ()
    if chain[-1].target is torch.ops.aten.cat.default:
        chunks = scattered_chunks(chain, collective)
        if refused(chunks):
            return chunks.at(chain[-1])
        scatter_dim, full, between = chunks.split_dim, chunks.source, (*chain, *chunks.between)
    product = (find or find_product)(full, between or (collective.node,))
    if refused(product):
        return product.at(proofs.views_up(full)[-1])
    code = _rejected_shape(collective, product, full, scatter_dim)
    if code is not None:
        return code.at(full)
    steps = tuple(dict.fromkeys((*product.steps, *between, collective.node, collective.wait)))
    shape = tuple(collective.wait.meta["val"].shape)
    if scatter_dim == len(shape) - 1:
        sizes = sizes_in_graph(product, shape)
        if product.pre is not None:
            pre = product.pre.transposed()
            if pre is None:
                return ReasonCode.LAYOUT.at(full)
            product = replace(product, pre=pre)
        return ReasonCode.SHAPE_UNPROVEN.at(full) if sizes is None else Match(collective, product, 0, (), sizes, steps)
    lefts = lefts_in_shape(product, tuple(full.meta["val"].shape))
    if lefts is None:
        return ReasonCode.SHAPE_UNPROVEN.at(full)
    return Match(collective, product, scatter_dim, lefts, None, steps)


def scattered_chunks(chain: list[fx.Node], collective: Collective) -> proofs.Regrouped | Refused:
    """Proves that the operand is the W chunks of an inner dimension, put one after the other along dimension 0."""
    chunks = proofs.regrouped(chain[-1], collective.world_size)
    if refused(chunks):
        if chunks is not ReasonCode.NO_MATMUL:
            return chunks
        # A cat that does not put together the pieces of one tensor is no product.
        codes = {classify(proofs.views_up(part)[-1]) for part in chain[-1].all_input_nodes}
        return ReasonCode.CHUNKS_PARTIAL if codes - {ReasonCode.NO_MATMUL} else ReasonCode.NO_MATMUL
    operand, cat = proofs.fake(chain[0]), proofs.fake(chain[-1])
    if any(proofs.sole_user(step) is None for step in chain):
        return ReasonCode.INTERMEDIATE_USED.at(proofs.other_user(chain, {collective.node, *chain}) or chain[-1])
    return chunks if chunks.cat_dim == 0 and proofs.same_shape(operand.shape, cat.shape) else ReasonCode.LAYOUT


def _rejected_shape(collective: Collective, product: Product, full: fx.Node, scatter_dim: int) -> ReasonCode | None:
    """Proves that scattering `full` along `scatter_dim` scatters rows of the product, or its columns."""
    whole, rows, result = proofs.fake(full), proofs.fake(product.mm), proofs.fake(collective.wait)
    if whole.dtype != result.dtype:
        return ReasonCode.MIXED_DTYPES
    if whole.ndim < 2 or not proofs.known_equal(whole.shape[-1], rows.shape[-1]):
        return ReasonCode.LAYOUT
    expected = list(whole.shape)
    expected[scatter_dim] = result.shape[scatter_dim] if result.ndim == whole.ndim else 0
    divides = proofs.known_equal(expected[scatter_dim] * collective.world_size, whole.shape[scatter_dim])
    same = divides and proofs.same_shape(tuple(expected), result.shape)
    return None if same and proofs.known(rows.shape[-1] > 0) else ReasonCode.SHAPE_UNPROVEN


def rewrite(graph: fx.Graph, match: Match, options: Options) -> fx.Node:
    """Replaces the match by one op call and returns that call."""
    collective, product = match.collective, match.product
    wait = collective.wait
    assert collective.reduce_op is not None
    task = MatmulReduceScatter(
        scatter_dim=match.scatter_dim,
        reduce_op=collective.reduce_op,
        **rewriting.site_fields(collective.world_size, collective.group_name, options),
        **product.counts,
        **product.epilogue_fields,
    )
    with graph.inserting_before(collective.node):
        lefts, rights, value = _operands(graph, match)
        bias = rewriting.bias_row(graph, product.biases)
        if bias is not None and match.column_sizes is not None:
            bias = rewriting.column(graph, bias)
        operands = {"a": lefts, "b": rights, "bias": bias, "extras": product.epilogue[0]}
        call = rewriting.call_task(graph, task, operands, product.mm, (value, rewriting.new_token(value)))
        call.meta[rewriting.TRANSPOSED] = match.column_sizes is not None
        scattered = rewriting.output(graph, call, 0, wait)
        if match.column_sizes is not None:
            scattered = rewriting.transposed_back(graph, scattered, wait)
            shape = tuple(wait.meta["val"].shape)
            if len(shape) > 2:
                scattered = rewriting.reshaped_rows(graph, scattered, match.column_sizes, shape)
    wait.replace_all_uses_with(scattered)
    factors = [factor for pair in product.factors for factor in (pair.lhs, pair.rhs)]
    turned = [factor for factor in factors if factor.target in proofs.TRANSPOSES]
    rewriting.erase_unused(graph, [*match.steps, *product.operand_views, *turned])
    return call


def _operands(graph: fx.Graph, match: Match) -> tuple[list[fx.Node], list[fx.Node], torch.Tensor]:
    """The first and the second operands of the op, and the fake value of what it returns."""
    product, value = match.product, match.collective.wait.meta["val"]
    if match.column_sizes is not None:
        lefts = [rewriting.transposed(graph, factors.rhs) for factors in product.factors]
        rights = [rewriting.transposed(graph, factors.lhs) for factors in product.factors]
        columns, rows = value.shape[-1], product.mm.meta["val"].shape[0]
        return lefts, rights, rewriting.fake_like(value, (columns, rows), (rows, 1))
    whole = (product.views[0] if product.views else product.mm).meta["val"].shape
    return rewriting.in_shape(graph, match.lefts, whole), product.rights, value


matmul_reduce_scatter = Fusion(MatmulReduceScatter, (REDUCE_SCATTER,), find_matmul_reduce_scatter, rewrite)
"""Fuses every reduce-scatter of provable matmuls. The others get a reason."""
