"""What a mixture's experts return -> sum for each token -> all_reduce becomes `ditron::grouped_matmul_all_reduce`.

Before, with T tokens that take k experts each, in S = T * k slots sorted by expert, as `transformers` writes it:

    _grouped_mm(x [S, K], weight [E, K, N], ends [E]) [S, N] -> mul(.., unsqueeze(scale [S], -1))
    -> index(.., [places [S]]) -> reshape [T, k, N] -> sum over k -> [cast] -> [add(.., added)] -> all_reduce -> wait

After:

    x, weight, ends, places, scale, [added] -> ditron.grouped_matmul_all_reduce -> getitem 0 [T, N]

Order-keeping views may stand between the sum and the collective. Whatever made `places` and `scale`, each token gets
the sum of the slots that they name. What is rounded on the way to the sum is not rounded in the node, which adds in
fp32, as Inductor's kernel does.

It must not fire when
* the products, or anything between them and the collective, are used elsewhere, as the backward of training does;
* the slots of a token are not side by side behind the index, or the rows are not as many as the slots;
* there are at most `MOST_EXPERT_TOKENS` tokens, or their number is dynamic: the reduction of a few rows goes with its
  norm (see all_reduce_rms_norm.py), which takes longer than what could be overlapped here;
* the dtype is not bfloat16, in which torch's grouped matmul computes;
* something writes into an operand, which the call would read later.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from ditron_inductor.options import Options
from ditron_inductor.passes.graph import proofs, rewriting
from ditron_inductor.passes.graph.all_to_all import written
from ditron_inductor.passes.graph.collectives import ALL_REDUCE, Collective, read_collective
from ditron_inductor.passes.graph.fusion import Fusion
from ditron_inductor.passes.graph.reasons import ReasonCode, Refused, leave_unless_known, refused
from ditron_inductor.task.nodes import MOST_EXPERT_TOKENS, GroupedMatmulAllReduce

aten = torch.ops.aten
GROUPED = aten._grouped_mm.default
CAST = torch.ops.prims.convert_element_type.default


@dataclass(frozen=True)
class SlotSums:
    """The sums of the slots of all tokens, [T, N]. grouped: the grouped matmul. places, scale: of the slots, scale in
    any shape of S elements. steps: the nodes between the grouped matmul and the sums, these included.
    """

    grouped: fx.Node
    places: fx.Node
    scale: fx.Node
    top_k: int
    steps: tuple[fx.Node, ...]


@dataclass(frozen=True)
class Match:
    """A reduction of what experts return. added: what is added to the sums before they are reduced, in any shape of T *
    N elements, or None. steps: the grouped matmul and the nodes between it and the collective.
    """

    collective: Collective
    sums: SlotSums
    added: fx.Node | None
    steps: tuple[fx.Node, ...]


def find_grouped_matmul_all_reduce(node: fx.Node) -> Match | Refused:
    """Proves that the all-reduce `node` reduces what experts return as drawn above, or says why not."""
    collective = read_collective(node)
    if isinstance(collective, ReasonCode):
        return collective
    *views, source = proofs.views_up(collective.operand)
    if source.target is not aten.add.Tensor:
        found = _sum_of_slots(source)
        return found if refused(found) else _match(collective, found, None, (*views, source))
    terms = [term for term in source.args if isinstance(term, fx.Node)]
    if len(terms) != 2 or source.kwargs or not proofs.alike(*terms):
        return ReasonCode.NO_MATMUL.at(source)
    for term, other in (terms, terms[::-1]):
        *more, last = proofs.views_up(term)
        found = _sum_of_slots(last)
        if not refused(found):
            return _match(collective, found, other, (*views, source, *more, last))
    return ReasonCode.NO_MATMUL.at(source)


def _sum_of_slots(node: fx.Node) -> SlotSums | Refused:
    """Proves that a node is the sum [T, N] of the slots of each token, or a cast of it, or says why not."""
    steps, total = [node], node
    if total.target is CAST:
        total = proofs.operand(total)
        steps.append(total)
    if total.target is not aten.sum.dim_IntList or proofs.arguments(total)["keepdim"]:
        return ReasonCode.NO_MATMUL.at(total)
    terms = proofs.operand(total)
    shape = proofs.fake(terms).shape
    if len(shape) != 3 or [dim % 3 for dim in proofs.arguments(total)["dim"]] != [1] or not isinstance(shape[1], int):
        return ReasonCode.NO_MATMUL.at(total)
    *views, taken = proofs.views_up(terms)
    scaled = taken.args[0] if taken.target is aten.index.Tensor else None
    indices = taken.args[1] if scaled is not None else None
    if not isinstance(scaled, fx.Node) or not isinstance(indices, (list, tuple)) or len(indices) != 1:
        return ReasonCode.NO_MATMUL.at(taken)
    places, factors = indices[0], [factor for factor in scaled.args if isinstance(factor, fx.Node)]
    if scaled.target is not aten.mul.Tensor or len(factors) != 2 or not isinstance(places, fx.Node):
        return ReasonCode.NO_MATMUL.at(scaled)
    grouped, scale = factors if factors[0].target is GROUPED else factors[::-1]
    if grouped.target is not GROUPED:
        return ReasonCode.NO_MATMUL.at(scaled)
    found = SlotSums(grouped, places, scale, shape[1], (*steps, *views, taken, scaled))
    return _refusal(found, shape) or found


def _refusal(found: SlotSums, shape: torch.Size) -> Refused | None:
    """Returns what is wrong with a sum of slots [T, k, N] by its shapes and dtypes; None if nothing is."""
    bound, scale = proofs.arguments(found.grouped), proofs.fake(found.scale)
    x, weight, product = proofs.fake(bound["self"]), proofs.fake(bound["mat2"]), proofs.fake(found.grouped)
    places, (T, top_k, N) = proofs.fake(found.places), shape
    if bound["offs"] is None or bound["bias"] is not None or (x.ndim, weight.ndim) != (2, 3):
        return ReasonCode.GROUPED_MATMUL.at(found.grouped)
    if not x.dtype == weight.dtype == product.dtype == torch.bfloat16:
        return ReasonCode.DTYPE.at(found.grouped)
    few = not isinstance(T, int) or T <= MOST_EXPERT_TOKENS
    expected = ((places, (T * top_k,)), (product, (T * top_k, N)), (scale, (T * top_k, 1)))
    fits = all(proofs.same_shape(tuple(value.shape), of_slots) for value, of_slots in expected)
    if few or not fits or places.dtype != torch.int64 or not scale.dtype.is_floating_point:
        return ReasonCode.GROUPED_MATMUL.at(found.grouped)
    return None


def _match(
    collective: Collective, found: SlotSums, added: fx.Node | None, behind: tuple[fx.Node, ...]
) -> Match | Refused:
    """Returns the match if nothing on the way is used elsewhere or written to. behind: what follows the sum."""
    steps = (found.grouped, *found.steps, *behind)
    other = proofs.other_user(steps, {*steps, collective.node})
    if other is not None:
        return ReasonCode.INTERMEDIATE_USED.at(other)
    if proofs.fake(collective.operand).dtype != torch.bfloat16:
        return ReasonCode.DTYPE.at(collective.operand)
    operands = (*found.grouped.all_input_nodes, found.places, found.scale, *((added,) if added is not None else ()))
    writer = written(operands)
    if writer is not None:
        return ReasonCode.GROUPED_MATMUL.at(writer)
    return Match(collective, found, added, steps)


def rewrite(graph: fx.Graph, match: Match, options: Options) -> fx.Node:
    """Replaces the match by one op call and returns that call."""
    collective, sums, bound = match.collective, match.sums, proofs.arguments(match.sums.grouped)
    assert collective.reduce_op is not None
    x, weight = bound["self"], bound["mat2"]
    S, N = proofs.fake(sums.grouped).shape
    shape = (S // sums.top_k, N)
    task = GroupedMatmulAllReduce(
        reduce_op=collective.reduce_op,
        top_k=sums.top_k,
        has_added=match.added is not None,
        **rewriting.site_fields(collective.world_size, collective.group_name, options),
    )
    with graph.inserting_before(collective.node):
        scale = rewriting.computed(graph, aten.reshape.default, (sums.scale, [S]), sums.scale)
        operands = {"x": x, "weight": weight, "ends": bound["offs"], "places": sums.places, "scale": scale}
        if match.added is not None:
            operands["added"] = rewriting.computed(graph, aten.reshape.default, (match.added, [*shape]), match.added)
        like = proofs.fake(sums.grouped)
        reduced = rewriting.fake_like(like, shape, rewriting.contiguous_strides(shape))
        call = rewriting.call_task(graph, task, operands, collective.node, (reduced, rewriting.new_token(reduced)))
        result = rewriting.output(graph, call, 0, collective.wait)
        wanted = proofs.fake(collective.wait).shape
        if not proofs.same_shape(tuple(wanted), shape):
            result = rewriting.computed(graph, aten.reshape.default, (result, [*wanted]), collective.wait)
    collective.wait.replace_all_uses_with(result)
    rewriting.erase_unused(graph, [collective.wait, collective.node, *match.steps])
    return call


grouped_matmul_all_reduce = Fusion(
    GroupedMatmulAllReduce, (ALL_REDUCE,), find_grouped_matmul_all_reduce, rewrite, leave_unless_known
)
"""Fuses every all-reduce of what experts return. The others keep the reason of the fusion of sums."""
