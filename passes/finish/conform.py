"""Collectives of a graph become the Task nodes that the other ranks run in their places.

    wait(all_reduce(x, "sum"))  ->  matmul_all_reduce([0 [.., 1]], [0 [1, N]], extras=[x],
                                                      epilogue="pre: mm0 + full(x0); mm0")[0]
    wait(all_gather(x))         ->  all_gather_matmul(x, [0 [K, 1]], return_gathered)[1]
    wait(reduce_scatter(x))     ->  matmul_reduce_scatter(.., as the first)[0]
    wait(all_reduce(x))         ->  grouped_matmul_all_reduce(0 [T, 16], 0 [1, 16, N], .., added x)[0]
    wait(reduce_scatter(x))     ->  grouped_matmul_reduce_scatter(.., as the one before)[0]
    wait(all_reduce(x))         ->  all_reduce_rms_norm(x), the output `total`

If a rank's graph has no matmul in front of a collective, but its peers wait for the tiles of one, the rank has to send
tiles too. They are those of a product of zeros to which x is added, or of experts whose weights are zeros. The sum
is x bit for bit, except for the sign of zeros. This is not a pass of the pipeline. It runs on a graph as it was before
the passes, if the graph comes under an agreement that was made without it (device/agreements.py). It costs a small
product that nobody needs, or zeros of the size of x. If x has as many elements as was agreed, but another shape, as
for other sequences, it is sent in the shape that was agreed, by which the kernels of the peers cut it.

It raises DitronDiverged if the collective is not a functional collective that is waited for once, if x has no
dimension, or if the peers' node is of a kind that is not drawn above or of a dtype that no kernel takes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
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
from ditron_inductor.task import schema
from ditron_inductor.task.exchange import GATHERED_OPERAND, SCATTERED_PRODUCT
from ditron_inductor.task.nodes import (
    TASKS,
    Norm,
    ReducedExperts,
    ReducedSum,
    ReductionWithNorm,
    TaskNode,
    WithPrologue,
)
from ditron_inductor.task.torch_dtypes import ACTIVATION_DTYPES

aten = torch.ops.aten
ADD_ALL = "pre: mm0 + full(x0); mm0"
DIMENSIONS = ("gather_dim", "scatter_dim")
WIDTH = 16
"""K of the stand-ins of experts, which is aligned as a grouped matmul needs it."""
OUTER = "outer"
"""The field of a node whose rows of a rank are several runs."""


@dataclass(frozen=True)
class Match:
    """A collective, the form of the node that its peers run, and the local facts of rank 0 in this node."""

    collective: Collective
    form: Form
    leader: Mapping[str, Any]


def find(node: fx.Node, form: Form) -> Match:
    """Proves that the node can be replaced as drawn above. Raises DitronDiverged."""
    collective = read_collective(node)
    if isinstance(collective, ReasonCode) or not _stands_in(TASKS.get(form.kind)):
        raise _unable(node, form)
    value: torch.Tensor = collective.operand.meta["val"]
    if value.ndim == 0 or value.dtype not in ACTIVATION_DTYPES:
        raise _unable(node, form)
    shape = _agreed_shape(value, form)
    if shape and math.prod(shape) != value.numel():
        raise _unable(node, form)
    return Match(collective, form, json.loads(form.leader))


def rewrite(graph: fx.Graph, match: Match, options: Options) -> None:
    """Replaces the collective and its wait."""
    collective = match.collective
    with graph.inserting_before(collective.node):
        result = _replacement(graph, match, options)
    collective.wait.replace_all_uses_with(result)
    graph.erase_node(collective.wait)
    graph.erase_node(collective.node)


def conform(graph: fx.Graph, forms: Mapping[str, Sequence[Form]], *, options: Options) -> int:
    """Gives launches the forms that the ranks agreed on; returns how many were rewritten. Raises DitronDiverged."""
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


def _agreed_shape(x: torch.Tensor, form: Form) -> list[int]:
    """The sizes by which the peers cut what they send in the place of x; empty if any of them or of x is a symbol."""
    sizes = [size for size in form.sizes if size is not None]
    known = len(sizes) == len(form.sizes) and all(isinstance(size, int) for size in x.shape)
    return sizes if known else []


def _stands_in(declared: type[TaskNode] | None) -> bool:
    """Whether a node of this kind can take the place of a collective that no matmul is beside."""
    if declared is None:
        return False
    gathers = declared.exchange == GATHERED_OPERAND and issubclass(declared, WithPrologue)
    return gathers or issubclass(declared, ReducedSum | ReductionWithNorm | ReducedExperts)


def _task(match: Match, options: Options) -> TaskNode:
    """The node that stands in for the collective. Of a norm behind it: that concerns no other rank."""
    collective, declared = match.collective, TASKS[match.form.kind]
    known: dict[str, Any] = {
        **{name: int(size) for name, size in match.leader.items() if name in (*DIMENSIONS, OUTER)},
        "reduce_op": collective.reduce_op,
        "norm": Norm(),
        "extras": (),
        "return_gathered": True,
        "num_weights": 1,
        **({"num_extras": 1, "epilogue": ADD_ALL} if _adds(declared) else {}),
        **({"top_k": 1, "has_added": True} if issubclass(declared, ReducedExperts) else {}),
        **rewriting.site_fields(collective.world_size, collective.group_name, options),
    }
    return declared(**{field.name: known[field.name] for field in fields(declared) if field.name in known})


def _adds(declared: type[TaskNode]) -> bool:
    """Whether the node adds what the collective has to a product of zeros, before it is reduced."""
    return "num_products" in {field.name for field in fields(declared)}


def _operands(graph: fx.Graph, task: TaskNode, x: fx.Node) -> dict[str, Any]:
    """x, wherever the node takes what a rank contributes, and zeros where it takes weights."""
    if _adds(type(task)):
        *rows, columns = x.meta["val"].shape
        a, b = rewriting.zeros(graph, x, (*rows, 1)), rewriting.zeros(graph, x, (1, columns))
        return {"a": [a], "b": [b], "extras": [x]}
    if isinstance(task, ReducedExperts):
        rows, columns = x.meta["val"].shape
        shapes = {"x": (rows, WIDTH), "weight": (1, WIDTH, columns), "scale": (rows,)}
        return {
            **{name: rewriting.zeros(graph, x, shape) for name, shape in shapes.items()},
            "ends": rewriting.full(graph, x, (1,), rows, torch.int32),
            "places": rewriting.full(graph, x, (rows,), 0, torch.int64),
            "added": x,
        }
    (name, _), *others = task.slots()
    return {name: x, **{weights: [rewriting.zeros(graph, x, (x.meta["val"].shape[-1], 1))] for weights, _ in others}}


def _result(task: TaskNode) -> int:
    """Returns the index of the output that is the result of the collective."""
    if isinstance(task, ReductionWithNorm):
        return task.returned.index("total")
    return 1 if isinstance(task, WithPrologue) else 0


def _as_runs(graph: fx.Graph, x: fx.Node, outer: int, world_size: int) -> fx.Node:
    """Inserts x as rows [T, N]. The chunks of the ranks, which lie together here, are `outer` runs each there."""
    shape = x.meta["val"].shape
    rows = rewriting.computed(graph, aten.reshape.default, (x, [math.prod(shape[:-1]), shape[-1]]), x)
    if outer == 1:
        return rows
    runs = rewriting.computed(graph, aten.reshape.default, (rows, [world_size * outer, -1, shape[-1]]), x)
    runs = rewriting.regrouped(graph, runs, 0, 1, world_size, x)
    return rewriting.computed(graph, aten.reshape.default, (runs, [-1, shape[-1]]), x)


def _replacement(graph: fx.Graph, match: Match, options: Options) -> fx.Node:
    collective, task = match.collective, _task(match, options)
    x, wait, world_size = collective.operand, collective.wait, collective.world_size
    # The peers' dimension: chunks that lie together here are side by side along it there.
    dim = next((int(match.leader[name]) for name in DIMENSIONS if name in match.leader), 0)
    chunks = world_size if dim and task.exchange == SCATTERED_PRODUCT else 1
    sizes = _agreed_shape(x.meta["val"], match.form)
    if sizes:
        sizes[dim] //= chunks
        sizes[0] *= chunks
        x = rewriting.shaped(graph, x, tuple(sizes))
    if chunks > 1:
        x = rewriting.regrouped(graph, x, 0, dim, world_size, x)
    if isinstance(task, ReducedExperts):
        x = _as_runs(graph, x, getattr(task, OUTER, 1), world_size)
    if task.exchange != GATHERED_OPERAND:
        shape = tuple(x.meta["val"].shape)
        x = rewriting.call(graph, aten.clone.default, (x,), x, shape)
    operands = _operands(graph, task, x)
    value = x.meta["val"]
    shapes = schema.shapes_of({name: schema.values_of(operand) for name, operand in operands.items()})
    values = [*schema.memory(value, task.outputs(shapes)), rewriting.new_token(value)]
    call = rewriting.call_task(graph, task, operands, wait, values)
    result = rewriting.output(graph, call, _result(task), wait)
    if dim and task.exchange == GATHERED_OPERAND:
        result = rewriting.regrouped(graph, result, dim, 0, world_size, result)
    return rewriting.shaped(graph, result, tuple(wait.meta["val"].shape))
