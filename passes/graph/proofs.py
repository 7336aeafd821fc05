"""What the passes prove about a graph: sizes, dtypes, views, chunks, users. Nothing here changes a graph or adds a
guard.

Sizes may be symbolic. `known_equal` answers True only if equality holds for every value that the symbols can take. It
never specialises a symbol. What cannot be proved is treated as not equal.

These facts are equal on all ranks: the full-size side of a collective (the gathered tensor, the operand of a
reduce-scatter or of an all-reduce) has the same shape on every rank, and in SPMD programs the same ops. The shard side
may differ. If a dimension does not divide, DTensor pads the last rank's shard before a gather and slices its result
after a scatter, on that rank alone. But on the full-size side it then cuts the padding off, or adds it, on every rank.
So the proofs look at the full-size side only, and all ranks reach one answer.

One thing cannot be seen. The sharded dimension of a weight belongs to one rank alone and may be uneven (DTensor with
`use_local_output=False`). The fusions do not depend on it, and the ranks compare it when they first run a site. But on
a rank whose part of the dimension is 1, torch may have replaced the matmul by a product of vectors before any pass of
ours runs. Then that rank is missing when the others meet, which raises an error with the names of the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ditron_inductor.passes.graph.other_matmuls import other_matmul
from ditron_inductor.passes.graph.reasons import ReasonCode, Refused
from ditron_inductor.task.torch_dtypes import OPERAND_DTYPES

aten = torch.ops.aten


# Ops that keep every element, in row-major order, at the same dtype: only the division into dimensions changes.
ORDER_KEEPING: frozenset[object] = frozenset(
    {
        aten.reshape.default,
        aten.view.default,
        aten._unsafe_view.default,
        aten.unsqueeze.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.alias.default,
        aten.detach.default,
        aten.clone.default,
    }
)
CASTS: frozenset[object] = frozenset(
    {torch.ops.prims.convert_element_type.default, aten._to_copy.default, aten.to.dtype, aten.view.dtype}
)
TRANSPOSES: frozenset[object] = frozenset({aten.permute.default, aten.transpose.int, aten.t.default})
# These keep the order only where they move dimensions of size 1, grow nothing, or take everything.
MAY_KEEP_ORDER: frozenset[object] = ORDER_KEEPING | TRANSPOSES | {aten.expand.default, aten.slice.Tensor}
# Ops that cut a tensor along one dimension, `dim`.
CUTS: frozenset[object] = frozenset({aten.slice.Tensor, aten.split.Tensor, aten.split_with_sizes.default})
SLICES: frozenset[object] = CUTS | {getitem}
BATCHED: frozenset[object] = frozenset({aten.bmm.default, aten.baddbmm.default})
MATMULS: frozenset[object] = BATCHED | {aten.mm.default, aten.mm.dtype, aten.addmm.default}
GROUPED = aten._grouped_mm.default
"""The matmul of rows that are sorted by expert with the weights of all experts."""


def known(condition: Any) -> bool:
    """Returns whether a (symbolic) condition is certain to hold; adds no guard."""
    return bool(statically_known_true(condition))


def known_equal(left: Any, right: Any) -> bool:
    """Returns whether two (symbolic) sizes are certain to be equal; adds no guard."""
    return left == right if isinstance(left, int) and isinstance(right, int) else known(left == right)


def same_shape(left: tuple[Any, ...], right: tuple[Any, ...]) -> bool:
    return len(left) == len(right) and all(known_equal(a, b) for a, b in zip(left, right, strict=True))


def tensor(node: object) -> torch.Tensor | None:
    """The fake tensor of a node; None for other values, and for placeholders that hold objects such as a mesh."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def fake(node: object) -> torch.Tensor:
    """The fake tensor of a node that is known to hold one."""
    value = tensor(node)
    assert value is not None
    return value


def operand(node: fx.Node) -> fx.Node:
    """The first argument of a call that is known to be a node."""
    first = node.args[0]
    assert isinstance(first, fx.Node)
    return first


