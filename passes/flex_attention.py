"""FlexAttention: what its `score_mod` and its block mask show, where that can be proved.

Inductor shows `torch.nn.attention.flex_attention.flex_attention` as one call, with two graphs of numbers, of a score
and the numbers of batch, head, query and key, and with tensors that say which blocks of keys each block of queries
sees:

    flex_attention(q, k, v, score_mod, (Sq, Skv, kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices, ..,
                   block, block, mask_mod), scale, ..) -> getitem 0: out

A score is what `score_mod` makes of it, and is hidden where `mask_mod` is false, except in the full blocks. Proved are
* a `score_mod` that returns the score, or hides it where something is not true of the numbers of query and key;
* without a block mask, one block that holds everything;
* blocks that `create_block_mask` counts in the same graph, from the mask that `mask_mod` has. A block mask that is an
  input of the graph holds blocks of which nothing is known.
"""

from __future__ import annotations

import math
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch._higher_order_ops.flex_attention import flex_attention

from ditron_inductor.passes import proofs
from ditron_inductor.passes.affine import Affine
from ditron_inductor.passes.mask_values import TRUE, Truth
from ditron_inductor.passes.masks import Masks, Unknown
from ditron_inductor.passes.reasons import ReasonCode, Refused
from ditron_inductor.passes.shown_masks import Shown, shown_by

aten = torch.ops.aten
prims = torch.ops.prims

FLEX_ATTENTION: object = flex_attention
QUERY, KEY = Affine(0, (1, 0)), Affine(0, (0, 1))
BLOCKS = 4
"""Tensors that say which blocks a forward looks at, behind the two lengths."""


def read_flex(node: fx.Node) -> tuple[Shown, float] | Refused:
    """(what the rows of a call see, the scale), or why that is not known."""
    q, k, _, score_mod, block_mask, scale, _, *buffers = node.args
    assert isinstance(q, fx.Node) and isinstance(k, fx.Node) and isinstance(block_mask, (tuple, list))
    if any(user.target is not getitem or (user.args[1] != 0 and user.users) for user in node.users):
        return ReasonCode.FLEX_GRADIENT.at(node)
    shape = q.meta["val"].shape[2], k.meta["val"].shape[2]
    try:
        scores = _score_truth(node, score_mod, shape)
    except Unknown:
        scores = None
    if scores is None or any(buffers[:1]) or not isinstance(scale, (int, float)):
        return ReasonCode.FLEX_SCORE_MOD.at(node)
    try:
        masked = _mask_truth(node, block_mask[-1], shape)
        seen = masked.both(scores)
        if seen is None or any(buffers[1:]) or not _counted(block_mask, masked, shape):
            return ReasonCode.FLEX_BLOCK_MASK.at(node)
        return shown_by(seen, shape, node), float(scale)
    except Unknown as unknown:
        return ReasonCode.FLEX_BLOCK_MASK.at(unknown.node if unknown.node.graph is node.graph else node)


def _inner(node: fx.Node, attribute: object, shape: tuple[Any, Any]) -> tuple[Masks, list[fx.Node], fx.Node]:
    """(values, placeholders, result) of one of the graphs of numbers, whose last two arguments are query and key, of so
    many.
    """
    module = node.graph.owning_module
    if not isinstance(attribute, fx.Node) or attribute.op != "get_attr" or module is None:
        raise Unknown(node)
    inner = module.get_submodule(str(attribute.target))
    if not isinstance(inner, fx.GraphModule):
        raise Unknown(node)
    given = list(inner.graph.find_nodes(op="placeholder"))
    (result,) = inner.graph.find_nodes(op="output")[0].args
    if isinstance(result, (tuple, list)) and len(result) == 1:
        (result,) = result
    if not isinstance(result, fx.Node):
        raise Unknown(node)
    return Masks({given[-2]: QUERY, given[-1]: KEY}, shape), given, result


def _score_truth(node: fx.Node, attribute: object, shape: tuple[Any, Any]) -> Truth | None:
    """Where a score is kept as it is; elsewhere it is hidden."""
    masks, given, result = _inner(node, attribute, shape)
    if len(given) != 5:
        return None
    score = given[0]
    if result is score:
        return TRUE
    if result.target is not aten.where.self:
        return None
    condition, yes, no = result.args
    truth = masks.operand(result, condition)
    if not isinstance(truth, Truth) or score not in (yes, no):
        return None
    other = no if yes is score else yes
    hidden = other.args[1] if isinstance(other, fx.Node) and other.target is aten.full.default else other
    if hidden != -math.inf:
        return None
    return truth if yes is score else truth.negated()


def _mask_truth(node: fx.Node, attribute: object, shape: tuple[Any, Any]) -> Truth:
    masks, given, result = _inner(node, attribute, shape)
    truth = masks.value(result) if len(given) == 4 else None
    if not isinstance(truth, Truth):
        raise Unknown(node)
    return truth


def _counted(block_mask: Any, masked: Truth, shape: tuple[Any, Any]) -> bool:
    """Whether the blocks are those in which `masked` holds somewhere, full ones apart. Raises Unknown."""
    numbers, indices, full_numbers, full_indices = block_mask[2 : 2 + BLOCKS]
    rows, columns = block_mask[-3:-1]
    if full_numbers is None and full_indices is None and _is_full(numbers, 1) and _is_full(indices, 0):
        whole = all(value.shape[2] == 1 for value in (numbers.meta["val"], indices.meta["val"]))
        return whole and proofs.known(shape[0] <= rows) and proofs.known(shape[1] <= columns)
    some, every = _ordered(numbers, indices), _ordered(full_numbers, full_indices)
    if some is None or every is None:
        return False
    if some.target is not aten.bitwise_and.Tensor or every.target is not aten.eq.Scalar:
        return False
    counts = every.args[0]
    bounds = {one.target: one.args for one in some.all_input_nodes}
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


def _ordered(numbers: object, indices: object) -> fx.Node | None:
    """The truths of the blocks, whose sum is `numbers`, and whose order, those that hold first, is `indices`."""
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
    truths = _uncast(source)
    value = proofs.tensor(truths)
    return truths if value is not None and value.dtype == torch.bool else None


def _in_blocks(counts: object, rows: int, columns: int) -> fx.Node | None:
    """The mask [.., Sq, Skv] whose true elements `counts` counts, block by block."""
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
    """What a chain of casts between integers, and copies, holds: numbers that fit into all of them."""
    while isinstance(node, fx.Node) and node.target in (prims.convert_element_type.default, aten.clone.default):
        value = proofs.tensor(node)
        if value is None or value.dtype not in (torch.int8, torch.int32, torch.int64):
            return None
        node = node.args[0]
    return node if isinstance(node, fx.Node) else None


def _is_full(node: object, number: int) -> bool:
    return isinstance(node, fx.Node) and node.target is aten.full.default and node.args[1] in (number,)
