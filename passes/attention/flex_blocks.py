"""The block masks of FlexAttention, proved to have the blocks that the mask shows, if the graph computes them.

    mask [.., Sq, Skv] -> reshape, permute -> sums of blocks -> > 0, < block, == block -> sum: numbers, sort: indices

`create_block_mask` computes them so. For each block of queries it lists the blocks of keys in which the mask is neither
all false nor all true, and in a second list the blocks in which it is all true. A backward has the same blocks with
queries and keys exchanged. They are computed from numbers and indices: 1 is written where an index is below its number,
and the result is transposed and sorted.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import getitem
from typing import Any

import torch
from torch import fx

from ditron_inductor.passes.attention.affine import Affine
from ditron_inductor.passes.attention.mask_values import Truth
from ditron_inductor.passes.attention.masks import Masks
from ditron_inductor.passes.graph import proofs

aten = torch.ops.aten
prims = torch.ops.prims

FIRST = 2
"""The place in a block mask behind the lengths. Numbers and indices of blocks follow, then those of full blocks, and
then both with queries and keys exchanged.
"""
EXCHANGED = [0, 1, 3, 2]


def are_counted(block_mask: Sequence[Any], masked: Truth, shape: tuple[Any, Any]) -> bool:
    """Whether the blocks are those in which `masked` holds somewhere, full ones listed apart. Raises UnknownMask."""
    numbers, indices, full_numbers, full_indices = block_mask[FIRST : FIRST + 4]
    rows, columns = block_mask[-3:-1]
    if full_numbers is None and full_indices is None and proofs.is_full(numbers, 1) and proofs.is_full(indices, 0):
        whole = all(value.shape[2] == 1 for value in (numbers.meta["val"], indices.meta["val"]))
        return whole and proofs.known(shape[0] <= rows) and proofs.known(shape[1] <= columns)
    some, every = _ordered(numbers, indices), _ordered(full_numbers, full_indices)
    if some is None or every is None:
        return False
    if some.target is not aten.bitwise_and.Tensor or every.target is not aten.eq.Scalar:
        return False
    counts = every.args[0]
    bounds = {node.target: node.args for node in some.all_input_nodes}
    size = rows * columns
    if bounds != {aten.gt.Scalar: (counts, 0), aten.lt.Scalar: (counts, size)} or every.args[1] != size:
        return False
    whole_mask = _in_blocks(counts, rows, columns)
    if whole_mask is None or not proofs.same_shape(tuple(whole_mask.meta["val"].shape[-2:]), shape):
        return False
    found = Masks().value(whole_mask)
    if not isinstance(found, Truth) or any(term.depends_on((0, 1)) for term in found.terms):
        return False
    terms = frozenset(term.narrowed(2) for term in found.terms)
    return Truth(terms, found.every) == masked


def are_transposed(block_mask: Sequence[Any]) -> bool:
    """Returns whether the blocks of keys are those of queries with the two exchanged. Raises UnknownMask."""
    given = block_mask[FIRST : FIRST + 8]
    pairs = [tuple(given[place : place + 2]) for place in range(0, 8, 2)]
    for blocks, exchanged in zip(pairs[:2], pairs[2:], strict=True):
        if blocks == exchanged == (None, None):
            continue
        if not _is_transposed(*blocks, *exchanged):
            return False
    return True


def _is_transposed(numbers: object, indices: object, exchanged_numbers: object, exchanged_indices: object) -> bool:
    permuted = _sorted(exchanged_numbers, exchanged_indices)
    if permuted is None or permuted.target is not aten.permute.default or proofs.permutation(permuted) != EXCHANGED:
        return False
    part = _uncast(permuted.args[0])
    piece = None if part is None or part.target is not aten.slice.Tensor else proofs.piece(part)
    if piece is None or piece.dim != 3 or piece.start != 0 or piece.source.target is not aten.index_put.default:
        return False
    put = proofs.arguments(piece.source)
    zeros, places, ones = put["self"], put["indices"], put["values"]
    whole, found = proofs.tensor(zeros), proofs.tensor(indices)
    filled = proofs.is_full(zeros, 0) and proofs.is_full(ones, 1)
    if whole is None or found is None or put["accumulate"] or not filled:
        return False
    shape, count = tuple(found.shape), found.shape[-1]
    if len(shape) != 4 or not proofs.same_shape(tuple(whole.shape), (*shape[:3], count + 1)) or len(places) != 4:
        return False
    return (
        proofs.known_equal(piece.length, count)
        and all(_is_index(place, dim, shape) for dim, place in enumerate(places[:3]))
        and _is_wanted(places[3], numbers, indices, count)
    )


def _is_index(node: object, dim: int, shape: tuple[Any, ...]) -> bool:
    """Returns whether a tensor holds the index of a dimension, as broadcast to this shape. Raises UnknownMask."""
    value = proofs.tensor(node)
    if not isinstance(node, fx.Node) or value is None:
        return False
    found = Masks().value(node)
    own = Affine(0, tuple(int(place == dim) for place in range(len(shape)))).cleaned(shape)
    return isinstance(found, Affine) and found.widened(len(shape) - value.ndim) == own


def _is_wanted(node: object, numbers: object, indices: object, count: Any) -> bool:
    """Whether a tensor holds the indices where their place is below the number of them, else what is behind all."""
    if not isinstance(node, fx.Node) or node.target is not aten.where.self:
        return False
    below, chosen, behind = node.args
    if chosen is not indices or not proofs.is_full(behind, count) or not isinstance(below, fx.Node):
        return False
    if below.target is not aten.lt.Tensor:
        return False
    place, bound = below.args
    wide = isinstance(bound, fx.Node) and bound.target is aten.unsqueeze.default and bound.args[1] in (3, -1)
    return wide and bound.all_input_nodes == [numbers] and _is_index(place, 0, (count,))  # type: ignore[union-attr]


def _ordered(numbers: object, indices: object) -> fx.Node | None:
    """Returns the truths of the blocks: `numbers` is their sum, and `indices` their order with the true ones first."""
    truths = _uncast(_sorted(numbers, indices))
    value = proofs.tensor(truths)
    return truths if value is not None and value.dtype == torch.bool else None


def _sorted(numbers: object, indices: object) -> fx.Node | None:
    """Returns the tensor whose sum is `numbers` and whose descending order is `indices`; None if there is none."""
    summed, ordered = _uncast(numbers), _uncast(indices)
    if summed is None or ordered is None or summed.target is not aten.sum.dim_IntList or ordered.target is not getitem:
        return None
    source, dims, *kept = summed.args
    sort, place = ordered.args
    if dims not in ([-1], [3]) or any(kept) or place != 1:
        return None
    if not isinstance(sort, fx.Node) or sort.target is not aten.sort.stable:
        return None
    bound = proofs.arguments(sort)
    if bound["self"] is not source or not bound["stable"] or not bound["descending"] or bound["dim"] not in (-1, 3):
        return None
    return source if isinstance(source, fx.Node) else None


def _in_blocks(counts: object, rows: int, columns: int) -> fx.Node | None:
    """Returns the mask [.., Sq, Skv] whose true elements `counts` counts, block by block."""
    if not isinstance(counts, fx.Node) or counts.target is not aten.sum.dim_IntList:
        return None
    permuted, dims, *kept = counts.args
    if dims not in ([-2, -1], [4, 5]) or any(kept) or not isinstance(permuted, fx.Node):
        return None
    if permuted.target is not aten.permute.default or proofs.permutation(permuted) != [0, 1, 2, 4, 3, 5]:
        return None
    divided = permuted.args[0]
    if not isinstance(divided, fx.Node) or divided.target not in proofs.ORDER_KEEPING:
        return None
    whole = divided.args[0]
    value, parts = proofs.tensor(whole), proofs.tensor(divided)
    if not isinstance(whole, fx.Node) or value is None or parts is None or value.ndim != 4 or parts.ndim != 6:
        return None
    wanted = (*value.shape[:2], value.shape[2] // rows, rows, value.shape[3] // columns, columns)
    exact = proofs.known(value.shape[2] % rows == 0) and proofs.known(value.shape[3] % columns == 0)
    if not exact or value.dtype != torch.bool or not proofs.same_shape(tuple(parts.shape), wanted):
        return None
    return whole


def _uncast(node: object) -> fx.Node | None:
    """Returns the source of a chain of copies and casts between integers, whose numbers fit into all of the dtypes."""
    while isinstance(node, fx.Node) and node.target in (prims.convert_element_type.default, aten.clone.default):
        value = proofs.tensor(node)
        if value is None or value.dtype not in (torch.int8, torch.int32, torch.int64):
            return None
        node = node.args[0]
    return node if isinstance(node, fx.Node) else None
