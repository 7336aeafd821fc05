"""Reads from a rewritten graph what became of each of its collectives: the records behind `explain`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ditron_inductor.passes.finish.name_sites import find_sites
from ditron_inductor.passes.graph.collectives import group_size
from ditron_inductor.passes.graph.culprits import describe
from ditron_inductor.passes.graph.launches import GROUP_ARGUMENT, is_task, launches_collective
from ditron_inductor.passes.graph.proofs import arguments
from ditron_inductor.passes.graph.reasons import LEFT_ALONE
from ditron_inductor.task.all_gather_attention import AllGatherAttention, AttentionReduceScatter, attention_sizes
from ditron_inductor.task.epilogue import ProductTerm
from ditron_inductor.task.epilogue import text as expression_text
from ditron_inductor.task.nodes import (
    NO_NORM,
    AllGatherMatmul,
    AllReduceRmsNorm,
    AllToAllMatmul,
    AttentionNode,
    FlashDecode,
    MatmulAllGather,
    MatmulAllReduce,
    MatmulAllReduceRmsNorm,
    MatmulAllToAll,
    MatmulNode,
    MatmulReduceScatter,
    NormNode,
    TaskNode,
    UlyssesNode,
    WithEpilogue,
)
from ditron_inductor.task.ops import node_from_call, operand, operands_from_call
from ditron_inductor.task.problem import Problem
from ditron_inductor.task.site_records import GraphRecord, SiteRecord
from ditron_inductor.task.torch_dtypes import precision_of

Sizes = tuple[int | None, int | None, int | None]
"""m, n, k of a record, None where a size is not known."""
MOST_SHOWN = 80
"""Characters of an epilogue; the node's text has all of it."""


def record_graph(graph: fx.Graph, *, graph_before: str, graph_after: str) -> GraphRecord:
    """What the passes did with the collectives of `graph`, read from the rewritten graph."""
    region, _ = find_sites(graph)
    sites = [_task_record(node) for node in graph.nodes if is_task(node)]
    alone = [_collective_record(node) for node in graph.nodes if launches_collective(node)]
    order = {node.name: position for position, node in enumerate(graph.nodes)}
    records = sorted([*sites, *alone], key=lambda record: order[record.node])
    return GraphRecord(
        index=0,
        is_backward=any(node.name.startswith("tangents_") for node in graph.find_nodes(op="placeholder")),
        region=region,
        sites=tuple(records),
        graph_before=graph_before,
        graph_after=graph_after,
    )


def _task_record(node: fx.Node) -> SiteRecord:
    task = node_from_call(node.target, node.args)
    if isinstance(task, FlashDecode):
        return _decode_record(node, task)
    if isinstance(task, AttentionNode):
        return _attention_record(node, task)
    gathers = isinstance(task, AllGatherMatmul)
    operands = list(operands_from_call(node).values())
    left, right = operands[0], [] if isinstance(task, AllReduceRmsNorm) else operands[1]
    lefts = [_value(one) for one in (left if isinstance(left, list) else [left])]
    weights = [_value(weight) for weight in (right if isinstance(right, list) else [right])]
    lhs = lefts[0]
    rows = [_hint(size) for size in lhs.shape[:-1]]
    # The products that a gather feeds lie side by side, all others are added up; without any, x has its own columns.
    columns = [_hint(weight.shape[1]) for weight in (weights if gathers else weights[:1])] or [_hint(lhs.shape[-1])]
    depths = [_hint(one.shape[-1]) for one in lefts] if weights else [1]
    m = None if None in rows else math.prod(size for size in rows if size is not None)
    if m is not None and gathers:
        m *= task.world_size
    n = None if None in columns else sum(size for size in columns if size is not None)
    k = None if None in depths else sum(size for size in depths if size is not None)
    if isinstance(task, AllToAllMatmul):
        # What is multiplied: a part of the rows, with the columns of all ranks.
        m = None if m is None else m // task.world_size
        k = None if k is None else k * task.world_size
    return replace(
        _fused_record(node, task, lhs, (*lefts, *weights), (m, n, k)),
        rows=() if m is None or k is None or not weights else _rows(task, lhs, k),
        columns=() if n is None else tuple(size for size in columns if size is not None),
        dim=_dim(task),
        depths=() if k is None else tuple(size for size in depths if size is not None),
        bias=bool(getattr(task, "has_bias", False)),
        parts=task.parts if isinstance(task, MatmulAllToAll | AllToAllMatmul) else 1,
        epilogue=task.epilogue if isinstance(task, WithEpilogue) else "",
    )


