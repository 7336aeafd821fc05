"""The tensor that another tensor is a view of, with the atoms of every dimension on the way (see `softmax_algebra`)."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch
from torch import fx

from ditron_inductor.passes.attention.softmax_algebra import Atoms, Axes, Unknown, static_shape
from ditron_inductor.passes.graph import proofs, rewriting

aten = torch.ops.aten

MULTIPLICATIONS = (aten.mul.Tensor, aten.mul.Scalar)
DIVISIONS = (aten.div.Tensor, aten.div.Scalar)
VIEWS = proofs.ORDER_KEEPING | {aten.permute.default, aten.transpose.int, aten.expand.default}


@dataclass(frozen=True)
class Root:
    """A tensor of the graph, and its dimensions' atoms. factor: the product of the numbers on the way to it."""

    node: fx.Node
    axes: Axes
    factor: float = 1.0


def chain_to(atoms: Atoms, node: fx.Node, ends: Collection[fx.Node] = (), *, scaled: bool = False) -> tuple[Root, ...]:
    """Returns (the tensor that `node` is a view of, .., `node`), not beyond `ends`. Casts that keep every value count
    as views. With `ends`, repetitions are followed too; if `scaled`, so are multiples. Raises Unknown.
    """
    nodes = [node]
    while nodes[-1] not in ends and (
        nodes[-1].target in VIEWS
        or (ends and nodes[-1].target is aten.repeat.default)
        or widens(nodes[-1])
        or (scaled and _factor(nodes[-1]) is not None)
    ):
        nodes.append(proofs.operand(nodes[-1]))
    found = [Root(nodes[-1], atoms.new(static_shape(nodes[-1])))]
    for view in reversed(nodes[:-1]):
        axes, factor = found[-1].axes, found[-1].factor
        if view.target is aten.expand.default:
            shape = static_shape(view)
            padded = ((),) * (len(shape) - len(axes)) + axes
            axes = tuple(axis or new for axis, new in zip(padded, atoms.new(shape), strict=True))
        elif view.target is aten.repeat.default:
            times = proofs.arguments(view)["repeats"]
            padded = ((),) * (len(times) - len(axes)) + axes
            axes = tuple(new + axis for axis, new in zip(padded, atoms.new(times), strict=True))
        elif view.target in VIEWS:
            axes = viewed(atoms, view, axes)
        found.append(Root(view, axes, factor * (_factor(view) or 1.0)))
    return tuple(found)


def _factor(node: fx.Node) -> float | None:
    """Returns the positive factor by which a node multiplies a tensor; None for other nodes."""
    if node.target not in (*MULTIPLICATIONS, *DIVISIONS):
        return None
    number = node.args[1]
    if not isinstance(number, (int, float)) or not 0.0 < number < math.inf:
        return None
    return float(number) if node.target in MULTIPLICATIONS else 1.0 / number


def viewed(atoms: Atoms, view: fx.Node, axes: Axes) -> Axes:
    """The axes behind a view other than `expand`. Raises Unknown."""
    if view.target not in proofs.ORDER_KEEPING:
        return tuple(axes[dim] for dim in proofs.permutation(view))
    found = atoms.reshaped(axes, static_shape(view))
    if found is None:
        raise Unknown(view)
    return found


def widens(node: fx.Node) -> bool:
    """Returns whether a node is a cast that keeps every value."""
    if node.target not in proofs.CASTS or node.target is aten.view.dtype:
        return False
    source, result = proofs.tensor(node.args[0]), proofs.tensor(node)
    if source is None or result is None:
        return False
    both = source.dtype, result.dtype
    whole = (torch.int32, torch.int64)
    return both in ((torch.bfloat16, torch.float32), (torch.float16, torch.float32)) or both == whole


@dataclass(frozen=True)
class Moved:
    """Views that rearrange a tensor: it is `divided` into sizes, permuted in this order, and joined to this shape."""

    divided: tuple[int, ...]
    order: tuple[int, ...]
    shape: tuple[int, ...]

    def insert(self, graph: fx.Graph, node: fx.Node) -> fx.Node:
        """Inserts as few of these views as are needed, and returns the last one, or `node` itself if none is needed."""
        if tuple(node.meta["val"].shape) != self.divided:
            node = rewriting.computed(graph, aten.reshape.default, (node, list(self.divided)), node)
        if self.order != tuple(range(len(self.order))):
            node = rewriting.computed(graph, aten.permute.default, (node, list(self.order)), node)
        if tuple(node.meta["val"].shape) != self.shape:
            node = rewriting.computed(graph, aten.reshape.default, (node, list(self.shape)), node)
        return node


def moved(atoms: Atoms, have: Axes, wanted: Axes) -> Moved | None:
    """Returns the views from dimensions of these atoms to another arrangement of them; None if the atoms differ."""
    have, wanted = atoms.of(have), atoms.of(wanted)
    places = {atom: (dim, index) for dim, axis in enumerate(wanted) for index, atom in enumerate(axis)}
    given = [atom for axis in have for atom in axis]
    if len(given) != len(places) or set(given) != set(places) or sum(map(len, wanted)) != len(places):
        return None
    if sorted(have) == sorted(wanted):
        # Dimensions of one element keep their order among each other.
        left = list(range(len(have)))
        order = [left.pop(next(place for place, dim in enumerate(left) if have[dim] == axis)) for axis in wanted]
        return Moved(_sizes(atoms, have), tuple(order), _sizes(atoms, wanted))
    runs: list[list[int]] = []
    for axis in have:
        for index, atom in enumerate(axis):
            dim, place = places[atom]
            if index and places[axis[index - 1]] == (dim, place - 1):
                runs[-1].append(atom)
            else:
                runs.append([atom])
    order = sorted(range(len(runs)), key=lambda index: places[runs[index][0]])
    return Moved(_sizes(atoms, runs), tuple(order), _sizes(atoms, wanted))


def _sizes(atoms: Atoms, axes: Iterable[Iterable[int]]) -> tuple[int, ...]:
    return tuple(math.prod(map(atoms.size, axis)) for axis in axes)
