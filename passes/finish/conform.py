"""Collectives of a graph become the Task nodes that the other ranks run in their places.

    wait(all_reduce(x, "sum"))  ->  matmul_all_reduce([0 [.., 1]], [0 [1, N]], extras=[x],
                                                      epilogue="pre: mm0 + full(x0); mm0")[0]
    wait(all_gather(x))         ->  all_gather_matmul(x, [0 [K, 1]], return_gathered)[1]
    wait(reduce_scatter(x))     ->  matmul_reduce_scatter(.., as the first)[0]

If a rank's graph has no matmul in front of a collective, but its peers wait for the tiles of one, the rank has to send
tiles too. They are those of a product of zeros to which x is added. The sum is x bit for bit, except for the sign of
zeros. This is not a pass of the pipeline. It runs on a graph as it was before the passes, if the graph comes under an
agreement that was made without it (device/agreements.py). It costs a small product that nobody needs.

It raises DitronDiverged if the collective is not a functional collective that is waited for once, if x has no
dimension, or if the peers' node is of a kind that is not drawn above or of a dtype that no kernel takes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ditron_inductor.device.agreements import Form
from ditron_inductor.errors import DitronDiverged
from ditron_inductor.options import Options
from ditron_inductor.passes.finish.wire_facts import launches_of
from ditron_inductor.passes.graph import rewriting
from ditron_inductor.passes.graph.collectives import Collective, read_collective
from ditron_inductor.passes.graph.reasons import ReasonCode
from ditron_inductor.task.nodes import (
    AllGatherMatmul,
    AllReduceRmsNorm,
    MatmulAllReduce,
    MatmulAllReduceRmsNorm,
    MatmulReduceScatter,
    Norm,
)
from ditron_inductor.task.torch_dtypes import ACTIVATION_DTYPES

aten = torch.ops.aten
ADD_ALL = "pre: mm0 + full(x0); mm0"


@dataclass(frozen=True)
class Match:
    """A collective, the form of the node that its peers run, and the local facts of rank 0 in this node."""

    collective: Collective
    form: Form
    leader: Mapping[str, Any]


def find(node: fx.Node, form: Form) -> Match:
    """Proves that the node can be replaced as drawn above. Raises DitronDiverged."""
    collective = read_collective(node)
    kind = form.kind
    if isinstance(collective, ReasonCode) or kind not in _REWRITES:
        raise _unable(node, form)
    value: torch.Tensor = collective.operand.meta["val"]
    if value.ndim == 0 or value.dtype not in ACTIVATION_DTYPES:
        raise _unable(node, form)
    return Match(collective, form, json.loads(form.leader))


def rewrite(graph: fx.Graph, match: Match, options: Options) -> None:
    """Replaces the collective and its wait."""
    collective = match.collective
    with graph.inserting_before(collective.node):
        result = _REWRITES[match.form.kind](graph, match, options)
    collective.wait.replace_all_uses_with(result)
    graph.erase_node(collective.wait)
    graph.erase_node(collective.node)


def conform(graph: fx.Graph, forms: Mapping[str, Sequence[Form]], *, options: Options) -> int:
    """Gives the launches of every group the forms that the ranks agreed on, and returns how many were rewritten.

    Raises DitronDiverged if that is impossible.
    """
    count = 0
    for group_name, launches in launches_of(graph).items():
        for (node, _), form in zip(launches, forms.get(group_name, ()), strict=False):
            if form.kind:
                rewrite(graph, find(node, form), options)
                count += 1
    return count


def _unable(node: fx.Node, form: Form) -> DitronDiverged:
    return DitronDiverged(
        rank=torch.distributed.get_rank(),
        site=f"{node.target}, which nothing is fused with here",
        peer="any other",
        peer_site=f"{form.kind}, agreed on before",
    )


def _common(match: Match, options: Options) -> dict[str, Any]:
    return {
        "world_size": match.collective.world_size,
        "group_name": match.collective.group_name,
        "site": rewriting.UNNAMED_SITE,
        "policy": rewriting.policy(options),
    }


def _zeros(graph: fx.Graph, origin: fx.Node, shape: Sequence[Any]) -> fx.Node:
    value: torch.Tensor = origin.meta["val"]
    node = graph.call_function(
        aten.full.default,
        (list(shape), 0),
        {"dtype": value.dtype, "layout": torch.strided, "device": value.device, "pin_memory": False},
    )
    node.meta.update(rewriting.copied_meta(origin))
    node.meta["val"] = rewriting.fake_like(value, tuple(shape), rewriting.contiguous_strides(tuple(shape)))
    return node


def _factors(graph: fx.Graph, x: fx.Node) -> dict[str, list[fx.Node]]:
    """Returns the operands of a product of zeros in the shape of x."""
    shape = tuple(x.meta["val"].shape)
    return {"a": [_zeros(graph, x, (*shape[:-1], 1))], "b": [_zeros(graph, x, (1, shape[-1]))]}


def _contiguous(graph: fx.Graph, x: fx.Node) -> fx.Node:
    shape = tuple(x.meta["val"].shape)
    return rewriting.call(graph, aten.clone.default, (x,), x, shape)


def _all_reduce(graph: fx.Graph, match: Match, options: Options) -> fx.Node:
    collective = match.collective
    x, wait = _contiguous(graph, collective.operand), collective.wait
    assert collective.reduce_op is not None
    task = MatmulAllReduce(reduce_op=collective.reduce_op, num_extras=1, epilogue=ADD_ALL, **_common(match, options))
    values = [x.meta["val"], rewriting.new_token(x.meta["val"])]
    meta = rewriting.copied_meta(wait)
    call = rewriting.call_task(graph, task, {**_factors(graph, x), "extras": [x]}, meta, values)
    return rewriting.output(graph, call, 0, meta)


def _reduce_with_norm(graph: fx.Graph, match: Match, options: Options) -> fx.Node:
    """Inserts the reduction without a norm, because a norm behind it concerns no other rank."""
    collective = match.collective
    x, wait = _contiguous(graph, collective.operand), collective.wait
    assert collective.reduce_op is not None
    common = {"reduce_op": collective.reduce_op, "norm": Norm(), "extras": (), **_common(match, options)}
    task: AllReduceRmsNorm | MatmulAllReduceRmsNorm
    operands: dict[str, Any]
    if match.form.kind == AllReduceRmsNorm.kind:
        task, operands = AllReduceRmsNorm(**common), {"x": x}
    else:
        task = MatmulAllReduceRmsNorm(num_products=1, num_extras=1, epilogue=ADD_ALL, **common)
        operands = {**_factors(graph, x), "extras": [x]}
    values = [x.meta["val"], x.meta["val"], rewriting.new_token(x.meta["val"])]
    meta = rewriting.copied_meta(wait)
    call = rewriting.call_task(graph, task, operands, meta, values)
    return rewriting.output(graph, call, task.returned.index("total"), meta)


def _reduce_scatter(graph: fx.Graph, match: Match, options: Options) -> fx.Node:
    collective, dim = match.collective, int(match.leader["scatter_dim"])
    wait = collective.wait
    assert collective.reduce_op is not None
    # The peers scatter another dimension: the parts for the ranks lie together here, and side by side along it there.
    operand = collective.operand
    x = rewriting.regrouped(graph, operand, 0, dim, collective.world_size, operand) if dim else operand
    x = _contiguous(graph, x)
    task = MatmulReduceScatter(
        scatter_dim=dim, reduce_op=collective.reduce_op, num_extras=1, epilogue=ADD_ALL, **_common(match, options)
    )
    values = [wait.meta["val"], rewriting.new_token(wait.meta["val"])]
    meta = rewriting.copied_meta(wait)
    call = rewriting.call_task(graph, task, {**_factors(graph, x), "extras": [x]}, meta, values)
    return rewriting.output(graph, call, 0, meta)


def _all_gather(graph: fx.Graph, match: Match, options: Options) -> fx.Node:
    collective, dim = match.collective, int(match.leader["gather_dim"])
    x, wait, world_size = collective.operand, collective.wait, collective.world_size
    value: torch.Tensor = x.meta["val"]
    task = AllGatherMatmul(gather_dim=dim, return_gathered=True, num_weights=1, **_common(match, options))
    shape = list(value.shape)
    shape[dim] *= world_size
    gathered_like = rewriting.fake_like(value, tuple(shape), rewriting.contiguous_strides(tuple(shape)))
    rows = gathered_like.numel() // shape[-1] if shape[-1] else 0
    values = [value.new_empty(rows, 1), gathered_like, rewriting.new_token(value)]
    meta = rewriting.copied_meta(wait)
    operands = {"shard": x, "weights": [_zeros(graph, x, (shape[-1], 1))]}
    call = rewriting.call_task(graph, task, operands, meta, values)
    gathered = rewriting.output(graph, call, 1, meta)
    return rewriting.regrouped(graph, gathered, dim, 0, world_size, gathered) if dim else gathered


_REWRITES: Mapping[str, Callable[[fx.Graph, Match, Options], fx.Node]] = {
    MatmulAllReduce.kind: _all_reduce,
    AllReduceRmsNorm.kind: _reduce_with_norm,
    MatmulAllReduceRmsNorm.kind: _reduce_with_norm,
    MatmulReduceScatter.kind: _reduce_scatter,
    AllGatherMatmul.kind: _all_gather,
}
