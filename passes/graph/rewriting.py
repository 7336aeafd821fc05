"""Writes a Task node into a graph: the op call, its outputs and metadata, and the removal of what it replaces."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch._inductor import config
from torch._subclasses.fake_tensor import FakeTensor

from ditron_inductor.options import STRICT_RUN, Options
from ditron_inductor.passes.graph import proofs
from ditron_inductor.task import schema
from ditron_inductor.task.node import Node
from ditron_inductor.task.norms import norm_form
from ditron_inductor.task.policy import Policy
from ditron_inductor.task.torch_dtypes import TORCH_DTYPES

# Written by a late pass, which sees all sites of the graph.
UNNAMED_SITE = ""

aten = torch.ops.aten

COMMUNICATING = ("_c10d_functional", "_c10d_functional_autograd", "symm_mem", "vllm", schema.NAMESPACE)
VIEWS: frozenset[object] = frozenset({aten.view.default, aten._unsafe_view.default})
MOVES: frozenset[object] = proofs.MAY_KEEP_ORDER | proofs.SLICES
ANY_STRIDES: frozenset[object] = frozenset(
    {
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten.cat.default,
        aten.sum.default,
        aten.sum.dim_IntList,
        aten.mean.dim,
        aten.amax.default,
        aten.var_mean.correction,
        aten.sym_size.int,
        torch.ops.prims.convert_element_type.default,
    }
)


def policy(options: Options) -> Policy:
    """Returns what the options say about how a site runs."""
    strict = options.strict == STRICT_RUN
    return Policy(options.strategy, options.workspace_limit, options.timeout_arg, options.trials, strict)


def is_replayed() -> bool:
    """Returns whether Inductor captures in CUDA graphs what is compiled now."""
    return bool(config.triton.cudagraphs)


def site_fields(world_size: int, group_name: str, options: Options) -> dict[str, Any]:
    """The fields that the nodes of all kinds have, of one whose site has no name yet."""
    return {"world_size": world_size, "group_name": group_name, "site": UNNAMED_SITE, "policy": policy(options)}


def copied_meta(node: fx.Node) -> dict[str, Any]:
    """Returns the metadata of a node for its replacement, without the values of its eager inputs, which differ."""
    return {key: value for key, value in node.meta.items() if key != "eager_input_vals"}


def copied(graph: fx.Graph) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """A copy of the graph to try a rewrite on, and its nodes by those of the original."""
    copy, twins = fx.Graph(), dict[fx.Node, fx.Node]()
    copy.output(copy.graph_copy(graph, twins))
    return copy, twins


def new_token(like: torch.Tensor) -> torch.Tensor:
    """The fake token of a site whose tensors are on the device of `like`, a fake tensor."""
    with _mode_of(like):
        return schema.new_token(like)


def fake_like(
    like: torch.Tensor, shape: tuple[Any, ...], strides: tuple[Any, ...], dtype: torch.dtype | None = None
) -> torch.Tensor:
    """A fake tensor beside `like`, one too, made from (symbolic) shape and strides alone. Running the op that it stands
    for would have the symbols' relations checked, which adds guards.
    """
    with _mode_of(like):
        return like.new_empty_strided(shape, strides, dtype=dtype)


def contiguous_strides(shape: Sequence[Any]) -> tuple[Any, ...]:
    """The strides of a row-major tensor."""
    strides: list[Any] = [1]
    for length in reversed(shape[1:]):
        strides.insert(0, strides[0] * length)
    return tuple(strides[: len(shape)])


def recompute(node: fx.Node) -> None:
    """Brings the fake value of an op call up to date with those of its arguments, whose sizes are all known."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda given: given.meta["val"])
    target: Any = node.target
    old = node.meta["val"]
    with _mode_of(old[0] if isinstance(old, (list, tuple)) else old):
        node.meta["val"] = target(*args, **kwargs)
    node.meta.pop("eager_input_vals", None)


