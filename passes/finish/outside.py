"""Finds what lies beside Task nodes and became no part of them and no call of its own, and says why, for `explain`:
norms, epilogues, the matmuls of experts whose weights are copied for each slot of a token, those of experts whose sum
a reduction with its norm did not take, and the attention of one query for each sequence.

It asks the passes that absorb them once more, on the rewritten graph. It changes nothing, and runs only if a report is
being made.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import fx

from ditron_inductor.options import Options
from ditron_inductor.passes.absorb import absorb_epilogues, absorb_norms
from ditron_inductor.passes.attention import cached_attention
from ditron_inductor.passes.fuse import all_reduce_rms_norm
from ditron_inductor.passes.graph import expert_rows, proofs
from ditron_inductor.passes.graph.culprits import describe
from ditron_inductor.passes.graph.launches import is_task, takes_local
from ditron_inductor.passes.graph.norm_forms import rsqrt_before
from ditron_inductor.passes.graph.reasons import LEFT_ALONE, SUM_OF_SLOTS, Reason, ReasonCode
from ditron_inductor.task import schema
from ditron_inductor.task.nodes import (
    HEAD_DIMS,
    MOST_EXPERT_TOKENS,
    MOST_NORM_COLUMNS,
    MOST_ORDERED_TOKENS,
    ReductionWithNorm,
    WithEpilogue,
    WithPrologue,
)
from ditron_inductor.task.site_records import OutsideRecord
from ditron_inductor.task.verify import task_calls

aten = torch.ops.aten
NORM_BEHIND, NORM_IN_FRONT, EPILOGUE = "norm behind", "norm in front", "epilogue"
EXPERTS, EXPERTS_FORM = "experts in front", "experts_form"
MATMULS = "matmuls in front"
ATTENTION, ATTENTION_FORM = "attention in front", "attention_form"
HEADS = f"{', '.join(str(size) for size in HEAD_DIMS[:-1])} or {HEAD_DIMS[-1]}"
TEXTS: dict[str, str] = {
    ATTENTION_FORM: (
        "attention of one query for each sequence is one call, which turns and stores the new key too and reads only "
        f"the part of a cache that the mask shows, for known sizes, heads of {HEADS} elements in keys and values, "
        "caches of the query's dtype, and a mask that is the same for all heads, if it is one of torch's attention "
        "ops, or written out with sinks, and nothing else is done to the scores"
    ),
    EXPERTS_FORM: (
        "their weights are copied for each slot. It is one call, which reads each weight once, for a known number of "
        f"{MOST_ORDERED_TOKENS} tokens or fewer, if the experts are choices of a topk among all experts of the weight, "
        "and if nothing else reads the copies"
    ),
    absorb_epilogues.NO_TEXT: (
        "the op is none that the kernels have a text for, or another operand of it is not in memory before the node "
        "runs, or does not fit the rows and columns of the product"
    ),
    absorb_epilogues.WITH_READER: "the compiler computes it in one kernel with what reads it",
    absorb_norms.COMPUTED: (
        "the compiler computes what is normalised in the kernel of the norm, and would have to write it to memory for "
        "the node"
    ),
    absorb_norms.FEW_ROWS: (
        f"only the strategy chunked gains by it, and that needs {absorb_norms.LEAST_ROWS} rows of all ranks or more, "
        "in a number that is known"
    ),
    ReasonCode.DYNAMIC_TOKENS: (
        "the number of tokens is dynamic. For a known one their sum goes into a node with the reduction"
    ),
    ReasonCode.EXPERTS_SUM: (
        f"this op is none of the form of their sum that is taken. Write it as {SUM_OF_SLOTS}"
    ),
    ReasonCode.EXPERT_BIAS: (
        "their biases are not proved to be those of the rows' experts. Index a table with as many biases as experts by "
        "the sorted ids that torch.sort returns"
    ),
    ReasonCode.EXPERT_ENDS: (
        "they have biases, and the ends of the rows of each expert are not proved to count the ids by which the biases "
        "are indexed. Count them by torch.histc and sum that up by cumsum"
    ),
    ReasonCode.FEW_TOKENS: (
        "their matmul is too short to hide the reduction, and the norm's node takes their sum only from a call of the "
        f"experts, for {MOST_EXPERT_TOKENS} tokens or fewer, as a product with the weights that is summed over slots"
    ),
    ReasonCode.GROUPED_MATMUL: "no kernel multiplies as they do, or rows of another length are reduced",
    ReasonCode.SUM_OF_MATMULS: (
        "a fusion takes one matmul, or up to eight of one shape. Concatenate their operands along the contracted "
        "dimension"
    ),
    ReasonCode.CAST_BETWEEN: "a dtype conversion stands between it and the collective",
    ReasonCode.DISABLED: f"the option ditron.fusions leaves {all_reduce_rms_norm.PATTERN} out",
    ReasonCode.INTERMEDIATE_USED: "a tensor between it and the collective is used elsewhere too",
    ReasonCode.LAYOUT: "a view between it and the collective changes rows",
    ReasonCode.NORM_CONSUMER: "an op on the elements follows it, and the compiler computes both in one kernel",
    ReasonCode.NORM_FORM: "it is of no form that is known, or its eps is not a constant",
    ReasonCode.NORM_SHARED: (
        "more norms than the node has share its scaled rows, and the compiler computes all of them in one kernel"
    ),
    ReasonCode.NORM_USED: "a value inside it is used elsewhere too",
    ReasonCode.NORM_WIDTH: f"its rows are longer than {MOST_NORM_COLUMNS} elements, or of a length that is not known",
    ReasonCode.OPERAND_DEPENDS: "another operand of it is computed from the result of the collective",
    ReasonCode.OPERAND_LATE: "another operand of it is computed later, behind an op that cannot be moved",
    ReasonCode.SHAPE_UNPROVEN: "sizes that have to be equal could not be proved to be equal",
}
"""Why something stays outside, by code."""
OF_EXPERTS = frozenset(
    {
        ReasonCode.DYNAMIC_TOKENS,
        ReasonCode.EXPERTS_SUM,
        ReasonCode.EXPERT_BIAS,
        ReasonCode.EXPERT_ENDS,
        ReasonCode.FEW_TOKENS,
        ReasonCode.GROUPED_MATMUL,
        ReasonCode.SUM_OF_MATMULS,
    }
)
"""The reasons for which a fusion leaves the sum of what experts return outside."""


def find_outside(graph: fx.Graph, options: Options) -> dict[fx.Node, tuple[OutsideRecord, ...]]:
    """Returns what stays outside of each Task node, for the nodes for which anything does."""
    found: dict[fx.Node, tuple[OutsideRecord, ...]] = {}

    def add(call: fx.Node, what: str, code: str, node: fx.Node, reader: fx.Node | None = None) -> None:
        # Any other code is about the collective of the node.
        text = TEXTS.get(code, "it could not be proved to belong to the node")
        if reader is not None:
            text += f": {describe(reader).text()}"
        found[call] = (*found.get(call, ()), OutsideRecord(what, str(code), text, describe(node)))

    for rsqrt in all_reduce_rms_norm.rsqrts(graph):
        launch, why = all_reduce_rms_norm.find_norm_behind(rsqrt) or (None, None)
        if launch is not None and is_task(launch):
            # A match that the pass did not take is one that the option excludes, or it had a reader that is gone.
            excluded = all_reduce_rms_norm.PATTERN not in options.fusions
            missed = ReasonCode.DISABLED if excluded else ReasonCode.NORM_CONSUMER
            add(launch, NORM_BEHIND, why if isinstance(why, ReasonCode) else missed, rsqrt)
    for call, task in task_calls(graph):
        if isinstance(task, WithPrologue):
            prologue = absorb_norms.find_prologue(call, task, options)
            if isinstance(prologue, str):
                add(call, NORM_IN_FRONT, prologue, _norm_in_front(call))
        # What stands between a reduction and a norm is computed with the norm.
        if isinstance(task, WithEpilogue) and call not in found:
            epilogue = absorb_epilogues.find_left_outside(call, task)
            if epilogue is not None:
                add(call, EPILOGUE, *epilogue)
    for bmm in graph.find_nodes(op="call_function", target=aten.bmm.default):
        launch = _task_behind(bmm) if expert_rows.COPIED in bmm.meta else None
        if launch is not None:
            add(launch, EXPERTS, EXPERTS_FORM, bmm)
    for call, task in task_calls(graph):
        known = _experts_in_front(call, task, options)
        if known is not None:
            what = MATMULS if known.code == ReasonCode.SUM_OF_MATMULS else EXPERTS
            record = OutsideRecord(what, known.code, TEXTS[known.code], known.culprit)
            found[call] = (*found.get(call, ()), record)
    if takes_local(graph, cached_attention.PATTERN, options):
        for attention in cached_attention.left_alone(graph, cached_attention.GPUS):
            launch = _task_behind(attention)
            # A softmax may have several maxima, such as one for each rounding of its scores.
            if launch is not None and not any(one.what == ATTENTION for one in found.get(launch, ())):
                add(launch, ATTENTION, ATTENTION_FORM, attention)
    return found


def _experts_in_front(call: fx.Node, task: Any, options: Options) -> Reason | None:
    """Returns why a reduction with its norm has not the sum of the experts in front of it; None if it has, if there are
    none, or if nobody wants it.
    """
    reason: Reason | None = call.meta.get(LEFT_ALONE)
    without = isinstance(task, ReductionWithNorm) and task.sums_slots and not getattr(task, "top_k", 0)
    if not without or reason is None or reason.pattern not in options.fusions:
        return None
    return reason if reason.code in OF_EXPERTS else None


def _task_behind(node: fx.Node) -> fx.Node | None:
    """The nearest Task node that is computed from `node`."""
    seen, left = {node}, deque([node])
    while left:
        one = left.popleft()
        if is_task(one):
            return one
        new = [user for user in one.users if user not in seen]
        seen.update(new)
        left.extend(new)
    return None


def _norm_in_front(call: fx.Node) -> fx.Node:
    """The inverse deviation of the norm whose result is gathered, or what is gathered if that is not found."""
    shard = schema.operands_from_call(call)["shard"]
    assert isinstance(shard, fx.Node)
    return rsqrt_before(proofs.views_up(shard)[-1]) or shard
