"""Symbolic sizes that are read from tensors which a fusion removes are read from elsewhere instead.

With dynamic shapes a graph asks tensors for their sizes, `sym_size(cat, 1)`, and so looks as if it used their data:

    cat [s0, 4*s1, s2] -> sym_size(cat, 1) -> reshape(mm, [s0, sym_size, s3])

`read_elsewhere` answers the question from a placeholder, from an argument that made the tensor, or from the tensor's
own operands (`s1 * 4` here). The symbolic value stays the same, nothing is specialised and no guard is added.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ditron_inductor.passes.graph import proofs
from ditron_inductor.passes.graph.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, SINGLE, WAIT

aten = torch.ops.aten

RESHAPES: frozenset[object] = frozenset({aten.reshape.default, aten.view.default, aten._unsafe_view.default})


def read_elsewhere(graph: fx.Graph, asked: Callable[[fx.Node], bool]) -> int:
    """Answers `sym_size` of nodes that `asked` accepts from elsewhere, if possible; returns how many."""
    count = 0
    for reader in graph.find_nodes(op="call_function", target=aten.sym_size.int):
        source, dim = reader.args
        if not asked(source):
            continue
        with graph.inserting_before(reader):
            answer = _size(graph, reader, source, dim, asked)
        if answer is not None:
            reader.replace_all_uses_with(answer)
            graph.erase_node(reader)
            count += 1
    return count


def _size(graph: fx.Graph, reader: fx.Node, source: fx.Node, dim: int, asked: Callable[[fx.Node], bool]) -> Any:
    """Returns a node or int with the size of `source` in dimension `dim` that does not ask `source`, or None."""
    value = proofs.tensor(source)
    if value is None:
        return None
    dim = dim % value.ndim
    length = value.shape[dim]
    if isinstance(length, int):
        return length
    known = _existing(graph, reader, length, asked)
    if known is not None:
        return known
    if not asked(source):
        return made(graph, aten.sym_size.int, (source, dim), length)
    if source.target in RESHAPES:
        size = list(proofs.arguments(source).values())[1][dim]
        return size if isinstance(size, fx.Node) else None
    if source.target is WAIT:
        return _size(graph, reader, source.args[0], dim, asked)  # type: ignore[arg-type]
    single = _communicated(source)
    if single is not None:
        target, operand, group_size = single
        if target is ALL_REDUCE or dim > 0:
            return _size(graph, reader, operand, dim, asked)
        if target is ALL_GATHER:
            return _multiple(graph, reader, operand, dim, group_size, length, asked)
        whole = _size(graph, reader, operand, dim, asked)
        return None if whole is None else made(graph, operator.floordiv, (whole, group_size), length)
    if source.target is aten.mm.default:
        return _size(graph, reader, source.args[dim], dim, asked)  # type: ignore[arg-type]
    if source.target is aten.addmm.default:
        return _size(graph, reader, source.args[1 + dim], dim, asked)  # type: ignore[arg-type]
    if source.target is aten.add.Tensor:
        # An operand that is not broadcast to the result's shape.
        alike = [node for node in source.all_input_nodes if proofs.alike(node, source)]
        return _size(graph, reader, alike[0], dim, asked) if alike else None
    if source.target is aten.bmm.default:
        return _size(graph, reader, source.args[dim // 2], dim, asked)  # type: ignore[arg-type]
    part = proofs.piece(source)
    if part is not None and part.dim != dim:
        return _size(graph, reader, part.source, dim, asked)
    if source.target is aten.cat.default:
        return _size_of_cat(graph, reader, source, dim, asked)
    return None


def _communicated(source: fx.Node) -> tuple[object, fx.Node, Any] | None:
    """Returns (collective, operand, group size) of the result of a collective, also of one of several tensors."""
    index = None
    if source.target is operator.getitem:
        source, index = source.args  # type: ignore[assignment]
    target = source.target if index is None else SINGLE.get(source.target)
    if target not in (ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE):
        return None
    bound = proofs.arguments(source)
    operand = bound["input"] if index is None else bound["inputs"][index]
    return target, operand, bound.get("group_size")


def _size_of_cat(graph: fx.Graph, reader: fx.Node, cat: fx.Node, dim: int, asked: Callable[[fx.Node], bool]) -> Any:
    bound = proofs.arguments(cat)
    parts: list[fx.Node] = list(bound["tensors"])
    value, first = proofs.tensor(cat), proofs.tensor(parts[0])
    if value is None or first is None or first.ndim != value.ndim:
        return None
    if dim != bound["dim"] % value.ndim:
        return _size(graph, reader, parts[0], dim, asked)
    if not proofs.known_equal(first.shape[dim] * len(parts), value.shape[dim]):
        return None
    return _multiple(graph, reader, parts[0], dim, len(parts), value.shape[dim], asked)


def _multiple(
    graph: fx.Graph, reader: fx.Node, source: Any, dim: int, times: Any, length: Any, asked: Callable[[fx.Node], bool]
) -> Any:
    size = _size(graph, reader, source, dim, asked)
    return None if size is None else made(graph, operator.mul, (size, times), length)


def in_graph(graph: fx.Graph, before: fx.Node, length: Any) -> Any:
    """Returns a size as an argument of an op at `before`: the int, or an existing node that holds it, or None."""
    return length if isinstance(length, int) else _existing(graph, before, length, lambda node: False)


def shape_in_graph(before: fx.Node, shape: Sequence[Any]) -> list[Any] | None:
    """Returns a shape as the argument of a reshape at `before`: ints, nodes of the graph, and -1 at most once; None if
    more than one size stands in no node there.
    """
    found = [in_graph(before.graph, before, size) for size in shape]
    return None if found.count(None) > 1 else [-1 if size is None else size for size in found]


def _existing(graph: fx.Graph, reader: fx.Node, length: Any, asked: Callable[[fx.Node], bool]) -> fx.Node | None:
    """Returns a node before `reader` with exactly this expression, not got from a tensor that `asked` accepts."""
    for node in graph.nodes:
        if node is reader:
            return None
        value = node.meta.get("val")
        # Compared as expressions: a proof of equality for every size of a large graph would take long.
        if not isinstance(value, torch.SymInt) or value.node.expr != length.node.expr:
            continue
        if not any(asked(source) for source in proofs.ancestors(node)):
            return node
    return None


def made(graph: fx.Graph, target: Callable[..., Any], args: tuple[Any, ...], length: Any) -> fx.Node:
    """Inserts a call that computes the size `length`."""
    node = graph.call_function(target, args)
    node.meta["val"] = length
    return node
