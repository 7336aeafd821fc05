"""The ops of the Task level: one schema for all node kinds, and their fake implementations.

    ditron.<kind>(Tensor[] operands, str node, Tensor? token) -> Tensor[]

`node` is the text of the node (codec.py), which holds all that a site needs at run time; the operands are those that
the node's `slots()` name, in that order. `define()` declares the ops; the implementations are bound by
`ditron_inductor.lowering.host.register`. In words, by kind:

`all_gather_matmul: shard, weights, (extras), <of nodes.SHARD_EXTRAS> -> out_0, .., (gathered,) <saved>, token`
    shard [.., S, .., K] with S at gather_dim (never the last dimension), weights [K, N_i] with any strides.
    out_i [rows, N_i] contiguous, rows = the gathered tensor's dimensions but the last, flattened. With an epilogue the
    outputs are those that its text names, made of the products and of the extra tensors (see task/epilogue.py).
    gathered [.., W*S, .., K], contiguous, present if and only if return_gathered. With a prologue the first operand is
    x, and the shard is norm(total), total = x + residual, with the weight and the shift, as in `all_reduce_rms_norm`;
    total is returned where there is a residual, then what the prologue saves.
`matmul_reduce_scatter: a, b, (bias), (extras) -> out, .., token`
    a_i [.., W*S, .., K_i] with W*S at scatter_dim (never the last dimension), alike but for K_i; b_i [K_i, N]; bias a
    row [N], or of matrices a column [W*S, 1], added on every rank before the reduction; out [.., S, .., N] contiguous.
    With an epilogue the outputs are those that its text names, made of out as `mm0` and of the extra tensors, each in
    its shape.
`matmul_all_reduce: a, b, (bias), (extras) -> out, .., token`
    a_i [.., K_i], alike but for K_i; b_i [K_i, N]; bias [N]; out [.., N] contiguous, bit-identical on every rank.
    Epilogues as above.
`all_reduce_rms_norm: x, <names of nodes.EXTRAS> -> normed, total, <saved>, token`
    x [.., N]. The residual has as many elements, in any shape whose rows are N long; the others have N elements.
    total = post(all_reduce(x) + bias + second_bias) + residual and normed = norm(total): shape and dtype of x,
    contiguous, bit-identical on every rank. See `nodes.Norm`; without a norm (`none`) there is no normed. What is saved
    is contiguous; mean and rstd are fp32 [.., 1], scaled is fp32; other is norm(total) with other_weight and
    other_shift.
`matmul_all_reduce_rms_norm: a, b, (product_bias), <names of nodes.EXTRAS>, (extras) -> normed, total, <saved>, token`
    The same for x = sum_i a_i @ b_i + product_bias, or what an epilogue's `pre:` makes of that, as `matmul_all_reduce`.
`matmul_all_gather: a, b, (bias) -> out, token`
    a_i [.., K_i], alike but for K_i; b_i [K_i, N]; bias [N]; out is the sum [.., N] with gather_dim W times as long,
    contiguous.
`matmul_all_to_all: a, b, (bias) -> out, token`
    a_i [.., S, .., K_i] with S at gather_dim (never the last dimension), alike but for K_i; b_i [K_i, N] with N a
    multiple of parts * W; bias [N]; out [.., W*S, .., N / W] contiguous. See task/ulysses.py.
`all_to_all_matmul: x, weight -> out, (received,) token`
    x [.., W*S, .., C] with W*S at scatter_dim (never the last dimension), C a multiple of parts; weight [W*C, N]; out
    [rows, N] contiguous, rows = received's dimensions but the last, flattened. received [.., S, .., W*C], contiguous,
    present if and only if return_received. See task/ulysses.py.
`flash_decode: q, k, v, lengths, (block_table) -> out, token`
    See task/flash_decode.py.
`all_gather_attention: q, k, v, (bias) -> out, lse, (gathered_k, gathered_v,) token`
`attention_reduce_scatter: grad_out, q, k, v, out, lse, (bias) -> grad_q, grad_k, grad_v, token`
    See task/attention_ops.py.
`projections: x, weights, (extras) -> out_0, ..`
    x [M, K] contiguous, weights [K, N_i], out_i = x @ weight_i [M, N_i] contiguous, or what the epilogue makes of them.
    No site and no token: nothing is communicated.

A token is `uint8[1]` and never read: it is only a dependency, which keeps the sites of a group in graph order
through every reordering of the compiler. The first site of a chain gets None. Other ops:

`after(x, token) -> x`
    an alias of x that is ordered after token: puts a collective that was not fused into the order of its group.
`after_(x, token)`
    the same for a collective that writes into x: x itself, declared as written, so that its memory has one owner.
`token_of(x) -> token`
    a token ordered after the op that made x.
`meet(key)`
    marks a graph whose ranks compare it when it first runs, see device/meetings.py. It computes nothing.
`own_chunk(x, dim, world_size, group_name) -> chunk`
    this rank's of the world_size equal chunks of x along dim, a copy; found by the rank at run time.
`replicated(x, same, group_name, site, names, constants) -> x`
    an alias of x; now and then the ranks compare samples of `same` and the `constants`, and raise where they differ.
    names: where the program reads each of `same`. Both are texts with a line for each.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.library import Library

from ditron_inductor.task import attention_ops, ulysses
from ditron_inductor.task.codec import decode
from ditron_inductor.task.epilogue import parse, products
from ditron_inductor.task.epilogue_torch import out_dtypes
from ditron_inductor.task.node import Node
from ditron_inductor.task.nodes import (
    AS_SUM,
    NODES,
    AllGatherMatmul,
    AllReduceRmsNorm,
    AllToAllMatmul,
    FlashDecode,
    MatmulAllGather,
    MatmulAllReduce,
    MatmulAllReduceRmsNorm,
    MatmulAllToAll,
    MatmulReduceScatter,
    Projections,
)

NAMESPACE = "ditron"
OPERANDS, NODE, TOKEN = range(3)
"""The places of the arguments of a node's op."""
SCHEMAS: dict[str, str] = {
    **dict.fromkeys(NODES, "(Tensor[] operands, str node, Tensor? token) -> Tensor[]"),
    "after": "(Tensor(a) x, Tensor token) -> Tensor(a)",
    "after_": "(Tensor(a!) x, Tensor token) -> ()",
    "token_of": "(Tensor x) -> Tensor",
    "meet": "(str key) -> ()",
    "own_chunk": "(Tensor x, int dim, int world_size, str group_name) -> Tensor",
    "replicated": "(Tensor(a) x, Tensor[] same, str group_name, str site, str names, str constants) -> Tensor(a)",
}


