"""The second matmul of a mixture's experts -> weighted sum for each token -> all_reduce becomes one node.

    _grouped_mm(x [S, K], weight [E, K, N], ends [E]) -> [+ _grouped_mm(second_x, second_weight, ends)]
    -> the sum of combine_experts.py, in either form [T, N]
    -> views -> all_reduce -> wait
    =>  x, weight, ends, [second_x, second_weight], [bias [E, N]], places, scale, [absent], [added]
    -> ditron.grouped_matmul_all_reduce
    -> getitem 0 [T, N] -> views

Order-keeping views may stand between the sum and the collective. The call stands where the collective stood, so the
order of collectives does not change. What is rounded on the way to the sum is not rounded in the node, except for the
products and for the sum of a rank, before it is sent.

It must not fire when
* combine_experts.py could not make a node of the sum, except that any number of experts and tokens is taken here;
* the sum, or a view of it in front of the collective, is used elsewhere, or the products are, except that a forward
  may keep them for its backward: then they are a second output of the node, behind which they are masked if the forward
  keeps them so;
* a view has rows of another length;
* the grouped matmul has another dtype than its operands, or strides of which the kernel would need a copy; of two whose
  products are added, the rows end elsewhere or operands differ in shape, dtype or strides;
* experts have biases, and it is not proved that the bias of a row is that of the expert by whose matrix the grouped
  matmul multiplies the row (see graph/expert_rows.py), or there are not as many biases as matrices;
* a size is dynamic, or there are fewer than LEAST_TOKENS tokens: the reduction of a few rows goes with its norm (see
  all_reduce_rms_norm.py), which takes longer than what could be overlapped here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ditron_inductor.options import Options
from ditron_inductor.passes.fuse import combine_experts
from ditron_inductor.passes.graph import expert_rows, proofs, rewriting
from ditron_inductor.passes.graph.collectives import ALL_REDUCE, Collective, read_collective
from ditron_inductor.passes.graph.fusion import Fusion
from ditron_inductor.passes.graph.reasons import ReasonCode, Refused, leave_unless_known
from ditron_inductor.passes.graph.slot_sums import LEAST_TOKENS, ending_with
from ditron_inductor.task.expert_nodes import SECOND
from ditron_inductor.task.nodes import GroupedMatmulAllReduce, ReducedExperts

aten = torch.ops.aten
OPERANDS = expert_rows.OPERANDS


@dataclass(frozen=True)
class Match:
    """A reduction of what experts return. steps: the nodes between the sum and the collective."""

    collective: Collective
    sums: combine_experts.Match
    steps: tuple[fx.Node, ...]


def find_grouped_matmul_all_reduce(node: fx.Node) -> Match | Refused:
    """Proves that the all-reduce `node` reduces what experts return as drawn above, or says why not."""
    collective = read_collective(node)
    if isinstance(collective, ReasonCode):
        return collective
    return find_sums(collective, collective.operand, ())


def find_sums(collective: Collective, operand: fx.Node, between: tuple[fx.Node, ...]) -> Match | Refused:
    """Proves that `operand` holds the sums of the slots of enough tokens, or says why not. between: the nodes from
    behind `operand` to the collective.
    """
    *views, source = proofs.views_up(operand)
    sums = ending_with(source, lambda total: combine_experts.find_combine_experts(total, whenever=True))
    if sums is None:
        return ReasonCode.NO_MATMUL.at(source)
    tokens = proofs.fake(sums.index).shape[0] // sums.top_k
    whole, N = proofs.fake(operand).shape, proofs.fake(sums.terms.grouped).shape[1]
    static = all(isinstance(size, int) for size in (tokens, *proofs.fake(collective.wait).shape))
    if static and tokens < LEAST_TOKENS:
        return ReasonCode.FEW_TOKENS.at(source)
    # Rows of another length would be those of another site to a rank that reduces them without experts.
    if not whole or not proofs.known_equal(whole[-1], N):
        return ReasonCode.GROUPED_MATMUL.at(source)
    refusal = _refusal(sums)
    if refusal is not None:
        return refusal
    behind = (*views, *between)
    other = proofs.other_user((source, *behind), {*behind, collective.node})
    if other is None and not static:
        return ReasonCode.DYNAMIC_TOKENS.at(source)
    return Match(collective, sums, behind) if other is None else ReasonCode.INTERMEDIATE_USED.at(other)


def _refusal(sums: combine_experts.Match) -> Refused | None:
    """Returns why the node cannot compute the products of the grouped matmuls, with their biases, which the first step
    of the sum reads. The graph may return them too, masked or not, in row-major order. None: it can compute them.
    """
    terms, (reader, *behind) = sums.terms, sums.steps
    grouped, summed = terms.grouped, terms.summed
    matmuls = (grouped,) if terms.second is None else (grouped, terms.second[0])
    wrong = next((matmul for matmul in matmuls if not expert_rows.is_taken(matmul)), None)
    if wrong is not None or not _are_alike(matmuls):
        return ReasonCode.GROUPED_MATMUL.at(wrong or matmuls[-1])
    ends = proofs.arguments(grouped)["offs"]
    readers = {summed: reader} if terms.masked is None else {summed: reader, terms.masked: behind[0]}
    others = [
        user
        for source, known in readers.items()
        for user in source.users
        if user is not known and not (user.op == "output" and _is_row_major(source))
    ]
    if summed is not grouped:
        others += [user for matmul in matmuls for user in matmul.users if user is not summed]
    if others:
        return ReasonCode.INTERMEDIATE_USED.at(others[0])
    num_experts = proofs.fake(proofs.arguments(grouped)["mat2"]).shape[0]
    return None if terms.bias is None else _bias_refusal(terms.bias, ends, num_experts)


def _is_row_major(node: fx.Node) -> bool:
    made = proofs.fake(node)
    return proofs.same_shape(made.stride(), rewriting.contiguous_strides(made.shape))


def _are_alike(matmuls: tuple[fx.Node, ...]) -> bool:
    """Returns whether grouped matmuls have the same ends, and operands of the same shapes, and weights of the same
    strides.
    """
    first, *others = (proofs.arguments(matmul) for matmul in matmuls)
    weight = proofs.fake(first["mat2"])
    return all(
        other["offs"] is first["offs"]
        and proofs.alike(other["self"], first["self"])
        and proofs.alike(other["mat2"], first["mat2"])
        and proofs.same_shape(proofs.fake(other["mat2"]).stride(), weight.stride())
        and proofs.fake(other["mat2"]).dtype == weight.dtype
        for other in others
    )


def _bias_refusal(bias: combine_experts.SlotBias, ends: fx.Node, num_experts: Any) -> Refused | None:
    """Returns why the bias of a row is not proved to be that of the expert whose rows end there; None if it is."""
    as_many = isinstance(num_experts, int) and proofs.known_equal(proofs.fake(bias.table).shape[0], num_experts)
    if as_many and expert_rows.are_experts_of_rows(bias.experts, ends, num_experts):
        return None
    ends_alone = as_many and expert_rows.are_sorted_ids(bias.experts, num_experts)
    if ends_alone and not expert_rows.are_counts(ends, num_experts):
        return ReasonCode.EXPERT_ENDS.at(ends)
    return ReasonCode.EXPERT_BIAS.at(bias.rows)


def rewrite(graph: fx.Graph, match: Match, options: Options) -> fx.Node:
    """Replaces the match by one op call and returns that call."""
    return replaced(graph, match, GroupedMatmulAllReduce(**fields_of(match, options)))


def fields_of(match: Match, options: Options) -> dict[str, Any]:
    """Returns the fields of the node that a reduction becomes, but for those of its own collective."""
    collective, sums = match.collective, match.sums
    site = rewriting.site_fields(collective.world_size, collective.group_name, options)
    optional = {
        "has_added": sums.added is not None,
        "has_absent": sums.terms.absent is not None,
        "has_bias": sums.terms.bias is not None,
        "has_second": sums.terms.second is not None,
        # Beside the sum only the graph's result reads them.
        "returns_products": len(sums.terms.summed.users) > 1 or _keeps_masked(sums.terms),
    }
    return {"reduce_op": collective.reduce_op, "top_k": sums.top_k, **optional, **site}


def _keeps_masked(terms: combine_experts.ScaledProducts) -> bool:
    """Returns whether the graph returns the products with 0 in the absent slots."""
    return terms.masked is not None and len(terms.masked.users) > 1


def replaced(graph: fx.Graph, match: Match, task: ReducedExperts) -> fx.Node:
    """Replaces the match by one call of `task` and returns that call."""
    collective, sums = match.collective, match.sums
    wanted, source = proofs.fake(collective.wait), sums.terms.summed
    with graph.inserting_before(collective.node):
        operands, total = combine_experts.operands_of(graph, sums)
        grouped = proofs.arguments(sums.terms.grouped)
        operands |= dict(zip(("x", "weight", "ends"), (grouped[name] for name in OPERANDS), strict=True))
        if sums.terms.second is not None:
            second = proofs.arguments(sums.terms.second[0])
            operands |= dict(zip(SECOND, (second["self"], second["mat2"]), strict=True))
        biases = () if sums.terms.bias is None else (sums.terms.bias.rows,)
        seconds = () if sums.terms.second is None else (sums.terms.second[0],)
        if sums.terms.bias is not None:
            operands["bias"] = sums.terms.bias.table
        shape = (wanted.numel() // total.shape[1], total.shape[1])
        made = rewriting.fake_like(total, shape, rewriting.contiguous_strides(shape))
        rows = (proofs.fake(sums.index).shape[0], total.shape[1])
        kept = [rewriting.fake_like(total, rows, rewriting.contiguous_strides(rows))] * task.returns_products
        call = rewriting.call_task(graph, task, operands, collective.node, (made, *kept, rewriting.new_token(made)))
        result = rewriting.output(graph, call, 0, collective.wait)
        if task.returns_products:
            products = rewriting.output(graph, call, 1, source)
            source.replace_all_uses_with(products, delete_user_cb=lambda user: user.op == "output")
            if (masked := sums.terms.masked) is not None and _keeps_masked(sums.terms):
                kept_so = rewriting.computed(graph, aten.where.self, (*masked.args[:2], products), masked)
                masked.replace_all_uses_with(kept_so, delete_user_cb=lambda user: user.op == "output")
        if not proofs.same_shape(tuple(wanted.shape), shape):
            result = rewriting.computed(graph, aten.reshape.default, (result, [*wanted.shape]), collective.wait)
    collective.wait.replace_all_uses_with(result)
    inside = (*match.steps, *sums.steps, source, *biases, *seconds, sums.terms.grouped)
    rewriting.erase_unused(graph, [collective.wait, collective.node, *inside])
    return call


grouped_matmul_all_reduce = Fusion(
    GroupedMatmulAllReduce, (ALL_REDUCE,), find_grouped_matmul_all_reduce, rewrite, leave_unless_known
)
"""Fuses every all-reduce of what experts return. The others keep the reason of the fusion of sums."""
