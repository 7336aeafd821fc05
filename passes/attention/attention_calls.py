"""This module reads attention: aten's calls of it, and the views between them and the gathers or scatters beside them.

Inductor shows scaled dot-product attention as one call of a kernel's own op, `_scaled_dot_product_*_attention`, and its
backward as another call. A few views stand between the keys [B, H, S, D] and the tensor that was gathered along the
sequence: heads are split off, dimensions are moved, keys and values are taken apart. `follow` finds the gathered
dimension behind these views, and `replay` applies the views to one rank's part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from ditron_inductor.passes.attention.flex_attention import FLEX_ATTENTION, FLEX_BACKWARD, flex_call, read_flex
from ditron_inductor.passes.attention.masks import UnknownMask
from ditron_inductor.passes.attention.roots import Moved
from ditron_inductor.passes.attention.shown_masks import Shown, read_mask
from ditron_inductor.passes.graph import proofs, rewriting
from ditron_inductor.passes.graph.reasons import ReasonCode, Refused, refused
from ditron_inductor.task.attention_masks import GIVEN, MAX_HEAD_DIM, Mask
from ditron_inductor.task.torch_dtypes import BIAS_DTYPES

aten = torch.ops.aten

SEQUENCE = 2
"""The dimension of keys that is gathered."""


@dataclass(frozen=True)
class Kernel:
    """Properties of one attention op. square: its causal mask is known only if there are as many queries as keys. lse:
    the number of dimensions that its logarithms of sums have behind [B, H, S]. multiple: S is padded to a multiple of
    this, with infinity. base: the base of the logarithms. unseen: the logarithm for a row that sees nothing.
    """

    square: bool
    lse: int = 0
    multiple: int = 1
    base: float = math.e
    unseen: float = 0.0


FORWARD: dict[object, Kernel] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: Kernel(square=False),
    aten._scaled_dot_product_flash_attention.default: Kernel(square=True),
    aten._scaled_dot_product_efficient_attention.default: Kernel(square=False, multiple=32),
    aten._scaled_dot_product_cudnn_attention.default: Kernel(square=True, lse=1),
    aten._scaled_dot_product_fused_attention_overrideable.default: Kernel(square=True),
    FLEX_ATTENTION: Kernel(square=False, base=2.0, unseen=-math.inf),
}
BACKWARD: dict[object, Kernel] = {
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: Kernel(square=False),
    aten._scaled_dot_product_flash_attention_backward.default: Kernel(square=True),
    aten._scaled_dot_product_efficient_attention_backward.default: Kernel(square=False, multiple=32),
    aten._scaled_dot_product_cudnn_attention_backward.default: Kernel(square=True, lse=1),
    FLEX_BACKWARD: Kernel(square=False, base=2.0, unseen=-math.inf),
}
FLEX = (FLEX_ATTENTION, FLEX_BACKWARD)
LONGEST_REPEAT = 6
"""The most nodes that repeat heads: a dimension is added, expanded, copied, and merged again."""
FOLLOWED: frozenset[object] = proofs.ORDER_KEEPING | proofs.TRANSPOSES | proofs.SLICES | {aten.select.int}


@dataclass(frozen=True)
class WrittenOut:
    """The nodes of attention that is written out. between: from the scores to the result; views: those in front of keys
    and values. moved: from [B, H, S, D] to the dimensions of the result.
    """

    between: tuple[fx.Node, ...]
    views: tuple[fx.Node, ...]
    moved: Moved


@dataclass(frozen=True)
class AttentionCall:
    """Attention without dropout: a call of one of these ops, or attention that is written out. shown: what its mask
    shows. softcap: the soft cap of the scores, or 0. tensor: the mask or bias, or None. It has an element for each pair
    of a query and a key, or is repeated along some dimensions.
    """

    node: fx.Node
    kernel: Kernel
    q: fx.Node
    k: fx.Node
    v: fx.Node
    shown: Shown
    scale: float
    softcap: float = 0.0
    written: WrittenOut | None = None
    tensor: fx.Node | None = None

    @property
    def mask(self) -> Mask:
        return self.shown.mask

    @property
    def of_scores(self) -> tuple[Mask, float, float]:
        """The first fields of our nodes."""
        return self.mask, self.scale, self.softcap

    @property
    def bias(self) -> fx.Node | None:
        """The tensor that our op gets as its bias, or None."""
        return self.tensor if self.mask.kind == GIVEN else None

    def of_ranks(self, world_size: int) -> AttentionCall | Refused:
        """Returns the call, with its mask as a bias unless the mask holds for the keys of this many ranks."""
        return self if self.shown.ranks in (0, world_size) else self.with_bias()

    def with_bias(self) -> AttentionCall | Refused:
        """Returns the call with its mask as a bias of which nothing is known, if our op accepts that. The answer is the
        same on all ranks, because the dtype and the sizes of the bias are those of one program, whatever its constants
        are.
        """
        if self.tensor is None:
            return ReasonCode.FLEX_BLOCK_MASK if self.node.target in FLEX else ReasonCode.ATTENTION_MASK
        value = proofs.tensor(self.tensor)
        scores = (*self.q.meta["val"].shape[:3], self.k.meta["val"].shape[2])
        if value is None or value.dtype not in BIAS_DTYPES or value.ndim > len(scores):
            return ReasonCode.ATTENTION_MASK.at(self.tensor)
        for size, wanted in zip(reversed(value.shape), reversed(scores), strict=False):
            if not proofs.known_equal(size, 1) and not proofs.known_equal(size, wanted):
                static = isinstance(size, int) and isinstance(wanted, int)
                return (ReasonCode.ATTENTION_MASK if static else ReasonCode.SHAPE_UNPROVEN).at(self.tensor)
        return replace(self, shown=Shown(Mask(GIVEN)))

    @property
    def lse_shape(self) -> tuple[Any, ...]:
        """The shape of the logarithms of sums that the op returns."""
        B, heads, queries = self.q.meta["val"].shape[:3]
        filled = -(-queries // self.kernel.multiple) * self.kernel.multiple
        return B, heads, filled, *[1] * self.kernel.lse


def operands(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node]:
    """Returns the queries, keys and values of an attention call."""
    if node.target in FLEX:
        q, k, v = node.args[:3]
    else:
        bound = proofs.arguments(node)
        q, k, v = bound["query"], bound["key"], bound["value"]
    assert isinstance(q, fx.Node) and isinstance(k, fx.Node) and isinstance(v, fx.Node)
    return q, k, v


def backward_operands(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node]:
    """The gradient of a backward's output, the output, and the logarithms of sums."""
    gradient = flex_call(node).gradient if node.target is FLEX_BACKWARD else None
    if gradient is not None:
        return gradient.grad_out, gradient.out, gradient.sums
    bound = proofs.arguments(node)
    gradient_out, out, sums = bound.get("grad_out", bound.get("grad_out_")), bound["out"], bound["logsumexp"]
    assert isinstance(gradient_out, fx.Node) and isinstance(out, fx.Node) and isinstance(sums, fx.Node)
    return gradient_out, out, sums


