"""Reads the gather that brings a paged cache in the order of its tokens.

A paged cache is a tensor of blocks, each with the same number of tokens. A table says which blocks a sequence has:

    blocks [blocks, P, Hkv, D] -> index by table [B, N] = [B, N, P, Hkv, D] -> views = keys [B, Hkv, N P, D]

The dimensions of blocks may be in another order, or joined, and the table may be a vector of as many elements. A block
of a single token is a cache that is gathered token by token. The roles of the dimensions are proved by their atoms (see
`softmax_algebra`): the sequences and then the blocks of one are those of the table, in order, and the tokens of a block
follow each other behind them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import fx

from ditron_inductor.passes.attention.roots import VIEWS, Moved, chain_to, moved
from ditron_inductor.passes.attention.softmax_algebra import Atoms, Unknown, static_shape
from ditron_inductor.passes.attention.step_attention import WHOLE_NUMBERS
from ditron_inductor.passes.graph import proofs

aten = torch.ops.aten

PARTS = (VIEWS - {aten.clone.default}) | {aten.slice.Tensor, aten.select.int}


@dataclass(frozen=True)
class Blocks:
    """A paged cache. view: from `cache` to [blocks, Hkv, P, D], without a copy. shape: the table's sizes [B, N]."""

    cache: fx.Node
    view: Moved
    table: fx.Node
    shape: tuple[int, int]


def read_blocks(keys: fx.Node) -> Blocks | None:
    """Returns the blocks from which keys, or values, [B, Hkv, S, D] are gathered; None if they are not."""
    atoms = Atoms()
    try:
        chain = chain_to(atoms, keys)
        gathered, wanted = chain[0], chain[-1].axes
        taken = _taken(gathered.node)
        if taken is None or len(wanted) != 4:
            return None
        cache, table = taken
        (count, *_), dims = static_shape(cache), len(static_shape(table))
    except Unknown:
        return None
    if proofs.fake(cache).dtype != proofs.fake(keys).dtype:
        return None
    batch, heads, tokens, dim = atoms.of(wanted)
    found, inner = sum(atoms.of(gathered.axes[:dims]), ()), gathered.axes[dims:]
    columns = tuple(takewhile(lambda atom: atom in found, tokens))
    (block,) = atoms.new((count,))
    view = moved(atoms, (block, *inner), (block, heads, tokens[len(columns) :], dim))
    if batch + columns != found or view is None or not _is_view(view, proofs.fake(cache)):
        return None
    sizes = (math.prod(map(atoms.size, part)) for part in (batch, columns))
    return Blocks(cache, view, table, (next(sizes), next(sizes)))


def _taken(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Returns (a tensor, a table) if a node is the tensor indexed by the table in its first dimension."""
    if node.target is not aten.index.Tensor:
        return None
    cache, indices = node.args
    assert isinstance(cache, fx.Node) and isinstance(indices, (list, tuple))
    table = indices[0] if all(index is None for index in indices[1:]) else None
    value = proofs.tensor(table)
    right = value is not None and value.dtype in WHOLE_NUMBERS and value.device == proofs.fake(cache).device
    return (cache, table) if isinstance(table, fx.Node) and right and _is_in_memory(cache) else None


def _is_in_memory(node: fx.Node) -> bool:
    """Returns whether a tensor is an input of the graph, written or not, or a part of one. The compiler would compute
    only those blocks of any other tensor that are gathered.
    """
    while node.target in PARTS or node.target is aten.index_put.default:
        node = proofs.operand(node)
    return node.op in ("placeholder", "get_attr")


def _is_view(view: Moved, cache: torch.Tensor) -> bool:
    """Returns whether `view` copies nothing of a cache, and leaves the elements of its last dimension together."""
    divides = view.divided != tuple(cache.shape)
    permuted = [view.divided[dim] for dim in view.order]
    joins = [size for size in permuted if size > 1] != [size for size in view.shape if size > 1]
    in_rows = view.order[-1] == len(view.order) - 1 and cache.stride(-1) == 1
    return in_rows and not joins and (cache.is_contiguous() or not divides)
