"""Regions of a graph, from its all-reduces through all row-wise ops, in which a rank could compute only its own rows.

A region starts at all-reduces of one group whose results meet in row-wise ops; their shapes may differ in the last
dimension only. Each row of a result depends on the same row of the inputs, and on operands that all rows share:

    all_reduce -> wait -> + residual -> mean over the last dimension, rsqrt, * -> * weight -> matmul
                            '-> the residual of the next all_reduce

The members of a region are the results of the all-reduces and the row-wise ops behind them. Row-wise ops are pointwise
ops whose operands are members, whole tensors (`entering`, of which a rank takes its rows) or shared by all rows;
reductions of the last dimension that keep it; and copies. Members that something else reads are `exits`.

What is not a member may differ between ranks unless it is replicated. The result of an all-reduce or an all-gather of
the group is replicated, and so is what deterministic ops make of such results. A graph does not show whether its inputs
are replicated. The inputs that a region assumes to be replicated, norm weights and the first residual, are its `roots`,
which the ranks compare when they run. The result of a matmul or of another collective is not replicated and ends the
region.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import getitem

import torch
from torch import fx

from ditron_inductor.passes.graph import proofs
from ditron_inductor.passes.graph.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    WAIT,
    Collective,
    collectives,
    read_collective,
)
from ditron_inductor.task.torch_dtypes import ACTIVATION_DTYPES

aten = torch.ops.aten

REDUCTIONS: frozenset[object] = frozenset(
    {
        aten.mean.dim,
        aten.sum.dim_IntList,
        aten.amax.default,
        aten.amin.default,
        aten.var.correction,
        aten.var_mean.correction,
    }
)
# Ops that give the same result on all ranks if their operands are the same, beside pointwise ops, views and pieces.
DETERMINISTIC: frozenset[object] = REDUCTIONS | {
    aten.embedding.default,
    aten.cat.default,
    aten.arange.start_step,
    aten.arange.default,
    aten.full.default,
    aten.scalar_tensor.default,
    aten._to_copy.default,
}


@dataclass(frozen=True)
class Region:
    """Row-wise work behind `reductions`; `rows` is the shape of all members but for the last dimension. `members` are
    in graph order, results of the reductions included. `entering` are whole tensors that members read, `roots` the
    placeholders that have to be equal on all ranks.
    """

    rows: tuple[int, ...]
    reductions: tuple[Collective, ...]
    members: tuple[fx.Node, ...]
    entering: tuple[fx.Node, ...]
    roots: tuple[fx.Node, ...]

    @property
    def exits(self) -> tuple[fx.Node, ...]:
        """Members that a node outside of the region reads."""
        inside = set(self.members)
        return tuple(node for node in self.members if any(user not in inside for user in node.users))


@dataclass
class _Growing:
    """Members so far of the regions of one group and shape, and what each of them reads from outside."""

    group_name: str
    rows: tuple[int, ...]
    members: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    replicated: dict[fx.Node, frozenset[fx.Node] | None] = field(default_factory=dict)

    def starts_at(self, reduction: Collective) -> bool:
        """Returns whether the result of an all-reduce is a member."""
        value = reduction.wait.meta["val"]
        return reduction.group_name == self.group_name and value.dtype in ACTIVATION_DTYPES and self.has_rows(value)

    def takes(self, node: fx.Node) -> list[fx.Node] | None:
        """The operands from outside of a row-wise op on members; None if the node is none."""
        if node.op != "call_function" or not any(source in self.members for source in node.all_input_nodes):
            return None
        if node.target is getitem:
            return []
        if not isinstance(node.target, torch._ops.OpOverload) or not self._is_row_wise(node):
            return None
        outside = [source for source in node.all_input_nodes if source not in self.members]
        fits = all(self._fits(source, node) and self.roots_of(source) is not None for source in outside)
        return outside if fits else None

    def _is_row_wise(self, node: fx.Node) -> bool:
        target = node.target
        assert isinstance(target, torch._ops.OpOverload)
        values = node.meta.get("val")
        results = values if isinstance(values, (list, tuple)) else [values]
        if not all(isinstance(result, torch.Tensor) and self.has_rows(result) for result in results):
            return False
        if target in REDUCTIONS:
            bound, source = proofs.arguments(node), proofs.fake(node.args[0])
            dims = bound["dim"] if isinstance(bound["dim"], (list, tuple)) else [bound["dim"]]
            return bool(bound["keepdim"]) and [dim in (-1, source.ndim - 1) for dim in dims] == [True]
        if target is aten._to_copy.default:
            return set(node.kwargs) <= {"dtype"}
        return is_pointwise(target)

    def has_rows(self, value: torch.Tensor) -> bool:
        """Returns whether a tensor has all rows and a last dimension of known size."""
        known = all(isinstance(length, int) for length in value.shape)
        return known and tuple(value.shape[:-1]) == self.rows

    def _fits(self, source: fx.Node, node: fx.Node) -> bool:
        """Returns whether an operand from outside has all rows, or none of its own."""
        value = proofs.tensor(source)
        if value is None:
            return False
        return self.has_rows(value) or all(proofs.known_equal(length, 1) for length in value.shape[:-1])

    def roots_of(self, node: fx.Node) -> frozenset[fx.Node] | None:
        """The placeholders that a replicated tensor comes from; None if it may differ between ranks."""
        if node not in self.replicated:
            self.replicated[node] = self._roots_of(node)
        return self.replicated[node]

    def _roots_of(self, node: fx.Node) -> frozenset[fx.Node] | None:
        if node.op == "placeholder":
            return frozenset({node}) if proofs.tensor(node) is not None else None
        if node.op != "call_function":
            return None
        if node.target is WAIT:
            sent = node.args[0]
            if not isinstance(sent, fx.Node) or sent.target not in (ALL_REDUCE, ALL_GATHER):
                return None
            return frozenset() if proofs.arguments(sent)["group_name"] == self.group_name else None
        target = node.target
        made = target in DETERMINISTIC or target in proofs.MAY_KEEP_ORDER or target in proofs.SLICES
        if not made and not is_pointwise(target):
            return None
        roots: frozenset[fx.Node] = frozenset()
        for source in node.all_input_nodes:
            found = self.roots_of(source)
            if found is None:
                return None
            roots |= found
        return roots


def is_pointwise(target: object) -> bool:
    """Returns whether an op computes each element from the elements in its place, and nothing else."""
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return False
    return torch.Tag.pointwise in target.tags and torch.Tag.nondeterministic_seeded not in target.tags


def find_regions(graph: fx.Graph) -> list[Region]:
    """Returns all regions of a graph whose sizes are known, in graph order. What is summed over ranks is no replicated
    tensor, so there is no region with a root from which alone the operand of one of its reductions is made.
    """
    starts = [read for node in collectives(graph, ALL_REDUCE) if isinstance(read := read_collective(node), Collective)]
    waits = {start.wait: start for start in starts}
    growing: dict[tuple[str, tuple[int, ...]], _Growing] = {}
    for start in starts:
        value = start.wait.meta["val"]
        shape, known = tuple(value.shape), all(isinstance(length, int) for length in value.shape)
        if len(shape) > 1 and known and value.dtype in ACTIVATION_DTYPES:
            growing.setdefault((start.group_name, shape[:-1]), _Growing(start.group_name, shape[:-1]))
    for node in graph.nodes:
        for each in growing.values():
            if node in waits and each.starts_at(waits[node]):
                each.members[node] = []
            elif (outside := each.takes(node)) is not None:
                each.members[node] = outside
    order = {node: index for index, node in enumerate(graph.nodes)}
    regions = [
        region
        for each in growing.values()
        for part in _connected(each.members)
        if not _sums_roots(each, region := _region(each, part, waits))
    ]
    return sorted(regions, key=lambda region: order[region.members[0]])


def _sums_roots(growing: _Growing, region: Region) -> bool:
    """Returns whether a reduction of the region adds up what comes from its roots and other inputs alone."""
    operands = [growing.roots_of(reduction.operand) or frozenset() for reduction in region.reductions]
    return any(found.intersection(region.roots) for found in operands)


def _connected(members: Iterable[fx.Node]) -> list[list[fx.Node]]:
    """The members in groups of those that read each other, each in the order given."""
    ordered = list(members)
    inside, left, parts = set(ordered), set(ordered), []
    for start in ordered:
        if start not in left:
            continue
        found = set(proofs.reached([start], lambda node: inside.intersection((*node.users, *node.all_input_nodes))))
        left -= found
        parts.append([node for node in ordered if node in found])
    return parts


def _region(growing: _Growing, members: list[fx.Node], waits: dict[fx.Node, Collective]) -> Region:
    outside = dict.fromkeys(source for node in members for source in growing.members[node])
    roots: dict[fx.Node, None] = {}
    for source in outside:
        found = growing.roots_of(source)
        assert found is not None
        roots.update(dict.fromkeys(sorted(found)))
    return Region(
        rows=growing.rows,
        reductions=tuple(waits[node] for node in members if node in waits),
        members=tuple(members),
        entering=tuple(source for source in outside if growing.has_rows(source.meta["val"])),
        roots=tuple(roots),
    )
