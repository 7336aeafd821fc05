"""The ops of the Task level: one schema for all node kinds, and their fake implementations.

    ditron.<kind>(Tensor[] operands, str node, Tensor? token) -> Tensor[]

`node` is the text of the node (codec.py), which holds all that a site needs at run time; the operands are those that
the node's `slots()` name, in that order. `define()` declares the ops; the implementations are bound by
`ditron_inductor.lowering.register`. In words, by kind:

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
    q [B, Hq, Sq, D], k and v [B, Hkv, S, D], any strides; out [B, Hq, Sq, D] with the memory of a contiguous
    [B, Sq, Hq, D], lse [B, Hq, Sq] contiguous, fp32; gathered_k, gathered_v [B, Hkv, W*S, D] with the memory of a
    contiguous [B, W*S, Hkv, D], present if and only if return_gathered. bias: broadcastable to [B, Hq, Sq, W*S], of
    bool or floats, present if and only if the mask is `given`. Masks: see task/attention_masks.py.
`attention_reduce_scatter: grad_out, q, k, v, out, lse, (bias) -> grad_q, grad_k, grad_v, token`
    its backward, from the gathered k and v [B, Hkv, W*S, D]; grad_q [B, Hq, Sq, D] and this rank's part of the sums
    over the ranks, grad_k and grad_v [B, Hkv, S, D], with the memory of a contiguous [B, S, H, D].
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
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.library import Library

from ditron_inductor.task.codec import decode
from ditron_inductor.task.node import Node, Output
from ditron_inductor.task.nodes import NODES
from ditron_inductor.task.norms import norm_form
from ditron_inductor.task.torch_dtypes import TORCH_DTYPES

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


def node_of(call: fx.Node) -> Node | None:
    """The node that a call in a graph stands for; None where what is called is no op of a node."""
    target = call.target
    ours = isinstance(target, torch._ops.OpOverload) and target.namespace == NAMESPACE and target._opname in NODES
    return node_from_call(target, call.args) if ours else None


def operands_of(call: fx.Node) -> Sequence[Any]:
    """The operands of a call in a graph, in their order."""
    operands: Any = call.args[OPERANDS]
    return list(operands)


def operands_from_call(call: fx.Node) -> dict[str, Any]:
    """The operands of a call in a graph, by name."""
    found: dict[str, Any] = node_from_call(call.target, call.args).named(operands_of(call))
    return found


def shapes_from_call(call: fx.Node) -> dict[str, Any]:
    """The shapes of the operands of a call in a graph, by name."""
    return shapes_of({name: values_of(value) for name, value in operands_from_call(call).items()})


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


def shapes_of(operands: Mapping[str, Any]) -> dict[str, Any]:
    """The shapes of operands by name, as the declarations take them."""
    return {
        name: [one.shape for one in value] if isinstance(value, list) else value.shape
        for name, value in operands.items()
    }


def values_of(operand: Any) -> Any:
    """The fake tensor of an operand in a graph, or those of a list."""
    return [one.meta["val"] for one in operand] if isinstance(operand, list) else operand.meta["val"]


def memory(like: torch.Tensor, outputs: Sequence[Output]) -> list[torch.Tensor]:
    """New tensors for these outputs, on the device of the first operand, and of its dtype where they name none."""
    return [_empty(like, output, TORCH_DTYPES.get(output.dtype, like.dtype)) for output in outputs]


def norm_output(x: torch.Tensor, shape: Sequence[Any], name: str) -> torch.Tensor:
    """Memory for the output of this name of a norm, of a sum of this shape [.., N], beside x."""
    sizes, dtype = norm_form(name, shape)
    return x.new_empty(sizes, dtype=TORCH_DTYPES.get(dtype))


def _empty(like: torch.Tensor, output: Output, dtype: torch.dtype) -> torch.Tensor:
    if output.sequence_first:
        B, heads, sequence, D = output.shape
        return like.new_empty([B, sequence, heads, D], dtype=dtype).transpose(1, 2)
    return like.new_empty(output.shape, dtype=dtype)


def _fake(kind: str, operands: Sequence[torch.Tensor], node: str, token: torch.Tensor | None) -> list[torch.Tensor]:
    declared = parsed(kind, node)
    outputs = memory(operands[0], declared.outputs(shapes_of(declared.named(operands))))
    return outputs if declared.exchange is None else [*outputs, new_token(operands[0])]


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