def mask_tensors(node: fx.Node) -> list[fx.Node]:
    """Returns the tensors of a call that determine what its rows see."""
    if node.target in FLEX:
        given = flex_call(node).block_mask
        return [tensor for tensor in given if isinstance(tensor, fx.Node) and tensor.op == "call_function"]
    bound = proofs.arguments(node)
    mask = bound.get("attn_mask", bound.get("attn_bias"))
    return [mask] if isinstance(mask, fx.Node) else []


def read_attention(node: fx.Node) -> AttentionCall | Refused:
    """Proves that a call of attention is one that our ops compute. A mask not proved becomes their bias."""
    kernel = (FORWARD | BACKWARD)[node.target]
    q, k, v = operands(node)
    values = [proofs.tensor(operand) for operand in (q, k, v)]
    rejected = proofs.rejected_dtypes(values)
    if rejected is not None:
        return rejected
    flex = node.target in FLEX
    # The arguments that the other ops have by name.
    bound: dict[str, Any] = {"dropout_p": 0.0, "scale": None, "is_causal": False} if flex else proofs.arguments(node)
    if bound["dropout_p"] != 0.0:
        return ReasonCode.ATTENTION_DROPOUT
    if bound.get("return_debug_mask") or any(value is None or value.ndim != 4 for value in values):
        return ReasonCode.ATTENTION_FORM
    q_value, k_value, v_value = (value for value in values if value is not None)
    (B, heads, queries, D), (_, key_heads, keys, _) = q_value.shape, k_value.shape
    scale = bound["scale"]
    if scale is None and isinstance(D, int):
        scale = 1.0 / math.sqrt(D)
    shared = isinstance(heads, int) and isinstance(key_heads, int) and key_heads > 0 and heads % key_heads == 0
    fits = proofs.same_shape(k_value.shape, v_value.shape) and proofs.known_equal(B, k_value.shape[0])
    if not isinstance(scale, (int, float)) or not shared or not fits or not proofs.known_equal(D, k_value.shape[3]):
        return ReasonCode.ATTENTION_FORM
    if isinstance(D, int) and D > MAX_HEAD_DIM:
        return ReasonCode.ATTENTION_HEAD_DIM
    causal = bound["is_causal"]
    if not isinstance(causal, bool) or (causal and kernel.square and not proofs.known_equal(queries, keys)):
        return ReasonCode.ATTENTION_FORM
    if flex:
        scale = flex_call(node).scale
    # With a negative scale the score that the kernels take for the largest would be the smallest.
    if isinstance(scale, (int, float)) and scale <= 0:
        return ReasonCode.ATTENTION_FORM
    if flex:
        found = read_flex(node)
        return found if refused(found) else AttentionCall(node, kernel, q, k, v, *found)
    shown = Shown(Mask("causal" if causal else "full"))
    bias = bound.get("attn_mask", bound.get("attn_bias"))
    if bias is None:
        return AttentionCall(node, kernel, q, k, v, shown, float(scale))
    if causal:
        return ReasonCode.ATTENTION_FORM
    masked = AttentionCall(node, kernel, q, k, v, shown, float(scale), tensor=unexpanded(bias))
    try:
        return replace(masked, shown=read_mask(bias, queries, keys))
    except UnknownMask:
        return masked.with_bias()


