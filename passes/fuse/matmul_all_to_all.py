"""mm -> all_to_all becomes one `ditron::matmul_all_to_all`: each rank gets some columns of every row of the product.

Before, as in front of an attention that has all of the sequence and some of the heads (Ulysses), C columns in a head:

    x [B, S, K] -> reshape [B*S, K] -> mm(reshape, w [K, N]) -> reshape [B, S, W, h, C] -> permute [W, S, B, h, C]
      -> clone -> all_to_all_single -> wait -> reshape [W*S, B, h, C] -> permute [B, W*S, h, C] -> clone

    .. -> mm -> reshape [B, S, W*h, C] -> shard_dim_alltoall(gather 1, shard 2) [B, W*S, h, C]

After:

    x [B, S, K], w [K, N] -> ditron.matmul_all_to_all -> getitem 0 [B, W*S, h*C] -> reshape [B, W*S, h, C]

The elements may be in any order on their way: views, permutes, copies and cats of equal chunks are followed by axes.
The op returns the last node that holds rows and then columns in their order, with the ranks in front of some of the
rows. If there is no such node, a permute of the output replaces the last copy. If each rank has several runs of
columns, as with queries, keys and values side by side, they are `parts`. A sum of matmuls, and a bias of one row, are
computed by the node too. The call stands where the collective stood.

It must not fire when
* the product, or anything between it and what the node returns, is used elsewhere;
* the splits are not W equal ones, or rows of the product are divided among the ranks;
* there is a cast, a batched matmul, an elementwise op, an added tensor that is no row, or a dtype other than bfloat16,
  float16 and float32;
* it is not certain how views divide symbolic sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ditron_inductor.options import Options
from ditron_inductor.passes.graph import all_to_all, axes, proofs, rewriting
from ditron_inductor.passes.graph.all_to_all import AllToAll, Chain, read_all_to_all
from ditron_inductor.passes.graph.axes import Axis
from ditron_inductor.passes.graph.collectives import ALL_TO_ALL, SHARD_DIM
from ditron_inductor.passes.graph.fusion import Fusion
from ditron_inductor.passes.graph.products import Product, find_product
from ditron_inductor.passes.graph.reasons import ReasonCode, Refused, leave_unless_known, refused
from ditron_inductor.task.nodes import MatmulAllToAll

aten = torch.ops.aten

ATTENTION = "_scaled_dot_product"
"""The prefix of the names of torch's attention ops, which accept any strides."""


@dataclass(frozen=True)
class Match:
    """A product, or a sum of them, and the all-to-all of its columns. The product is [first * second, parts * W *
    columns], and the node returns [first, W * second, parts * columns]. result: the node that this output replaces;
    sizes: its sizes, as arguments of a reshape. order: if the output has to be permuted, the axes of the result by
    their place in the output, whose sizes are `axes_sizes`; otherwise None. steps: all nodes from the products to the
    result.
    """

    collective: AllToAll
    product: Product
    first: Any
    second: Any
    parts: int
    result: fx.Node
    sizes: list[Any]
    axes_sizes: tuple[Any, ...]
    order: tuple[int, ...] | None
    steps: tuple[fx.Node, ...]


def find_matmul_all_to_all(node: fx.Node) -> Match | Refused:
    """Proves that an all-to-all divides matmuls' columns among the ranks as drawn above, or says why not."""
    collective = read_all_to_all(node)
    if isinstance(collective, ReasonCode):
        return collective
    up = all_to_all.above(collective)
    top = up.nodes[0]
    product = find_product(top, top.users)
    if refused(product):
        if top.target is aten.cat.default and refused(chunks := proofs.regrouped(top, collective.world_size)):
            return chunks.at(top)
        return product.at(top)
    other = proofs.other_user((*up.nodes, *up.between), {node, *up.nodes, *up.between})
    if other is not None:
        return ReasonCode.INTERMEDIATE_USED.at(other)
    writes = all_to_all.written(factor for factors in product.factors for factor in (factors.lhs, factors.rhs))
    if writes is not None:
        return ReasonCode.INTERMEDIATE_USED.at(writes)
    value, whole = proofs.fake(product.mm), proofs.fake(top)
    rows, columns = Axis(value.shape[0]), Axis(value.shape[1])
    shaped = axes.reshaped(((rows,), (columns,)), whole.shape)
    sent = None if shaped is None else _last(up, shaped)
    exchange = None if sent is None else all_to_all.exchanged(collective, sent)
    if exchange is None:
        return ReasonCode.SHAPE_UNPROVEN.at(collective.operand)
    ranks, came, layout = exchange
    down = all_to_all.below(collective)
    behind = list(down.layouts(layout))
    of_rows, of_columns = list(axes.leaves([rows])), list(axes.leaves([columns]))
    if not any(axis is ranks for axis in of_columns):
        return ReasonCode.ROWS_EXCHANGED.at(product.mm)
    outer, inner = all_to_all.split_at(of_columns, ranks)
    parts = all_to_all.concrete(axes.size_of(outer))
    found = None if parts is None else _result(behind, came, of_rows, [*outer, *inner])
    if parts is None or found is None:
        return ReasonCode.SHAPE_UNPROVEN.at(collective.operand)
    result, sizes, place, order = found
    first, second = axes.size_of(of_rows[:place]), axes.size_of(of_rows[place:])
    lhs_columns = [factors.lhs.meta["val"].shape[1] for factors in product.factors]
    if any(all_to_all.rows_and_columns(first, second, columns) is None for columns in lhs_columns):
        return ReasonCode.SHAPE_UNPROVEN.at(collective.operand)
    given = [*of_rows[:place], came, *of_rows[place:], *outer, *inner]
    nodes = [step for step, _ in behind]
    steps = (*product.steps, *up.nodes, *up.between, node, *nodes[: nodes.index(result) + 1], *down.between)
    return Match(
        collective,
        product,
        first,
        second,
        parts,
        result,
        sizes,
        tuple(axis.size for axis in given),
        order,
        tuple(dict.fromkeys(steps)),
    )


