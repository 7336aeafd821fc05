"""Binds the ops of the Task level to what runs them, once.

`KINDS` is the list of the node kinds with kernels of ours: a new kind of matmuls is one line here. The first call of a
node with operands of one form goes through host/prepare.py; later calls look up what that kept (host/prepared.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch

from ditron_inductor.device.replicas import own_chunk, replicas
from ditron_inductor.lowering.all_gather_attention import op as attention
from ditron_inductor.lowering.all_gather_matmul.op import LOWERING as all_gather_matmul
from ditron_inductor.lowering.all_reduce_rms_norm.op import LOWERING as all_reduce_rms_norm
from ditron_inductor.lowering.all_to_all_matmul.op import LOWERING as all_to_all_matmul
from ditron_inductor.lowering.flash_decode import op as flash_decode
from ditron_inductor.lowering.host.kind import Lowering
from ditron_inductor.lowering.host.launch import is_tf32_allowed
from ditron_inductor.lowering.host.prepare import prepare_matmul
from ditron_inductor.lowering.host.prepared import PreparedCalls, form
from ditron_inductor.lowering.matmul_all_gather.op import LOWERING as matmul_all_gather
from ditron_inductor.lowering.matmul_all_reduce.op import LOWERING as matmul_all_reduce
from ditron_inductor.lowering.matmul_all_reduce_rms_norm.op import LOWERING as matmul_all_reduce_rms_norm
from ditron_inductor.lowering.matmul_all_to_all.op import LOWERING as matmul_all_to_all
from ditron_inductor.lowering.matmul_reduce_scatter.op import LOWERING as matmul_reduce_scatter
from ditron_inductor.lowering.projections.projections_kernel import projections
from ditron_inductor.task import schema
from ditron_inductor.task.nodes import AllGatherAttention, AttentionReduceScatter, FlashDecode, Projections

KINDS: tuple[Lowering, ...] = (
    all_gather_matmul,
    matmul_reduce_scatter,
    matmul_all_reduce,
    all_reduce_rms_norm,
    matmul_all_reduce_rms_norm,
    matmul_all_gather,
    matmul_all_to_all,
    all_to_all_matmul,
)
Prepare = Callable[[Hashable, Any, Sequence[torch.Tensor]], Callable[..., Any]]
calls = PreparedCalls()
"""Those of this process."""


def lookup(
    kind: str, text: str, operands: Sequence[torch.Tensor]
) -> tuple[Hashable, Any, Callable[..., Any] | None]:
    """The key of a call of a kind, its node, and what runs it if that is known."""
    # With the operands' forms the node is all that a call depends on, but for the precision of fp32.
    key = kind, text, is_tf32_allowed(), *[form(one) for one in operands]
    return key, schema.parsed(kind, text), calls.find(key)


def implementation(kind: str, prepare: Prepare) -> Callable[..., list[torch.Tensor]]:
    """The op of a kind. prepare: a function of the key of a call, the node and the operands, which returns what runs
    this call and later ones of the same key, as a function of what `split` makes of the operands.
    """

    def op(operands: Sequence[torch.Tensor], text: str, token: torch.Tensor | None) -> list[torch.Tensor]:
        first = operands[0]
        if first.is_cuda and first.get_device() != torch.cuda.current_device():
            # Kernels are launched on the current GPU.
            with torch.cuda.device(first.get_device()):
                return op(operands, text, token)
        key, node, run = lookup(kind, text, operands)
        if run is None:
            run = prepare(key, node, operands)
        outputs = run(*node.split(operands))
        return [*((outputs,) if isinstance(outputs, torch.Tensor) else outputs), schema.new_token(first)]

    return op


def _projections(operands: Sequence[torch.Tensor], text: str, token: torch.Tensor | None) -> list[torch.Tensor]:
    first = operands[0]
    if first.is_cuda and first.get_device() != torch.cuda.current_device():
        with torch.cuda.device(first.get_device()):
            return projections(schema.parsed(Projections.kind, text), operands)
    return projections(schema.parsed(Projections.kind, text), operands)


def _after(x: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    return x.view_as(x)


@functools.cache
def implementations() -> Mapping[str, Callable[..., Any]]:
    """What the ops run, by name."""
    preparing: dict[str, Prepare] = {
        **{lowering.node.kind: functools.partial(prepare_matmul, lowering, calls) for lowering in KINDS},
        FlashDecode.kind: functools.partial(flash_decode.prepare, calls),
        AllGatherAttention.kind: functools.partial(attention.prepare_forward, calls),
        AttentionReduceScatter.kind: functools.partial(attention.prepare_backward, calls),
    }
    return {
        **{kind: implementation(kind, one) for kind, one in preparing.items()},
        Projections.kind: _projections,
        "after": _after,
        "after_": schema.do_nothing,
        "token_of": schema.new_token,
        "meet": schema.meet_nobody,
        "own_chunk": own_chunk,
        "replicated": replicas.compared,
    }


@functools.cache
def register() -> None:
    """Bind the implementations, once; further calls do nothing."""
    library: Any = schema.define()
    for name, one in implementations().items():
        library.impl(name, one, "CompositeExplicitAutograd")