def _fused_record(
    node: fx.Node, task: TaskNode, first: torch.Tensor, operands: Sequence[torch.Tensor], sizes: Sizes
) -> SiteRecord:
    """What the records of all Task nodes have in common. first: the tensor whose dtype and device are the node's."""
    m, n, k = sizes
    moved = None
    if m is not None and n is not None and k is not None:
        assert task.exchange is not None
        problem = Problem(task.kind, m, n, k, precision_of(first.dtype), task.world_size)
        moved = task.exchange.received_bytes(problem)
    return SiteRecord(
        site=task.site,
        kind=task.kind,
        fused=True,
        pattern=_pattern(task),
        group_name=task.group_name,
        world_size=task.world_size,
        dtype=str(first.dtype).removeprefix("torch."),
        device_type=first.device.type,
        shapes=tuple(shape_text(value.shape) for value in operands),
        m=m,
        n=n,
        k=k,
        itemsize=first.dtype.itemsize,
        bytes_moved=moved,
        strategy=task.policy.strategy,
        node=node.name,
        text=f"{task.kind} {task.text()}",
        line=describe(node).line,
    )


def _decode_record(node: fx.Node, task: FlashDecode) -> SiteRecord:
    """m: query heads of all sequences, of n elements each. There is no product to be timed: no rows, no columns."""
    q, k, v = (_value(operand(node, name)) for name in "qkv")
    sizes = _hint(q.shape[0] * q.shape[1]), _hint(q.shape[2]), 1
    return _fused_record(node, task, q, (q, k, v), sizes)


def _attention_record(node: fx.Node, task: AttentionNode) -> SiteRecord:
    """Its sizes are those of a matmul with as many operations; see `attention_sizes`."""
    q, k = (_value(operand(node, name)) for name in ("q", "k"))
    hints = [_hint(size) for size in (*q.shape, *k.shape[1:3])]
    sizes: Sizes = None, None, None
    if None not in hints:
        B, heads, queries, D, key_heads, keys = (hint for hint in hints if hint is not None)
        keys //= task.world_size if isinstance(task, AttentionReduceScatter) else 1
        sizes = attention_sizes(task.mask, task.world_size, B, heads, queries, D, key_heads, keys)
    return _fused_record(node, task, q, (q, k), sizes)


def _rows(task: MatmulNode | NormNode | UlyssesNode, lhs: torch.Tensor, k: int) -> tuple[int, ...]:
    """The shape of the left operand, or shard, whose sizes are known; K is that of all products that are added up."""
    sizes = [size for size in map(_hint, lhs.shape) if size is not None]
    return tuple(sizes) if isinstance(task, AllToAllMatmul) else (*sizes[:-1], k)


def _dim(task: MatmulNode | NormNode | UlyssesNode) -> int:
    match task:
        case AllGatherMatmul() | MatmulAllGather() | MatmulAllToAll():
            return task.gather_dim
        case MatmulReduceScatter() | AllToAllMatmul():
            return task.scatter_dim
    return 0


def _pattern(task: TaskNode) -> str:
    match task:
        case FlashDecode():
            return f"{'paged ' * task.paged}decode attention -> all_gather of parts -> merge"
        case AllGatherMatmul():
            matmuls = "matmul" if task.num_weights == 1 else f"{task.num_weights} matmuls"
            used = ", gathered used" * task.return_gathered
            return f"{_prologue_text(task)}all_gather(dim {task.gather_dim}) -> {matmuls}{_behind_text(task)}{used}"
        case MatmulReduceScatter():
            return f"{_sum_text(task)} -> reduce_scatter({task.reduce_op}, dim {task.scatter_dim}){_behind_text(task)}"
        case MatmulAllReduce():
            return f"{_sum_text(task)} -> all_reduce({task.reduce_op}){_behind_text(task)}"
        case AllReduceRmsNorm():
            return _norm_text(task)
        case MatmulAllReduceRmsNorm():
            return f"{_sum_text(task)} -> {_norm_text(task)}"
        case MatmulAllGather():
            return f"{_sum_text(task)} -> all_gather(dim {task.gather_dim})"
        case AllGatherAttention():
            used = ", gathered used" * task.return_gathered
            return f"all_gather(keys, values) -> attention({_attention_text(task)}){used}"
        case AttentionReduceScatter():
            return f"attention backward({_attention_text(task)}) -> reduce_scatter(keys, values)"
        case MatmulAllToAll():
            return f"{_sum_text(task)} -> all_to_all(columns to dim {task.gather_dim})"
        case AllToAllMatmul():
            received = ", received used" * task.return_received
            return f"all_to_all(dim {task.scatter_dim} to columns) -> matmul{received}"


