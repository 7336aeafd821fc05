"""Reviews the reasons of the collectives that were left alone, after all fusions. No node changes.

    gather bf16 -> to fp8 -> _scaled_mm     no_matmul, cast_between    -> fp8_matmul
    gather int8 -> dequantize -> mm         no_matmul, cast_between    -> quantized_matmul
    _int_mm -> * scale -> reduce_scatter    pointwise_between          -> quantized_matmul
    gather -> index -> _grouped_mm          no_matmul                  -> grouped_matmul
    _grouped_mm -> index -> sum -> reduce   no_matmul, cast_between    -> experts_sum, few_tokens, dynamic_tokens
    bmm(.., index(weight)) -> sum -> reduce no_matmul, batched_matmul  -> experts_sum, few_tokens, dynamic_tokens
    bmm -> index -> sum, in a backward      no_matmul                  -> batched_matmul
    bmm -> sum over its batches -> reduce   no_matmul, cast_between    -> sum_of_matmuls
    all_reduce(amax(x), "max")              reduce_op                  -> no_matmul
    fused product -> relu -> all_reduce     pointwise_between          -> already_fused
    keys -> all_to_all -> part -> attention unequal_splits, no_matmul  -> attention_parts
    rows -> all_to_all -> _grouped_mm       unequal_splits, no_matmul  -> tokens_exchanged
    index(x, [order of a sort]) -> all_to_all, and back               -> tokens_exchanged
    all_to_all, searchsorted(counts, rows)  unequal_splits, no_matmul  -> tokens_exchanged
    rows -> all_to_all -> a part -> bmm     batched_matmul, no_matmul  -> rows_exchanged

A fusion looks only for the matmuls that it takes. If a chain ends in a matmul of another kind, the reason that the
fusion gives is not the real one. So the chain is followed here: from a reduction upwards through casts, views and
scales, and from a gather downwards through ops that make or read quantised numbers. A gather that is scaled more than
once on the way down (a norm) does not count as next to the matmul. A grouped matmul, as that of routed experts, counts
also behind the ops that bring the slots of a token together, or the rows of an expert: they are a part of it. An
all-to-all beside it is that of expert parallelism; `graph/token_exchanges.py` has what else proves that. One that sends
whole rows of other matmuls, as to experts of a fixed capacity, is not fused either, whatever else is changed.

A reason of the collective itself, such as its reduce op, counts only if a matmul is next to it. Otherwise there is
nothing to fuse, whatever the collective.
"""

from __future__ import annotations

from itertools import chain
from operator import getitem

import torch
from torch import fx

from ditron_inductor.options import Options
from ditron_inductor.passes.attention.ring_attention import ring_attention
from ditron_inductor.passes.finish.left_experts import find_experts, pattern_of, why_experts_stay
from ditron_inductor.passes.graph import proofs
from ditron_inductor.passes.graph.collectives import is_collective
from ditron_inductor.passes.graph.launches import is_task
from ditron_inductor.passes.graph.other_matmuls import dequantizes, other_matmul, quantizes
from ditron_inductor.passes.graph.reasons import LEFT_ALONE, Reason, ReasonCode, Refusal, leave_alone
from ditron_inductor.passes.graph.routes import MOVES, ROUTES, SCALES, copies_weights, downwards, upwards
from ditron_inductor.passes.graph.token_exchanges import matmul_of_rows, shows_tokens
from ditron_inductor.task import schema
from ditron_inductor.task.nodes import ATTENTION_KINDS, ReductionWithNorm
from ditron_inductor.task.verify import task_calls

aten = torch.ops.aten

VAGUE = frozenset(
    {
        ReasonCode.NO_MATMUL,
        ReasonCode.CAST_BETWEEN,
        ReasonCode.POINTWISE_BETWEEN,
        ReasonCode.LAYOUT,
        ReasonCode.CHUNKS_PARTIAL,
    }
)
OWN = frozenset(
    {
        ReasonCode.GROUP_UNKNOWN,
        ReasonCode.REDUCE_OP,
        ReasonCode.UNEQUAL_SPLITS,
        ReasonCode.UNSUPPORTED_COLLECTIVE,
        ReasonCode.WAIT_FORM,
        ReasonCode.WORLD_SIZE,
    }
)
OF_ROWS = VAGUE | {ReasonCode.BATCHED_MATMUL}
"""Reasons that an all-to-all of whole rows may have been given: no change of what they name would have it fused."""
OF_EXCHANGES = OF_ROWS | {
    ReasonCode.GROUPED_MATMUL,
    ReasonCode.ROWS_CONTRACTED,
    ReasonCode.SHAPE_UNPROVEN,
    ReasonCode.UNEQUAL_SPLITS,
    ReasonCode.WAIT_FORM,
}
"""The same of an all-to-all of tokens."""
CLAMPS: frozenset[object] = frozenset(
    {
        aten.clamp.default,
        aten.clamp_min.default,
        aten.clamp_max.default,
        aten.minimum.default,
        aten.maximum.default,
        aten.round.default,
        aten.sub.Tensor,
        aten.add.Tensor,
    }
)