def _last(chain: Chain, first: axes.Layout) -> axes.Layout | None:
    """Returns the layout of a chain's last node."""
    found = list(chain.layouts(first))
    return found[-1][1] if len(found) == len(chain.nodes) else None


def _result(
    behind: list[tuple[fx.Node, axes.Layout]], came: Axis, rows: list[Axis], columns: list[Axis]
) -> tuple[fx.Node, list[Any], int, tuple[int, ...] | None] | None:
    """Returns (the node that the op's output replaces, its sizes, the index of the row axis that the ranks stand in
    front of, the permutation from the output to the node, if one is needed); None if its sizes cannot be written as
    arguments.
    """
    for node, layout in reversed(behind):
        order = axes.flat(layout)
        before, _ = all_to_all.split_at(order, came)
        others = [axis for axis in order if axis is not came]
        in_order = len(before) <= len(rows) and all_to_all.same_axes(others, [*rows, *columns])
        sizes = all_to_all.sizes_of(node)
        if in_order and sizes is not None and (proofs.row_major(node.meta["val"]) or _takes_any_strides(node)):
            return node, sizes, len(before), None
    copies = [(node, layout) for node, layout in behind if proofs.row_major(node.meta["val"])]
    node, layout = copies[-1]
    given, sizes = [came, *rows, *columns], all_to_all.sizes_of(node)
    if sizes is None or sum(not isinstance(axis.size, int) for axis in given) > 1:
        return None
    places = tuple(next(i for i, found in enumerate(given) if found is axis) for axis in axes.flat(layout))
    return node, sizes, 0, places


def _takes_any_strides(node: fx.Node) -> bool:
    """Returns whether whatever reads the elements of a node, or of views of it, takes them however they lie."""
    views, takes_any = rewriting.views_and_strides(node)
    if takes_any:
        return True
    readers = {user for view in views for user in view.users if user not in views}
    return all(
        isinstance(user.target, torch._ops.OpOverload) and user.target._opname.startswith(ATTENTION) for user in readers
    )


def rewrite(graph: fx.Graph, match: Match, options: Options) -> fx.Node:
    """Replaces the match by one op call and returns that call."""
    collective, product, first, second = match.collective, match.product, match.first, match.second
    result, like, world_size = match.result, collective.wait.meta["val"], collective.world_size
    task = MatmulAllToAll(
        gather_dim=0 if proofs.known_equal(first, 1) else 1,
        parts=match.parts,
        **rewriting.site_fields(world_size, collective.group_name, options),
        **product.counts,
    )
    columns = product.mm.meta["val"].shape[1] // world_size
    shape = all_to_all.shape_of(first, world_size * second, columns)
    with graph.inserting_before(collective.node):
        lefts = []
        for factors in product.factors:
            depth = factors.lhs.meta["val"].shape[1]
            sizes = all_to_all.rows_and_columns(first, second, depth)
            assert sizes is not None
            lefts.append(all_to_all.reshape(graph, factors.lhs, sizes, all_to_all.shape_of(first, second, depth)))
        values = (rewriting.fake_like(like, shape, rewriting.contiguous_strides(shape)), rewriting.new_token(like))
        operands = {"a": lefts, "b": product.rights, "bias": rewriting.bias_row(graph, product.biases)}
        call = rewriting.call_task(graph, task, operands, product.mm, values)
    with graph.inserting_before(result):
        whole = rewriting.output(graph, call, 0, result)
        if match.order is not None:
            whole = _permuted(graph, whole, match)
        whole = all_to_all.reshape(graph, whole, match.sizes, tuple(result.meta["val"].shape))
    if not proofs.row_major(result.meta["val"]):
        rewriting.reshape_views(rewriting.views_and_strides(result)[0])
    result.replace_all_uses_with(whole)
    rewriting.erase_unused(graph, [*match.steps, *product.operand_views])
    return call


def _permuted(graph: fx.Graph, out: fx.Node, match: Match) -> fx.Node:
    """Inserts a copy of the output with its axes in the order of the result."""
    assert match.order is not None
    sizes = [size if isinstance(size, int) else -1 for size in match.axes_sizes]
    apart = all_to_all.reshape(graph, out, sizes, match.axes_sizes)
    shape = tuple(match.axes_sizes[axis] for axis in match.order)
    strides = [apart.meta["val"].stride(axis) for axis in match.order]
    moved = rewriting.call(graph, aten.permute.default, (apart, list(match.order)), apart, shape, strides)
    return rewriting.row_major_copy(graph, moved, moved)


matmul_all_to_all = Fusion(MatmulAllToAll, (ALL_TO_ALL, SHARD_DIM), find_matmul_all_to_all, rewrite, leave_unless_known)
"""Fuses every all-to-all of provable matmuls. The others get a reason."""
