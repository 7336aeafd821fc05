"""A `topk` of few values becomes a chain of maxima, which Inductor fuses with what is around it.

    x [T, E] -> topk(k=2) -> getitem 0 [T, 2], getitem 1 [T, 2]

becomes

    x -> view(int32), .. -> keys [T, E] (int32) -> amax, argmax [T, 1]
      -> where(column == argmax, least, keys) [T, E] -> amax, argmax [T, 1]
    cat(the maxima) -> .., view(float32) [T, 2];  cat(the places) [T, 2]

Problem. A router chooses k of its E experts for each token. torch's `topk` is a launch of its own, and with more than
one chosen value two, around which nothing can be fused. Algorithm. A key is the value's bits as an integer, changed so
that integers are ordered as the values are. In each step the largest key that is left is chosen, and then replaced by
an integer below all keys. Inductor computes all steps in one kernel, with the softmax in front of them.

The result is that of `topk`: a NaN is the largest value, -0.0 is less than 0.0, and equal values are chosen from the
left, as by torch's kernels. The chosen values are returned bit for bit, but that each NaN has the same bits. The keys
are read from a value as it would be stored, so ranks that fuse differently choose alike. Equal values are returned in
the order of their places, which `topk` leaves open.

It must not fire when
* the values are not on a GPU: elsewhere torch's `topk` chooses among equal values in another order;
* the values are not of bf16, fp16 or fp32, they do not lie along the last dimension, or the smallest are chosen;
* there are more than `MOST_VALUES`, or more than `MOST_CHOSEN` are chosen, which has not been measured to pay;
* the number of values or of chosen ones is dynamic, or no value is chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import fx

from ditron_inductor.options import Options
from ditron_inductor.passes.graph import proofs, rewriting

aten = torch.ops.aten
CONVERT = torch.ops.prims.convert_element_type.default

GPUS = ("cuda",)
MOST_VALUES = 512
MOST_CHOSEN = 16
INTEGERS: dict[torch.dtype, torch.dtype] = {
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float32: torch.int32,
}
"""The integers that are as wide as a value."""
LEAST = torch.iinfo(torch.int32).min
"""Below every key, because no value has the bits of which this would be the key, but for a NaN."""


@dataclass(frozen=True)
class Match:
    """A topk of values [.., E]. chosen: k, how many are chosen. outputs: the nodes that read an output, and which."""

    node: fx.Node
    values: fx.Node
    chosen: int
    outputs: tuple[tuple[fx.Node, int], ...]


def find_topk(node: fx.Node, devices: tuple[str, ...] = GPUS) -> Match | None:
    """Proves that a node is a topk of few values whose result is read; None if it is not."""
    if node.target is not aten.topk.default:
        return None
    bound = proofs.arguments(node)
    values, k, dim = bound["self"], bound["k"], bound["dim"]
    value = proofs.tensor(values)
    if value is None or value.ndim == 0 or value.dtype not in INTEGERS or value.device.type not in devices:
        return None
    size = value.shape[-1]
    known = isinstance(size, int) and isinstance(k, int) and dim in (-1, value.ndim - 1)
    if not known or not bound["largest"] or not 0 < k <= min(size, MOST_CHOSEN) or size > MOST_VALUES:
        return None
    outputs = tuple((user, user.args[1]) for user in node.users if user.target is getitem)
    return Match(node, values, k, outputs) if outputs and len(outputs) == len(node.users) else None


def rewrite(graph: fx.Graph, match: Match) -> None:
    """Puts the chain of maxima in the place of the topk."""
    origin, value = match.outputs[0][0], match.values.meta["val"]
    integer = INTEGERS[value.dtype]
    info = torch.iinfo(integer)
    built: list[fx.Node] = []

    def build(target: Any, *args: Any) -> fx.Node:
        built.append(rewriting.computed(graph, target, args, origin))
        return built[-1]

    def number(given: int, dtype: torch.dtype) -> fx.Node:
        return rewriting.full(graph, origin, (), given, dtype)

    def ordered(bits: fx.Node) -> fx.Node:
        """Inserts integers ordered as the values that have these bits; of such integers, the bits."""
        sign = build(aten.__rshift__.Scalar, bits, info.bits - 1)
        return build(aten.bitwise_xor.Tensor, bits, build(aten.bitwise_and.Scalar, sign, info.max))

    with graph.inserting_before(match.node):
        nan = build(aten.ne.Tensor, match.values, match.values)
        keys = ordered(build(aten.view.dtype, match.values, integer))
        left = build(CONVERT, build(aten.where.self, nan, number(info.max, integer), keys), torch.int32)
        columns, least = rewriting.integers(graph, origin, value.shape[-1]), number(LEAST, torch.int32)
        maxima, places = [], []
        for step in range(match.chosen):
            if step:
                left = build(aten.where.self, build(aten.eq.Tensor, columns, places[-1]), least, left)
            maxima.append(build(aten.amax.default, left, [-1], True))
            places.append(build(aten.argmax.default, left, -1, True))
        bits = ordered(build(CONVERT, build(aten.cat.default, maxima, -1), integer))
        results = build(aten.view.dtype, bits, value.dtype), build(aten.cat.default, places, -1)
    for user, index in match.outputs:
        user.replace_all_uses_with(results[index])
        graph.erase_node(user)
    graph.erase_node(match.node)
    rewriting.erase_unused(graph, built)


def unroll_topk(graph: fx.Graph, *, options: Options) -> int:
    """Unrolls every topk of few values on a GPU; returns how many."""
    found = [match for node in graph.nodes if (match := find_topk(node)) is not None]
    for match in found:
        rewrite(graph, match)
    return len(found)
