"""Binds the ops of the Task level to their implementations, once.

`KINDS` lists the node kinds that multiply matrices or normalise; a new kind is one line here. The first call of a node
with operands of a given form goes through host/prepare.py. Later calls look up what it kept (host/prepared.py).
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
from ditron_inductor.lowering.cached_attention.cached_kernel import cached_attention
from ditron_inductor.lowering.choose_experts.choose_kernel import choose_experts
from ditron_inductor.lowering.combine_experts.op import combine_experts
from ditron_inductor.lowering.expert_projections.experts_kernel import expert_projections
from ditron_inductor.lowering.flash_decode import op as flash_decode
from ditron_inductor.lowering.grouped_matmul_all_reduce.op import LOWERING as grouped_matmul_all_reduce
from ditron_inductor.lowering.grouped_matmul_reduce_scatter.op import LOWERING as grouped_matmul_reduce_scatter
from ditron_inductor.lowering.grouped_projections.grouped_kernel import grouped_projections
from ditron_inductor.lowering.host.kind import Lowering
from ditron_inductor.lowering.host.launch import is_tf32_allowed
from ditron_inductor.lowering.host.local_calls import LocalCalls
from ditron_inductor.lowering.host.prepare import prepare_matmul
from ditron_inductor.lowering.host.prepared import PreparedCalls, form
from ditron_inductor.lowering.matmul_all_gather.op import LOWERING as matmul_all_gather
from ditron_inductor.lowering.matmul_all_reduce.op import LOWERING as matmul_all_reduce
from ditron_inductor.lowering.matmul_all_reduce_rms_norm.op import LOWERING as matmul_all_reduce_rms_norm
from ditron_inductor.lowering.matmul_all_to_all.op import LOWERING as matmul_all_to_all
from ditron_inductor.lowering.matmul_reduce_scatter.op import LOWERING as matmul_reduce_scatter
from ditron_inductor.lowering.projections.projections_kernel import projections
from ditron_inductor.task import schema
from ditron_inductor.task.nodes import (
    AllGatherAttention,
    AttentionReduceScatter,
    CachedAttention,
    ChooseExperts,
    CombineExperts,
    ExpertProjections,
    FlashDecode,
    GroupedProjections,
    Projections,
)

KINDS: tuple[Lowering, ...] = (
    all_gather_matmul,
    matmul_reduce_scatter,
    matmul_all_reduce,
    all_reduce_rms_norm,
    matmul_all_reduce_rms_norm,
    matmul_all_gather,
    matmul_all_to_all,
    all_to_all_matmul,
    grouped_matmul_all_reduce,
    grouped_matmul_reduce_scatter,
)
LOCAL: Mapping[str, LocalCalls[Any]] = {
    CachedAttention.kind: cached_attention,
    Projections.kind: projections,
    ExpertProjections.kind: expert_projections,
    GroupedProjections.kind: grouped_projections,
    CombineExperts.kind: combine_experts,
    ChooseExperts.kind: choose_experts,
}
"""The kinds that communicate nothing."""
Prepare = Callable[[Hashable, Any, Sequence[torch.Tensor]], Callable[..., Any]]
calls = PreparedCalls()
"""The prepared calls of this process."""


def lookup(kind: str, text: str, operands: Sequence[torch.Tensor]) -> tuple[Hashable, Any, Callable[..., Any] | None]:
    """Returns the key of a call, its node, and the function that runs it, or None if the call is not prepared yet."""
    # A call depends on the node, the forms of the operands, and the precision of fp32 products; on nothing else.
    key = kind, text, is_tf32_allowed(), *[form(operand) for operand in operands]
    return key, schema.parsed(kind, text), calls.find(key)


def implementation(kind: str, prepare: Prepare) -> Callable[..., list[torch.Tensor]]:
    """Returns the implementation of the op of a kind. prepare: a function of the key of a call, its node and its
    operands. It returns the function that runs this call and later calls with the same key, and that takes the operands
    as `node.split` returns them.
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


def local(kind: str, run: LocalCalls[Any]) -> Callable[..., list[torch.Tensor]]:
    """Returns the implementation of the op of a kind that communicates nothing."""

    def op(operands: Sequence[torch.Tensor], text: str, token: torch.Tensor | None) -> list[torch.Tensor]:
        first = operands[0]
        if first.is_cuda and first.get_device() != torch.cuda.current_device():
            with torch.cuda.device(first.get_device()):
                return run(schema.parsed(kind, text), operands)
        return run(schema.parsed(kind, text), operands)

    return op


def _after(x: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    return x.view_as(x)


@functools.cache
def implementations() -> Mapping[str, Callable[..., Any]]:
    preparing: dict[str, Prepare] = {
        **{lowering.node.kind: functools.partial(prepare_matmul, lowering, calls) for lowering in KINDS},
        FlashDecode.kind: functools.partial(flash_decode.prepare, calls),
        AllGatherAttention.kind: functools.partial(attention.prepare_forward, calls),
        AttentionReduceScatter.kind: functools.partial(attention.prepare_backward, calls),
    }
    return {
        **{kind: implementation(kind, prepare) for kind, prepare in preparing.items()},
        **{kind: local(kind, run) for kind, run in LOCAL.items()},
        "after": _after,
        "after_": schema.do_nothing,
        "token_of": schema.new_token,
        "meet": schema.meet_nobody,
        "own_chunk": own_chunk,
        "replicated": replicas.compared,
    }


@functools.cache
def register() -> None:
    """Binds the implementations. Only the first call does anything."""
    library: Any = schema.define()
    for name, function in implementations().items():
        library.impl(name, function, "CompositeExplicitAutograd")
