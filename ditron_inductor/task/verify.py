"""The legality of a graph with Task nodes: what must hold of every op call, and of the chain of tokens through them.

A violation is a mistake of a pass. It is found here, at compile time, and not as a wrong result or a hang.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ditron_inductor.errors import GraphVerificationError
from ditron_inductor.task import ops
from ditron_inductor.task.all_gather_attention import ALIGNED, AllGatherAttention, AttentionReduceScatter
from ditron_inductor.task.epilogue import extras_of, products
from ditron_inductor.task.epilogue_torch import extra_shape
from ditron_inductor.task.nodes import (
    TASK_KINDS,
    AllGatherMatmul,
    AllReduceRmsNorm,
    AllToAllMatmul,
    AttentionNode,
    FlashDecode,
    MatmulAllGather,
    MatmulAllReduce,
    MatmulAllReduceRmsNorm,
    MatmulAllToAll,
    MatmulReduceScatter,
    NormNode,
    ShardNorm,
    TaskNode,
    WithEpilogue,
)
from ditron_inductor.task.torch_dtypes import ACTIVATION_DTYPES, BIAS_DTYPES, OPERAND_DTYPES

Given = Mapping[str, Any]
"""The values of a call's operands by name: tensors and lists of tensors."""


def task_calls(graph: fx.Graph) -> list[tuple[fx.Node, TaskNode]]:
    """The calls of our fused ops in graph order, each with the node that it stands for."""
    targets = {ops.overload(kind) for kind in TASK_KINDS}
    calls = [node for node in graph.nodes if node.op == "call_function" and node.target in targets]
    return [(call, ops.node_from_call(call.target, call.args)) for call in calls]


def verify_graph(graph: fx.Graph) -> None:
    """Raises `InvalidTaskNode` for a wrong field, `GraphVerificationError` for a wrong call or a wrong chain."""
    calls = task_calls(graph)
    for call, task in calls:
        task.verify()
        _require(not call.kwargs, call, "has keyword arguments")
        given = len(ops.operands_of(call))
        _require(given == task.num_tensors, call, f"has {given} operands, and its node has {task.num_tensors}")
        _require(bool(task.site), call, "has no site name")
        _verify_operands(call, task)
        _verify_outputs(call, task)
    sites = Counter((task.group_name, task.site) for _, task in calls)
    for call, task in calls:
        alone = sites[task.group_name, task.site] == 1
        _require(alone, call, f"shares its site name {task.site!r} with another call of its group")
    _verify_tokens(calls)


