"""The second matmul of a decode step's experts -> weighted sum for each token -> all_reduce becomes one node.

    topk -> getitem 1 [T, k] -> reshape [S] -> index(weight [E, N, K], [that]) [S, N, K]
    bmm(index, rows [S, K, 1]) -> squeeze [S, N] -> mul(.., factors [S, 1]) -> reshape [T, k, N] -> sum over k [T, N]
    -> [cast] -> [add(.., added)] -> views -> all_reduce -> wait
    =>  rows [S, K], permute(weight) [E, K, N], reshape [S], factors [S], [added]
    -> ditron.experts_all_reduce -> getitem 0 [T, N] -> views

The bmm, and what it proves, are those of expert_projections.py. The products are rounded in the node as the bmm rounds
them; what is rounded between them and the collective is added in fp32 there, and rounded once. A norm behind the
collective is taken by all_reduce_rms_norm.py, as behind a matmul. The call stands where the collective stood, so the
order of collectives does not change.

It must not fire when
* the bmm could not become an `expert_projections`, but for the strategy and for the other nodes of the graph;
* some slots may be of other ranks' experts, as under expert parallelism;
* the slots of a token share its row, as in front of a first matmul;
* the products, the terms, the sum, or a view of it in front of the collective, are used elsewhere;
* the sum is one of integers, or rounded to another dtype than that of the products;
* what is scaled, added up or reduced has rows of another length than the products: its rows would not be slots;
* there are more than MOST_EXPERT_COLUMNS columns, for whose tiles there are no flags, or a dynamic number;
* something writes into an operand, which the call would read later.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from ditron_inductor.options import Options
from ditron_inductor.passes.fuse.expert_projections import Match as Product
from ditron_inductor.passes.fuse.expert_projections import find_expert_projections, operands_of
from ditron_inductor.passes.graph import proofs, rewriting
from ditron_inductor.passes.graph.all_to_all import written
from ditron_inductor.passes.graph.collectives import ALL_REDUCE, Collective, read_collective
from ditron_inductor.passes.graph.fusion import Fusion
from ditron_inductor.passes.graph.reasons import ReasonCode, Refused, leave_unless_known
from ditron_inductor.passes.graph.slot_sums import added_to, candidates, casts, rounded_to
from ditron_inductor.task.nodes import MOST_EXPERT_COLUMNS, ExpertsAllReduce
from ditron_inductor.task.torch_dtypes import ACTIVATION_DTYPES

aten = torch.ops.aten


@dataclass(frozen=True)
class SlotSum:
    """A sum over the slots of each token. bmm: the product of all slots. products: a view [.., N] of it. factors: a
    number for each row of that. summed: the terms that are added up. top_k: the slots of a token. added: what is added
    to the sum, or None. result: the sum, with that, rounded. steps: the nodes from the views of the products to the
    result.
    """

    bmm: fx.Node
    products: fx.Node
    factors: fx.Node
    summed: fx.Node
    top_k: int
    added: fx.Node | None
    result: fx.Node
    steps: tuple[fx.Node, ...]


@dataclass(frozen=True)
class Match:
    """A reduction of what experts return. steps: the nodes from behind the matmul to the collective."""

    collective: Collective
    product: Product
    terms: SlotSum
    steps: tuple[fx.Node, ...]


def find_experts_all_reduce(node: fx.Node) -> Match | Refused:
    """Proves that the all-reduce `node` reduces what experts return as drawn above, or says why not."""
    collective = read_collective(node)
    if isinstance(collective, ReasonCode):
        # Whether anything stands in front of it, other fusions tell.
        return ReasonCode.NO_MATMUL
    *views, source = proofs.views_up(collective.operand)
    terms = next(_sums(source), None)
    if terms is None:
        return ReasonCode.NO_MATMUL.at(source)
    product = find_expert_projections(terms.bmm)
    if product is None or product.by_token or product.has_absent or product.top_k != terms.top_k:
        return ReasonCode.EXPERTS_FORM.at(terms.bmm)
    behind = proofs.views_up(terms.products)
    N = proofs.fake(product.result).shape[1]
    # Terms in rows of another length are not those of slots, and a reduced tensor in such rows would be that of another
    # site to a rank that reduces it without experts.
    shapes = [tuple(proofs.fake(one).shape) for one in (terms.products, terms.summed, collective.operand)]
    whole_rows = all(shape and proofs.known_equal(shape[-1], N) for shape in shapes)
    if product.result not in behind or not whole_rows or not isinstance(N, int) or N > MOST_EXPERT_COLUMNS:
        return ReasonCode.EXPERTS_FORM.at(source)
    if proofs.fake(terms.result).dtype != proofs.fake(product.result).dtype:
        return ReasonCode.CAST_BETWEEN.at(source)
    steps = (*behind[:-1], *terms.steps, *views)
    other = proofs.other_user(steps, {*steps, collective.node})
    if other is not None:
        return ReasonCode.INTERMEDIATE_USED.at(other)
    late = written([one for one in (terms.factors, terms.added) if one is not None])
    return Match(collective, product, terms, steps) if late is None else ReasonCode.OPERAND_LATE.at(late)


def _sums(source: fx.Node) -> Iterator[SlotSum]:
    """Yields the sums of slots, of those near `source`, that end with it."""
    for total in candidates(source):
        found = _terms(total) if total.target is aten.sum.dim_IntList else None
        if found is not None and found.result is source:
            yield found


def _terms(total: fx.Node) -> SlotSum | None:
    """Reads `total` as a sum of scaled products of slots; None if it is none."""
    summed, bound = proofs.operand(total), proofs.arguments(total)
    shape = proofs.fake(summed).shape
    if not proofs.fake(total).dtype.is_floating_point:
        # A sum of another kind of numbers would not be what is added up here.
        return None
    if len(shape) != 3 or [dim % 3 for dim in bound["dim"] or ()] != [1] or bound["keepdim"]:
        return None
    *views, scaled = proofs.views_up(summed)
    rounded = [scaled] if casts(scaled) else []
    scaled = proofs.operand(scaled) if rounded else scaled
    factors = [factor for factor in scaled.args if isinstance(factor, fx.Node)]
    if scaled.target is not aten.mul.Tensor or len(factors) != 2 or not isinstance(shape[1], int):
        return None
    for factor, scale in (factors, factors[::-1]):
        wide = [factor] if casts(factor) else []
        products = proofs.operand(factor) if wide else factor
        bmm = proofs.views_up(products)[-1]
        if bmm.target is aten.bmm.default and _is_column(scale, scaled) and proofs.alike(factor, scaled):
            last = rounded_to(total, proofs.fake(products).dtype)
            result, behind, added = added_to(last)
            steps = dict.fromkeys((*wide, scaled, *rounded, *views, total, last, *behind, result))
            return SlotSum(bmm, products, scale, summed, shape[1], added, result, tuple(steps))
    return None


def _is_column(scale: fx.Node, scaled: fx.Node) -> bool:
    """Returns whether a factor has one number for each row of a product."""
    value, product = proofs.tensor(scale), proofs.fake(scaled)
    if value is None or value.dtype not in ACTIVATION_DTYPES:
        return False
    return proofs.same_shape(tuple(value.shape), (*product.shape[:-1], 1))


def rewrite(graph: fx.Graph, match: Match, options: Options) -> fx.Node:
    """Replaces the match by one op call and returns that call."""
    collective, terms = match.collective, match.terms
    wanted, like = proofs.fake(collective.wait), proofs.fake(match.product.result)
    (S, N), top_k = like.shape, terms.top_k
    site = rewriting.site_fields(collective.world_size, collective.group_name, options)
    assert collective.reduce_op is not None
    task = ExpertsAllReduce(collective.reduce_op, top_k, has_added=terms.added is not None, **site)
    with graph.inserting_before(collective.node):
        rows, factor = operands_of(graph, match.product)
        factors = rewriting.call(graph, aten.reshape.default, (terms.factors, [S]), terms.factors, (S,))
        operands = {"x": rows, "matrices": factor, "experts": match.product.experts, "factors": factors}
        if terms.added is not None:
            shape = (S // top_k, N)
            operands["added"] = rewriting.call(
                graph, aten.reshape.default, (terms.added, [*shape]), terms.added, shape
            )
        made = rewriting.fake_like(like, (S // top_k, N), (N, 1))
        call = rewriting.call_task(graph, task, operands, collective.node, (made, rewriting.new_token(made)))
        result = rewriting.output(graph, call, 0, collective.wait)
        if not proofs.same_shape(tuple(wanted.shape), (S // top_k, N)):
            result = rewriting.computed(graph, aten.reshape.default, (result, [*wanted.shape]), collective.wait)
    collective.wait.replace_all_uses_with(result)
    rewriting.erase_unused(graph, [collective.wait, collective.node, *match.steps, *match.product.copies])
    return call


experts_all_reduce = Fusion(ExpertsAllReduce, (ALL_REDUCE,), find_experts_all_reduce, rewrite, leave_unless_known)
"""Fuses every all-reduce of what a decode step's experts return. The others keep the reason of the other fusions."""
