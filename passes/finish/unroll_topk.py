"""A `topk` of few values becomes a chain of maxima, which Inductor fuses with what is around it.

    x [T, E] -> topk(k=2) -> getitem 0 [T, 2], getitem 1 [T, 2]

becomes, for fp32,

    x -> view(int32), .., or the place -> keys [T, E] (int64) -> amax [T, 1]
      -> where(keys < amax, keys, least) [T, E] -> amax [T, 1]
    cat(the maxima) -> .., view(float32) [T, 2];  cat(the maxima) -> .. the places [T, 2]

Problem. A router chooses k of its E experts for each token. torch's `topk` is a launch of its own, and another one
where more than one value is chosen and sorted, around which nothing can be fused. Algorithm. A key is the value's bits
as an integer, changed so that integers are ordered as the values are, and behind them the place, counted from the
right. So no two keys are equal, and the key that is chosen next is the largest one below the last. Inductor computes
all steps in one kernel, if it can with the softmax in front of them. If there are more than `WIDTH` values, they are
cut into equal parts, which lie on top of each other: the largest key of each column is found first.

All steps have to see the same keys, and they do in one kernel. Inductor loops over the values in a kernel if there are
many. Then it may store what it computes once, and load it in its next loop without a barrier in between, by other
threads (pytorch/pytorch#190519). In an earlier form of this pass, which stored the keys that were left, 1 of 1,024
tokens of a router as in DeepSeek V3 got a wrong expert. Up to `WIDTH` values are never reduced in a loop, whatever else
is in the kernel.

The result is that of `topk`: a NaN is the largest value, -0.0 is less than 0.0, and equal values are chosen from the
left, as by torch's kernels. The chosen values are returned bit for bit, but that each NaN has the same bits. A value is
rounded to its own dtype before it is compared. Equal values are returned in the order of their places, which `topk`
leaves open.

It must not fire when
* the values are not on a GPU: elsewhere torch's `topk` chooses among equal values in another order;
* the values are not of bf16, fp16 or fp32, they do not lie along the last dimension, or the smallest are chosen;
* there are more than `MOST_VALUES`, or more than `MOST_CHOSEN` are chosen, which has not been measured to pay;
* so many are chosen of so many parts that Inductor would need more than one kernel;
* there are more than `WIDTH` values, and no more than `MOST_PARTS` equal parts of them are as narrow;
* the number of values or of chosen ones is dynamic, or no value is chosen;
* Inductor is told to reduce few values in loops too, or to make smaller kernels than by default.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from operator import getitem
from typing import Any, cast

import torch
from torch import fx
from torch._inductor import config

from ditron_inductor.options import Options
from ditron_inductor.passes.graph import proofs, rewriting

aten = torch.ops.aten
CONVERT = torch.ops.prims.convert_element_type.default

GPUS = ("cuda",)
WIDTH = 64
MOST_VALUES = 512
MOST_CHOSEN = 16
MOST_PARTS = 8
FUSED_NODES = 64
"""As many of its nodes Inductor puts into one kernel by default."""
MOST_STEPS = 48
"""The most of them for the chain, so that what is around it finds room. Each chosen value is one for its maximum, and
one for each three parts, or fewer, that it is looked for in."""
INTEGERS: dict[torch.dtype, tuple[torch.dtype, torch.dtype]] = {
    torch.bfloat16: (torch.int16, torch.int32),
    torch.float16: (torch.int16, torch.int32),
    torch.float32: (torch.int32, torch.int64),
}
"""The integers that are as wide as a value, and as its key."""


@dataclass(frozen=True)
class Match:
    """A topk of values [.., E]. chosen: k, how many are chosen. parts: into how many parts the E values are cut.
    outputs: the nodes that read an output, and which.
    """

    node: fx.Node
    values: fx.Node
    chosen: int
    parts: int
    outputs: tuple[tuple[fx.Node, int], ...]


@dataclass(frozen=True)
class Bounds:
    """devices: on which a topk is unrolled; of how many values; and how many lie beside each other in a part."""

    devices: tuple[str, ...] = GPUS
    most_values: int = MOST_VALUES
    width: int = WIDTH


def find_topk(node: fx.Node, bounds: Bounds) -> Match | None:
    """Proves that a node is a topk of few values whose result is read; None if it is not."""
    if node.target is not aten.topk.default or not _in_one_kernel():
        return None
    bound = proofs.arguments(node)
    values, k, dim = bound["self"], bound["k"], bound["dim"]
    value = proofs.tensor(values)
    if value is None or value.ndim == 0 or value.dtype not in INTEGERS or value.device.type not in bounds.devices:
        return None
    size = value.shape[-1]
    known = isinstance(size, int) and isinstance(k, int) and dim in (-1, value.ndim - 1)
    if not known or not bound["largest"] or not 0 < k <= min(size, MOST_CHOSEN) or size > bounds.most_values:
        return None
    parts = next((parts for parts in range(1, MOST_PARTS + 1) if size <= parts * bounds.width and not size % parts), 0)
    if k * (1 + math.ceil(parts / 3)) > MOST_STEPS:
        return None
    outputs = tuple((user, cast(int, user.args[1])) for user in node.users if user.target is getitem)
    if not parts or not outputs or len(outputs) < len(node.users):
        return None
    return Match(node, values, k, parts, outputs)


def _in_one_kernel() -> bool:
    """Returns whether Inductor computes all steps in one kernel and in registers, as it does by default."""
    triton = config.triton
    others = triton.multi_kernel, triton.cooperative_reductions, triton.force_cooperative_reductions
    return bool(triton.persistent_reductions) and not any(others) and config.max_fusion_size >= FUSED_NODES


class _Chain:
    """Inserts the ops that choose k of `size` values of this dtype, with the metadata of `origin`."""

    def __init__(self, graph: fx.Graph, origin: fx.Node, dtype: torch.dtype, size: int) -> None:
        self.graph, self.origin, self.dtype, self.size = graph, origin, dtype, size
        self.narrow, self.wide = INTEGERS[dtype]
        self.bits, self.most = torch.iinfo(self.narrow).bits, torch.iinfo(self.narrow).max
        self.built: list[fx.Node] = []

    def op(self, target: Any, *args: Any) -> fx.Node:
        return self._kept(rewriting.computed(self.graph, target, args, self.origin))

    def _kept(self, node: fx.Node) -> fx.Node:
        """Notes what was inserted, so that it can be erased if nothing needs it."""
        self.built.append(node)
        return node

    def _number(self, given: int, dtype: torch.dtype) -> fx.Node:
        """Inserts a number as a tensor without dimensions."""
        return self._kept(rewriting.full(self.graph, self.origin, (), given, dtype))

    def _ordered(self, bits: fx.Node) -> fx.Node:
        """Inserts integers ordered as the values that have these bits; of such integers, the bits."""
        sign = self.op(aten.__rshift__.Scalar, bits, self.bits - 1)
        return self.op(aten.bitwise_xor.Tensor, bits, self.op(aten.bitwise_and.Scalar, sign, self.most))

    def keys(self, values: fx.Node) -> fx.Node:
        """Inserts the keys of values."""
        nan = self.op(aten.ne.Tensor, values, values)
        ordered = self._ordered(self.op(aten.view.dtype, values, self.narrow))
        ordered = self.op(aten.where.self, nan, self._number(self.most, self.narrow), ordered)
        places = self._kept(
            rewriting.integers(self.graph, self.origin, self.size, self.wide, begin=self.size - 1, step=-1)
        )
        above = self.op(aten.__lshift__.Scalar, self.op(CONVERT, ordered, self.wide), self.bits)
        return self.op(aten.bitwise_or.Tensor, above, places)

    def largest(self, keys: fx.Node, k: int, parts: int) -> fx.Node:
        """Inserts the k largest of keys [.., E] in their order, [.., k]."""
        least = self._number(torch.iinfo(self.wide).min, self.wide)
        width = self.size // parts
        begins = range(0, self.size, width) if parts > 1 else ()
        cut = [self.op(aten.slice.Tensor, keys, -1, begin, begin + width) for begin in begins] or [keys]
        maxima: list[fx.Node] = []
        for step in range(k):
            left = cut
            if step:
                left = [
                    self.op(aten.where.self, self.op(aten.lt.Tensor, part, maxima[-1]), part, least) for part in cut
                ]
            columns = functools.reduce(functools.partial(self.op, aten.maximum.default), left)
            maxima.append(self.op(aten.amax.default, columns, [-1], True))
        return self.op(aten.cat.default, maxima, -1)

    def values(self, keys: fx.Node) -> fx.Node:
        """Inserts the values that have these keys."""
        ordered = self.op(CONVERT, self.op(aten.__rshift__.Scalar, keys, self.bits), self.narrow)
        return self.op(aten.view.dtype, self._ordered(ordered), self.dtype)

    def places(self, keys: fx.Node) -> fx.Node:
        """Inserts the places of the values that have these keys."""
        from_right = self.op(CONVERT, self.op(aten.bitwise_and.Scalar, keys, (1 << self.bits) - 1), torch.int64)
        return self.op(aten.sub.Tensor, self._number(self.size - 1, torch.int64), from_right)


def rewrite(graph: fx.Graph, match: Match) -> None:
    """Puts the chain of maxima in the place of the topk."""
    value = match.values.meta["val"]
    chain = _Chain(graph, match.outputs[0][0], value.dtype, value.shape[-1])
    with graph.inserting_before(match.node):
        keys = chain.largest(chain.keys(match.values), match.chosen, match.parts)
        results = chain.values(keys), chain.places(keys)
    for user, index in match.outputs:
        user.replace_all_uses_with(results[index])
        graph.erase_node(user)
    graph.erase_node(match.node)
    rewriting.erase_unused(graph, chain.built)


def unroll_within(graph: fx.Graph, bounds: Bounds) -> int:
    """Unrolls every topk within these bounds; returns how many."""
    count = 0
    for node in list(graph.nodes):
        # One after the other, because a topk may read the values of another one.
        if (match := find_topk(node, bounds)) is not None:
            rewrite(graph, match)
            count += 1
    return count


def unroll_topk(graph: fx.Graph, *, options: Options) -> int:
    """Unrolls every topk of few values on a GPU; returns how many."""
    return unroll_within(graph, Bounds())
