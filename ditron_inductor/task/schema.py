"""The ops of the Task level: one schema for all node kinds, and their fake implementations.

    ditron.<kind>(Tensor[] operands, str node, Tensor? token) -> Tensor[]

`node` is the text of the node (codec.py), which holds all that a site needs at run time; the operands are those that
the node's `slots()` name, in that order. What they are, and what is returned, stands in the docstring of the kind's
declaration, see nodes.py. Operands may have any strides, but for the x of `projections`, which is contiguous. Outputs
have the memory that their `Output` says; behind them comes a token, but for `projections`, which has no site.

`define()` declares the ops; the implementations are bound by `ditron_inductor.lowering.register`.

A token is `uint8[1]` and is never read. It is only a dependency, which keeps the sites of a group in graph order
through every reordering of the compiler. The first site of a chain gets None. There are further ops:

`after(x, token) -> x`
    an alias of x that is ordered after token. It puts a collective that was not fused into the order of its group.
`after_(x, token)`
    the same for a collective that writes into x. The result is x itself, which is declared as written, so that its
    memory has one owner.
`token_of(x) -> token`
    a token ordered after the op that made x.
`meet(key)`
    marks a graph whose ranks compare it when it first runs, see device/meetings.py. It computes nothing.
`own_chunk(x, dim, world_size, group_name) -> chunk`
    a copy of this rank's chunk of the world_size equal chunks of x along dim; the rank is found at run time.
`replicated(x, same, group_name, site, names, constants, again) -> x`
    an alias of x. In the first call, and now and then if `again`, the ranks compare samples of the tensors `same` and
    the `constants`, and raise if they differ. names: where the program reads each of `same`. names and constants are
    texts with one line for each.
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
from ditron_inductor.task.torch_dtypes import OUTPUT_DTYPES, TORCH_DTYPES

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
    "replicated": "(Tensor(a) x, Tensor[] same, str group_name, str site, str names, str constants, "
    "bool again=True) -> Tensor(a)",
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
        "after": _alias,
        "after_": do_nothing,
        "token_of": new_token,
        "meet": meet_nobody,
        "own_chunk": _fake_own_chunk,
        "replicated": _alias,
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
    """Calls the op of a node with operands given by name, and returns its results."""
    results: list[torch.Tensor] = overload(node.kind)(*arguments(node, token, **given))
    return results


def parsed(kind: str, text: str) -> Any:
    """The node of a kind with this text, the same object every time."""
    return decode(NODES[kind], text)


def node_from_call(target: object, args: Sequence[Any]) -> Any:
    """The node that a call of a Task op stands for; AssertionError for others, as our passes alone write calls."""
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
    found: dict[str, Any] = node_from_call(call.target, call.args).named(operands_of(call))
    return found


def shapes_from_call(call: fx.Node) -> dict[str, Any]:
    """The shapes of the operands of a call in a graph, by name."""
    return shapes_of({name: values_of(value) for name, value in operands_from_call(call).items()})


def operand(call: fx.Node, name: str) -> Any:
    """An operand of a call in a graph, a node or a list of nodes; None if there is none of this name."""
    return operands_from_call(call).get(name)


def new_token(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(1, dtype=torch.uint8, device=x.device)


def do_nothing(x: torch.Tensor, token: torch.Tensor) -> None:
    """Implements `after_`, which matters only by its place among the ops that use x."""


def meet_nobody(key: str) -> None:
    """Implements `meet` by nothing: the code that Inductor writes has the meeting (codegen/meeting_kernel.py)."""


def shapes_of(operands: Mapping[str, Any]) -> dict[str, Any]:
    """The shapes of operands by name, as the declarations take them."""
    return {
        name: [tensor.shape for tensor in value] if isinstance(value, list) else value.shape
        for name, value in operands.items()
    }


def values_of(operand: Any) -> Any:
    """The fake tensor of an operand in a graph, or those of a list."""
    return [tensor.meta["val"] for tensor in operand] if isinstance(operand, list) else operand.meta["val"]


def memory(like: torch.Tensor, outputs: Sequence[Output]) -> list[torch.Tensor]:
    """Returns new tensors for these outputs, by default of the first operand's dtype, on its device."""
    return [_empty(like, output, OUTPUT_DTYPES.get(output.dtype, like.dtype)) for output in outputs]


def norm_output(x: torch.Tensor, shape: Sequence[Any], name: str) -> torch.Tensor:
    """Returns memory on the device of x for the output of a norm with this name, for a sum of this shape [.., N]."""
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


def _alias(x: torch.Tensor, *_: Any) -> torch.Tensor:
    aliased: torch.Tensor = torch.ops.aten.alias.default(x)
    return aliased


def _fake_own_chunk(x: torch.Tensor, dim: int, world_size: int, group_name: str) -> torch.Tensor:
    shape = list(x.shape)
    shape[dim] = shape[dim] // world_size
    return x.new_empty(shape)