def is_full(node: object, number: Any) -> bool:
    """Returns whether a node is a tensor full of this number."""
    if not isinstance(node, fx.Node) or node.target not in (aten.full.default, aten.scalar_tensor.default):
        return False
    return node.args[int(node.target is aten.full.default)] in (number,)


def counts_from(node: object, start: int) -> bool:
    """Returns whether a node has the integers from `start` on, in one dimension."""
    if not isinstance(node, fx.Node) or node.target is not torch.ops.prims.iota.default:
        return False
    bound = arguments(node)
    return bool((bound["start"], bound["step"]) == (start, 1))


def alike(node: object, other: object) -> bool:
    """Returns whether two nodes hold tensors of one shape."""
    value, like = tensor(node), tensor(other)
    return value is not None and like is not None and same_shape(value.shape, like.shape)


def indexed_rows(node: object) -> tuple[fx.Node, fx.Node] | None:
    """Returns (a matrix, int64 [S]) if `node` has, in this order, the S rows of the matrix that the numbers name."""
    if not isinstance(node, fx.Node) or node.target is not aten.index.Tensor:
        return None
    table, indices = node.args
    if not isinstance(table, fx.Node) or not isinstance(indices, (list, tuple)) or len(indices) != 1:
        return None
    (rows,) = indices
    value, numbers = tensor(table), tensor(rows)
    if not isinstance(rows, fx.Node) or value is None or numbers is None:
        return None
    return (table, rows) if value.ndim == 2 and numbers.ndim == 1 and numbers.dtype == torch.int64 else None


def size(argument: Any) -> Any:
    """The (symbolic) integer that an op's argument stands for: an int, or a node that computes one."""
    return argument.meta.get("val") if isinstance(argument, fx.Node) else argument


def arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of an op call by schema name, with defaults filled in."""
    assert isinstance(node.target, torch._ops.OpOverload), f"not an op call: {node.format_node()}"
    bound: dict[str, Any] = {}
    for index, argument in enumerate(node.target._schema.arguments):
        if index < len(node.args) and not argument.kwarg_only:
            bound[argument.name] = node.args[index]
        elif argument.name in node.kwargs:
            bound[argument.name] = node.kwargs[argument.name]
        elif argument.has_default_value():
            bound[argument.name] = argument.default_value
    return bound


def keeps_order(node: fx.Node) -> bool:
    """Returns whether a node holds the elements of its first argument, in row-major order, at the same dtype."""
    if node.op != "call_function" or node.target not in MAY_KEEP_ORDER:
        return False
    source, result = tensor(node.args[0]), tensor(node)
    if source is None or result is None or source.dtype != result.dtype or source.device != result.device:
        return False
    if node.target in TRANSPOSES:
        moved = [dim for dim in permutation(node) if not known_equal(source.shape[dim], 1)]
        return moved == sorted(moved)
    if node.target is aten.expand.default:
        added = result.ndim - source.ndim
        ones = all(known_equal(size, 1) for size in result.shape[:added])
        return ones and same_shape(source.shape, result.shape[added:])
    # A slice that takes everything: with a step it would have fewer elements.
    return node.target in ORDER_KEEPING or same_shape(source.shape, result.shape)


def permutation(node: fx.Node) -> list[int]:
    """The source's dimensions in the order of the result's, of a permute, transpose or t."""
    bound, value = arguments(node), fake(node)
    if node.target is aten.permute.default:
        return [dim % value.ndim for dim in bound["dims"]]
    order = list(range(value.ndim))
    if node.target is aten.t.default:
        return order[::-1]
    first, second = bound["dim0"] % value.ndim, bound["dim1"] % value.ndim
    order[first], order[second] = order[second], order[first]
    return order


def views_up(node: fx.Node) -> list[fx.Node]:
    """`node` and what it is a view of, up to the first node that is no order-keeping view: [node, .., source]."""
    chain = [node]
    while keeps_order(chain[-1]):
        chain.append(operand(chain[-1]))
    return chain


def permuted(node: fx.Node) -> tuple[fx.Node, list[int], tuple[fx.Node, ...]]:
    """Returns (what a node is views of permutes of; its dimensions that are not of size 1, in the order in which they
    are in the node; the nodes behind it).
    """
    *steps, source = views_up(node)
    dims = list(range(fake(source).ndim))
    while source.target in TRANSPOSES:
        order = permutation(source)
        dims = [order[dim] for dim in dims]
        steps.append(source)
        source = operand(source)
    return source, [dim for dim in dims if not known_equal(fake(source).shape[dim], 1)], tuple(steps)


def view_in_shape(node: fx.Node, shape: tuple[Any, ...]) -> fx.Node | None:
    """The first of `views_up` that has this shape; None if none has."""
    for view in views_up(node):
        value = tensor(view)
        if value is not None and same_shape(value.shape, shape):
            return view
    return None


def views_down(node: fx.Node) -> Iterator[fx.Node]:
    """`node` and all order-keeping views of it, each before its own views."""
    yield node
    for user in node.users:
        if keeps_order(user) and user.args[0] is node:
            yield from views_down(user)


def sole_user(node: fx.Node) -> fx.Node | None:
    """The only user of a node, which uses it once."""
    if len(node.users) != 1:
        return None
    (user,) = node.users
    read: list[fx.Node] = []
    fx.map_arg((user.args, user.kwargs), read.append)
    return user if read.count(node) == 1 else None


def other_user(nodes: Iterable[fx.Node], known: Collection[fx.Node]) -> fx.Node | None:
    """The first node that uses one of `nodes` and is none of `known`."""
    return next((user for node in nodes for user in node.users if user not in known), None)


@dataclass(frozen=True)
class SlicedPart:
    """A node as the part [start, start + length) of dimension `dim` of `source`."""

    source: fx.Node
    dim: int
    start: Any
    length: Any


def piece(node: fx.Node) -> SlicedPart | None:
    """Reads `split[i]`, `split_with_sizes[i]` or a slice with step 1 as a piece of a tensor; None for anything else."""
    if node.target is getitem:
        return _split_piece(node)
    if node.target is not aten.slice.Tensor:
        return None
    bound = arguments(node)
    source, result = tensor(bound["self"]), tensor(node)
    start = 0 if bound["start"] is None else size(bound["start"])
    if source is None or result is None or not known_equal(size(bound["step"]), 1) or not known(start >= 0):
        return None
    dim = bound["dim"] % source.ndim
    length = result.shape[dim]
    # A start beyond the end is clamped, and then the piece does not begin where the slice says.
    return SlicedPart(bound["self"], dim, start, length) if known(start + length <= source.shape[dim]) else None


def _split_piece(node: fx.Node) -> SlicedPart | None:
    split, index = node.args
    if not isinstance(split, fx.Node) or not isinstance(index, int) or index < 0:
        return None
    if split.target not in (aten.split.Tensor, aten.split_with_sizes.default):
        return None
    bound = arguments(split)
    source, result = tensor(bound["self"]), tensor(node)
    if source is None or result is None:
        return None
    dim = bound["dim"] % source.ndim
    if split.target is aten.split.Tensor:
        start = index * size(bound["split_size"])
    else:
        start = sum((size(length) for length in bound["split_sizes"][:index]), 0)
    return SlicedPart(bound["self"], dim, start, result.shape[dim])


@dataclass(frozen=True)
class Regrouped:
    """`cat(chunks of source along split_dim, cat_dim)` with W equal chunks that cover the source in order. `between`
    are the nodes from the source to the result, without both: splits and pieces. None of them is used elsewhere.
    """

    source: fx.Node
    result: fx.Node
    split_dim: int
    cat_dim: int
    between: tuple[fx.Node, ...]


def regrouped(cat: fx.Node, world_size: int) -> Regrouped | Refused:
    """Proves that `cat` concatenates the `world_size` equal chunks of one tensor, all of them, once, in order."""
    assert cat.target is aten.cat.default
    bound = arguments(cat)
    parts: list[fx.Node] = list(bound["tensors"])
    if any(padded(part) for part in parts):
        return ReasonCode.UNEVEN_SHARDS
    pieces = [piece(part) for part in parts]
    result = tensor(cat)
    if result is None or not pieces:
        return ReasonCode.NO_MATMUL
    first = pieces[0]
    found = [chunk for chunk in pieces if chunk is not None]
    if first is None or len(found) != len(pieces) or any(chunk.source is not first.source for chunk in found):
        return ReasonCode.NO_MATMUL
    if len(found) != world_size or any(chunk.dim != first.dim for chunk in found):
        return ReasonCode.CHUNKS_PARTIAL
    source = fake(first.source)
    total = source.shape[first.dim]
    # W chunks of one length that fill the dimension: this length is the dimension divided by W, on every rank.
    if not all(known_equal(chunk.length * world_size, total) for chunk in found):
        return ReasonCode.CHUNKS_PARTIAL
    if not all(known_equal(chunk.start, index * chunk.length) for index, chunk in enumerate(found)):
        return ReasonCode.CHUNKS_PERMUTED
    splits = [part.args[0] for part in parts if part.target is getitem and isinstance(part.args[0], fx.Node)]
    between = list(dict.fromkeys([*splits, *parts]))
    other = other_user(between, {cat, *between})
    if other is not None:
        return ReasonCode.INTERMEDIATE_USED.at(other)
    return Regrouped(first.source, cat, first.dim, bound["dim"] % result.ndim, tuple(between))


def unpadded(node: fx.Node) -> fx.Node | None:
    """Returns the tensor that was padded behind its last dimension and cut to its own length again, as torch does with
    the masks of attention to keep their rows aligned; None if `node` is something else.
    """
    part = piece(node)
    if part is None or part.source.target is not aten.constant_pad_nd.default:
        return None
    inner, pads = part.source.args[0], part.source.args[1]
    assert isinstance(inner, fx.Node) and isinstance(pads, (list, tuple))
    last = part.dim == fake(inner).ndim - 1 and len(pads) == 2
    whole = last and known_equal(part.start, 0) and known_equal(size(pads[0]), 0)
    return inner if whole and same_shape(tuple(fake(inner).shape), tuple(fake(node).shape)) else None


def padded(node: fx.Node) -> bool:
    """Returns whether a node was padded, as a shard is that is smaller than the others."""
    return any(view.target is aten.constant_pad_nd.default for view in views_up(node))


def proved_mm(node: fx.Node) -> ReasonCode | None:
    """Returns why `node` is not a 2-D matmul with one dtype that kernels exist for; None if it is."""
    if node.target is aten.mm.dtype:
        return ReasonCode.MIXED_DTYPES
    if node.target is aten.addmm.default:
        return ReasonCode.BIAS
    if node.target in BATCHED:
        return ReasonCode.BATCHED_MATMUL
    if node.target is not aten.mm.default:
        return other_matmul(node) or ReasonCode.NO_MATMUL
    return rejected_dtypes([tensor(node), tensor(node.args[0]), tensor(node.args[1])])


def rejected_dtypes(values: Collection[torch.Tensor | None]) -> ReasonCode | None:
    """Returns None if all of these are tensors of one dtype that kernels exist for, and otherwise the reason."""
    dtypes = {None if value is None else value.dtype for value in values}
    if len(dtypes) != 1:
        return ReasonCode.MIXED_DTYPES
    return None if dtypes <= set(OPERAND_DTYPES) else ReasonCode.DTYPE


def is_matmul(node: fx.Node) -> bool:
    """Returns whether a node is a matmul of any kind, also of one that no fusion takes."""
    return node.target in MATMULS or other_matmul(node) is not None


def feeds_matmul(node: fx.Node) -> bool:
    """Returns whether a matmul of any kind uses `node`, or an order-keeping or transposed view of it."""
    users = [user for view in views_down(node) for user in view.users]
    return any(is_matmul(user) or (user.target in TRANSPOSES and feeds_matmul(user)) for user in users)


def tangents(graph: fx.Graph) -> set[fx.Node]:
    """Returns the gradients that a graph takes of what its forward returns. A graph without a backward has none."""
    return {node for node in graph.find_nodes(op="placeholder") if node.name.startswith("tangents_")}


def depends_on(node: fx.Node, sources: set[fx.Node]) -> bool:
    """Returns whether `node` is, or is computed from, one of `sources`."""
    return any(ancestor in sources for ancestor in ancestors(node))


def ancestors(node: fx.Node) -> Iterator[fx.Node]:
    """`node` and everything that it is computed from, each once."""
    return reached([node], lambda current: current.all_input_nodes)


def reached(nodes: Iterable[fx.Node], onward: Callable[[fx.Node], Iterable[fx.Node]]) -> Iterator[fx.Node]:
    """Yields nodes, and whatever is reached from them by steps of `onward`, each once."""
    seen, pending = set[fx.Node](), list(nodes)
    while pending:
        node = pending.pop()
        if node not in seen:
            seen.add(node)
            yield node
            pending += onward(node)


def wanted_in(node: fx.Node, dtype: torch.dtype) -> bool:
    """Whether a tensor is of this dtype, or all its users round it to that at once, behind views and transposes."""
    value = fake(node)
    if value.dtype == dtype:
        return True
    users = list(node.users)
    for user in users:
        if user.target in CASTS:
            result = tensor(user)
            if result is None or result.dtype != dtype:
                return False
        elif user.target in TRANSPOSES or keeps_order(user):
            users += user.users
        else:
            return False
    return bool(users)


def writes(node: fx.Node) -> bool:
    """Returns whether an op writes into the memory of an operand."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def writers(node: fx.Node) -> list[fx.Node]:
    """The ops that write into the memory of a tensor, or into what it is a view or a slice of, in any order."""
    sources = [node]
    while sources[-1].target in MAY_KEEP_ORDER | SLICES:
        sources.append(operand(sources[-1]))
    lie_in = {memory(source) for source in sources} - {None}
    return [
        each
        for each in node.graph.nodes
        if writes(each) and any(memory(given) in lie_in for given in each.all_input_nodes)
    ]


