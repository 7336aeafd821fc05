"""Reads the ends of the experts of a grouped matmul as the counts of whole numbers, in the ways in which people count.

    ids -> [cast] -> histc(E, 0, E - 1), or histc(E, 0, E)       -> [cast] -> cumsum -> [cast]
    ids [S, 1] == iota(E) -> [cast] -> sum over S                -> [cast] -> cumsum -> [cast]
    zeros [E] -> scatter_add(0, ids, ones)                       -> [cast] -> cumsum -> [cast]
    searchsorted(the sorted ids, iota(E), right), or by iota(1, E)                 -> [cast]

The last of these counts how many of the sorted numbers are at most e, which is where those of e end. Negative numbers
are counted by the last way alone, and numbers of E and more by none, except that `histc(E, 0, E)` counts E among those
of E - 1.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import fx

from ditron_inductor.passes.graph import proofs

aten = torch.ops.aten
CAST = torch.ops.prims.convert_element_type.default
EXACT = 1 << 24
"""Smaller integers are exact in fp32."""
COUNTED_IN: frozenset[torch.dtype] = frozenset({torch.float32, torch.float64, torch.int32, torch.int64})


class Counted(NamedTuple):
    """What is counted. most: none of the numbers may be greater; None if they may be. ascending: whether they have to
    ascend.
    """

    numbers: fx.Node
    most: int | None = None
    ascending: bool = False


def counted(ends: fx.Node, num_experts: int) -> Counted | None:
    """Returns the whole numbers of which `ends` [E] has, for each e, how many are at most e; None if it has others."""
    last = _uncast(ends)
    if last is None:
        return None
    found = None
    if last.target is aten.searchsorted.Tensor:
        found = _searched(last, num_experts)
    # Of several dimensions, one after the other is summed.
    elif last.target is aten.cumsum.default and proofs.fake(last).ndim == 1:
        counts = _uncast(proofs.operand(last))
        if counts is not None and proofs.fake(last).dtype in COUNTED_IN:
            found = _histogram(counts, num_experts) or _compared(counts, num_experts) or _added(counts, num_experts)
    if found is None:
        return None
    value = proofs.fake(found.numbers)
    exact = value.dtype in (torch.int64, torch.int32) and proofs.known(value.numel() < EXACT)
    return found if exact else None


def _uncast(node: fx.Node) -> fx.Node | None:
    """Returns what `node` has in another shape or dtype; None if the dtype does not hold the numbers of a count."""
    source = proofs.views_up(node)[-1]
    while source.target is CAST:
        if proofs.fake(source).dtype not in COUNTED_IN:
            return None
        source = proofs.views_up(proofs.operand(source))[-1]
    return source


def _histogram(counts: fx.Node, num_experts: int) -> Counted | None:
    if counts.target is not aten.histc.default:
        return None
    bound = proofs.arguments(counts)
    bins, least, most = (bound[name] for name in ("bins", "min", "max"))
    numbers = _uncast(bound["self"])
    # Products of a number and the bins are exact, so that each number is in its own bin.
    known = numbers is not None and num_experts * num_experts < EXACT and (bins, least) == (num_experts, 0)
    if numbers is None or not known or most not in (num_experts - 1, num_experts):
        return None
    return Counted(numbers, num_experts - 1 if most == num_experts else None)


def _compared(counts: fx.Node, num_experts: int) -> Counted | None:
    if counts.target is not aten.sum.dim_IntList:
        return None
    bound = proofs.arguments(counts)
    equal = _uncast(bound["self"])
    if equal is None or equal.target is not aten.eq.Tensor or bound["keepdim"] or proofs.fake(equal).ndim != 2:
        return None
    if [dim % 2 for dim in bound["dim"] or ()] != [0]:
        return None
    for numbers, named in (equal.args, equal.args[::-1]):
        column = proofs.tensor(numbers)
        of_rows = column is not None and column.ndim == 2 and proofs.known_equal(column.shape[1], 1)
        if of_rows and isinstance(numbers, fx.Node) and _counts_up(named, 0, num_experts):
            return Counted(proofs.views_up(numbers)[-1])
    return None


def _added(counts: fx.Node, num_experts: int) -> Counted | None:
    if counts.target is not aten.scatter_add.default:
        return None
    zeros, dim, numbers, ones = counts.args
    of_vectors = dim in (0, -1) and proofs.is_full(zeros, 0) and proofs.is_full(ones, 1)
    fits = proofs.same_shape(tuple(proofs.fake(zeros).shape), (num_experts,)) and proofs.alike(ones, numbers)
    exact = proofs.fake(counts).dtype in COUNTED_IN
    return Counted(proofs.views_up(numbers)[-1]) if of_vectors and fits and exact else None  # type: ignore[arg-type]


def _searched(ends: fx.Node, num_experts: int) -> Counted | None:
    bound = proofs.arguments(ends)
    ascending, right = bound["sorted_sequence"], bound["right"] or bound.get("side") == "right"
    if bound.get("sorter") is not None or proofs.fake(ascending).ndim != 1:
        return None
    return Counted(ascending, ascending=True) if _counts_up(bound["self"], 0 if right else 1, num_experts) else None


def _counts_up(node: Any, start: int, length: int) -> bool:
    """Returns whether a node has the integers from `start` on, so many of them, in one dimension."""
    return proofs.counts_from(node, start) and proofs.same_shape(tuple(proofs.fake(node).shape), (length,))
