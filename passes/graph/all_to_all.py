"""This module reads the all-to-alls of a graph for both fusions: what is sent, what is received, and the views around.

There are two forms. Of the first one only equal splits are read:

    all_to_all_single(x [W*c, ..], [c] * W, [c] * W, group) -> wait     the chunks of dimension 0
    shard_dim_alltoall(x, gather_dim, shard_dim, group)                 chunks of one dimension, concatenated along
    another

Views, permutes, copies, and cats of equal chunks stand in front of the collective and behind it. Their effect on the
order of elements is followed by axes (see `axes`). The axis of the ranks leaves the dimension that is scattered
(`sent`), and another axis of the ranks comes in front of the dimension that is gathered (`came`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ditron_inductor.passes.graph import axes, proofs, rewriting
from ditron_inductor.passes.graph.axes import Axis, Layout
from ditron_inductor.passes.graph.collectives import SHARD_DIM, WAIT, read_group
from ditron_inductor.passes.graph.gathered import cats_of_pieces
from ditron_inductor.passes.graph.reasons import ReasonCode

aten = torch.ops.aten


@dataclass(frozen=True)
class AllToAll:
    """An all-to-all of a known group with equal splits. wait: the node of the result, the op itself if that waits."""

    node: fx.Node
    wait: fx.Node
    operand: fx.Node
    world_size: int
    group_name: str


@dataclass(frozen=True)
class Chain:
    """Nodes that move elements, each of them made from the one before: a source, or a result, first. between: splits
    and pieces that the cats among them are made of.
    """

    nodes: tuple[fx.Node, ...]
    between: tuple[fx.Node, ...]
    world_size: int

    def layouts(self, first: Layout) -> Iterator[tuple[fx.Node, Layout]]:
        """Yields each node and its layout, given the layout `first` of the first one, as far as layouts are certain."""
        layout: Layout | None = first
        for place, node in enumerate(self.nodes):
            if place > 0 and layout is not None:
                chunks = axes.chunks_of(node, self.world_size)
                if chunks is not None:
                    layout = axes.regrouped(chunks, self.world_size, layout)
                else:
                    layout = axes.moved(node, layout)
            if layout is None:
                return
            yield node, layout


def read_all_to_all(node: fx.Node) -> AllToAll | ReasonCode:
    """Proves the group, the equal splits and the wait of an all-to-all."""
    bound = proofs.arguments(node)
    group = read_group(node)
    if isinstance(group, ReasonCode):
        return group
    group_name, world_size = group
    operand = bound["input"]
    value = proofs.tensor(operand)
    if value is None or value.ndim == 0 or proofs.tensor(node) is None:
        return ReasonCode.WAIT_FORM
    if node.target is SHARD_DIM:
        if bound["gather_dim"] % value.ndim == bound["shard_dim"] % value.ndim:
            return ReasonCode.LAYOUT
        return AllToAll(node, node, operand, world_size, group_name)
    for splits in (bound["output_split_sizes"], bound["input_split_sizes"]):
        equal = all(proofs.known_equal(proofs.size(split) * world_size, value.shape[0]) for split in splits)
        if len(splits) != world_size or not equal:
            return ReasonCode.UNEQUAL_SPLITS
    wait = proofs.sole_user(node)
    if wait is None or wait.target is not WAIT or proofs.tensor(wait) is None:
        return ReasonCode.WAIT_FORM
    return AllToAll(node, wait, operand, world_size, group_name)


def exchanged(collective: AllToAll, sent: Layout) -> tuple[Axis, Axis, Layout] | None:
    """Returns (the ranks' axis in what is sent, theirs in what is received, its layout); None if not certain."""
    came = Axis(collective.world_size)
    dims = list(sent)
    scattered = gathered = 0
    if collective.node.target is SHARD_DIM:
        bound = proofs.arguments(collective.node)
        scattered, gathered = bound["shard_dim"] % len(dims), bound["gather_dim"] % len(dims)
    lead = axes.without_lead(dims[scattered], collective.world_size)
    if lead is None:
        return None
    ranks, dims[scattered] = lead
    dims[gathered] = (came, *dims[gathered])
    return ranks, came, tuple(dims)


def above(collective: AllToAll) -> Chain:
    """Returns the chain of nodes that move the elements that are sent, from their source to the collective."""
    nodes, between = [collective.operand], list[fx.Node]()
    while True:
        chunks = axes.chunks_of(nodes[-1], collective.world_size)
        if chunks is not None:
            between += chunks.between
            nodes.append(chunks.source)
        elif axes.moves(nodes[-1]):
            nodes.append(proofs.operand(nodes[-1]))
        else:
            return Chain(tuple(reversed(nodes)), tuple(between), collective.world_size)


def below(collective: AllToAll) -> Chain:
    """Returns the chain of nodes that move what is received, as far as each is the only user of the one before."""
    nodes, between = [collective.wait], list[fx.Node]()
    while True:
        user = proofs.sole_user(nodes[-1])
        if user is not None and axes.moves(user) and user.args[0] is nodes[-1]:
            nodes.append(user)
            continue
        chunks = _cat_below(nodes[-1], collective.world_size)
        if chunks is None:
            return Chain(tuple(nodes), tuple(between), collective.world_size)
        between += chunks.between
        nodes.append(chunks.result)


def _cat_below(node: fx.Node, world_size: int) -> proofs.Regrouped | None:
    """The cat that puts all equal chunks of a node together, if it is the only use of all of them."""
    cats = cats_of_pieces(node)
    if len(cats) != 1:
        return None
    chunks = axes.chunks_of(cats[0], world_size)
    if chunks is None or chunks.source is not node or proofs.other_user([node], chunks.between) is not None:
        return None
    return chunks


def written(nodes: Iterable[fx.Node]) -> fx.Node | None:
    """Returns the first op that writes into one of these nodes, or into what it is a view or a slice of. A fusion would
    read it at another time.
    """
    sources = (source for node in nodes for source in _with_sources(node))
    return next((user for source in sources for user in source.users if proofs.writes(user)), None)


def _with_sources(node: fx.Node) -> Iterator[fx.Node]:
    """Yields a node, and what it is a view or a slice of."""
    yield node
    while node.target in rewriting.MOVES:
        node = proofs.operand(node)
        yield node


def split_at(order: Sequence[Axis], axis: Axis) -> tuple[list[Axis], list[Axis]]:
    """Returns the axes in front of `axis`, and those behind it."""
    place = next(index for index, candidate in enumerate(order) if candidate is axis)
    return list(order[:place]), list(order[place + 1 :])


def same_axes(left: Sequence[Axis], right: Sequence[Axis]) -> bool:
    return len(left) == len(right) and all(a is b for a, b in zip(left, right, strict=True))


def concrete(size: Any) -> int | None:
    """Returns a size as an int; None for a symbol."""
    return size if isinstance(size, int) else None


def sizes_of(node: fx.Node) -> list[Any] | None:
    """The shape of a node as arguments of a reshape that stands in its place; None where it has too many symbols."""
    value = proofs.fake(node)
    if node.target is aten.reshape.default:
        return list(proofs.arguments(node)["shape"])
    sizes = [size if isinstance(size, int) else -1 for size in value.shape]
    return sizes if sizes.count(-1) <= 1 else None


def rows_and_columns(first: Any, second: Any, columns: Any) -> list[Any] | None:
    """Returns the sizes of a reshape to [first * second, columns], or [first, second, columns] if `first` is not 1."""
    sizes = [columns] if isinstance(columns, int) else []
    if not sizes:
        return None
    if proofs.known_equal(first, 1):
        return [-1, *sizes]
    if isinstance(first, int):
        return [first, -1, *sizes]
    return [-1, second, *sizes] if isinstance(second, int) else None


def shape_of(first: Any, second: Any, columns: Any) -> tuple[Any, ...]:
    return (second, columns) if proofs.known_equal(first, 1) else (first, second, columns)


def reshape(graph: fx.Graph, source: fx.Node, sizes: Sequence[Any], shape: Sequence[Any]) -> fx.Node:
    """Inserts and returns a reshape; if the source, or what it is a view of, has this shape already, returns that."""
    view = proofs.view_in_shape(source, tuple(shape))
    if view is not None:
        return view
    return rewriting.call(graph, aten.reshape.default, (source, list(sizes)), source, tuple(shape))