@functools.cache
def define() -> Library:
    """Declares the ops and their fake implementations, once; further calls return the same library."""
    library: Any = Library(NAMESPACE, "DEF")
    tags = (torch.Tag.needs_fixed_stride_order, torch.Tag.pt2_compliant_tag)
    for name, schema in SCHEMAS.items():
        library.define(name + schema, tags=tags)
    fakes: dict[str, Callable[..., object]] = {
        **{kind: functools.partial(_fake, kind) for kind in NODES},
        "after": _fake_after,
        "after_": do_nothing,
        "token_of": new_token,
        "meet": meet_nobody,
        "own_chunk": _fake_own_chunk,
        "replicated": _fake_replicated,
    }
    for name, fake in fakes.items():
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
    declared: Library = library
    return declared


def overload(kind: str) -> torch._ops.OpOverload:
    """The op of a node kind (or `after`, `after_`, `token_of`), declared if it was not."""
    define()
    op: torch._ops.OpOverload = getattr(torch.ops.ditron, kind).default
    return op


def arguments(node: Node, token: Any = None, **given: Any) -> tuple[list[Any], str, Any]:
    """The arguments of the op of a node: its operands by name, as `Node.flat` takes them."""
    return node.flat(given), node.text(), token


def call(node: Node, token: torch.Tensor | None = None, **given: Any) -> list[torch.Tensor]:
    """What the op of a node returns for operands by name."""
    results: list[torch.Tensor] = overload(node.kind)(*arguments(node, token, **given))
    return results