def _sum_text(
    task: MatmulReduceScatter | MatmulAllReduce | MatmulAllReduceRmsNorm | MatmulAllGather | MatmulAllToAll,
) -> str:
    matmuls = "matmul" if task.num_products == 1 else f"sum of {task.num_products} matmuls"
    reduction = task.reduction if isinstance(task, MatmulAllReduceRmsNorm) else task
    parsed = reduction.parsed if isinstance(reduction, WithEpilogue) else None
    before = "" if parsed is None or parsed.pre is None else f" -> {expression_text(parsed.pre)}"
    return matmuls + " + bias" * task.has_bias + before


def _behind_text(task: WithEpilogue) -> str:
    """What is made of the products, or of their sum, as part of the node."""
    behind = None if task.parsed is None else task.parsed.behind
    outputs = () if behind is None else behind.outputs
    made = [expression_text(output) for output in outputs if not isinstance(output, ProductTerm)]
    text = "; ".join(made)
    return f" -> {text if len(text) <= MOST_SHOWN else text[: MOST_SHOWN - 3] + ' ..'}" if text else ""


def _attention_text(task: AttentionNode) -> str:
    """What its rows see, and what becomes of the scores."""
    return f"{task.mask.name}, softcap={task.softcap:g}" if task.softcap else task.mask.name


def _prologue_text(task: AllGatherMatmul) -> str:
    """What makes the shard."""
    if task.prologue is None:
        return ""
    return "x + residual -> " * ("residual" in task.prologue.extras) + f"{task.prologue.norm.form} norm -> "


def _norm_text(task: AllReduceRmsNorm | MatmulAllReduceRmsNorm) -> str:
    """The reduction, what is added to it, and the norms."""
    biases = " + bias" * sum(name in task.extras for name in ("bias", "second_bias"))
    post = "" if task.post is None else f" -> {task.post.form} norm"
    residual = " + residual" * ("residual" in task.extras)
    twice = "other" in task.saved
    norm = "" if task.norm.form == NO_NORM else f" -> {'two ' * twice}{task.norm.form} norm{'s' * twice}"
    return f"all_reduce({task.reduce_op}){biases}{post}{residual}{norm}"


def _collective_record(node: fx.Node) -> SiteRecord:
    assert isinstance(node.target, torch._ops.OpOverload)
    kind = node.target._opname
    inputs = [given.meta["val"] for given in node.all_input_nodes if isinstance(given.meta.get("val"), torch.Tensor)]
    group_name = arguments(node)[GROUP_ARGUMENT]
    world_size = None
    if isinstance(group_name, str):
        world_size = group_size(group_name)
    reason = node.meta.get(LEFT_ALONE)
    return SiteRecord(
        site="",
        kind=kind,
        fused=False,
        pattern=reason.pattern if reason is not None else kind,
        group_name=str(group_name),
        world_size=world_size,
        dtype=str(inputs[0].dtype).removeprefix("torch.") if inputs else "",
        device_type=inputs[0].device.type if inputs else "",
        shapes=tuple(shape_text(value.shape) for value in inputs),
        m=None,
        n=None,
        k=None,
        itemsize=inputs[0].dtype.itemsize if inputs else None,
        bytes_moved=_collective_bytes(kind, inputs, world_size),
        strategy="",
        node=node.name,
        text=node.format_node() or node.name,
        reason_code=reason.code if reason is not None else "no_pattern",
        reason=reason.text if reason is not None else f"no fusion takes {kind}",
        line=describe(node).line,
        culprit=reason.culprit if reason is not None else None,
    )


def _collective_bytes(kind: str, inputs: Sequence[torch.Tensor], world_size: int | None) -> int | None:
    sizes = [_hint(value.numel()) for value in inputs]
    if world_size is None or not inputs or None in sizes:
        return None
    sent = sum(size * value.dtype.itemsize for size, value in zip(sizes, inputs, strict=True) if size is not None)
    peers = world_size - 1
    if kind.startswith("all_gather"):
        return sent * peers
    if kind.startswith("all_reduce"):
        return 2 * sent * peers // world_size
    if kind.startswith(("reduce_scatter", "all_to_all", "shard_dim_alltoall")):
        return sent * peers // world_size
    return sent


def shape_text(shape: Sequence[Any]) -> str:
    """`[8, s0, 16]`."""
    return "[" + ", ".join(str(size) for size in shape) + "]"


def _value(node: Any) -> torch.Tensor:
    assert isinstance(node, fx.Node)
    value = node.meta["val"]
    assert isinstance(value, torch.Tensor)
    return value


def _hint(size: Any) -> int | None:
    """The size, or for a symbol the size that the compiler saw; None where it saw none."""
    if isinstance(size, int):
        return size
    assert isinstance(size, torch.SymInt)
    return int(size.node.hint) if size.node.has_hint() else None