def find_other_matmul(collective: fx.Node) -> Refusal | None:
    """Returns the matmul that no fusion takes yet, or the dequantisation, next to a collective, or None."""
    below = None if _reduces(collective) else _below(collective)
    if below is not None:
        return below
    quiet = MOVES | proofs.CASTS | SCALES
    for node in upwards(collective, quiet):
        code = other_matmul(node)
        if code is not None:
            return code.at(node)
    experts = _experts(collective)
    if experts is not None:
        return experts
    found = _routed_matmul(collective)
    if found is not None:
        return ReasonCode.GROUPED_MATMUL.at(found)
    return _batched_experts(collective) if _reduces(collective) else None


def _batched_experts(reduction: fx.Node) -> Refusal | None:
    """Returns the batched matmul of experts of which a backward sums up the gradients of their tokens."""
    # In a forward `why_experts_stay` has said what there is to say of experts.
    if not proofs.tangents(reduction.graph):
        return None
    (operand, *_) = reduction.all_input_nodes
    experts = find_experts(operand)
    if experts is None or experts.matmul.target not in proofs.BATCHED:
        return None
    return ReasonCode.BATCHED_MATMUL.at(experts.matmul)


def _experts(collective: fx.Node) -> Refusal | None:
    """Returns why the sum of what experts return is not fused with its reduction; None if that is none."""
    (operand, *_) = collective.all_input_nodes
    return why_experts_stay(operand, normed=False) if _reduces(collective) else None


def _routed_matmul(collective: fx.Node) -> fx.Node | None:
    """Returns the matmul of experts whose rows a collective brings, or whose products it reduces, between a routing."""
    # From a gather the routing leads down, from a reduction up, and all-to-alls stand on both sides.
    through = MOVES | proofs.CASTS | SCALES | ROUTES
    down = () if _reduces(collective) else downwards(collective, through)
    up = () if _gathers(collective) else upwards(collective, through)
    return next((node for node in chain(down, up) if _is_of_experts(node, copied=not _reduces(collective))), None)


def _is_of_experts(node: fx.Node, *, copied: bool) -> bool:
    """Returns whether a node is a grouped matmul or, if `copied`, one with copies of its experts' weights."""
    if other_matmul(node) is ReasonCode.GROUPED_MATMUL:
        return True
    return copied and node.target in proofs.BATCHED and copies_weights(node)


def _reduces(collective: fx.Node) -> bool:
    """Returns whether a collective reduces what it sends: then its result is as good as any other tensor."""
    return _name(collective).startswith(("all_reduce", "reduce_scatter"))


def _gathers(collective: fx.Node) -> bool:
    return _name(collective).startswith("all_gather")


def _name(collective: fx.Node) -> str:
    target = collective.target
    assert isinstance(target, torch._ops.OpOverload)
    return target._opname


def _below(gather: fx.Node) -> Refusal | None:
    """Returns the matmul that a gather feeds, through at most one scaling, as a refusal; None without one."""
    pending: list[tuple[fx.Node, int, fx.Node | None]] = [(gather, 0, None)]
    seen: set[tuple[fx.Node, int]] = set()
    while pending:
        node, scalings, dequantized = pending.pop()
        if (node, scalings) in seen:
            continue
        seen.add((node, scalings))
        for user in node.users:
            code = other_matmul(user)
            if code is not None:
                return code.at(user)
            if user.target in proofs.MATMULS:
                if dequantized is not None:
                    return ReasonCode.QUANTIZED_MATMUL.at(dequantized)
                continue
            wide = dequantized or (user if dequantizes(user) or _widens_bytes(user) else None)
            if user.target in SCALES and scalings == 0:
                pending.append((user, 1, wide))
            elif _passes(user):
                pending.append((user, scalings, wide))
    return None