def parsed(kind: str, text: str) -> Any:
    """The node of a kind with this text, the same object every time."""
    return decode(NODES[kind], text)


def node_from_call(target: object, args: Sequence[Any]) -> Any:
    """The node that a call of one of the Task ops stands for.

    Raises AssertionError for any other target: only our own passes write these calls.
    """
    assert isinstance(target, torch._ops.OpOverload) and target.namespace == NAMESPACE, f"not an op of ours: {target}"
    kind = target._opname
    assert kind in NODES and len(args) == TOKEN + 1, f"not a call of a node: {kind} with {len(args)} arguments"
    return parsed(kind, args[NODE])


def operands_of(call: fx.Node) -> Sequence[Any]:
    """The operands of a call in a graph, in their order."""
    operands: Any = call.args[OPERANDS]
    return list(operands)


def operands_from_call(call: fx.Node) -> dict[str, Any]:
    """The operands of a call in a graph, by name."""
    found: dict[str, Any] = node_from_call(call.target, call.args).named(operands_of(call))
    return found


def operand(call: fx.Node, name: str) -> Any:
    """An operand of a call in a graph, a node or a list of nodes; None if there is none of this name."""
    return operands_from_call(call).get(name)


def new_token(x: torch.Tensor) -> torch.Tensor:
    """A token on the device of x."""
    return torch.empty(1, dtype=torch.uint8, device=x.device)


def do_nothing(x: torch.Tensor, token: torch.Tensor) -> None:
    """`after_`: only its place among the ops that use x matters."""


def meet_nobody(key: str) -> None:
    """`meet`: the meeting of a graph is in the code that Inductor writes, see codegen/meeting_kernel.py."""


def _fake(kind: str, operands: Sequence[torch.Tensor], node: str, token: torch.Tensor | None) -> list[torch.Tensor]:
    declared = parsed(kind, node)
    outputs = _OUTPUTS[kind](declared, **declared.named(operands))
    return outputs if kind == Projections.kind else [*outputs, new_token(operands[0])]


def _all_gather_matmul(
    node: AllGatherMatmul, shard: torch.Tensor, weights: Sequence[torch.Tensor], **others: Any
) -> list[torch.Tensor]:
    gathered_shape = _gathered_shape(shard, node.gather_dim, node.world_size)
    rows = math.prod(gathered_shape[:-1])
    outputs = _after_epilogue([shard.new_empty([rows, weight.shape[1]]) for weight in weights], node.epilogue)
    if node.return_gathered:
        outputs.append(shard.new_empty(gathered_shape))
    if node.prologue is not None:
        outputs += [norm_output(shard, shard.shape, name) for name in node.prologue.returned]
    return outputs


def _gathered_shape(shard: torch.Tensor, gather_dim: int, world_size: int) -> list[Any]:
    shape = list(shard.shape)
    shape[gather_dim] = shape[gather_dim] * world_size
    return shape


