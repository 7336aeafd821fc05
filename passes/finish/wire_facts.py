"""Facts about the collectives of a graph: what the other ranks have to share, and what only this rank has beside them.

*Wire facts* are what two ranks must share for a collective to be right: its kind, the reduction, the dtype, and how
many elements a rank contributes. *Local facts* may differ from rank to rank: a bias, an epilogue, how many products are
added up. `facts_of(graph)` lists both, group by group, in graph order. `device/meetings.py` compares the lists of all
ranks when a graph first runs.

A Task node that stands for exactly one collective has the wire facts of this collective. So a rank that has fused a
collective and a rank that has not describe it in the same way.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import fx

from ditron_inductor.device.facts import GraphFacts, GroupFacts, LaunchFacts, digest
from ditron_inductor.passes.forms.move_across import FACTORS
from ditron_inductor.passes.forms.move_sums import SUM
from ditron_inductor.passes.graph.collectives import WAIT, group_size
from ditron_inductor.passes.graph.launches import group_of, is_task, launches_collective
from ditron_inductor.passes.graph.proofs import arguments, fake, operand, views_up
from ditron_inductor.passes.graph.rewriting import TRANSPOSED
from ditron_inductor.passes.normalize.vllm_collectives import group_names, is_vllm_collective
from ditron_inductor.task import schema

FRAME = re.compile(r'File "([^"]*)", line (\d+)')
WIRES: Mapping[str, str] = {
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "all_gather": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}
"""The collective that an op of torch launches, by the op's name. Other ops are compared by their own names."""
LOCAL_FIELDS = (
    "num_weights", "num_products", "has_bias", "num_extras", "epilogue", "return_gathered",
    "gather_dim", "scatter_dim", "top_k", "has_added", "has_absent", "returns_products", "has_second", "outer",
)  # fmt: skip
"""Fields of a Task node that may differ between ranks."""


def launches_of(graph: fx.Graph) -> dict[str, list[tuple[fx.Node, LaunchFacts]]]:
    """The launches of every group with more than one rank, by the group's name, in graph order: nodes and their facts.
    Groups that the graph holds as objects are left out, and so are groups that this process does not know, because it
    is not known by which store their ranks would meet.
    """
    aliases = group_names()
    found: dict[str, list[tuple[fx.Node, LaunchFacts]]] = {}
    order = 0
    for node in graph.nodes:
        if is_task(node):
            facts = replace(_task_facts(node), order=order)
            found.setdefault(group_of(node), []).append((node, facts))
            order += 1
        elif launches_collective(node):
            group_name = group_of(node)
            group_name = aliases.get(group_name, group_name) if isinstance(group_name, str) else None
            if group_name is not None and (group_size(group_name) or 1) > 1:
                facts = replace(_collective_facts(node), order=order)
                found.setdefault(group_name, []).append((node, facts))
                order += 1
    return found


def facts_of(graph: fx.Graph) -> dict[str, list[LaunchFacts]]:
    """The facts of the launches of every group, by the group's name, in graph order."""
    return {name: [facts for _, facts in launches] for name, launches in launches_of(graph).items()}


@dataclass(frozen=True)
class Before:
    """Facts about a graph before the passes: its launches by group, and the hash of its ops."""

    launches: Mapping[str, Sequence[LaunchFacts]]
    structure: str


def before_passes(graph: fx.Graph) -> Before | None:
    """Returns the facts of a graph to be known before the passes change it; None for one without collectives."""
    launches = facts_of(graph)
    return Before(launches, _structure(graph)) if launches else None


def graph_facts(
    before: Before, after: Mapping[str, Sequence[LaunchFacts]], moved: str, options: Mapping[str, str]
) -> GraphFacts:
    """The facts of one graph before the passes and after them. moved: see GroupFacts."""
    groups = (
        GroupFacts(
            name,
            group_size(name) or 0,
            tuple(before.launches.get(name, ())),
            tuple(after.get(name, ())),
            moved,
            before.structure,
        )
        for name in {*before.launches, *after}
    )
    return GraphFacts(tuple(sorted(groups, key=_place_of)), dict(options))


def _place_of(group: GroupFacts) -> tuple[list[tuple[str, str]], int, str]:
    """Returns by what the groups of a graph are put in order: the same on all ranks, as their names are not. The ranks
    call each other's counterpart of a group by another name.
    """
    launches = group.before or group.after
    return [(launch.wire, launch.place) for launch in launches], launches[0].order, group.name


