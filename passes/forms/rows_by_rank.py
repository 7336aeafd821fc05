"""Rows between a gather and a scatter of sequences stay in the order in which the ranks sent them.

Before, for several sequences whose tokens are divided over W ranks, as DTensor writes it:

    x [B, S, D] -> all_gather -> wait [W*B, S, D] -> split .. cat [B, W*S, D] -> mm .. silu .. mm [B, W*S, D]
    -> split .. cat [W*B, S, D] -> reduce_scatter -> wait [B, S, D]

After:

    x [B, S, D] -> all_gather -> wait [W*B, S, D] -> reshape [B, W*S, D] -> mm .. silu .. mm [B, W*S, D]
    -> reshape [W*B, S, D] -> reduce_scatter -> wait [B, S, D]

The two regroupings are permutations of rows, and the second one undoes the first. What lies between them has one row
for each row of what was gathered, made of this row and of what all rows share. So it may have its rows in any order,
and without the regroupings the rows of a rank are one piece of memory. The fusions then have one long run of rows for
each rank, where they would have a short one for each sequence and rank. The same numbers are sent, in the same order.

So ranks need not agree on it: a node whose sizes differ between them, because one rank reads the tokens in their order,
runs by the library (device/facts.py). It must not fire if
* what was gathered, or anything that is made of it, is read by an op that does not work row by row, such as attention,
  or is returned, as training does for its backward;
* another tensor with rows of its own is read in between;
* no reduce-scatter of the same group and dimension is behind it;
* there is only one sequence, whose rows are in the order of the ranks anyway;
* a size is dynamic.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from operator import getitem, mul
from typing import Any

import torch
from torch import fx

from ditron_inductor.options import Options
from ditron_inductor.passes.graph import proofs, rewriting
from ditron_inductor.passes.graph.collectives import (
    ALL_GATHER,
    REDUCE_SCATTER,
    Collective,
    collectives,
    read_collective,
)
from ditron_inductor.passes.graph.gathered import Gathered, gathered_tensor
from ditron_inductor.passes.graph.reasons import refused
from ditron_inductor.passes.graph.row_regions import REDUCTIONS, is_pointwise

aten = torch.ops.aten
PRODUCTS: Mapping[object, str] = {aten.mm.default: "self", aten.addmm.default: "mat1"}
"""Matmuls, with the operand of which each row makes a row of the result."""


@dataclass(frozen=True)
class Match:
    """A gather along a dimension behind that of the sequences, and the regroupings in front of the scatters that undo
    its own.
    """

    collective: Collective
    gathered: Gathered
    ends: tuple[proofs.Regrouped, ...]


def find_rows_by_rank(collective: Collective, scatters: Mapping[fx.Node, proofs.Regrouped]) -> Match | None:
    """Proves that the rows of a gather may stay in the order of the ranks. scatters: the regroupings of all scatters of
    its group, by all their nodes.
    """
    gathered = gathered_tensor(collective)
    if refused(gathered) or not 0 < gathered.dim < proofs.fake(gathered.node).ndim - 1:
        return None
    shape = tuple(proofs.fake(gathered.node).shape)
    if not all(isinstance(length, int) for length in shape) or math.prod(shape[: gathered.dim]) < 2:
        return None
    rows = shape[: gathered.dim + 1]
    members: dict[fx.Node, int] = {gathered.node: gathered.dim + 1}
    ends: dict[fx.Node, proofs.Regrouped] = {}
    node = gathered.node.next
    while node.op != "root":
        end = scatters.get(node)
        if end is not None and end.source in members:
            # Its first dimensions are the sequences and the tokens, and it is cut along the tokens.
            if tuple(proofs.fake(end.source).shape[: gathered.dim + 1]) != rows or end.split_dim != gathered.dim:
                return None
            ends[end.result] = end
        elif any(source in members for source in node.all_input_nodes):
            lead = _lead_of(node, members, math.prod(rows))
            if lead is None:
                return None
            members[node] = lead
        node = node.next
    return Match(collective, gathered, tuple(ends.values())) if ends else None


def _lead_of(node: fx.Node, members: Mapping[fx.Node, int], rows: int) -> int | None:
    """Returns how many first dimensions of a result of `node`, which reads members, are the rows; None if it does not
    work row by row. rows: how many there are.
    """
    if node.op != "call_function":
        return None
    inside = [source for source in node.all_input_nodes if source in members]
    lead = members[inside[0]]
    if node.target is getitem:
        return lead
    if node.target in PRODUCTS:
        return 1 if _multiplies_rows(node, members) else None
    if node.target in proofs.ORDER_KEEPING and proofs.keeps_order(node):
        return _leading(tuple(proofs.fake(node).shape), rows)
    if node.target in proofs.TRANSPOSES:
        return lead if proofs.permutation(node)[:lead] == list(range(lead)) else None
    if any(members[source] != lead for source in inside):
        return None
    if node.target in proofs.CUTS:
        dim = int(proofs.arguments(node)["dim"]) % proofs.fake(inside[0]).ndim
        return lead if dim >= lead else None
    if node.target is aten.cat.default:
        bound, value = proofs.arguments(node), proofs.fake(node)
        alike = all(part in members for part in bound["tensors"])
        return lead if alike and bound["dim"] % value.ndim >= lead else None
    if node.target in REDUCTIONS:
        return lead if _reduces_columns(node, lead) else None
    by_element = node.target in proofs.CASTS or is_pointwise(node.target)
    return lead if by_element and _combines_rows(node, members, lead) else None


def _leading(shape: tuple[Any, ...], rows: int) -> int | None:
    """Returns how many of the first dimensions have so many rows; None if none have."""
    known = itertools.takewhile(lambda length: isinstance(length, int), shape)
    counts = itertools.accumulate(known, mul)
    return next((lead for lead, count in enumerate(counts, 1) if count == rows), None)


def _multiplies_rows(node: fx.Node, members: Mapping[fx.Node, int]) -> bool:
    """Returns whether a matmul makes each row of its result of one row of a member, and of what all rows share."""
    bound = proofs.arguments(node)
    rows = bound[PRODUCTS[node.target]]
    if members.get(rows) != 1 or proofs.fake(rows).ndim != 2 or bound["mat2"] in members:
        return False
    return node.target is aten.mm.default or _is_shared(bound["self"], members, 2, 1)


def _reduces_columns(node: fx.Node, lead: int) -> bool:
    """Returns whether a reduction is of dimensions behind the rows."""
    bound, ndim = proofs.arguments(node), proofs.fake(node.args[0]).ndim
    dims = bound["dim"] if isinstance(bound["dim"], (list, tuple)) else [bound["dim"]]
    return bool(dims) and all(isinstance(dim, int) and dim % ndim >= lead for dim in dims)


def _combines_rows(node: fx.Node, members: Mapping[fx.Node, int], lead: int) -> bool:
    """Returns whether an op on elements reads in each row of its result the same row of members, and what all rows
    share.
    """
    value = proofs.tensor(node)
    if value is None:
        return False
    for source in node.all_input_nodes:
        given = proofs.tensor(source)
        if given is None:
            return False
        if source in members:
            if given.ndim != value.ndim or tuple(given.shape[:lead]) != tuple(value.shape[:lead]):
                return False
        elif not _is_shared(source, members, value.ndim, lead):
            return False
    return True


def _is_shared(source: fx.Node, members: Mapping[fx.Node, int], ndim: int, lead: int) -> bool:
    """Returns whether an operand that is broadcast to `ndim` dimensions is the same for all rows, of which `lead` are
    the first dimensions.
    """
    given = proofs.tensor(source)
    if given is None or source in members:
        return False
    own = given.shape[: max(0, given.ndim - ndim + lead)]
    return all(proofs.known_equal(length, 1) for length in own)


def rewrite(graph: fx.Graph, match: Match) -> None:
    """Leaves the rows in the order of the ranks."""
    start = match.gathered.node
    with graph.inserting_before(start):
        whole = rewriting.shaped(graph, match.collective.wait, tuple(proofs.fake(start).shape))
    start.replace_all_uses_with(whole)
    ends = [(end.result, whole if end.source is start else end.source) for end in match.ends]
    for result, source in ends:
        with graph.inserting_before(result):
            parts = rewriting.shaped(graph, source, tuple(proofs.fake(result).shape))
        result.replace_all_uses_with(parts)
    between = [step for end in match.ends for step in (end.result, *end.between)]
    kept = (match.collective.node, match.collective.wait)
    rewriting.erase_unused(graph, [*between, *(step for step in match.gathered.steps if step not in kept)])


def rows_by_rank(graph: fx.Graph, *, options: Options) -> int:
    """Leaves the rows of every gather for which this is proved in the order of the ranks; returns how many."""
    if not options.fusions:
        return 0
    count, scatters = 0, _scatters(graph)
    for node in collectives(graph, ALL_GATHER):
        collective = read_collective(node)
        if isinstance(collective, Collective):
            match = find_rows_by_rank(collective, scatters.get(collective.group_name, {}))
            if match is not None:
                rewrite(graph, match)
                count += 1
    return count


def _scatters(graph: fx.Graph) -> dict[str, dict[fx.Node, proofs.Regrouped]]:
    """Returns the regroupings in front of the scatters of each group, by all their nodes."""
    found: dict[str, dict[fx.Node, proofs.Regrouped]] = {}
    for node in collectives(graph, REDUCE_SCATTER):
        scatter = read_collective(node)
        if not isinstance(scatter, Collective) or scatter.operand.target is not aten.cat.default:
            continue
        chunks = proofs.regrouped(scatter.operand, scatter.world_size)
        alone = proofs.sole_user(scatter.operand) is node
        if not refused(chunks) and alone and chunks.cat_dim == 0 and chunks.split_dim > 0:
            steps = dict.fromkeys((*chunks.between, chunks.result), chunks)
            found.setdefault(scatter.group_name, {}).update(steps)
    return found
