"""This module finds a gathered tensor and its uses, and puts a Task node in their place.

The gathered tensor is the result of the collective, gathered along dimension 0, or what split and cat make of this
result, gathered along an inner dimension. Its matmuls read order-keeping views of it, or transposes of such views.
`find_feeds` finds the matmuls that can go into one node in front of the first use of the tensor, and `replace` writes
that node.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from ditron_inductor.passes.graph import proofs, rewriting
from ditron_inductor.passes.graph.biases import read_matmul, with_bias
from ditron_inductor.passes.graph.collectives import Collective
from ditron_inductor.passes.graph.reasons import ReasonCode, Refusal, Refused, refused
from ditron_inductor.task.nodes import TaskNode


@dataclass(frozen=True)
class OrientedMatmul:
    """A matmul as the node computes it, with its other operand: of transposes, if `transposed`."""

    mm: fx.Node
    operand: fx.Node
    transposed: bool


@dataclass(frozen=True)
class Gathered:
    """The node that holds the tensor gathered along `dim`, and all nodes from the collective to it."""

    node: fx.Node
    dim: int
    steps: tuple[fx.Node, ...]

    @property
    def swapped(self) -> bool:
        """Whether it is a matrix gathered along its columns, which is read as its transpose."""
        return self.dim == 1 and proofs.fake(self.node).ndim == 2


@dataclass(frozen=True)
class Feeds:
    """The matmuls in graph order that one gathered tensor feeds. steps: all nodes from the collective to the tensor,
    and its views. first_use: the first node that reads elements of it.
    """

    gathered: Gathered
    matmuls: tuple[OrientedMatmul, ...]
    steps: tuple[fx.Node, ...]
    first_use: fx.Node
    return_gathered: bool


def find_feeds(collective: Collective) -> Feeds | Refused:
    """Proves that the result of the wait feeds matmuls or, if it does not, that what split and cat make of it does."""
    # Dimension 0 first: its matmuls use the waited-for tensor itself. If there are none, look behind split and cat.
    direct = _collect(collective, Gathered(collective.wait, 0, (collective.node, collective.wait)))
    if not refused(direct):
        return direct
    cats = cats_of_pieces(collective.wait)
    if cats:
        inner = _inner_gathered(collective, cats)
        return inner if refused(inner) else _collect(collective, inner)
    parts = [piece for piece in _pieces_of(collective.wait) if proofs.feeds_matmul(piece)]
    return ReasonCode.CHUNKS_PARTIAL.at(parts[0]) if direct is ReasonCode.NO_MATMUL and parts else direct


def gathered_tensor(collective: Collective) -> Gathered | Refused:
    """Returns the tensor gathered along an inner dimension where pieces are put together, or what is waited for."""
    cats = cats_of_pieces(collective.wait)
    if cats:
        return _inner_gathered(collective, cats)
    return Gathered(collective.wait, 0, (collective.node, collective.wait))


def _inner_gathered(collective: Collective, cats: list[fx.Node]) -> Gathered | Refused:
    """The gathered tensor of a gather along an inner dimension, which `cats` put together from chunks."""
    if len(cats) > 1:
        return ReasonCode.INTERMEDIATE_USED.at(cats[1])
    chunks = proofs.regrouped(cats[0], collective.world_size)
    if refused(chunks):
        unread = chunks is ReasonCode.NO_MATMUL and proofs.feeds_matmul(cats[0])
        return (ReasonCode.CHUNKS_PARTIAL if unread else chunks).at(cats[0])
    result, source = proofs.fake(cats[0]), proofs.fake(chunks.source)
    if chunks.source is not collective.wait or chunks.split_dim != 0 or result.ndim != source.ndim:
        return ReasonCode.CHUNKS_PARTIAL.at(cats[0])
    other = proofs.other_user([collective.wait], chunks.between)
    if other is not None:
        return ReasonCode.INTERMEDIATE_USED.at(other)
    steps = (collective.node, collective.wait, *chunks.between, cats[0])
    return Gathered(cats[0], chunks.cat_dim, steps)


def _pieces_of(whole: fx.Node) -> list[fx.Node]:
    """The slices of a tensor, and the parts that it is split into."""
    pieces = [user for user in whole.users if user.target in proofs.SLICES]
    return pieces + [part for split in pieces for part in split.users if part.target in proofs.SLICES]


def cats_of_pieces(whole: fx.Node) -> list[fx.Node]:
    """The cat nodes that put pieces of a tensor together, directly."""
    users = dict.fromkeys(user for piece in _pieces_of(whole) for user in piece.users)
    return [user for user in users if user.target is torch.ops.aten.cat.default]


@dataclass(frozen=True)
class GatheredUse:
    """`user` reads the gathered tensor through `view`, which holds its transpose if `transposed`."""

    view: fx.Node
    user: fx.Node
    transposed: bool

    @property
    def first(self) -> bool:
        """Whether the view is the first operand of `user`, which is a matmul."""
        return self.user.args[-2] is self.view

    @property
    def operand(self) -> fx.Node:
        """The other operand of `user`, which is a matmul."""
        # addmm begins with what it adds.
        operand = self.user.args[-1 if self.first else -2]
        assert isinstance(operand, fx.Node)
        return operand


def _collect(collective: Collective, gathered: Gathered) -> Feeds | Refused:
    """Collects the matmuls on views of the gathered tensor that can be proved."""
    value = proofs.fake(gathered.node)
    views, uses = _uses(gathered.node)
    order = {node: index for index, node in enumerate(collective.node.graph.nodes)}
    refusals: list[Refusal] = []
    candidates: dict[fx.Node, OrientedMatmul] = {}
    for use in uses:
        found = _read_use(use, gathered, value)
        if isinstance(found, OrientedMatmul):
            candidates[use.user] = found
        else:
            refusals.append(found.at(use.user))
    if not candidates:
        return _strongest(refusals)
    first_use = min((use.user for use in uses), key=lambda user: order[user])
    matmuls: list[OrientedMatmul] = []
    for mm in sorted(candidates, key=lambda mm: order[mm]):
        candidate = candidates[mm]
        if proofs.depends_on(candidate.operand, {collective.wait}):
            refusals.append(ReasonCode.OPERAND_DEPENDS.at(candidate.operand))
        elif (pinned := rewriting.pinned(candidate.operand, first_use)) is not None:
            refusals.append(ReasonCode.OPERAND_LATE.at(pinned))
        else:
            matmuls.append(candidate)
    if not matmuls:
        return _strongest(refusals)
    fused = {matmul.mm for matmul in matmuls}
    return_gathered = any(use.user not in fused for use in uses)
    if return_gathered and not proofs.row_major(value):
        return ReasonCode.INTERMEDIATE_USED.at(next(use.user for use in uses if use.user not in fused))
    steps = tuple(dict.fromkeys([*gathered.steps, *views]))
    return Feeds(gathered, tuple(matmuls), steps, first_use, return_gathered)


def _uses(gathered: fx.Node) -> tuple[list[fx.Node], list[GatheredUse]]:
    """Returns (views of the gathered tensor, also of its transposes, each before its own views; all other uses)."""
    views, uses = list(proofs.views_down(gathered)), list[GatheredUse]()
    for view in list(views):
        for user in view.users:
            if user in views:
                continue
            if not _transposes_matrix(user):
                uses.append(GatheredUse(view, user, False))
                continue
            turned = list(proofs.views_down(user))
            views += turned
            uses += [GatheredUse(view, last, True) for view in turned for last in view.users if last not in turned]
    return views, uses


def _transposes_matrix(node: fx.Node) -> bool:
    """Whether a node transposes its source as a matrix of rows. Dimensions of size 1 may stand anywhere."""
    value = proofs.tensor(node)
    if node.target not in proofs.TRANSPOSES or value is None:
        return False
    source = proofs.fake(node.args[0])
    moved = [dim for dim in proofs.permutation(node) if not proofs.known_equal(source.shape[dim], 1)]
    in_order = sorted(moved)
    return len(moved) > 1 and moved == [in_order[-1], *in_order[:-1]]


def _read_use(use: GatheredUse, gathered: Gathered, value: torch.Tensor) -> OrientedMatmul | ReasonCode:
    """The matmul that a use of the gathered tensor (`value`) is, or why it cannot be fused. It has to keep the gathered
    dimension, as rows of the product or as its columns.
    """
    view, user = use.view, use.user
    if user.target in proofs.TRANSPOSES:
        # More than two dimensions: it moves rows (batch and sequence change places).
        return ReasonCode.LAYOUT if proofs.feeds_matmul(user) else ReasonCode.NO_MATMUL
    if user.target in proofs.SLICES:
        return _rejected_slice(user)
    if user.target in proofs.CASTS:
        return ReasonCode.CAST_BETWEEN if proofs.feeds_matmul(user) else ReasonCode.NO_MATMUL
    matmul = read_matmul(user)
    if refused(matmul) and user.target is not torch.ops.aten.addmm.default:
        return matmul
    left, right = user.args[-2:]
    if view not in (left, right):
        return ReasonCode.NO_MATMUL  # it is what addmm adds
    if left is right:
        return ReasonCode.OPERAND_DEPENDS
    last_dim = gathered.dim == value.ndim - 1
    if use.first == (use.transposed != last_dim):
        return ReasonCode.NO_GAIN
    if last_dim and not gathered.swapped:
        return ReasonCode.LAST_DIM
    if refused(matmul):
        return matmul
    rows = proofs.fake(view)
    if not proofs.known_equal(rows.shape[0 if use.transposed else 1], value.shape[-1]):
        return ReasonCode.LAYOUT
    # Rows follow from the number of elements, unless there are none.
    if not proofs.known(value.shape[-1] > 0):
        return ReasonCode.SHAPE_UNPROVEN
    return OrientedMatmul(user, use.operand, use.transposed != gathered.swapped)


def _rejected_slice(part: fx.Node) -> ReasonCode:
    """Returns the reason why a part of the gathered tensor is not fused. The padding of uneven shards is cut off at the
    end of a dimension that is not the last.
    """
    if part.target is not torch.ops.aten.slice.Tensor or not proofs.feeds_matmul(part):
        return ReasonCode.NO_MATMUL
    bound = proofs.arguments(part)
    value = proofs.fake(part)
    start = 0 if bound["start"] is None else proofs.size(bound["start"])
    cut = bound["dim"] % value.ndim < value.ndim - 1 and proofs.known_equal(start, 0)
    return ReasonCode.UNEVEN_SHARDS if cut else ReasonCode.NO_MATMUL


def _strongest(refusals: list[Refusal]) -> Refused:
    """The reason to report when every use was rejected: the first one that names a matmul, if any does."""
    named = [refusal for refusal in refusals if refusal.code is not ReasonCode.NO_MATMUL]
    actionable = [refusal for refusal in named if refusal.code is not ReasonCode.NO_GAIN]
    return next(iter(actionable or named), ReasonCode.NO_MATMUL)


def replace(graph: fx.Graph, feeds: Feeds, task: TaskNode, shard: fx.Node) -> fx.Node:
    """Replaces the matmuls, and all other uses of the gathered tensor, by one op call; returns that call. shard: the
    operand of the node, or its transpose if the gathered tensor is `swapped`.
    """
    first_use, gathered, swapped = feeds.first_use, feeds.gathered.node, feeds.gathered.swapped
    for matmul in feeds.matmuls:
        rewriting.hoist(matmul.operand, first_use)
    value = gathered.meta["val"]
    with graph.inserting_before(first_use):
        shard = rewriting.transposed(graph, shard) if swapped else shard
        operands = [
            rewriting.transposed(graph, matmul.operand) if matmul.transposed else matmul.operand
            for matmul in feeds.matmuls
        ]
        values = [_in_order(matmul.mm, matmul.transposed) for matmul in feeds.matmuls]
        values += [_in_order(gathered, swapped)] if feeds.return_gathered else []
        values.append(rewriting.new_token(value))
        first = feeds.matmuls[0].mm
        call = rewriting.call_task(graph, task, {"shard": shard, "weights": operands}, first, values)
        call.meta[rewriting.TRANSPOSED] = swapped
        products = [rewriting.output(graph, call, index, matmul.mm) for index, matmul in enumerate(feeds.matmuls)]
        if feeds.return_gathered:
            returned = rewriting.output(graph, call, len(operands), gathered)
            if swapped:
                returned = rewriting.transposed_back(graph, returned, gathered)
            gathered.replace_all_uses_with(returned)
            # Views of the gathered tensor may stand before the call, but all uses stand behind it.
            for view in feeds.steps:
                if view < call and view is not gathered and proofs.depends_on(view, {returned}):
                    first_use.prepend(view)
    for matmul, product in zip(feeds.matmuls, products, strict=True):
        product = with_bias(product, matmul.mm, transposed=matmul.transposed)
        if matmul.transposed:
            with graph.inserting_before(matmul.mm):
                product = rewriting.transposed_back(graph, product, matmul.mm)
        matmul.mm.replace_all_uses_with(product)
    turned = [matmul.operand for matmul in feeds.matmuls if matmul.operand.target in proofs.TRANSPOSES]
    rewriting.erase_unused(graph, [*feeds.steps, *(matmul.mm for matmul in feeds.matmuls), *turned])
    return call


def _in_order(node: fx.Node, transposed: bool) -> torch.Tensor:
    """Returns the fake value of the op's output for a matmul or for the gathered tensor."""
    value: torch.Tensor = node.meta["val"]
    if not transposed:
        return value
    return rewriting.fake_like(value, (value.shape[1], value.shape[0]), (value.shape[0], 1))