def _verify_operands(call: fx.Node, task: TaskNode) -> None:
    """Shapes, dtypes and devices of the tensors, as far as they are known: unknown sizes are not an error."""
    given: Given = {
        name: [_value(call, one) for one in value] if isinstance(value, list) else _value(call, value)
        for name, value in task.named(ops.operands_of(call)).items()
    }
    if isinstance(task, AllReduceRmsNorm):
        x = given["x"]
        _require(x.ndim >= 1, call, "reduces and normalises a scalar")
        _require(x.dtype in ACTIVATION_DTYPES, call, f"has dtype {x.dtype}, which no kernel takes")
        _verify_extras(call, task, given, x, x.shape[-1])
        return
    if isinstance(task, FlashDecode):
        _verify_decode(call, task, given)
        return
    if isinstance(task, AttentionNode):
        _verify_attention(call, task, given)
        return
    left, right = list(given.values())[:2]
    weights: list[torch.Tensor] = right if isinstance(right, list) else [right]
    rows: list[torch.Tensor] = left if isinstance(left, list) else [left]
    first = rows[0]
    _require(first.ndim >= 2, call, f"has a first operand with {first.ndim} dimensions, not 2 or more")
    _require(first.dtype in OPERAND_DTYPES, call, f"has dtype {first.dtype}, which no kernel takes")
    for value in [*rows, *weights]:
        _require(value.dtype == first.dtype, call, f"mixes {first.dtype} and {value.dtype}")
        _require(value.device == first.device, call, f"mixes {first.device} and {value.device}")
    for value in weights:
        _require(value.ndim == 2, call, f"has a weight with {value.ndim} dimensions, not 2")
    if isinstance(task, AllToAllMatmul):
        _verify_scattered(call, task, first, weights[0])
        return
    if isinstance(task, AllGatherMatmul):
        rows *= len(weights)
    else:
        bias = "product_bias" if isinstance(task, MatmulAllReduceRmsNorm) else "bias"
        _verify_sum(call, rows, weights, given.get(bias))
    for value, weight in zip(rows, weights, strict=True):
        _require(_possible(weight.shape[0] == value.shape[-1]), call, "multiplies shapes that do not fit")
    whole: Any = math.prod(first.shape[:-1])
    divides: Any
    if isinstance(task, MatmulReduceScatter):
        _require(task.scatter_dim < first.ndim - 1, call, f"scatters dimension {task.scatter_dim} of {first.ndim}")
        divides = first.shape[task.scatter_dim] % task.world_size == 0
        _require(_possible(divides), call, "scatters a dimension that does not divide by the number of ranks")
        _verify_epilogue(call, task, given, first, whole // task.world_size, [weights[0].shape[1]], whole)
    elif isinstance(task, AllGatherMatmul):
        _require(task.gather_dim < first.ndim - 1, call, f"gathers dimension {task.gather_dim} of {first.ndim}")
        gathered = task.world_size * math.prod(first.shape[:-1])
        _verify_epilogue(call, task, given, first, gathered, [weight.shape[1] for weight in weights])
        _verify_prologue(call, task, given, first)
    elif isinstance(task, MatmulAllReduceRmsNorm):
        _verify_epilogue(call, task.reduction, given, first, whole, [weights[0].shape[1]], whole)
        _verify_extras(call, task, given, first, weights[0].shape[1])
    elif isinstance(task, MatmulAllGather):
        _require(task.gather_dim < first.ndim, call, f"gathers dimension {task.gather_dim} of {first.ndim}")
    elif isinstance(task, MatmulAllToAll):
        _require(task.gather_dim < first.ndim - 1, call, f"gathers dimension {task.gather_dim} of {first.ndim}")
        divides = weights[0].shape[1] % (task.parts * task.world_size) == 0
        _require(_possible(divides), call, "scatters columns that do not divide by the number of ranks")
    else:
        assert isinstance(task, MatmulAllReduce)
        _verify_epilogue(call, task, given, first, whole, [weights[0].shape[1]], whole)


def _verify_scattered(call: fx.Node, task: AllToAllMatmul, x: torch.Tensor, weight: torch.Tensor) -> None:
    """The sizes of an all-to-all in front of a matmul."""
    _require(task.scatter_dim < x.ndim - 1, call, f"scatters dimension {task.scatter_dim} of {x.ndim}")
    divides: Any = x.shape[task.scatter_dim] % task.world_size == 0
    _require(_possible(divides), call, "scatters a dimension that does not divide by the number of ranks")
    _require(_possible(x.shape[-1] % task.parts == 0), call, f"has columns that do not divide into {task.parts} parts")
    fits: Any = weight.shape[0] == x.shape[-1] * task.world_size
    _require(_possible(fits), call, "multiplies shapes that do not fit")


def _verify_decode(call: fx.Node, task: FlashDecode, given: Given) -> None:
    q, k, v, lengths = (given[name] for name in ("q", "k", "v", "lengths"))
    _require(q.ndim == 3 and k.ndim == 4 and v.ndim == 4, call, "has a query or a cache of other dimensions")
    _require(q.dtype in ACTIVATION_DTYPES, call, f"has dtype {q.dtype}, which no kernel takes")
    for value in (k, v):
        _require(value.dtype == q.dtype, call, f"mixes {q.dtype} and {value.dtype}")
        _require(_possible(value.shape[3] == q.shape[2]), call, "has keys or values of another head size")
    for value in (k, v, lengths):
        _require(value.device == q.device, call, f"mixes {q.device} and {value.device}")
    divides: Any = q.shape[1] % k.shape[2] == 0
    _require(_possible(divides), call, "has heads that cannot share the keys evenly")
    _require(lengths.dtype == torch.int32 and lengths.ndim == 1, call, "has lengths that are no int32 vector")
    _require(_possible(lengths.shape[0] == q.shape[0]), call, "has lengths of another number of sequences")
    if not task.paged:
        _require(_possible(k.shape[0] == q.shape[0]), call, "has a cache of another number of sequences")


def _verify_attention(call: fx.Node, task: AttentionNode, given: Given) -> None:
    """Queries, keys and values fit together; what is gathered already divides by the number of ranks."""
    names = ("q", "k", "v") if isinstance(task, AllGatherAttention) else ("q", "k", "v", "grad_out", "out")
    q, k, *others = (given[name] for name in names)
    for value in (q, k, *others):
        _require(value.ndim == 4, call, f"has an operand with {value.ndim} dimensions, not 4")
        _require(value.dtype in ACTIVATION_DTYPES, call, f"has dtype {value.dtype}, which no kernel takes")
        _require(value.dtype == q.dtype, call, f"mixes {q.dtype} and {value.dtype}")
        _require(value.device == q.device, call, f"mixes {q.device} and {value.device}")
    for value, like in zip(others, (k, q, q), strict=False):
        alike = all(_possible(size == other) for size, other in zip(value.shape, like.shape, strict=True))
        _require(alike, call, "has keys and values, or queries and their gradients, of different shapes")
    _require(_possible(q.shape[0] == k.shape[0]) and _possible(q.shape[3] == k.shape[3]), call, "does not fit")
    shared: Any = q.shape[1] % k.shape[1] == 0
    _require(_possible(shared), call, "has heads of queries that do not divide among those of keys")
    queries, keys = q.shape[2], k.shape[2]
    if isinstance(task, AttentionReduceScatter):
        divides: Any = keys % task.world_size == 0
        _require(_possible(divides), call, "scatters keys that do not divide by the number of ranks")
        keys = keys // task.world_size
    if task.mask.kind in ALIGNED:
        _require(_possible(queries == keys), call, f"has the mask '{task.mask.kind}', but not as many queries as keys")
    _verify_attention_bias(call, given, q, (*q.shape[:3], keys * task.world_size))


def _verify_attention_bias(call: fx.Node, given: Given, q: torch.Tensor, scores: tuple[Any, ...]) -> None:
    """A bias can be broadcast to the scores of all keys. Whether there is one, the mask says."""
    if "bias" not in given:
        return
    value = given["bias"]
    _require(value.dtype in BIAS_DTYPES, call, f"has a bias of {value.dtype}")
    _require(value.device == q.device, call, f"mixes {q.device} and {value.device}")
    sizes = list(zip(reversed(value.shape), reversed(scores), strict=False))
    fits = value.ndim <= 4 and all(_possible(size == 1) or _possible(size == other) for size, other in sizes)
    _require(fits, call, "has a bias that is no tensor of queries and keys")


def _verify_sum(
    call: fx.Node, rows: list[torch.Tensor], weights: list[torch.Tensor], bias: torch.Tensor | None
) -> None:
    """What is added together has one shape, but for a bias, which is a row of it."""
    leading, columns = rows[0].shape[:-1], weights[0].shape[1]
    for value, weight in zip(rows, weights, strict=True):
        _require(value.ndim == rows[0].ndim, call, "adds products of different shapes")
        sizes = zip((*value.shape[:-1], weight.shape[1]), (*leading, columns), strict=True)
        alike = all(_possible(size == other) for size, other in sizes)
        _require(alike, call, "adds products of different shapes")
    if bias is not None:
        value = bias
        is_row = value.ndim == 1 and _possible(value.shape[0] == columns)
        is_column = value.ndim == 2 and value.shape[1] == 1 and _possible(value.shape[0] == leading[0])
        of_matrix = call.target is ops.overload(MatmulReduceScatter.kind) and rows[0].ndim == 2
        _require(is_row or (of_matrix and is_column), call, "has a bias that is no row")
        _require(value.dtype == rows[0].dtype, call, f"mixes {rows[0].dtype} and {value.dtype}")
        _require(value.device == rows[0].device, call, f"mixes {rows[0].device} and {value.device}")


def _verify_epilogue(
    call: fx.Node, task: WithEpilogue, given: Given, first: torch.Tensor, rows: Any, widths: list[Any], whole: Any = 0
) -> None:
    """Widths of products that are combined, and the sizes of the extra tensors beside so many `rows`; `whole`: of what
    is reduced.
    """
    epilogue = task.parsed
    if epilogue is None:
        return
    for group in epilogue.groups():
        width = widths[group.products[0]]
        for index in group.products:
            _require(_possible(widths[index] == width), call, "combines products of different widths")
    parts = [(output, rows) for output in epilogue.outputs]
    parts += [] if epilogue.pre is None else [(epilogue.pre, whole)]
    for part, length in parts:
        shape = (length, widths[min(products(part))])
        for extra in extras_of([part]):
            value = given["extras"][extra.index]
            _require(value.device == first.device, call, f"mixes {first.device} and {value.device}")
            _require(value.dtype in ACTIVATION_DTYPES, call, f"has an extra tensor of {value.dtype}")
            fits: Any = value.numel() == math.prod(extra_shape(extra.kind, shape))
            _require(_possible(fits), call, f"has an extra tensor that is no {extra.kind}: x{extra.index}")


def _verify_prologue(call: fx.Node, task: AllGatherMatmul, given: Given, first: torch.Tensor) -> None:
    """The tensors of the norm in front of a gather."""
    if task.prologue is not None:
        _verify_extras(call, task.prologue, given, first, first.shape[-1])
        if "residual" in given:
            fits: Any = given["residual"].numel() == first.numel()
            _require(_possible(fits), call, "adds a residual of another size")


def _verify_extras(
    call: fx.Node, task: NormNode | ShardNorm, given: Given, first: torch.Tensor, columns: Any
) -> None:
    """Those of a norm over rows of so many `columns`."""
    for name in task.extras:
        value = given[name]
        _require(value.device == first.device, call, f"mixes {first.device} and {value.device}")
        if name == "residual":
            _require(value.dtype == first.dtype, call, f"mixes {first.dtype} and {value.dtype}")
            _require(_possible(value.shape[-1] == columns), call, "adds a residual whose rows do not fit")
        else:
            _require(value.dtype in ACTIVATION_DTYPES, call, f"has dtype {value.dtype}, which no kernel takes")
            _require(_possible(value.numel() == columns), call, f"has a {name} that does not fit")


def _verify_outputs(call: fx.Node, task: TaskNode) -> None:
    """The call is taken apart by getitem only, and its fake outputs are as many as the schema says."""
    count = len(task.returned) + 1 if isinstance(task, NormNode) else 2
    if isinstance(task, WithEpilogue):
        count = task.num_outputs + 1
    if isinstance(task, AllGatherMatmul):
        count += int(task.return_gathered) + (0 if task.prologue is None else len(task.prologue.returned))
    if isinstance(task, AllToAllMatmul):
        count += int(task.return_received)
    if isinstance(task, AttentionReduceScatter):
        count = 4
    if isinstance(task, AllGatherAttention):
        count = 5 if task.return_gathered else 3
    values = call.meta.get("val")
    _require(isinstance(values, (list, tuple)) and len(values) == count, call, f"does not return {count} tensors")
    for user in call.users:
        index = user.args[1] if user.target is getitem else None
        _require(isinstance(index, int) and 0 <= index < count, call, f"is used by {user.format_node()}")


def _verify_tokens(calls: list[tuple[fx.Node, TaskNode]]) -> None:
    """Every call but the first waits for the token of what stands before it; no token orders two things."""
    token_of = ops.overload("token_of")
    for index, (call, _) in enumerate(calls):
        token = call.args[ops.TOKEN]
        if token is None:
            _require(index == 0, call, "has no token, though another site comes before it")
            continue
        _require(isinstance(token, fx.Node), call, f"has no node as its token: {token!r}")
        assert isinstance(token, fx.Node)
        is_last_output = (
            token.target is getitem
            and isinstance(token.args[0], fx.Node)
            and token.args[1] == len(token.args[0].meta["val"]) - 1
        )
        _require(token.target is token_of or is_last_output, call, f"has a token that is none: {token.format_node()}")
        _require(len(token.users) == 1, call, f"shares its token {token} with another op")


def _value(call: fx.Node, argument: object) -> torch.Tensor:
    value = argument.meta.get("val") if isinstance(argument, fx.Node) else None
    _require(isinstance(value, torch.Tensor), call, f"has an operand that is no tensor: {argument!r}")
    assert isinstance(value, torch.Tensor)
    return value


def _possible(condition: Any) -> bool:
    """Whether a (symbolic) condition may hold: False only if it is certain not to."""
    negated: Any = (not condition) if isinstance(condition, bool) else torch.sym_not(condition)
    return not statically_known_true(negated)


def _require(holds: Any, call: fx.Node, problem: str) -> None:
    if not holds:
        raise GraphVerificationError(where="the Ditron passes", problem=f"{call.format_node()} {problem}")
