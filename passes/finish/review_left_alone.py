"""Reviews the reasons of the collectives that were left alone, after all fusions. No node changes.

    gather bf16 -> to fp8 -> _scaled_mm     no_matmul, cast_between    -> fp8_matmul
    gather int8 -> dequantize -> mm         no_matmul, cast_between    -> quantized_matmul
    _int_mm -> * scale -> reduce_scatter    pointwise_between          -> quantized_matmul
    gather -> index -> _grouped_mm          no_matmul                  -> grouped_matmul
    _grouped_mm -> index -> sum -> reduce   no_matmul, cast_between    -> experts_sum, few_tokens, dynamic_tokens
    bmm(.., index(weight)) -> sum -> reduce no_matmul, batched_matmul  -> experts_sum, few_tokens, dynamic_tokens
    bmm -> sum over its batches -> reduce   no_matmul, cast_between    -> sum_of_matmuls
    all_reduce(amax(x), "max")              reduce_op                  -> no_matmul
    fused product -> relu -> all_reduce     pointwise_between          -> already_fused
    keys -> all_to_all -> part -> attention unequal_splits, no_matmul  -> attention_parts
    rows -> all_to_all -> _grouped_mm       unequal_splits             -> tokens_exchanged
    index(x, [order of a sort]) -> all_to_all, and back              -> tokens_exchanged
    all_to_all, searchsorted(counts, rows)  unequal_splits             -> tokens_exchanged

A fusion looks only for the matmuls that it takes. If a chain ends in a matmul of another kind, the reason that the
fusion gives is not the real one. So the chain is followed here: from a reduction upwards through casts, views and
scales, and from a gather downwards through ops that make or read quantised numbers. A gather that is scaled more than
once on the way down (a norm) does not count as next to the matmul. A grouped matmul, as that of routed experts, counts
also behind the ops that bring the slots of a token together, or the rows of an expert: they are a part of it. An
all-to-all of unequal parts beside it is that of expert parallelism. If a graph ends between both, as where the sizes
are read from the device, that shows in what picks the rows that are sent: the order of a sort, or in what names those
that come: the counts of each part.

A reason of the collective itself, such as its reduce op, counts only if a matmul is next to it. Otherwise there is
nothing to fuse, whatever the collective.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from operator import getitem

import torch
from torch import fx

from ditron_inductor.options import Options
from ditron_inductor.passes.attention.ring_attention import ring_attention
from ditron_inductor.passes.finish.left_experts import PICKS, pattern_of, why_experts_stay
from ditron_inductor.passes.graph import proofs
from ditron_inductor.passes.graph.collectives import WAIT, is_collective
from ditron_inductor.passes.graph.launches import is_task
from ditron_inductor.passes.graph.other_matmuls import dequantizes, other_matmul, quantizes
from ditron_inductor.passes.graph.reasons import LEFT_ALONE, Reason, ReasonCode, Refusal, leave_alone
from ditron_inductor.passes.graph.sorts import is_order, sorted_slots
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
# They move elements, cut them apart and put them together, and change none.
MOVES: frozenset[object] = proofs.MAY_KEEP_ORDER | proofs.SLICES | {aten.cat.default, aten.view.dtype, WAIT}
SCALES: frozenset[object] = frozenset({aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar})
ROUTES: frozenset[object] = PICKS | {aten.sum.dim_IntList, aten.add.Tensor, aten.where.self, getitem}
"""Ops that bring the slots of a token together, or the rows of an expert, and what takes one of several results."""
NUMBERS: frozenset[object] = frozenset(
    {torch.ops.prims.iota.default, aten.arange.default, aten.arange.start, aten.arange.start_step}
)
"""Ops that make numbers in a row."""
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
    for node in _upwards(collective, quiet):
        code = other_matmul(node)
        if code is not None:
            return code.at(node)
    experts = _experts(collective)
    if experts is not None:
        return experts
    found = _routed_matmul(collective)
    return None if found is None else ReasonCode.GROUPED_MATMUL.at(found)


def _experts(collective: fx.Node) -> Refusal | None:
    """Returns why the sum of what experts return is not fused with its reduction; None if that is none."""
    (operand, *_) = collective.all_input_nodes
    return why_experts_stay(operand, normed=False) if _reduces(collective) else None


def _routed_matmul(collective: fx.Node) -> fx.Node | None:
    """Returns the grouped matmul whose rows a collective brings, or whose products it reduces, between a routing."""
    # From a gather the routing leads down, from a reduction up, and all-to-alls stand on both sides.
    through = MOVES | proofs.CASTS | SCALES | ROUTES
    down = () if _reduces(collective) else _downwards(collective, through)
    up = () if _gathers(collective) else _upwards(collective, through)
    return next((node for node in chain(down, up) if other_matmul(node) is ReasonCode.GROUPED_MATMUL), None)


def _sorts_rows(exchange: fx.Node) -> fx.Node | None:
    """Returns what shows that an all-to-all sends rows in the order of a sort, brings them back to where they were, or
    brings rows of which others' counts say what they are; None if nothing does.
    """
    sent, received = proofs.operand(exchange), proofs.fake(exchange)
    if received.ndim < 2 or not received.dtype.is_floating_point:
        return None
    picked = proofs.indexed_rows(proofs.views_up(sent)[-1])
    if picked is not None and _is_of_sort(picked[1]):
        return proofs.views_up(sent)[-1]
    for user in _downwards(exchange, MOVES):
        rows = user.args[1] if user.target in (aten.index.Tensor, aten.index_put.default) else None
        if isinstance(rows, (list, tuple)) and len(rows) == 1 and _is_of_sort(rows[0]):
            return user
    for search in exchange.graph.find_nodes(op="call_function", target=aten.searchsorted.Tensor):
        bound = proofs.arguments(search)
        summed, numbers = (proofs.views_up(bound[name])[-1] for name in ("sorted_sequence", "self"))
        counted = summed.target is aten.cumsum.default and numbers.target in NUMBERS
        if counted and proofs.same_shape(tuple(proofs.fake(numbers).shape), (received.shape[0],)):
            return search
    return None


def _is_of_sort(rows: object) -> bool:
    """Returns whether numbers of rows are the indices of a sort, or their quotients."""
    if not isinstance(rows, fx.Node):
        return False
    source = proofs.views_up(rows)[-1]
    return is_order(source) or sorted_slots(source) is not None


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
    near = _upwards(collective, quiet)
    return any(map(proofs.is_matmul, near if _reduces(collective) else chain(near, _downwards(collective, quiet))))


def _upwards(node: fx.Node, through: frozenset[object]) -> Iterator[fx.Node]:
    """Yields the sources of `node` through ops of `through`, including the first sources that are no such op."""
    return proofs.reached(
        node.all_input_nodes, lambda source: source.all_input_nodes if _is_one(source, through) else ()
    )


def _downwards(node: fx.Node, through: frozenset[object]) -> Iterator[fx.Node]:
    """Yields the users of `node` through ops of `through`, including the first users that are no such op."""
    return proofs.reached(node.users, lambda user: user.users if _is_one(user, through) else ())


def _is_one(node: fx.Node, ops: frozenset[object]) -> bool:
    """Returns whether a node calls one of the ops, by the op or by its name."""
    return node.target in ops or (isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name in ops)


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
    if code in OWN:
        routed = _routed_matmul(node)
        exchanged = routed or _sorts_rows(node) if code is ReasonCode.UNEQUAL_SPLITS else None
        if exchanged is not None:
            return ReasonCode.TOKENS_EXCHANGED.at(exchanged)
        return None if is_beside_matmul(node) or routed is not None else ReasonCode.NO_MATMUL
    if code is ReasonCode.BATCHED_MATMUL:
        return _experts(node)
    if code not in VAGUE:
        return None
    return find_other_matmul(node) or (_fused_product(node) if _reduces(node) else None)


def _fused_product(reduction: fx.Node) -> Refusal | None:
    """Returns the output of a Task node from which one op computes what is reduced, if no other matmul does."""
    (operand, *_) = reduction.all_input_nodes
    sources = [proofs.views_up(source)[-1] for source in proofs.views_up(operand)[-1].all_input_nodes]
    fused = [source for source in sources if source.target is getitem and is_task(source.all_input_nodes[0])]
    if not fused or any(map(proofs.is_matmul, sources)):
        return None
    return ReasonCode.ALREADY_FUSED.at(fused[0])
