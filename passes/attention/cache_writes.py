"""Reads how a decode step writes its new keys and values into a static cache.

    cache [B, Hkv, S, D] -> index_put([None, None, position [1]], new [B, Hkv, 1, D]) -> copy_ into the cache

Sequences may have positions of their own, and a cache may be [B, S, Hkv, D], of which attention reads a transposition:

    cache [B, S, Hkv, D] -> index_put([arange(B), position [B]], new [B, Hkv, D]) -> copy_ into the cache
                                                                                  -> permute = keys [B, Hkv, S, D]

No two sequences write to one place, because each writes to its own part of the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import dropwhile
from typing import Any

import torch
from torch import fx

from ditron_inductor.passes.attention.attention_parts import first_of_range
from ditron_inductor.passes.attention.roots import VIEWS, Root, chain_to
from ditron_inductor.passes.attention.softmax_algebra import Atoms, Unknown
from ditron_inductor.passes.attention.step_attention import StepAttention
from ditron_inductor.passes.graph import proofs, rewriting

aten = torch.ops.aten

HEADS_FIRST, TOKENS_FIRST = (0, 1, 2, 3), (0, 2, 1, 3)
"""Where the dimensions of keys [B, Hkv, S, D] are in a cache."""


@dataclass(frozen=True)
class CacheWrite:
    """A cache in which `new`, of B Hkv D elements in this order, is put at `position`, of 1 or B elements, and which
    `copy` then makes the caller's. order: one of HEADS_FIRST and TOKENS_FIRST.
    """

    cache: fx.Node
    position: fx.Node
    new: fx.Node
    copy: fx.Node
    order: tuple[int, ...]

    def insert_view(self, graph: fx.Graph) -> fx.Node:
        """Inserts the view [B, Hkv, S, D] of the cache, if it is none itself, and returns it."""
        if self.order == HEADS_FIRST:
            return self.cache
        return rewriting.computed(graph, aten.permute.default, (self.cache, list(self.order)), self.cache)


def whole(node: fx.Node) -> Root | None:
    """Returns the vector of which a tensor is a view, or a wider copy, with as many elements in the same order; or one
    number of which all elements are copies.
    """
    atoms = Atoms()
    try:
        chain = chain_to(atoms, node)
    except Unknown:
        return None
    root, view = (sum(atoms.of(one.axes), ()) for one in (chain[0], chain[-1]))
    return chain[0] if root in ((), view) else None


def read_write(keys: fx.Node, attention: StepAttention) -> CacheWrite | None:
    """Returns how a cache is written before an attention reads it as `keys`, or as values; None if its call cannot do
    that.
    """
    put, order = keys, HEADS_FIRST
    if put.target in proofs.TRANSPOSES and tuple(proofs.permutation(put)) == TOKENS_FIRST:
        put, order = proofs.operand(put), TOKENS_FIRST
    if put.target is not aten.index_put.default:
        return None
    bound = proofs.arguments(put)
    cache, new = bound["self"], bound["values"]
    value, stored = proofs.tensor(new), proofs.tensor(cache)
    position = _position(bound["indices"], order, attention)
    if bound["accumulate"] or position is None or value is None or stored is None:
        return None
    B, heads, *_, S, D = attention.sizes
    sizes = [(B, heads, S, D)[dim] for dim in order]
    wanted = [1 if dim == 2 else size for dim, size in zip(order, sizes, strict=True)]
    if bound["indices"][0] is not None:
        # Indices that stand apart come first in what is put.
        wanted = [*proofs.fake(position).shape, heads, D]
    if not proofs.same_shape(tuple(stored.shape), tuple(sizes)):
        return None
    # What is put may lack the first dimensions if they have one element.
    if not proofs.same_shape(_behind_ones(value.shape), _behind_ones(wanted)):
        return None
    copies = [user for user in put.users if user.target is aten.copy_.default]
    if len(copies) != 1 or cache.op != "placeholder" or value.dtype != stored.dtype or stored.stride(-1) != 1:
        return None
    (copy,) = copies
    ours = copy.args[:2] == (cache, put) and not copy.users and set(cache.users) == {put, copy}
    others = [user for user in put.users if user is not copy and not _leads_to(user, attention.readers)]
    if not ours or others or set(proofs.writers(cache)) != {copy}:
        return None
    return CacheWrite(cache, position, new, copy, order)


def _behind_ones(shape: Sequence[Any]) -> tuple[Any, ...]:
    """Returns the sizes of dimensions without the first ones that have one element."""
    return tuple(dropwhile(lambda size: proofs.known_equal(size, 1), shape))


def _position(indices: list[fx.Node | None], order: tuple[int, ...], attention: StepAttention) -> fx.Node | None:
    """Returns the positions at which these indices write, in a cache of this order; None for other places."""
    place, B = order.index(2), attention.sizes[0]
    if len(indices) != place + 1 or any(index is not None for index in indices[1:place]):
        return None
    sequences, position = indices[0], indices[place]
    value = None if position is None else proofs.tensor(position)
    if value is None or value.dtype != torch.int64 or value.device != proofs.fake(attention.query).device:
        return None
    if sequences is None:
        return position if proofs.same_shape(tuple(value.shape), (1,)) else None
    places = proofs.fake(sequences)
    alike = any(proofs.same_shape(tuple(value.shape), shape) for shape in ((B,), (B, 1)))
    return position if alike and places.shape == value.shape and _counts(sequences, B) else None


def _counts(node: fx.Node, count: int) -> bool:
    """Returns whether a tensor is 0, 1, .., count - 1."""
    root = whole(node)
    if root is None or first_of_range(root.node) != 0:
        return False
    return proofs.same_shape(tuple(proofs.fake(root.node).shape), (count,))


def _leads_to(node: fx.Node, readers: tuple[fx.Node, ...]) -> bool:
    """Returns whether a node is one of the readers, or a view or copy that only they read."""
    if node in readers:
        return True
    return node.target in VIEWS and bool(node.users) and all(_leads_to(user, readers) for user in node.users)
