"""Reads from a rewritten graph what became of each of its collectives: the records behind `explain`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ditron_inductor.options import Options
from ditron_inductor.passes.finish.name_sites import find_sites
from ditron_inductor.passes.finish.near import near
from ditron_inductor.passes.finish.outside import find_outside
from ditron_inductor.passes.graph.collectives import group_size
from ditron_inductor.passes.graph.culprits import describe
from ditron_inductor.passes.graph.launches import GROUP_ARGUMENT, is_task, launches_collective
from ditron_inductor.passes.graph.proofs import arguments, tangents
from ditron_inductor.passes.graph.reasons import LEFT_ALONE
from ditron_inductor.task.problem import Problem
from ditron_inductor.task.schema import node_from_call, operands_from_call, values_of
from ditron_inductor.task.site_records import GraphRecord, SiteRecord
from ditron_inductor.task.torch_dtypes import precision_of
from ditron_inductor.task.verify import local_calls

NO_PATTERN = "no_pattern"
"""The reason for a collective that no pass has looked at."""


def record_graph(graph: fx.Graph, options: Options, *, graph_before: str, graph_after: str) -> GraphRecord:
    """Returns a record of what the passes did with the collectives of `graph`, read from the rewritten graph."""
    region, _ = find_sites(graph)
    outside = find_outside(graph, options)
    records = [
        replace(_task_record(node), outside=outside.get(node, ()), near=near(node))
        if is_task(node)
        else replace(_collective_record(node), near=near(node))
        for node in graph.nodes
        if is_task(node) or launches_collective(node)
    ]
    return GraphRecord(
        index=0,
        is_backward=bool(tangents(graph)),
        region=region,
        sites=tuple(records),
        graph_before=graph_before,
        graph_after=graph_after,
        local=tuple(node.kind for _, node in local_calls(graph)),
    )


def count_left_alone(graph: fx.Graph) -> dict[str, int]:
    """Returns the number of collectives that no pass fused, by the code of the reason."""
    reasons = [node.meta.get(LEFT_ALONE) for node in graph.nodes if launches_collective(node)]
    return dict(Counter(NO_PATTERN if reason is None else str(reason.code) for reason in reasons))


def _task_record(node: fx.Node) -> SiteRecord:
    task = node_from_call(node.target, node.args)
    given = {name: values_of(operand) for name, operand in operands_from_call(node).items()}
    tensors = [value for values in given.values() for value in (values if isinstance(values, list) else [values])]
    first = tensors[0]
    known = all(_hint(size) is not None for value in tensors for size in value.shape)
    shapes = {name: _hints(value) for name, value in given.items()} if known else None
    m = n = k = moved = None
    if shapes is not None:
        sizes = task.sizes(shapes)
        m, n, k = sizes.m, sizes.n, sizes.k
        moved = task.exchange.received_bytes(Problem(task.kind, m, n, k, precision_of(first.dtype), task.world_size))
    return SiteRecord(
        site=task.site,
        kind=task.kind,
        matched=True,
        pattern=task.pattern,
        group_name=task.group_name,
        world_size=task.world_size,
        dtype=str(first.dtype).removeprefix("torch."),
        device_type=first.device.type,
        shapes=tuple(shape_text(value.shape) for value in tensors),
        m=m,
        n=n,
        k=k,
        itemsize=first.dtype.itemsize,
        bytes_moved=moved,
        strategy=task.policy.strategy,
        node=node.name,
        text=f"{task.kind} {task.text()}",
        line=describe(node).line,
        task=task,
        operands=shapes,
    )


def _hints(value: Any) -> Any:
    """Returns the shape of a tensor whose sizes are known, or the shapes of a list of tensors."""
    if isinstance(value, list):
        return [_hints(each) for each in value]
    return tuple(_hint(size) for size in value.shape)


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
        kind=kind,
        matched=False,
        pattern=reason.pattern if reason is not None else kind,
        group_name=str(group_name),
        world_size=world_size,
        dtype=str(inputs[0].dtype).removeprefix("torch.") if inputs else "",
        device_type=inputs[0].device.type if inputs else "",
        shapes=tuple(shape_text(value.shape) for value in inputs),
        itemsize=inputs[0].dtype.itemsize if inputs else None,
        bytes_moved=_collective_bytes(kind, inputs, world_size),
        node=node.name,
        text=node.format_node() or node.name,
        reason_code=reason.code if reason is not None else NO_PATTERN,
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
    """Returns a shape as text, such as `[8, s0, 16]`."""
    return "[" + ", ".join(str(size) for size in shape) + "]"


def _hint(size: Any) -> int | None:
    """Returns the size, or for a symbol the size that the compiler saw; None if it saw none."""
    if isinstance(size, int):
        return size
    assert isinstance(size, torch.SymInt)
    return int(size.node.hint) if size.node.has_hint() else None
