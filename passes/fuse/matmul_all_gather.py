"""mm -> all_gather becomes one `ditron::matmul_all_gather`.

Before, for a gather along any dimension of the product, most often the last one (a column-parallel layer whose output
is replicated, such as logits). The collective gathers along dimension 0. Then split, getitem and cat, or slices and
cat, or a view with the ranks as a dimension, a permute and a reshape, move the parts to that dimension:

    a [B, S, K] -> reshape [B*S, K] -> mm(reshape, b [K, N]) -> reshape [B, S, N] -> all_gather_into_tensor
      -> wait [W*B, S, N] -> split -> getitem x W -> cat [B, S, W*N]

    .. -> wait [W*B, S, N] -> reshape [W, B, S, N] -> permute [B, S, W, N] -> reshape [B, S, W*N]

After:

    a [B, S, K], b [K, N] -> ditron.matmul_all_gather -> getitem 0 [B, S, W*N]

A product of one row is gathered along dimension 0, and a view does the rest: its columns are one after the other. A sum
of matmuls, and a bias of one row, are computed by the node too: each rank adds its own part before the gather. `a` is
the tensor that the graph already has in the shape of the product; where there is none, one new reshape makes it. The
call stands where the collective stood, so the order of collectives does not change.

It must not fire when
* the product, or anything between it and the gathered tensor, is used elsewhere;
* the chunks are not all of the W equal chunks, once, in order (a permute that also moves another dimension stays in the
  graph, behind a gather along dimension 0);
* a view between the product and the gather changes the last dimension;
* there is a cast, a batched matmul, an elementwise op, an added tensor that is no row, or a dtype other than bfloat16,
  float16 and float32;
* fewer elements than there are ranks are cut off behind the gather, or elements are picked by index (DTensor, where the
  dimension does not divide): the last rank pads its product, which is seen only there. But the cut is in the graph of
  every rank, and W or more elements are never padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ditron_inductor.options import Options
from ditron_inductor.passes.graph import proofs, rewriting
from ditron_inductor.passes.graph.collectives import ALL_GATHER, Collective, read_collective
from ditron_inductor.passes.graph.fusion import Fusion
from ditron_inductor.passes.graph.gathered import gathered_tensor
from ditron_inductor.passes.graph.products import (
    Left,
    Product,
    as_arguments,
    find_product,
    lefts_in_shape,
    view_sizes,
)
from ditron_inductor.passes.graph.reasons import ReasonCode, Refused, leave_unless_known, refused
from ditron_inductor.task.nodes import MatmulAllGather

aten = torch.ops.aten

PICKS: frozenset[object] = frozenset({aten.index_select.default, aten.index.Tensor})


@dataclass(frozen=True)
class GatheredProducts:
    """The node `result` holds the products of all ranks, each of `shape`, concatenated along dimension `dim`. between:
    the nodes from the result of the wait to `result`, without both. sizes: the sizes of `result` as arguments of a
    reshape, if the ranks are a dimension of their own there.
    """

    result: fx.Node
    dim: int
    shape: tuple[Any, ...]
    between: tuple[fx.Node, ...] = ()
    sizes: tuple[Any, ...] | None = None


@dataclass(frozen=True)
class Match:
    """A product, or a sum of them, and the gather of it. `lefts` are the first operands, `steps` the nodes from the
    products to the result, all included.
    """

    collective: Collective
    product: Product
    gathered: GatheredProducts
    lefts: tuple[Left, ...]
    steps: tuple[fx.Node, ...]


def find_matmul_all_gather(node: fx.Node) -> Match | Refused:
    """Proves that the all-gather `node` gathers matmuls as drawn above, or says why not."""
    collective = read_collective(node)
    if isinstance(collective, ReasonCode):
        return collective
    operand = collective.operand
    product = find_product(operand, (node,))
    if refused(product):
        return product.at(proofs.views_up(operand)[-1])
    gathered = _find_gathered(collective)
    if refused(gathered):
        return gathered.at(collective.wait)
    columns = product.mm.meta["val"].shape[1]
    if not proofs.known_equal(gathered.shape[-1], columns):
        return ReasonCode.LAYOUT.at(operand)
    cut = _cut_behind(gathered, collective.world_size)
    if cut is not None:
        return ReasonCode.UNEVEN_SHARDS.at(cut)
    lefts = lefts_in_shape(product, gathered.shape)
    # Rows follow from the number of elements, unless there are none.
    if lefts is None or not proofs.known(columns > 0):
        return ReasonCode.SHAPE_UNPROVEN.at(operand)
    steps = (*product.steps, node, collective.wait, *gathered.between, gathered.result)
    return Match(collective, product, gathered, lefts, tuple(dict.fromkeys(steps)))


def _find_gathered(collective: Collective) -> GatheredProducts | Refused:
    """Proves along which dimension the products are gathered, and which node holds them so."""
    wait = collective.wait
    shape = tuple(collective.operand.meta["val"].shape)
    inner = gathered_tensor(collective)
    if refused(inner):
        return inner
    if inner.node is not wait:
        between = tuple(step for step in inner.steps if step not in (collective.node, wait, inner.node))
        return GatheredProducts(inner.node, inner.dim, shape, between)
    views = list(proofs.views_down(wait))
    moves = [user for view in views for user in view.users if user.target in proofs.TRANSPOSES and user not in views]
    # Whatever happens to it later, the waited-for tensor itself is a gather along dimension 0.
    return (_find_moved(collective, moves[0]) if moves else None) or GatheredProducts(wait, 0, shape)


def _find_moved(collective: Collective, move: fx.Node) -> GatheredProducts | None:
    """The form with a permute, which moves the first dimension of a view [W, *shape] of what is gathered to `dim`."""
    source = proofs.operand(move)
    chain = proofs.views_up(source)
    value = source.meta["val"]
    order = proofs.permutation(move)
    dim = order.index(0)
    moved = [0] + [dim for dim in order if dim != 0]
    if moved != list(range(value.ndim)) or dim >= value.ndim - 1 or collective.wait not in chain:
        return None
    between = chain[: chain.index(collective.wait)]
    only = all(proofs.sole_user(step) is not None for step in (*between, collective.wait))
    # A user that depends on the strides would see others. Only copies in row-major order would not.
    copies = [user for user in move.users if user.target in proofs.ORDER_KEEPING and proofs.row_major(user.meta["val"])]
    sizes = as_arguments(move.meta["val"].shape, view_sizes(source))
    apart = proofs.known_equal(value.shape[0], collective.world_size)
    if not apart or not only or len(copies) != len(move.users) or sizes.count(-1) > 1:
        return None
    return GatheredProducts(move, dim, tuple(value.shape[1:]), tuple(between), sizes)


def _cut_behind(gathered: GatheredProducts, world_size: int) -> fx.Node | None:
    """Returns the node that cuts off, or leaves out, what may be the padding of uneven shards, or None."""
    whole = gathered.result.meta["val"]
    for view in proofs.views_down(gathered.result):
        value = view.meta["val"]
        same = proofs.same_shape(value.shape, whole.shape)
        for user in view.users:
            if user.target in PICKS:
                return user
            if user.target is not aten.slice.Tensor:
                continue
            bound = proofs.arguments(user)
            dim = bound["dim"] % value.ndim
            start = 0 if bound["start"] is None else proofs.size(bound["start"])
            left_out = value.shape[dim] - user.meta["val"].shape[dim]
            harmless = proofs.known_equal(left_out, 0) or proofs.known(left_out >= world_size)
            if proofs.known_equal(start, 0) and not harmless and (not same or dim == gathered.dim):
                return user
    return None


def rewrite(graph: fx.Graph, match: Match, options: Options) -> fx.Node:
    """Replaces the match by one op call and returns that call."""
    collective, product, gathered = match.collective, match.product, match.gathered
    result, like = gathered.result, collective.wait.meta["val"]
    task = MatmulAllGather(
        gather_dim=gathered.dim,
        **rewriting.site_fields(collective.world_size, collective.group_name, options),
        **product.counts,
    )
    shape = list(gathered.shape)
    shape[gathered.dim] = shape[gathered.dim] * collective.world_size
    with graph.inserting_before(collective.node):
        fake = rewriting.fake_like(like, tuple(shape), rewriting.contiguous_strides(shape))
        values = (fake, rewriting.new_token(like))
        operands = {
            "a": rewriting.in_shape(graph, match.lefts, gathered.shape),
            "b": product.rights,
            "bias": rewriting.bias_row(graph, product.biases),
        }
        call = rewriting.call_task(graph, task, operands, product.mm, values)
        whole = rewriting.output(graph, call, 0, result)
        if gathered.sizes is not None:
            args = (whole, list(gathered.sizes))
            whole = rewriting.call(graph, aten.reshape.default, args, result, result.meta["val"].shape)
    result.replace_all_uses_with(whole)
    rewriting.erase_unused(graph, [*match.steps, *product.operand_views])
    return call


matmul_all_gather = Fusion(MatmulAllGather, (ALL_GATHER,), find_matmul_all_gather, rewrite, leave_unless_known)
"""Fuses every all-gather of one provable matmul. The others get a reason, or keep one that says more."""