def written_memory(graph: fx.Graph) -> set[int | None]:
    """Returns the memory of all tensors that ops which write read or write."""
    return {memory(given) for node in graph.nodes if writes(node) for given in node.all_input_nodes}


def memory(node: fx.Node) -> int | None:
    """Returns a number that tensors of one piece of memory have in common; None if it is not known."""
    value = tensor(node)
    return None if value is None else value.untyped_storage()._cdata


def is_returned(node: fx.Node) -> bool:
    """Returns whether the graph returns the memory of a tensor, as it is or as a view of any kind."""
    (output,) = node.graph.find_nodes(op="output")
    views = reached([node], lambda view: [user for user in view.users if user.target in MAY_KEEP_ORDER | SLICES])
    return any(output in view.users for view in views) or any(
        memory(given) is not None and memory(given) == memory(node) for given in output.all_input_nodes
    )


def is_row(value: torch.Tensor, columns: Any) -> bool:
    """Returns whether a tensor is certain to hold one row of so many `columns`: 1 in all dimensions but the last."""
    if value.ndim == 0 or not known_equal(value.shape[-1], columns):
        return False
    return all(known_equal(size, 1) for size in value.shape[:-1])


def over_last(dims: Any, keepdim: Any, node: fx.Node) -> bool:
    """Returns whether an op with these arguments reduces the last dimension of `node` alone, and keeps it."""
    value = tensor(node)
    if value is None or not keepdim or not isinstance(dims, (list, tuple)) or len(dims) != 1:
        return False
    return value.ndim > 0 and dims[0] % value.ndim == value.ndim - 1


def row_major(value: torch.Tensor) -> bool:
    """Returns whether a tensor is certain to be contiguous."""
    expected: Any = 1
    for length, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if not known_equal(length, 1) and not known_equal(stride, expected):
            return False
        expected = expected * length
    return True