def _passes(node: fx.Node) -> bool:
    return node.target in MOVES | proofs.CASTS | CLAMPS or quantizes(node) or dequantizes(node)


def _widens_bytes(node: fx.Node) -> bool:
    """Returns whether a node converts elements of one byte, which are quantised numbers, to larger ones."""
    if node.target not in proofs.CASTS or node.target is aten.view.dtype:
        return False
    source, result = proofs.tensor(node.args[0]), proofs.tensor(node)
    if source is None or result is None or source.dtype is torch.bool:
        return False
    return source.dtype.itemsize == 1 and result.dtype.itemsize > 1


def is_beside_matmul(collective: fx.Node) -> bool:
    """Whether a matmul makes what a collective sends, or uses what it brings, with only moves and casts between."""
    quiet = MOVES | proofs.CASTS
    near = upwards(collective, quiet)
    return any(map(proofs.is_matmul, near if _reduces(collective) else chain(near, downwards(collective, quiet))))


def review_left_alone(graph: fx.Graph, *, options: Options) -> int:
    """Corrects the reasons that the fusions could not know, and returns how many."""
    count = 0
    forward, _ = ATTENTION_KINDS
    for node in [node for node in graph.nodes if LEFT_ALONE in node.meta and is_collective(node)]:
        given = node.meta[LEFT_ALONE]
        attention = None if given.pattern in ATTENTION_KINDS else ring_attention(node)
        if attention is not None:
            leave_alone(node, forward, ReasonCode.ATTENTION_PARTS.at(attention))
            count += 1
            continue
        better = _better(node, given)
        if better is not None:
            leave_alone(node, pattern_of(better.at(node), given.pattern, node.target), better)
            count += 1
    return count + _review_normed(graph)


def _review_normed(graph: fx.Graph) -> int:
    """Corrects what reductions with their norms remember of why they went without the experts in front of them."""
    count = 0
    for call, task in task_calls(graph):
        given = call.meta.get(LEFT_ALONE)
        if given is None or given.code not in VAGUE | {ReasonCode.BATCHED_MATMUL}:
            continue
        if isinstance(task, ReductionWithNorm) and task.sums_slots:
            x = schema.operands_from_call(call)["x"]
            better = why_experts_stay(x, normed=True)
            if better is not None:
                leave_alone(call, pattern_of(better, given.pattern), better)
                count += 1
    return count


def _better(node: fx.Node, given: Reason) -> ReasonCode | Refusal | None:
    code = ReasonCode(given.code)
    exchanged = _exchanged(node, code)
    if exchanged is not None:
        return exchanged
    if code in OWN:
        return None if is_beside_matmul(node) or _is_beside_experts(node) else ReasonCode.NO_MATMUL
    if code is ReasonCode.BIAS:
        return _experts(node)
    if code is ReasonCode.BATCHED_MATMUL:
        found = None if _reduces(node) else _routed_matmul(node)
        return _experts(node) if found is None else ReasonCode.GROUPED_MATMUL.at(found)
    if code not in VAGUE:
        return None
    return find_other_matmul(node) or (_fused_product(node) if _reduces(node) else None)


def _is_beside_experts(node: fx.Node) -> bool:
    (operand, *_) = node.all_input_nodes
    return _routed_matmul(node) is not None or (_reduces(node) and find_experts(operand) is not None)


def _exchanged(node: fx.Node, code: ReasonCode) -> Refusal | None:
    """Returns that an all-to-all exchanges tokens, or rows of a matmul, where a fusion gave another reason."""
    if code not in OF_EXCHANGES:
        return None
    shown = shows_tokens(node)
    if shown is not None:
        return ReasonCode.TOKENS_EXCHANGED.at(shown)
    matmul = matmul_of_rows(node) if code in OF_ROWS else None
    return None if matmul is None else ReasonCode.ROWS_EXCHANGED.at(matmul)


def _fused_product(reduction: fx.Node) -> Refusal | None:
    """Returns the output of a Task node from which one op computes what is reduced, if no other matmul does."""
    (operand, *_) = reduction.all_input_nodes
    sources = [proofs.views_up(source)[-1] for source in proofs.views_up(operand)[-1].all_input_nodes]
    fused = [source for source in sources if source.target is getitem and is_task(source.all_input_nodes[0])]
    if not fused or any(map(proofs.is_matmul, sources)):
        return None
    return ReasonCode.ALREADY_FUSED.at(fused[0])
