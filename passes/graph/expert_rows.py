"""Proofs about the rows of a grouped matmul: that a tensor names the expert of each row, and the range of its numbers.

    ids [S] -> sort -> getitem 0, or ids[getitem 1]: the sorted ids -> [clamp]       the experts of the rows
    the sorted ids, or ids -> a count (see expert_counts.py)                         the ends of the experts

The sorted ids ascend. If none of them is negative, those of expert e are the rows from ends[e - 1] to ends[e], which is
what a grouped matmul with these ends multiplies by matrix e. What is clamped to 0 .. E - 1, or to a wider range, is the
same number in all of these rows. Ids of E and more, which under expert parallelism name experts of other ranks, are
counted nowhere: their rows lie behind the last end, where a grouped matmul computes nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from operator import getitem

import torch
from torch import fx

from ditron_inductor.passes.graph import proofs
from ditron_inductor.passes.graph.all_to_all import written
from ditron_inductor.passes.graph.expert_counts import EXACT, counted
from ditron_inductor.passes.graph.expressions import CLAMPS
from ditron_inductor.passes.graph.sorts import SORTS
from ditron_inductor.task.torch_dtypes import OPERAND_DTYPES

aten = torch.ops.aten
OPERANDS = ("self", "mat2", "offs")
"""The parameters of a grouped matmul that are operands of a node."""
COPIED = "ditron_copied"
"""Mark of a bmm that goes on copying the weights of experts."""


@dataclass(frozen=True)
class Range:
    """Integers from `least` to `most`, both included; both may be infinite."""

    least: float = -math.inf
    most: float = math.inf

    def union(self, other: Range) -> Range:
        return Range(min(self.least, other.least), max(self.most, other.most))

    def clamped(self, least: float, most: float) -> Range:
        """The range of clamp(.., least, most): where these two contradict each other the latter wins."""
        return Range(min(max(self.least, least), most), min(max(self.most, least), most))

    def toward_zero(self, most: int) -> Range:
        """The range of what lies between 0 and a number of this range, and is not further from 0 than `most`."""
        return Range(min(max(self.least, -most), 0), max(min(self.most, most), 0))


ANY = Range()


def are_experts_of_rows(experts: fx.Node, ends: object, num_experts: int) -> bool:
    """Returns whether `experts` [S] has the expert of each row up to the last of the `ends` [E] of a grouped matmul."""
    if not isinstance(ends, fx.Node) or num_experts < 2:
        # histc takes its bounds from the data if they are equal.
        return False
    named = unclamped(experts, num_experts)
    ids = None if named is None else _sorted(named)
    count = counted(ends, num_experts)
    if ids is None or count is None:
        return False
    found = range_of(ids)
    in_range = found.least >= 0 and found.most < EXACT and (count.most is None or found.most <= count.most)
    in_order = _sorted(count.numbers)
    return in_range and (in_order is ids or (not count.ascending and _flat(count.numbers) is ids))


def are_sorted_ids(experts: fx.Node, num_experts: int) -> bool:
    """Returns whether `experts` are ids that a sort has brought into ascending order, from 0 on, perhaps clamped."""
    named = unclamped(experts, num_experts)
    ids = None if named is None else _sorted(named)
    return ids is not None and range_of(ids).least >= 0


def are_counts(ends: object, num_experts: int) -> bool:
    """Returns whether the `ends` [E] of a grouped matmul are proved to count whole numbers 0 .. E - 1."""
    return isinstance(ends, fx.Node) and counted(ends, num_experts) is not None


def unclamped(experts: fx.Node, num_experts: int) -> fx.Node | None:
    """Returns what has the same numbers from 0 to `num_experts` - 1 as `experts`, in front of all views and clamps;
    None if a clamp changes some of them.
    """
    kept = _clamped(experts)
    if kept is None or kept[1].least > 0 or kept[1].most < num_experts - 1:
        return None
    return kept[0]


def before_clamps(experts: fx.Node, source: fx.Node) -> fx.Node | None:
    """Returns what `experts` are before any clamp, as a view of `source` in their shape, where `unclamped` has returned
    `source`; None if there is no such view.
    """
    node = experts
    while node.target in CLAMPS or proofs.keeps_order(node):
        node = proofs.operand(node)
        if proofs.alike(node, experts) and proofs.views_up(node)[-1] is source:
            return node
    return None


def _clamped(node: fx.Node) -> tuple[fx.Node, Range] | None:
    """Returns (what is not clamped any more, the range to which `node` clamps it); None if a bound is no number. A
    number that lies in the range is what it was.
    """
    kept = ANY
    while (node := proofs.views_up(node)[-1]).target in CLAMPS:
        bounds = _bounds(node)
        if bounds is None:
            return None
        kept = Range(max(kept.least, bounds.least), min(kept.most, bounds.most))
        node = proofs.operand(node)
    return node, kept


def range_of(node: fx.Node) -> Range:
    """Returns a range in which all numbers of an integer tensor lie."""
    source = proofs.views_up(node)[-1]
    value = proofs.tensor(source)
    if value is None or value.dtype not in (torch.int64, torch.int32):
        return ANY
    if source.target is getitem and isinstance(source.args[0], fx.Node):
        return _of_output(source.args[0], source.args[1])
    if source.target in CLAMPS:
        bounds = _bounds(source)
        return ANY if bounds is None else range_of(proofs.operand(source)).clamped(bounds.least, bounds.most)
    if source.target is aten.where.self:
        condition, *values = source.args
        left, right = (range_of(value) if isinstance(value, fx.Node) else ANY for value in values)
        return left.union(_where_false(condition, values[1], right))
    if source.target in (aten.full.default, aten.scalar_tensor.default):
        filled = source.args[int(source.target is aten.full.default)]
        return Range(filled, filled) if isinstance(filled, int) else ANY
    if source.target is aten.remainder.Scalar:
        divisor = source.args[1]
        # Of a positive divisor; the remainder has its sign.
        return Range(0, divisor - 1) if isinstance(divisor, int) and divisor > 0 else ANY
    if source.target is aten.fmod.Scalar:
        divisor, divided = source.args[1], range_of(proofs.operand(source))
        # It has the sign of what is divided, and is not greater.
        return divided.toward_zero(divisor - 1) if isinstance(divisor, int) and divisor > 0 else ANY
    return ANY


def _where_false(condition: object, value: object, found: Range) -> Range:
    """Returns the range of `value`, whose numbers lie in `found`, where a condition is false."""
    if not isinstance(condition, fx.Node):
        return found
    if condition.target in (aten.bitwise_or.Tensor, aten.logical_or.default):
        for part in condition.args:
            found = _where_false(part, value, found)
        return found
    bound = condition.args[1] if len(condition.args) == 2 else None
    if condition.args[0] is not value or not isinstance(bound, int):
        return found
    if condition.target is aten.eq.Scalar:
        return Range(found.least + int(bound == found.least), found.most)
    if condition.target in (aten.lt.Scalar, aten.le.Scalar):
        return Range(max(found.least, bound + int(condition.target is aten.le.Scalar)), found.most)
    if condition.target in (aten.ge.Scalar, aten.gt.Scalar):
        return Range(found.least, min(found.most, bound - int(condition.target is aten.ge.Scalar)))
    return found


def taken_of(chosen: fx.Node, num_experts: int, *, of_ranks: bool) -> int | None:
    """Returns how many experts each token takes if `chosen` are the indices of a topk along the last dimension, so that
    those of a token differ; None if they are not, or if there are more choices than experts, unless they are of several
    ranks.
    """
    if chosen.target is not getitem or chosen.args[1] != 1:
        return None
    topk = chosen.args[0]
    if not isinstance(topk, fx.Node) or topk.target is not aten.topk.default:
        return None
    bound = proofs.arguments(topk)
    scores, value = proofs.tensor(bound["self"]), proofs.tensor(chosen)
    if scores is None or value is None or bound["dim"] % scores.ndim != scores.ndim - 1:
        return None
    top_k, choices = value.shape[-1], scores.shape[-1]
    if not isinstance(top_k, int) or not isinstance(choices, int):
        return None
    return top_k if 0 < top_k and (of_ranks or choices <= num_experts) else None


def is_taken(grouped: fx.Node) -> bool:
    """Returns whether a kernel of ours multiplies as this grouped matmul does, where its operands lie."""
    bound = proofs.arguments(grouped)
    x, weight, ends = (bound[name] for name in OPERANDS)
    if bound["bias"] is not None or bound["out_dtype"] is not None or not isinstance(ends, fx.Node):
        return False
    rows, matrices = proofs.fake(x), proofs.fake(weight)
    dims = rows.ndim == 2 and matrices.ndim == 3 and proofs.fake(ends).dtype == torch.int32
    lies = dims and rows.stride(1) == 1 and 1 in matrices.stride()[1:] and rows.dtype in OPERAND_DTYPES
    return lies and written([x, weight, ends]) is None


def copies_weights(bmm: fx.Node) -> bool:
    """Returns whether a bmm multiplies copies [S, .., ..] of matrices [E, .., ..] by something, one for each of S."""
    factors = [proofs.permuted(one)[0] for one in bmm.all_input_nodes]
    copied = [one for one in factors if one.target is aten.index.Tensor]
    # Of a weight and one tensor of indices. Others would be lists with gaps, or of more dimensions.
    return any([proofs.fake(source).ndim for source in one.all_input_nodes] in ([3, 1], [3, 2]) for one in copied)


def _of_output(call: fx.Node, index: object) -> Range:
    """Returns the range of output `index` of a call."""
    if call.target in SORTS and index == 0:
        return range_of(proofs.operand(call))
    if call.target is aten.topk.default and index == 1:
        bound = proofs.arguments(call)
        scores = proofs.fake(bound["self"])
        choices = scores.shape[bound["dim"]] if scores.ndim else 1
        return Range(0, choices - 1) if isinstance(choices, int) else ANY
    return ANY


def _bounds(clamp: fx.Node) -> Range | None:
    bound = proofs.arguments(clamp)
    least, most = bound.get("min"), bound.get("max")
    if not all(one is None or isinstance(one, (int, float)) for one in (least, most)):
        return None
    return Range(-math.inf if least is None else least, math.inf if most is None else most)


def _sorted(node: fx.Node) -> fx.Node | None:
    """Returns the ids whose sorted values `node` has, in ascending order; None if it has others."""
    source = proofs.views_up(node)[-1]
    if source.target is getitem and source.args[1] == 0:
        return _ascending(source.args[0])
    bound = proofs.arguments(source) if source.target in (aten.index.Tensor, aten.gather.default) else {}
    taken, order = bound.get("self"), bound.get("index")
    if "indices" in bound:
        order = bound["indices"][0] if len(bound["indices"]) == 1 else None
    if not isinstance(taken, fx.Node) or not isinstance(order, fx.Node) or order.target is not getitem:
        return None
    ids = _ascending(order.args[0]) if order.args[1] == 1 else None
    return ids if ids is _flat(taken) and proofs.fake(taken).ndim == 1 else None


def _ascending(sort: object) -> fx.Node | None:
    """Returns what a call sorts, if it sorts one dimension and its values ascend; None otherwise."""
    if not isinstance(sort, fx.Node) or sort.target not in SORTS:
        return None
    bound = proofs.arguments(sort)
    ascends = not bound["descending"] and proofs.fake(bound["self"]).ndim == 1
    return _flat(bound["self"]) if ascends else None


def _flat(node: fx.Node) -> fx.Node:
    """Returns what `node` is a view of."""
    return proofs.views_up(node)[-1]