def _structure(graph: fx.Graph) -> str:
    """Returns a hash of the ops, of what they read, and of the numbers with a fraction among their arguments. Whole
    numbers are left out, because they are sizes and offsets, which may differ between ranks, except for factors, which
    passes move. What is summed behind a collective moves too, and its shape counts.
    """
    numbers: dict[fx.Node, int] = {}
    lines = []
    for number, node in enumerate(graph.nodes):
        numbers[node] = number
        inputs = [numbers[given] for given in node.all_input_nodes]
        values = (int, float) if node.target in FACTORS else float
        factors = [argument for argument in (*node.args, *node.kwargs.values()) if isinstance(argument, values)]
        name = node.target if node.op == "call_function" else ""
        lines.append(f"{node.op} {name} {inputs} {factors} {_summed(node) or ''}")
    return digest("\n".join(lines))


def _summed(node: fx.Node) -> str | None:
    """Returns the shape that a sum adds up, and the dimensions, if it is what a collective returned."""
    if node.target is not SUM or views_up(operand(node))[-1].target is not WAIT:
        return None
    return f"{[_known([size]) for size in fake(operand(node)).shape]} {node.args[1:]}"


def _collective_facts(node: fx.Node) -> LaunchFacts:
    assert isinstance(node.target, torch._ops.OpOverload)
    name = node.target._opname
    values = [given.meta["val"] for given in node.all_input_nodes if isinstance(given.meta.get("val"), torch.Tensor)]
    counts = [_known(value.shape) for value in values]
    first = values[0] if values else None
    bound = arguments(node)
    reduce_op = "sum" if is_vllm_collective(node) and name != "all_gather" else bound.get("reduce_op")
    return LaunchFacts(
        wire=_wire(WIRES.get(name, str(node.target)), reduce_op, None if first is None else first.dtype),
        numel=None if None in counts else sum(count for count in counts if count is not None),
        device_type="" if first is None else first.device.type,
        place=_place(node.meta.get("stack_trace") or ""),
        shape=() if first is None else tuple(_known([size]) for size in first.shape),
    )


def _task_facts(node: fx.Node) -> LaunchFacts:
    task = schema.node_from_call(node.target, node.args)
    first = fake(schema.operands_of(node)[0])
    local = {field.name: getattr(task, field.name) for field in fields(task) if field.name in LOCAL_FIELDS}
    shapes = schema.shapes_from_call(node)
    contributed = task.contributed(shapes)
    wire = _wire(task.wire, getattr(task, "reduce_op", None), first.dtype)
    return LaunchFacts(
        # It then sends transposes of what its collective sent.
        wire=f"{wire} transposed" if node.meta.get(TRANSPOSED) else wire,
        numel=None if contributed is None else _known(contributed),
        device_type=first.device.type,
        kind=task.form,
        local=json.dumps(local, sort_keys=True),
        site=task.site,
        sizes=() if contributed is None else tuple(_known([size]) for size in task.sizes(shapes).wire),
    )


def lines_of(module: fx.GraphModule) -> str:
    """Returns a hash of the lines of the program that the ops of a graph come from, those of its subgraphs included.
    Ranks find each other's graphs by the lines that launch collectives, and a compiled graph has these in its code. So
    a graph must not be taken from the cache of a program with the same ops on other lines, such as the same program
    before an edit.
    """
    graphs = [part.graph for part in module.modules() if isinstance(part, fx.GraphModule)]
    traces = dict.fromkeys(node.meta.get("stack_trace") or "" for graph in graphs for node in graph.nodes)
    return digest(" ".join(_place(trace) for trace in traces))


def _place(stack_trace: str) -> str:
    """A hash of the lines of the program that launch a collective."""
    return digest(" ".join(f"{file}:{line}" for file, line in FRAME.findall(stack_trace)))


def _wire(collective: str, reduce_op: object, dtype: torch.dtype | None) -> str:
    return " ".join(str(part).removeprefix("torch.") for part in (collective, reduce_op, dtype) if part is not None)


def _known(shape: Sequence[Any]) -> int | None:
    """Returns the number of elements if every size is a number, and otherwise None."""
    return math.prod(shape) if all(isinstance(size, int) for size in shape) else None