def _mode_of(value: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    return value.fake_mode if isinstance(value, FakeTensor) else contextlib.nullcontext()


TRANSPOSED = "ditron_transposed"
"""Marks, in the metadata of a Task node, that it solves the transposed problem."""
RECOMPUTE = "recompute"
"""Marks, in the metadata of a node of a joint graph, how the partitioner of AOTAutograd treats it."""


def call(
    graph: fx.Graph,
    target: Any,
    args: tuple[Any, ...],
    origin: fx.Node,
    shape: Sequence[Any],
    strides: Sequence[Any] | None = None,
    *,
    dtype: torch.dtype | None = None,
    name: str | None = None,
) -> fx.Node:
    """Inserts an op call with the device, metadata and, by default, dtype of `origin`. Its result has this shape and
    these strides; without strides it is row-major. name: of the node; by default that of its target.
    """
    node = graph.create_node("call_function", target, args, name=name)
    node.meta.update(copied_meta(origin))
    strides = contiguous_strides(shape) if strides is None else strides
    node.meta["val"] = fake_like(origin.meta["val"], tuple(shape), tuple(strides), dtype)
    return node


def zeros(graph: fx.Graph, origin: fx.Node, shape: Sequence[Any]) -> fx.Node:
    """Inserts a row-major tensor of zeros with the dtype, device and metadata of `origin`."""
    return full(graph, origin, shape, 0, origin.meta["val"].dtype)


def full(graph: fx.Graph, origin: fx.Node, shape: Sequence[Any], value: float, dtype: torch.dtype) -> fx.Node:
    """Inserts a row-major tensor of `value` with the device and metadata of `origin`."""
    node = call(graph, aten.full.default, (list(shape), value), origin, shape, dtype=dtype)
    device = origin.meta["val"].device
    node.kwargs = {"dtype": dtype, "layout": torch.strided, "device": device, "pin_memory": False}
    return node


def integers(
    graph: fx.Graph, origin: fx.Node, count: int | fx.Node, dtype: torch.dtype, *, begin: int = 0, step: int = 1
) -> fx.Node:
    """Inserts the integers begin, begin + step, .., with the device and metadata of `origin`. count: how many, a number
    or the node of a size.
    """
    length = count.meta["val"] if isinstance(count, fx.Node) else count
    node = call(graph, torch.ops.prims.iota.default, (count,), origin, (length,), dtype=dtype)
    device = origin.meta["val"].device
    node.kwargs = {"start": begin, "step": step, "dtype": dtype, "device": device, "requires_grad": False}
    return node


def row_major_copy(graph: fx.Graph, node: fx.Node, origin: fx.Node, name: str | None = None) -> fx.Node:
    """Inserts a row-major copy of a tensor with the metadata of `origin`."""
    copy = call(graph, aten.clone.default, (node,), origin, node.meta["val"].shape, name=name)
    copy.kwargs = {"memory_format": torch.contiguous_format}
    return copy


def computed(graph: fx.Graph, target: Any, args: tuple[Any, ...], origin: fx.Node, name: str | None = None) -> fx.Node:
    """Inserts an op call with the metadata of `origin`, a tensor; its fake value is computed from those of `args`.
    name: of the node; by default that of its target.
    """
    node = graph.create_node("call_function", target, args, {}, name=name)
    node.meta.update(copied_meta(origin))
    recompute(node)
    return node


def shaped(graph: fx.Graph, node: fx.Node, shape: tuple[Any, ...], name: str | None = None) -> fx.Node:
    """Returns a tensor in this shape, whose sizes are all known if it is another: itself, or a reshape of it, which is
    inserted.
    """
    if proofs.same_shape(tuple(proofs.fake(node).shape), shape):
        return node
    return computed(graph, aten.reshape.default, (node, list(shape)), node, name)


def norm_output(like: torch.Tensor, name: str, shape: Sequence[Any]) -> torch.Tensor:
    """The fake value of the output of this name of a reduction with a norm, for a sum of this shape, beside `like`."""
    found, dtype = norm_form(name, shape)
    return fake_like(like, found, contiguous_strides(found), TORCH_DTYPES.get(dtype))


def call_task(
    graph: fx.Graph, task: Node, operands: Mapping[str, Any], origin: fx.Node, values: Any, token: Any = None
) -> fx.Node:
    """Inserts the op call of a verified node, with the metadata of `origin`, at the graph's insertion point. operands:
    by name, see `Node.slots`; None or missing for those that the node does not have. values: the fake tensors that the
    call returns. token: None until a later pass orders the sites.
    """
    task.verify()
    args = schema.arguments(task, token, **operands)
    call = graph.create_node("call_function", schema.overload(task.kind), args, {}, name=task.kind)
    call.meta.update(copied_meta(origin))
    call.meta["val"] = values
    return call


def replace_by_call(graph: fx.Graph, task: Node, operands: Mapping[str, Any], node: fx.Node) -> fx.Node:
    """Puts a call, whose only result is contiguous, in the place of `node`, which loses its users. Returns the call."""
    value: torch.Tensor = node.meta["val"]
    shape = tuple(value.shape)
    with graph.inserting_before(node):
        made = fake_like(value, shape, contiguous_strides(shape))
        found = call_task(graph, task, operands, node, [made])
        result = output(graph, found, 0, node)
    node.replace_all_uses_with(result)
    return found


def values_of(operands: Mapping[str, fx.Node | None]) -> dict[str, Any]:
    """The fake tensors of operands by name."""
    return {name: node.meta["val"] for name, node in operands.items() if node is not None}


def change_task(call: fx.Node, task: Node, **operands: Any) -> None:
    """Gives the op call of a node another node of its kind, and other operands for those of these names."""
    given = {**schema.operands_from_call(call), **operands}
    call.args = schema.arguments(task, call.args[schema.TOKEN], **given)


def output(graph: fx.Graph, call: fx.Node, index: int, origin: fx.Node) -> fx.Node:
    """Inserts `call[index]`, with the metadata of the node that it stands for."""
    node = graph.call_function(getitem, (call, index))
    node.meta.update(copied_meta(origin))
    node.meta["val"] = call.meta["val"][index]
    return node


def regrouped(graph: fx.Graph, source: fx.Node, split_dim: int, cat_dim: int, parts: int, origin: fx.Node) -> fx.Node:
    """Inserts `parts` equal chunks of `source` along a static dimension, concatenated along another, as of `origin`."""
    value: torch.Tensor = source.meta["val"]
    sizes = list(value.shape)
    sizes[split_dim] //= parts
    split = graph.call_function(aten.split.Tensor, (source, sizes[split_dim], split_dim))
    split.meta.update(copied_meta(origin))
    split.meta["val"] = [fake_like(value, tuple(sizes), tuple(value.stride())) for _ in range(parts)]
    pieces = [output(graph, split, index, origin) for index in range(parts)]
    sizes[cat_dim] *= parts
    return call(graph, aten.cat.default, (pieces, cat_dim), origin, tuple(sizes))


def reshaped_rows(graph: fx.Graph, source: fx.Node, sizes: tuple[Any, ...], shape: tuple[Any, ...]) -> fx.Node:
    """Inserts a reshape that divides the rows of a 2-D tensor into several dimensions: always a view. `shape` is the
    result's (symbolic) shape, `sizes` the same as arguments: ints, nodes of the graph, or -1 once.
    """
    value: torch.Tensor = source.meta["val"]
    strides = [value.stride(0), value.stride(1)]
    for length in reversed(shape[1:-1]):
        strides.insert(0, strides[0] * length)
    return call(graph, aten.reshape.default, (source, list(sizes)), source, shape, strides, name="rows")


def in_shape(
    graph: fx.Graph, lefts: Iterable[tuple[fx.Node, tuple[Any, ...] | None]], shape: Sequence[Any]
) -> list[fx.Node]:
    """Returns first operands (see `products.Left`) for a product in this shape. Inserts reshapes if necessary."""
    return [
        lhs if sizes is None else reshaped_rows(graph, lhs, sizes, (*shape[:-1], lhs.meta["val"].shape[-1]))
        for lhs, sizes in lefts
    ]


def bias_row(graph: fx.Graph, biases: Sequence[fx.Node]) -> fx.Node | None:
    """Returns the sum of biases [1, .., 1, N] as [N]; None if there are none. Inserts nodes if necessary."""
    total: fx.Node | None = None
    for bias in biases:
        bias_row = row(graph, bias)
        if total is None:
            total = bias_row
            continue
        shape = bias_row.meta["val"].shape
        total = call(graph, aten.add.Tensor, (total, bias_row), bias_row, shape, name="biases")
    return total


def row(graph: fx.Graph, bias: fx.Node) -> fx.Node:
    """Returns a bias [1, .., 1, N] as [N]: itself, or an inserted reshape, a view if the bias is contiguous."""
    if bias.meta["val"].ndim == 1:
        return bias
    value: torch.Tensor = bias.meta["val"]
    return call(graph, aten.reshape.default, (bias, [-1]), bias, value.shape[-1:], value.stride()[-1:], name="row")


def column(graph: fx.Graph, row: fx.Node) -> fx.Node:
    """Inserts a view of a row [N] as [N, 1]."""
    value: torch.Tensor = row.meta["val"]
    return call(graph, aten.unsqueeze.default, (row, 1), row, (*value.shape, 1), (*value.stride(), 1), name="column")


def transposed(graph: fx.Graph, source: fx.Node) -> fx.Node:
    """Inserts the transpose of a matrix, a view; the matrix itself, if `source` is a transpose of one."""
    if source.target in proofs.TRANSPOSES and proofs.permutation(source) == [1, 0]:
        return proofs.operand(source)
    value: torch.Tensor = source.meta["val"]
    shape, strides = value.shape[::-1], value.stride()[::-1]
    return call(graph, aten.permute.default, (source, [1, 0]), source, shape, strides, name="transposed")


def transposed_back(graph: fx.Graph, source: fx.Node, replaced: fx.Node) -> fx.Node:
    """Inserts the transpose of the result of a transposed problem, in the place of the matrix `replaced`. It is a view
    if all users of `replaced` accept any strides, and otherwise a copy with the strides that `replaced` had.
    """
    return with_strides_of(graph, transposed(graph, source), replaced)


def with_strides_of(graph: fx.Graph, node: fx.Node, replaced: fx.Node) -> fx.Node:
    """Returns the replacement of the row-major tensor `replaced`, whose elements `node` holds with other strides:
    `node` if all users of `replaced` accept any strides, and otherwise a row-major copy.
    """
    views, takes_any = views_and_strides(replaced)
    if takes_any:
        reshape_views(views)
        return node
    return row_major_copy(graph, node, node, "rows")


def reshape_views(nodes: Iterable[fx.Node]) -> None:
    """Makes reshapes of the views among `nodes`, since a view asks for strides that fit, and a reshape does not."""
    for node in nodes:
        if node.target in VIEWS:
            node.target = aten.reshape.default
            node.meta.pop("eager_input_vals", None)


def views_and_strides(node: fx.Node) -> tuple[list[fx.Node], bool]:
    """Returns (a node and all nodes that view or move its elements, whether all users of these accept any strides). A
    tensor that is saved for the backward has the strides of the traced graph. If its strides differ, the backward would
    take those of the first call as numbers. So with sizes that change from call to call it has to keep its strides.
    """
    has_symbols = any(isinstance(size, torch.SymInt) for size in node.meta["val"].shape)
    views: dict[fx.Node, None] = {node: None}
    pending, takes_any = [node], True
    while pending:
        for user in pending.pop().users:
            if user.target in MOVES and user not in views:
                views[user] = None
                pending.append(user)
            elif user not in views:
                takes_any &= _takes_any_strides(user) and not (user.op == "output" and has_symbols)
    return list(views), takes_any


def _takes_any_strides(user: fx.Node) -> bool:
    """Whether the compiler generates, or lays out, what the op reads; a graph's output gets the strides it had."""
    target = user.target
    if user.op == "output" or target in ANY_STRIDES:
        return True
    return isinstance(target, torch._ops.OpOverload) and (
        torch.Tag.pointwise in target.tags or target.namespace == schema.NAMESPACE
    )


def erase_unused(graph: fx.Graph, nodes: Iterable[fx.Node]) -> None:
    """Erases those of the nodes that nothing uses any more, users before what they use."""
    order = {node: index for index, node in enumerate(graph.nodes)}
    for node in sorted(set(nodes), key=lambda node: order[node], reverse=True):
        if not node.users:
            graph.erase_node(node)


def hoist(node: fx.Node, before: fx.Node) -> None:
    """Moves `node`, and what it needs from behind `before`, to just before that: proved by `can_hoist`."""
    for late in _late(node, before):
        before.prepend(late)


def can_hoist(node: fx.Node, before: fx.Node) -> bool:
    """Whether `node` can be computed before `before`: nothing that it needs from there on has to stay."""
    return pinned(node, before) is None


def pinned(node: fx.Node, before: fx.Node) -> fx.Node | None:
    """Returns the first op that `node` needs and that has to stay behind `before`; None if there is none."""
    return next((late for late in _late(node, before) if is_pinned(late)), None)


def _late(node: fx.Node, before: fx.Node) -> list[fx.Node]:
    """Returns the nodes at or behind `before` that `node` needs, including `node`, in graph order."""
    order = {each: index for index, each in enumerate(node.graph.nodes)}
    limit = order[before]
    needed = proofs.reached([node], lambda late: late.all_input_nodes if order[late] >= limit else ())
    return sorted((each for each in needed if order[each] >= limit), key=lambda each: order[each])


def is_pinned(node: fx.Node) -> bool:
    """Returns whether a node has to stay where it is: side effects, randomness, or communication."""
    target = node.target
    if node.op != "call_function" or node.is_impure():
        return True
    if not isinstance(target, torch._ops.OpOverload):
        return False
    communicates = target.namespace in COMMUNICATING
    return communicates or target._schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags
