"""FlexAttention: proofs of what its `score_mod` and its block mask show, in forward and backward.

Inductor shows `torch.nn.attention.flex_attention.flex_attention` as one call. It has graphs that work on single
numbers: a score, and the indices of batch, head, query and key. It also has tensors that say which blocks of keys each
block of queries sees:

    flex_attention(q, k, v, score_mod, (Sq, Skv, kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices, ..,
                   block, block, mask_mod), scale, options, ..) -> getitem 0: out, getitem 1: logarithms of sums
    flex_attention_backward(q, k, v, out, logarithms, grad_out, .., score_mod, its derivative, .., scale, options, ..)
        -> getitem 0, 1, 2: the gradients of q, k and v

`score_mod` changes a score, which is hidden where `mask_mod` is false, except in the full blocks. These forms are
proved:
* a `score_mod` that returns the score, or hides it by a condition on the indices of query and key, with or without a
  soft cap b * tanh(score / b);
* without a block mask, one block that holds everything;
* blocks that `create_block_mask` counts in the same graph, from the mask that `mask_mod` has (`flex_blocks`). Nothing
  is known of the blocks of a block mask that is an input of the graph;
* in the backward the same, if the derivative is 1 where the score is kept, and the logarithms have no gradient.

The logarithms have base 2 in every version of torch, except those of the backend FLASH.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch._higher_order_ops.flex_attention import flex_attention, flex_attention_backward

from ditron_inductor.passes.attention.affine import Affine
from ditron_inductor.passes.attention.flex_blocks import are_counted, are_transposed
from ditron_inductor.passes.attention.mask_values import TRUE, Truth
from ditron_inductor.passes.attention.masks import Masks, UnknownMask
from ditron_inductor.passes.attention.shown_masks import Shown, shown_by
from ditron_inductor.passes.graph.reasons import ReasonCode, Refused

aten = torch.ops.aten

FLEX_ATTENTION: object = flex_attention
FLEX_BACKWARD: object = flex_attention_backward
QUERY, KEY = Affine(0, (1, 0)), Affine(0, (0, 1))
SUMS, MOST = 1, 2
"""Outputs of the forward: logarithms of sums, and largest scores."""


@dataclass(frozen=True)
class Gradient:
    """The arguments of a backward that the forward does not have. of_sums: the gradient of the logarithms of sums."""

    out: fx.Node
    sums: fx.Node
    grad_out: Any
    of_sums: Any
    score_mod: object


@dataclass(frozen=True)
class FlexCall:
    """The arguments of a call, by name. gradient: the further arguments of a backward."""

    q: fx.Node
    k: fx.Node
    v: fx.Node
    score_mod: object
    block_mask: Sequence[Any]
    scale: object
    options: Any
    score_tensors: Sequence[Any] = ()
    mask_tensors: Sequence[Any] = ()
    gradient: Gradient | None = None


def flex_call(node: fx.Node) -> FlexCall:
    """Returns the arguments of a FlexAttention node."""
    args: tuple[Any, ...] = node.args
    if node.target is FLEX_ATTENTION:
        return FlexCall(*args)
    q, k, v, out, sums, grad_out, of_sums, score_mod, derivative, *others = args
    return replace(FlexCall(q, k, v, score_mod, *others), gradient=Gradient(out, sums, grad_out, of_sums, derivative))


def read_flex(node: fx.Node) -> tuple[Shown, float, float] | Refused:
    """Returns (what the rows of a call see, the scale, the soft cap or 0), or why that is not known."""
    call = flex_call(node)
    if not _outputs_are_known(node, call):
        return ReasonCode.FLEX_GRADIENT.at(node)
    shape = call.q.meta["val"].shape[2], call.k.meta["val"].shape[2]
    try:
        score = _read_score(node, call, shape)
    except UnknownMask:
        score = None
    if score is None or call.score_tensors or not isinstance(call.scale, (int, float)):
        return ReasonCode.FLEX_SCORE_MOD.at(node)
    shown, factor, softcap = score
    try:
        masked = _mask_truth(node, call.block_mask[-1], shape)
        seen = masked.both(shown)
        if seen is None or call.mask_tensors or not are_counted(call.block_mask, masked, shape):
            return ReasonCode.FLEX_BLOCK_MASK.at(node)
        if call.gradient is not None and not are_transposed(call.block_mask):
            return ReasonCode.FLEX_BLOCK_MASK.at(node)
        return shown_by(seen, shape, node), call.scale * factor, softcap
    except UnknownMask as unknown:
        return ReasonCode.FLEX_BLOCK_MASK.at(unknown.node if unknown.node.graph is node.graph else node)


def _outputs_are_known(node: fx.Node, call: FlexCall) -> bool:
    """Returns whether what is used of a call's outputs, and given to a backward, is what our ops have."""
    used = {user.args[1] if user.target is getitem else None for user in node.users if user.users}
    # The logarithms of this backend are natural ones.
    flash = isinstance(call.options, dict) and call.options.get("BACKEND") == "FLASH"
    gradient = call.gradient
    if gradient is None:
        return used <= {0, SUMS} and not (flash and SUMS in used)
    return not flash and isinstance(gradient.grad_out, fx.Node) and gradient.of_sums is None