def unexpanded(node: fx.Node) -> fx.Node:
    """Returns what `node` repeats along dimensions: the compiler may copy all of an expanded tensor."""
    while node.target is aten.expand.default:
        node = proofs.operand(node)
    return node


def source_of(node: fx.Node) -> fx.Node:
    """Returns the tensor that a node of FOLLOWED is a view of."""
    part = proofs.piece(node)
    source = node.args[0] if part is None else part.source
    assert isinstance(source, fx.Node)
    return source


def unrepeated(node: fx.Node) -> tuple[fx.Node, tuple[fx.Node, ...]]:
    """Undoes the repetition of heads. Returns (keys [B, Hkv, S, D], the nodes from there to `node`) for keys [B, Hq, S,
    D] in which every head stands Hq / Hkv times in a row. Models write this for attention with as many heads of keys as
    of queries. For other keys returns `node` and no nodes.
    """
    steps: list[fx.Node] = []
    shapes = []
    above = node
    while above.op == "call_function" and len(steps) < LONGEST_REPEAT and above.args:
        source, value = above.args[0], proofs.tensor(above)
        if above.target not in proofs.ORDER_KEEPING | {aten.expand.default} or not isinstance(source, fx.Node):
            break
        steps.append(above)
        shapes.append(() if value is None else tuple(value.shape))
        above = source
        inner, expanded = proofs.tensor(above), [step.target is aten.expand.default for step in steps]
        if inner is None or inner.ndim != 4 or sum(expanded) != 1:
            continue
        (B, heads, S, D), place = inner.shape, expanded.index(True)
        wide, before = shapes[place], shapes[place + 1] if place + 1 < len(shapes) else ()
        if not proofs.same_shape(before, (B, heads, 1, S, D)) or len(wide) != 5:
            continue
        times = wide[2]
        repeated = proofs.same_shape(wide, (B, heads, times, S, D)) and isinstance(times, int)
        # Whatever the views behind are, they keep the order of the elements.
        if repeated and proofs.same_shape(shapes[0], (B, heads * times, S, D)):
            return above, tuple(reversed(steps))
    return node, ()


