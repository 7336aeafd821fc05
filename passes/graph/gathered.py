"""This module finds a gathered tensor and its uses, and puts a Task node in their place.

The gathered tensor is the result of the collective, gathered along dimension 0, or what split and cat make of this
result, gathered along an inner dimension. Its matmuls read order-keeping views of it, or transposes of such views. The
fusion decides for each use what it is (an `OrientedMatmul`, or a reason). `collect` finds the matmuls that can go into
one node in front of the first use of the tensor, and `replace` writes that node.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import fx

from ditron_inductor.passes.graph import proofs, rewriting
from ditron_inductor.passes.graph.biases import read_matmul, with_bias
from ditron_inductor.passes.graph.collectives import Collective
from ditron_inductor.passes.graph.reasons import ReasonCode, Refusal, Refused, refused
from ditron_inductor.task.nodes import TaskNode

Found = TypeVar("Found")


@dataclass(frozen=True)
class OrientedMatmul:
    """A matmul as the node computes it, with its other operand: of transposes, if `transposed`."""

    mm: fx.Node
    operand: fx.Node
    transposed: bool


@dataclass(frozen=True)
class Feeds:
    """The matmuls in graph order that one gathered tensor feeds. steps: all nodes from the collective to the tensor,
    and its views. first_use: the first node that reads elements of it.
    """

    matmuls: tuple[OrientedMatmul, ...]
    steps: tuple[fx.Node, ...]
    first_use: fx.Node
    return_gathered: bool


@dataclass(frozen=True)
class Gathered:
    """The node that holds the tensor gathered along `dim`, and all nodes from the collective to it."""

    node: fx.Node
    dim: int
    steps: tuple[fx.Node, ...]


def find_feeding(collective: Collective, match: Callable[[Gathered], Found | Refused]) -> Found | Refused:
    """Returns what `match` finds for the result of the wait or, if it refuses, for what split and cat make of it."""
    # Dimension 0 first: its matmuls use the waited-for tensor itself. If there are none, look behind split and cat.
    direct = match(Gathered(collective.wait, 0, (collective.node, collective.wait)))
    if not refused(direct):
        return direct
    cats = _cats_of_pieces(collective.wait)
    if cats:
        inner = _inner_gathered(collective, cats)
        return inner if refused(inner) else match(inner)
    parts = [piece for piece in _pieces_of(collective.wait) if proofs.feeds_matmul(piece)]
    return ReasonCode.CHUNKS_PARTIAL.at(parts[0]) if direct is ReasonCode.NO_MATMUL and parts else direct


def gathered_tensor(collective: Collective) -> Gathered | Refused:
    """Returns the tensor gathered along an inner dimension where pieces are put together, or what is waited for."""
    cats = _cats_of_pieces(collective.wait)
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


def _pieces_of(wait: fx.Node) -> list[fx.Node]:
    """The slices of the waited-for tensor, and the parts that it is split into."""
    pieces = [user for user in wait.users if user.target in proofs.SLICES]
    return pieces + [part for split in pieces for part in split.users if part.target in proofs.SLICES]


def _cats_of_pieces(wait: fx.Node) -> list[fx.Node]:
    """The cat nodes that put pieces of the waited-for tensor together, directly."""
    users = dict.fromkeys(user for piece in _pieces_of(wait) for user in piece.users)
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


def contracts(use: GatheredUse, last_dim: bool) -> bool:
    """Whether a matmul on rows contracts the gathered dimension, given whether that is the last one."""
    return use.first == (use.transposed != last_dim)


def collect(
    collective: Collective, gathered: Gathered, read: Callable[[GatheredUse, torch.Tensor], OrientedMatmul | ReasonCode]
) -> Feeds | Refused:
    """Collects the matmuls on views of the gathered tensor that can be proved. read: returns what a use is, given the
    tensor's value. It is called for uses that `_read_use` accepts.
    """
    value = proofs.fake(gathered.node)
    views, uses = _uses(gathered.node)
    order = {node: index for index, node in enumerate(collective.node.graph.nodes)}
    refusals: list[Refusal] = []
    candidates: dict[fx.Node, OrientedMatmul] = {}
    for use in uses:
        found = _read_use(use, value, read)
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
    return Feeds(tuple(matmuls), steps, first_use, return_gathered)


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


def _read_use(
    use: GatheredUse, value: torch.Tensor, read: Callable[[GatheredUse, torch.Tensor], OrientedMatmul | ReasonCode]
) -> OrientedMatmul | ReasonCode:
    """The matmul that a use of the gathered tensor (`value`) is, or why it cannot be fused."""
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
    found = read(use, value)
    if refused(found):
        return found
    if refused(matmul):
        return matmul
    rows = proofs.fake(view)
    if not proofs.known_equal(rows.shape[0 if use.transposed else 1], value.shape[-1]):
        return ReasonCode.LAYOUT
    # Rows follow from the number of elements, unless there are none.
    return found if proofs.known(value.shape[-1] > 0) else ReasonCode.SHAPE_UNPROVEN


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


def replace(
    graph: fx.Graph, feeds: Feeds, gathered: fx.Node, task: TaskNode, shard: fx.Node, *, swapped: bool
) -> fx.Node:
    """Replaces the matmuls, and all other uses of the gathered tensor, by one op call; returns that call. shard: the
    operand of the node. swapped: the node's gathered tensor is the transpose of `gathered`.
    """
    first_use = feeds.first_use
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