Inner = tuple[list[fx.Node], fx.Node, Sequence[Any]]
"""(placeholders, result, further results) of a graph that works on single numbers."""


def _inner(node: fx.Node, attribute: object) -> Inner:
    module = node.graph.owning_module
    if not isinstance(attribute, fx.Node) or attribute.op != "get_attr" or module is None:
        raise UnknownMask(node)
    inner = module.get_submodule(str(attribute.target))
    if not isinstance(inner, fx.GraphModule):
        raise UnknownMask(node)
    given = list(inner.graph.find_nodes(op="placeholder"))
    (result,) = inner.graph.find_nodes(op="output")[0].args
    results = result if isinstance(result, (tuple, list)) else [result]
    if not results or not isinstance(results[0], fx.Node):
        raise UnknownMask(node)
    return given, results[0], results[1:]


Score = tuple[Truth, float, float]
"""(the truth where a score is kept, and hidden elsewhere; a factor of the score; its soft cap or 0)."""


def _read_score(node: fx.Node, call: FlexCall, shape: tuple[Any, Any]) -> Score | None:
    """Returns what `score_mod` does. In a backward its derivative has to be 1 where the score is kept."""
    given, result, others = _inner(node, call.score_mod)
    found = _kept(given, result, given[0], -math.inf, shape) if len(given) == 5 and not others else None
    if call.gradient is None or found is None:
        return found
    given, result, others = _inner(node, call.gradient.score_mod)
    if len(given) != 6 or any(other is not None for other in others) or found[2] != 0.0:
        return None
    gradient = given[5]
    # The gradient of a hidden score is 0 already.
    return found if result is gradient or _kept(given, result, gradient, 0.0, shape) == found else None


def _kept(given: list[fx.Node], result: fx.Node, score: fx.Node, hidden: float, shape: tuple[Any, Any]) -> Score | None:
    """Returns what is done to a score, or to its gradient. Elsewhere the score is `hidden`."""
    if result.target is not aten.where.self:
        kept = _softcap(result, score)
        return None if kept is None else (TRUE, *kept)
    condition, yes, no = result.args
    truth = Masks({given[3]: QUERY, given[4]: KEY}, shape).operand(result, condition)
    if not isinstance(truth, Truth):
        return None
    for first, other, seen in ((yes, no, truth), (no, yes, truth.negated())):
        number = other.args[1] if isinstance(other, fx.Node) and other.target is aten.full.default else other
        kept = _softcap(first, score) if number == hidden else None
        if kept is not None:
            return seen, *kept
    return None


def _softcap(node: object, score: fx.Node) -> tuple[float, float] | None:
    """Returns (factor, soft cap): (1, 0) for the score itself, and (a b, b) for b tanh(a score)."""
    if node is score:
        return 1.0, 0.0
    outside, capped = _factor(node)
    if not isinstance(capped, fx.Node) or capped.target is not aten.tanh.default:
        return None
    inside, source = _factor(capped.args[0])
    return (inside * outside, outside) if source is score and inside > 0 and outside > 0 else None


def _factor(node: object) -> tuple[float, object]:
    """Returns (a, x) for a node that is a * x or x / (1 / a), and (1, node) for any other."""
    if isinstance(node, fx.Node) and node.target in (aten.mul.Tensor, aten.div.Tensor):
        source, number = node.args
        if isinstance(number, (int, float)) and number > 0:
            return float(number) if node.target is aten.mul.Tensor else 1.0 / number, source
    return 1.0, node


def _mask_truth(node: fx.Node, attribute: object, shape: tuple[Any, Any]) -> Truth:
    given, result, others = _inner(node, attribute)
    truth = Masks({given[2]: QUERY, given[3]: KEY}, shape).value(result) if len(given) == 4 and not others else None
    if not isinstance(truth, Truth):
        raise UnknownMask(node)
    return truth