def views_above(node: fx.Node, ends: Sequence[fx.Node]) -> list[fx.Node] | None:
    """Returns [end, .., node], each a view of the one before; None if `node` is no view of any of `ends`."""
    chain = [node]
    while chain[-1] not in ends:
        last = chain[-1]
        if last.op != "call_function" or last.target not in FOLLOWED or proofs.tensor(last) is None:
            return None
        chain.append(source_of(last))
    return chain[::-1]


def follow(chain: Sequence[fx.Node], dim: int, world_size: int) -> int | None:
    """Returns the place of dimension `dim` of the first node of a chain of views in the last node. All of its elements
    must be there, with each rank's part together and in rank order. None if that cannot be proved.
    """
    found: int | None = dim
    for view in chain[1:]:
        if found is None:
            return None
        found = _next_dim(view, found, world_size)
    return found


def _next_dim(view: fx.Node, dim: int, world_size: int) -> int | None:
    source, result = proofs.tensor(source_of(view)), proofs.tensor(view)
    if source is None or result is None:
        return None
    if view.target in proofs.TRANSPOSES:
        return proofs.permutation(view).index(dim)
    if view.target is aten.select.int:
        left_out = proofs.arguments(view)["dim"] % source.ndim
        return None if left_out == dim else dim - (left_out < dim)
    if view.target in proofs.SLICES:
        part = proofs.piece(view)
        return dim if part is not None and part.dim != dim else None
    if view.target not in proofs.ORDER_KEEPING:
        return None
    before = math.prod(source.shape[:dim])
    for place, length in enumerate(result.shape):
        same = proofs.known_equal(math.prod(result.shape[:place]), before)
        if same and proofs.known_equal(length, source.shape[dim]):
            return place
        # No dimension is outside of it, so each rank's part is one run of the memory, however that is divided.
        leading = same and before == 1 and isinstance(length, int) and length > 1
        if leading and length % world_size == 0:
            return place
    return None


def replay(graph: fx.Graph, chain: Sequence[fx.Node], dim: int, world_size: int, local: fx.Node) -> fx.Node:
    """Inserts the views of `chain` for `local`, a rank's part of its first node along `dim`. Returns the last."""
    place: int | None = dim
    for view in chain[1:]:
        assert place is not None
        place = _next_dim(view, place, world_size)
        assert place is not None
        args = _local_args(view, local, place)
        if args is not None:
            local = rewriting.computed(graph, *args, view)
    return local


def replayable(chain: Sequence[fx.Node], dim: int, world_size: int) -> bool:
    """Returns whether `replay` is possible: all sizes have to be known, except that of the gathered dimension."""
    place: int | None = dim
    for view in chain[1:]:
        place = None if place is None else _next_dim(view, place, world_size)
        if place is None:
            return False
        shape = view.meta["val"].shape
        if view.target in proofs.ORDER_KEEPING and not all(
            isinstance(length, int) for index, length in enumerate(shape) if index != place
        ):
            return False
        part = proofs.piece(view) if view.target in proofs.SLICES else None
        if part is not None and not (isinstance(part.start, int) and isinstance(part.length, int)):
            return False
    return True


def _local_args(view: fx.Node, local: fx.Node, place: int) -> tuple[Any, tuple[Any, ...]] | None:
    """Returns (op, arguments) of a view of `local`; None for a copy, which is not needed."""
    if view.target in proofs.TRANSPOSES:
        return aten.permute.default, (local, proofs.permutation(view))
    if view.target is aten.select.int:
        return aten.select.int, (local, *view.args[1:])
    if view.target in proofs.SLICES:
        part = proofs.piece(view)
        assert part is not None
        return aten.slice.Tensor, (local, part.dim, part.start, part.start + part.length)
    if view.target in (aten.clone.default, aten.alias.default, aten.detach.default):
        return None
    shape = view.meta["val"].shape
    return aten.reshape.default, (local, [-1 if index == place else length for index, length in enumerate(shape)])


def scaled(graph: fx.Graph, source: fx.Node, factor: float) -> fx.Node:
    """Inserts a tensor times a number, which turns logarithms of one base into those of another."""
    return rewriting.computed(graph, aten.mul.Tensor, (source, factor), source)
