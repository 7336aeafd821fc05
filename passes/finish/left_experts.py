"""Says why no node computes what routed experts return, where a reduction sends the sum of it for each token.

    _grouped_mm(..) [S, N] or bmm(.., copies of weights) [S, N, 1]
    -> what brings the slots of a token together, in whatever way -> a reduction, with a norm behind it or without

A path from the reduction up to the matmul shows that experts are in front of it. The first op on the way back that is
none of the form that a fusion takes is the one that stopped the fusion. No fusion takes few tokens, or a dynamic number
of them, in whatever form. In a backward the form is not the user's, so nothing is said of it here.

A bmm counts if its matrices are copies, one for each slot, or if rows of its result are picked on the way. One whose
batches are summed up, without such a choice, is a matmul with a longer contracted dimension.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import torch
from torch import fx

from ditron_inductor.passes.fuse.fusions import FUSIONS
from ditron_inductor.passes.graph import expert_rows, proofs
from ditron_inductor.passes.graph.collectives import ALL_REDUCE
from ditron_inductor.passes.graph.other_matmuls import other_matmul
from ditron_inductor.passes.graph.reasons import ReasonCode, Refusal
from ditron_inductor.passes.graph.routes import PICKS, copies_weights
from ditron_inductor.passes.graph.slot_readings import Reading, casts, readings
from ditron_inductor.passes.graph.slot_sums import LEAST_TOKENS, adds_sorted_slots, number_of
from ditron_inductor.passes.graph.sorts import is_written
from ditron_inductor.task.nodes import MOST_EXPERT_TOKENS, ReducedExperts

aten = torch.ops.aten
SUMS: frozenset[object] = PICKS - {aten.index.Tensor, aten.index_select.default, aten.gather.default} | {
    aten.sum.dim_IntList,
    aten.add.Tensor,
    aten.bmm.default,
}
"""Ops that may add up the slots of a token."""
CHUNKS: frozenset[object] = proofs.SLICES | {aten.cat.default}
"""Ops by which a reduce-scatter scatters an inner dimension."""
ON_THE_WAY: frozenset[object] = (
    proofs.MAY_KEEP_ORDER
    | proofs.CASTS
    | CHUNKS
    | PICKS
    | (SUMS - {aten.bmm.default})
    | {aten.select.int, aten.where.self, aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor}
    | {aten.slice_scatter.default, aten.constant_pad_nd.default}
)


OF_EXPERTS = frozenset({ReasonCode.DYNAMIC_TOKENS, ReasonCode.EXPERTS_SUM, ReasonCode.FEW_TOKENS})
"""The reasons that are those of the fusion of experts, whatever other fusion was tried."""


@dataclass(frozen=True)
class Experts:
    """The matmul of experts. path: the nodes from behind it to what is reduced."""

    matmul: fx.Node
    path: tuple[fx.Node, ...]


def why_experts_stay(reduced: fx.Node, *, normed: bool) -> Refusal | None:
    """Returns why what experts return is not computed by the node of the reduction that sends `reduced`; None if no
    experts are in front of it, or if nothing could be proved. normed: the reduction has its norm in its node, which
    adds up the slots of a few tokens.
    """
    if proofs.tangents(reduced.graph):
        return None
    experts, shape = find_experts(reduced), proofs.fake(reduced).shape
    if experts is None:
        return None if (summed := _sum_of_batches(reduced)) is None else ReasonCode.SUM_OF_MATMULS.at(summed)
    copied, source = experts.matmul.target in proofs.BATCHED, proofs.views_up(reduced)[-1]
    if not copied and (experts.matmul.target is not proofs.GROUPED or not expert_rows.is_taken(experts.matmul)):
        return ReasonCode.GROUPED_MATMUL.at(experts.matmul)
    if not all(isinstance(size, int) for size in shape):
        return ReasonCode.DYNAMIC_TOKENS.at(source)
    tokens = math.prod(shape[:-1])
    if tokens < LEAST_TOKENS:
        stranger = _stranger(experts, few=True) if normed and tokens <= MOST_EXPERT_TOKENS else None
        return ReasonCode.FEW_TOKENS.at(source) if stranger is None else ReasonCode.EXPERTS_SUM.at(stranger)
    stranger = experts.matmul if copied else _stranger(experts, few=False)
    if stranger is not None:
        return ReasonCode.EXPERTS_SUM.at(stranger)
    other = _read_elsewhere(experts, reduced)
    return None if other is None else ReasonCode.INTERMEDIATE_USED.at(other)


def _read_elsewhere(experts: Experts, reduced: fx.Node) -> fx.Node | None:
    """Returns what reads something on the way that is not summed up yet, for another end than the reduction."""
    needed = set(proofs.reached([reduced], lambda node: node.all_input_nodes))
    return proofs.other_user(experts.path[:-1], needed)


def pattern_of(refusal: Refusal, tried: str, collective: object = ALL_REDUCE) -> str:
    """Returns the fusion that a reason is about, if `tried` is the one that was tried on such a collective."""
    kinds = (one.node.kind for one in FUSIONS if collective in one.ops and issubclass(one.node, ReducedExperts))
    return next(kinds, tried) if refusal.code in OF_EXPERTS else tried


def find_experts(reduced: fx.Node) -> Experts | None:
    """Returns the nearest matmul of experts whose products `reduced` has, added up in whatever way."""
    toward: dict[fx.Node, fx.Node | None] = {reduced: None}
    pending = deque([reduced])
    while pending:
        node = pending.popleft()
        path = _path(node, toward)
        picked, added = (any(step.target in ops for step in path) for ops in (PICKS, SUMS))
        batched = node.target in proofs.BATCHED
        # Of rows that stay in the order of the experts nobody knows the tokens.
        if picked and other_matmul(node) is ReasonCode.GROUPED_MATMUL:
            return Experts(node, path)
        if batched and ((picked and added) or copies_weights(node)):
            return Experts(node, path)
        if node.target not in ON_THE_WAY and not (batched and _combines(node)):
            continue
        for source in node.all_input_nodes:
            value = proofs.tensor(source)
            # The numbers of rows are none of the products. What takes one of several results has no value itself.
            if source not in toward and (value is None or value.dtype.is_floating_point):
                toward[source] = node
                pending.append(source)
    return None


def _path(node: fx.Node, toward: dict[fx.Node, fx.Node | None]) -> tuple[fx.Node, ...]:
    """Returns the nodes behind `node` to where the search began."""
    path = []
    behind = toward[node]
    while behind is not None:
        path.append(behind)
        behind = toward[behind]
    return tuple(path)


def _combines(bmm: fx.Node) -> bool:
    """Returns whether a batched matmul has one row or one column for each batch, as the sum over the slots of a token
    written by `einsum` has.
    """
    return any(proofs.known_equal(size, 1) for size in proofs.fake(bmm).shape[1:])


def _sum_of_batches(reduced: fx.Node) -> fx.Node | None:
    """Returns the batched matmul over whose batches `reduced` is the sum; None if it is not."""
    total = proofs.views_up(reduced)[-1]
    total = proofs.operand(total) if casts(total) else total
    if total.target is not aten.sum.dim_IntList:
        return None
    summed, bound = proofs.operand(total), proofs.arguments(total)
    *_, bmm = proofs.views_up(summed)
    if bmm.target is not aten.bmm.default or proofs.fake(summed).ndim != 3 or bound["dim"] not in ([0], [-3]):
        return None
    return bmm if proofs.same_shape(tuple(proofs.fake(summed).shape), tuple(proofs.fake(bmm).shape)) else None


def _stranger(experts: Experts, *, few: bool) -> fx.Node | None:
    """Returns the first op on the way from the matmul that is none of the form that is taken; None if there is none.
    few: the form that the reduction with a norm takes, in which any views are allowed.
    """
    products, before = proofs.fake(experts.matmul), experts.matmul
    scaled = placed = summed = added = False
    read = _read_as_sums(experts.path)
    for node in experts.path:
        if node.target in CHUNKS and summed:
            if _cuts_columns(node):
                # No node scatters the columns of what it sums up.
                return node
            continue
        if (reading := read.get(node)) is not None and not summed:
            weighted = reading.weights is not None
            fits = scaled or weighted if few else placed and not (scaled and weighted)
            summed, node = node is reading.total, node if fits else reading.total
        elif proofs.keeps_order(node):
            fits = few or placed or summed
        elif casts(node):
            fits = few or not summed or proofs.fake(node).dtype == products.dtype
        elif node.target is aten.add.Tensor and summed:
            fits, added = not added and proofs.alike(node, before), True
        elif summed:
            fits = not added and number_of(node) is not None
        elif node.target is aten.add.Tensor:
            fits = not placed and not scaled and _adds_bias(node, before)
        elif node.target is aten.where.self:
            fits = not placed
        elif node.target is aten.mul.Tensor:
            fits, scaled = not scaled and _scales(node, before), True
        elif node.target is aten.index.Tensor:
            fits, placed = not placed and proofs.indexed_rows(node) is not None, True
        elif not few and (node.target is aten.gather.default or is_written(node)):
            fits, placed = not placed, True
        elif node.target is aten.sum.dim_IntList:
            fits, summed = (scaled if few else placed) and any(readings(node)), True
        else:
            fits, summed = not few and not placed and adds_sorted_slots(node), True
        if not fits:
            return _read_by_bmm(node)
        before = node
    # What is reduced holds the sums, in the dtype of the products.
    return None if summed and proofs.fake(before).dtype == products.dtype else proofs.views_up(before)[-1]


def _read_as_sums(path: tuple[fx.Node, ...]) -> dict[fx.Node, Reading]:
    """Returns, by their nodes, the sums over slots that are no `sum`: batched matmuls, and slots added one by one."""
    found: dict[fx.Node, Reading] = {}
    for total in path:
        for reading in readings(total) if total.target in (aten.bmm.default, aten.add.Tensor) else ():
            found |= dict.fromkeys((*reading.steps, total), reading)
    return found


def _read_by_bmm(node: fx.Node) -> fx.Node:
    """Returns the batched matmul that alone reads `node` through views, if these transpose it; else `node`."""
    reader: fx.Node | None = node
    while reader is not None and reader.target in proofs.MAY_KEEP_ORDER:
        reader = proofs.sole_user(reader)
    return node if reader is None or reader.target not in proofs.BATCHED else reader


def _cuts_columns(node: fx.Node) -> bool:
    """Returns whether a node cuts the last dimension apart."""
    if node.target not in proofs.CUTS:
        return False
    ndim = proofs.fake(proofs.operand(node)).ndim
    return proofs.arguments(node)["dim"] % ndim == ndim - 1


def _adds_bias(add: fx.Node, products: fx.Node) -> bool:
    """Returns whether an addition has rows of a table, or other experts' products, beside the products."""
    others = [term for term in add.all_input_nodes if term is not products]
    return any(one.target is proofs.GROUPED or proofs.indexed_rows(one) is not None for one in others)


def _scales(mul: fx.Node, products: fx.Node) -> bool:
    """Returns whether a product has one factor for each row."""
    factors = [proofs.tensor(factor) for factor in mul.args if factor is not products]
    return all(factor is not None and factor.ndim and proofs.known_equal(factor.shape[-1], 1) for factor in factors)