def _sum_shape(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> list[Any]:
    """The shape of sum_i a_i @ b_i."""
    return [*a[0].shape[:-1], b[0].shape[1]]


def _matmul_reduce_scatter(
    node: MatmulReduceScatter, a: Sequence[torch.Tensor], b: Sequence[torch.Tensor], **others: Any
) -> list[torch.Tensor]:
    shape = _sum_shape(a, b)
    shape[node.scatter_dim] = shape[node.scatter_dim] // node.world_size
    return _after_epilogue([a[0].new_empty(shape)], node.epilogue)


def _matmul_all_reduce(
    node: MatmulAllReduce, a: Sequence[torch.Tensor], b: Sequence[torch.Tensor], **others: Any
) -> list[torch.Tensor]:
    return _after_epilogue([a[0].new_empty(_sum_shape(a, b))], node.epilogue)


def _matmul_all_gather(
    node: MatmulAllGather, a: Sequence[torch.Tensor], b: Sequence[torch.Tensor], **others: Any
) -> list[torch.Tensor]:
    shape = _sum_shape(a, b)
    shape[node.gather_dim] = shape[node.gather_dim] * node.world_size
    return [a[0].new_empty(shape)]


def _matmul_all_to_all(
    node: MatmulAllToAll, a: Sequence[torch.Tensor], b: Sequence[torch.Tensor], **others: Any
) -> list[torch.Tensor]:
    return [a[0].new_empty(ulysses.gathered_shape(a[0].shape, b[0].shape[1], node.gather_dim, node.world_size))]


def _all_to_all_matmul(node: AllToAllMatmul, x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
    shape = ulysses.received_shape(x.shape, node.scatter_dim, node.world_size)
    outputs = [x.new_empty([math.prod(shape[:-1]), weight.shape[1]])]
    return [*outputs, *([x.new_empty(shape)] if node.return_received else [])]


def _all_reduce_rms_norm(node: AllReduceRmsNorm, x: torch.Tensor, **others: Any) -> list[torch.Tensor]:
    return norm_outputs(node, x, list(x.shape))


def _matmul_all_reduce_rms_norm(
    node: MatmulAllReduceRmsNorm, a: Sequence[torch.Tensor], b: Sequence[torch.Tensor], **others: Any
) -> list[torch.Tensor]:
    return norm_outputs(node, a[0], _sum_shape(a, b))


def norm_outputs(
    node: AllReduceRmsNorm | MatmulAllReduceRmsNorm, x: torch.Tensor, shape: Sequence[Any]
) -> list[torch.Tensor]:
    """Memory for what a reduction with a norm returns, for sums of this shape [.., N], beside x."""
    return [norm_output(x, shape, name) for name in node.returned]


def norm_output(x: torch.Tensor, shape: Sequence[Any], name: str) -> torch.Tensor:
    """Memory for one of these outputs."""
    if name in AS_SUM:
        return x.new_empty(shape)
    return x.new_empty(shape if name == "scaled" else [*shape[:-1], 1], dtype=torch.float32)


def _flash_decode(node: FlashDecode, q: torch.Tensor, **others: Any) -> list[torch.Tensor]:
    return [q.new_empty(q.shape)]


def _projections(
    node: Projections, x: torch.Tensor, weights: Sequence[torch.Tensor], **others: Any
) -> list[torch.Tensor]:
    return _after_epilogue([x.new_empty([x.shape[0], weight.shape[1]]) for weight in weights], node.epilogue)


def _after_epilogue(given: list[torch.Tensor], epilogue: str) -> list[torch.Tensor]:
    """The fake outputs of products with these."""
    if not epilogue:
        return given
    read = parse(epilogue)
    return [
        torch.empty_like(given[min(products(output))], dtype=dtype)
        for output, dtype in zip(read.outputs, out_dtypes(read, given[0].dtype), strict=True)
    ]


_OUTPUTS: dict[str, Callable[..., list[torch.Tensor]]] = {
    AllGatherMatmul.kind: _all_gather_matmul,
    MatmulReduceScatter.kind: _matmul_reduce_scatter,
    MatmulAllReduce.kind: _matmul_all_reduce,
    MatmulAllGather.kind: _matmul_all_gather,
    MatmulAllToAll.kind: _matmul_all_to_all,
    AllToAllMatmul.kind: _all_to_all_matmul,
    AllReduceRmsNorm.kind: _all_reduce_rms_norm,
    MatmulAllReduceRmsNorm.kind: _matmul_all_reduce_rms_norm,
    FlashDecode.kind: _flash_decode,
    Projections.kind: _projections,
    **attention_ops.OUTPUTS,
}
"""What a node returns but for the token, as fake tensors, by kind: a function of the node and its operands by name."""


def _fake_after(x: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    aliased: torch.Tensor = torch.ops.aten.alias.default(x)
    return aliased


def _fake_own_chunk(x: torch.Tensor, dim: int, world_size: int, group_name: str) -> torch.Tensor:
    shape = list(x.shape)
    shape[dim] = shape[dim] // world_size
    return x.new_empty(shape)


def _fake_replicated(x: torch.Tensor, *_: Any) -> torch.Tensor:
    aliased: torch.Tensor = torch.ops.aten.alias.default(x)
    return aliased
