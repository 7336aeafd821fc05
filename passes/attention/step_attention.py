"""Attention of one query for each sequence, as one of torch's attention ops computes it.

query [B, Hq, 1, D], keys and values [B, Hkv, S, D], perhaps repeated for the query heads that share them, mask
    -> op -> getitem 0 = result [B, Hq, 1, D]
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import getitem

import torch
from torch import fx

from ditron_inductor.passes.attention.attention_calls import unrepeated
from ditron_inductor.passes.attention.attention_parts import SDPA, PartAlgebra, SoftmaxCall
from ditron_inductor.passes.attention.softmax_algebra import Unknown, static_shape
from ditron_inductor.passes.graph import proofs

aten = torch.ops.aten

WHOLE_NUMBERS = (torch.int32, torch.int64)


@dataclass(frozen=True)
class TokenChoice:
    """Which tokens are attended to: the first lengths + more, or those for which `shown` is true, or, if not `kept`,
    false; all if both are None. bias: what is added to the scores, or None.
    """

    lengths: fx.Node | None = None
    more: int = 0
    shown: fx.Node | None = None
    kept: bool = True
    bias: fx.Node | None = None

    @property
    def mask(self) -> str:
        """One of the MASKS of a `CachedAttention`."""
        if self.bias is not None:
            return "bias"
        return "given" if self.shown is not None else "all" if self.lengths is None else "lengths"


@dataclass(frozen=True)
class StepAttention:
    """An attention of a query [B, Hq, 1, D] to keys and values [B, Hkv, S, D]. result: what it computes, in the order
    of the query. readers: the nodes that read keys and values, through views and copies. sizes: B, Hkv, Hq / Hkv, 1,
    S, D. sinks: a vector [Hq] of one more score for each head, or None.
    """

    result: fx.Node
    readers: tuple[fx.Node, ...]
    query: fx.Node
    keys: fx.Node
    values: fx.Node
    choice: TokenChoice
    scale: float
    sizes: tuple[int, int, int, int, int, int]
    sinks: fx.Node | None = None


def read_step(node: fx.Node) -> StepAttention | None:
    """Returns the attention that a node is, if it is one of torch's ops of which nothing but the result is used."""
    users = list(node.users)
    if node.target not in SDPA or [(user.target, user.args[1]) for user in users] != [(getitem, 0)]:
        return None
    try:
        call = SoftmaxCall.read(node)
        keys, values = (unrepeated(cache)[0] for cache in (call.key, call.value))
        choice = _read_choice(call)
        if choice is None or static_shape(keys) != static_shape(values):
            return None
    except Unknown:
        return None
    B, _, _, L, S, D = call.sizes
    heads = static_shape(keys)[1]
    sizes = (B, heads, static_shape(call.query)[1] // heads, L, S, D)
    return StepAttention(users[0], (node,), call.query, keys, values, choice, call.scale, sizes)


def _read_choice(call: SoftmaxCall) -> TokenChoice | None:
    """Returns which tokens a call attends to; None if it is not known."""
    if call.added is None:
        return TokenChoice()
    mask = call.mask()
    if mask is None:
        return None
    B, _, _, _, S, _ = call.sizes
    device, attention = proofs.fake(call.query).device, PartAlgebra()
    batch, heads, group, rows, tokens, _ = attention.atoms.new(call.sizes)
    try:
        node, axes, more = attention.lengths_of(mask, (batch, heads + group, rows, tokens), tokens[0])
        used = sum(attention.atoms.of(axes), ())
        value = proofs.fake(node)
        known = value.dtype in WHOLE_NUMBERS and value.device == device
        if used in ((), attention.atoms.flat(batch)) and known and more in (0, 1):
            return TokenChoice(node, more)
    except Unknown:
        pass
    # Any mask that is the same for all heads. Views that repeat it come last, and nothing else moves its elements.
    views = list(mask.views)
    while views and views[0].target is aten.expand.default:
        views.pop(0)
    shape = static_shape(views[0] if views else mask.condition)
    shape = (1,) * (4 - len(shape)) + shape
    same = shape in ((1, 1, 1, S), (B, 1, 1, S)) and all(view.target in proofs.ORDER_KEEPING for view in views)
    here = proofs.fake(mask.condition).device == device
    return TokenChoice(shown=mask.condition, kept=mask.kept) if same and here else None
