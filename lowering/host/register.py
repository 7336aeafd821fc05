"""Binds the ops of the Task level to the strategies: one function a node kind, called once from the backend.

Each function leaves the first call of a node with operands of one form to prepare.py; later calls look up what that
kept (prepared.py).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch

from ditron_inductor.device.replicas import own_chunk, replicas
from ditron_inductor.lowering.all_gather_attention import binding as attention
from ditron_inductor.lowering.all_gather_matmul.shard_norm import gather_library, make_shard
from ditron_inductor.lowering.all_reduce_rms_norm import library as norm_library
from ditron_inductor.lowering.epilogues import Finisher, finisher_of_sum, preparer_of
from ditron_inductor.lowering.flash_decode import op as flash_decode
from ditron_inductor.lowering.host.launch import is_tf32_allowed
from ditron_inductor.lowering.host.prepare import prepare
from ditron_inductor.lowering.host.prepared import PreparedCalls, form
from ditron_inductor.lowering.projections.kernel import projections
from ditron_inductor.task import ops, reference
from ditron_inductor.task.nodes import (
    AllGatherAttention,
    AllGatherMatmul,
    AllReduceRmsNorm,
    AllToAllMatmul,
    AttentionReduceScatter,
    FlashDecode,
    MatmulAllGather,
    MatmulAllReduce,
    MatmulAllReduceRmsNorm,
    MatmulAllToAll,
    MatmulReduceScatter,
    NormNode,
    Projections,
    WithEpilogue,
)

Prepare = Callable[..., Callable[..., Any]]
calls = PreparedCalls()
"""Those of this process."""


def _prepare_all_gather_matmul(
    key: Hashable, node: AllGatherMatmul, operands: Sequence[torch.Tensor]
) -> Callable[..., Any]:
    shard, weights, extras, _ = node.split(operands)
    parsed = node.parsed
    library = functools.partial(
        gather_library,
        make_shard(node, shard.shape, shard.device),
        node=node,
        multiply=None if parsed is None else Finisher(parsed, shard, extras).multiply,
        gather_dim=node.gather_dim,
        world_size=node.world_size,
        group_name=node.group_name,
        return_gathered=node.return_gathered,
    )
    return prepare(
        calls,
        key,
        node,
        shard,
        library,
        sizes=shard.shape,
        m=node.world_size * math.prod(shard.shape[:-1]),
        shared=shard.shape[-1],
        local=("columns", sum(weight.shape[1] for weight in weights)),
    )


def _prepare_matmul_reduce_scatter(
    key: Hashable, node: MatmulReduceScatter, operands: Sequence[torch.Tensor]
) -> Callable[..., Any]:
    a, b, *_ = node.split(operands)
    reduce = functools.partial(
        reference.matmul_reduce_scatter,
        scatter_dim=node.scatter_dim,
        reduce_op=node.reduce_op,
        world_size=node.world_size,
        group_name=node.group_name,
    )
    library = _finished(reduce, node, a[0])
    leading, N = a[0].shape[:-1], b[0].shape[1]
    return prepare(
        calls,
        key,
        node,
        a[0],
        library,
        sizes=(*leading, N),
        m=math.prod(leading) // node.world_size * node.world_size,
        shared=N,
        local=("K", sum(one.shape[0] for one in b)),
    )


def _finished(
    reduce: Callable[..., torch.Tensor], node: WithEpilogue, like: torch.Tensor
) -> Callable[..., list[torch.Tensor]]:
    """The outputs of a reduction: its sum, or what is made of that."""
    preparer, finisher = preparer_of(node, like.device), finisher_of_sum(node, like)

    def library(
        a: Sequence[torch.Tensor],
        b: Sequence[torch.Tensor],
        bias: torch.Tensor | None,
        extras: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:
        prepare = None if preparer is None else functools.partial(preparer.prepare, extras=extras)
        total = reduce(a, b, bias, prepare=prepare)
        return [total] if finisher is None else finisher.finish_sum(total, extras)

    return library


def _prepare_matmul_all_reduce(
    key: Hashable, node: MatmulAllReduce, operands: Sequence[torch.Tensor]
) -> Callable[..., Any]:
    a, b, *_ = node.split(operands)
    reduce = functools.partial(
        reference.matmul_all_reduce,
        reduce_op=node.reduce_op,
        world_size=node.world_size,
        group_name=node.group_name,
    )
    library = _finished(reduce, node, a[0])
    M, N = math.prod(a[0].shape[:-1]), b[0].shape[1]
    local = "K", sum(one.shape[0] for one in b)
    return prepare(calls, key, node, a[0], library, sizes=(M, N), m=M, shared=N, local=local)


def _prepare_all_reduce_rms_norm(
    key: Hashable, node: AllReduceRmsNorm, operands: Sequence[torch.Tensor]
) -> Callable[..., Any]:
    return _prepare_norm(key, node, operands[0], operands[0].shape[-1], 1)


def _prepare_matmul_all_reduce_rms_norm(
    key: Hashable, node: MatmulAllReduceRmsNorm, operands: Sequence[torch.Tensor]
) -> Callable[..., Any]:
    a, b, *_ = node.split(operands)
    return _prepare_norm(key, node, a[0], b[0].shape[1], sum(one.shape[0] for one in b))


def _prepare_norm(key: Hashable, node: NormNode, x: torch.Tensor, N: int, K: int) -> Callable[..., Any]:
    """x: what is reduced, or the first of the operands of what is reduced."""
    M = math.prod(x.shape[:-1])
    library = norm_library.make(node, [*x.shape[:-1], N], x.device)
    return prepare(calls, key, node, x, library, sizes=(M, N), m=M, shared=N, local=("K", K))


def _prepare_matmul_all_gather(
    key: Hashable, node: MatmulAllGather, operands: Sequence[torch.Tensor]
) -> Callable[..., Any]:
    library = functools.partial(
        reference.matmul_all_gather,
        gather_dim=node.gather_dim,
        world_size=node.world_size,
        group_name=node.group_name,
    )
    return _prepare_product(key, node, operands, library)


def _prepare_product(
    key: Hashable,
    node: MatmulAllGather | MatmulAllToAll,
    operands: Sequence[torch.Tensor],
    library: Callable[..., Any],
) -> Callable[..., Any]:
    """For a node that sends all rows of its sum of products."""
    a, b, _ = node.split(operands)
    leading, N = a[0].shape[:-1], b[0].shape[1]
    local = "K", sum(one.shape[0] for one in b)
    return prepare(calls, key, node, a[0], library, sizes=(*leading, N), m=math.prod(leading), shared=N, local=local)


def _prepare_matmul_all_to_all(
    key: Hashable, node: MatmulAllToAll, operands: Sequence[torch.Tensor]
) -> Callable[..., Any]:
    library = functools.partial(
        reference.matmul_all_to_all,
        gather_dim=node.gather_dim,
        parts=node.parts,
        world_size=node.world_size,
        group_name=node.group_name,
    )
    return _prepare_product(key, node, operands, library)


def _prepare_all_to_all_matmul(
    key: Hashable, node: AllToAllMatmul, operands: Sequence[torch.Tensor]
) -> Callable[..., Any]:
    x, weight = node.split(operands)
    library = functools.partial(
        reference.all_to_all_matmul,
        scatter_dim=node.scatter_dim,
        parts=node.parts,
        world_size=node.world_size,
        group_name=node.group_name,
        return_received=node.return_received,
    )
    m, local = math.prod(x.shape[:-1]) // node.world_size, ("columns", weight.shape[1])
    return prepare(calls, key, node, x, library, sizes=x.shape, m=m, shared=node.world_size * x.shape[-1], local=local)


def lookup(
    kind: str, text: str, operands: Sequence[torch.Tensor]
) -> tuple[Hashable, Any, Callable[..., Any] | None]:
    """The key of a call of a kind, its node, and what runs it if that is known."""
    # With the operands' forms the node is all that a call depends on, but for the precision of fp32.
    key = kind, text, is_tf32_allowed(), *[form(one) for one in operands]
    return key, ops.parsed(kind, text), calls.find(key)


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
        return [*((outputs,) if isinstance(outputs, torch.Tensor) else outputs), ops.new_token(first)]

    return op


def _projections(operands: Sequence[torch.Tensor], text: str, token: torch.Tensor | None) -> list[torch.Tensor]:
    first = operands[0]
    if first.is_cuda and first.get_device() != torch.cuda.current_device():
        with torch.cuda.device(first.get_device()):
            return projections(ops.parsed(Projections.kind, text), operands)
    return projections(ops.parsed(Projections.kind, text), operands)


def _after(x: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    return x.view_as(x)


@functools.cache
def implementations() -> Mapping[str, Callable[..., Any]]:
    """What the ops run, by name."""
    preparing: dict[str, Prepare] = {
        AllGatherMatmul.kind: _prepare_all_gather_matmul,
        MatmulReduceScatter.kind: _prepare_matmul_reduce_scatter,
        MatmulAllReduce.kind: _prepare_matmul_all_reduce,
        AllReduceRmsNorm.kind: _prepare_all_reduce_rms_norm,
        MatmulAllReduceRmsNorm.kind: _prepare_matmul_all_reduce_rms_norm,
        MatmulAllGather.kind: _prepare_matmul_all_gather,
        MatmulAllToAll.kind: _prepare_matmul_all_to_all,
        AllToAllMatmul.kind: _prepare_all_to_all_matmul,
        FlashDecode.kind: functools.partial(flash_decode.prepare, calls),
        AllGatherAttention.kind: functools.partial(attention.prepare_forward, functools.partial(prepare, calls)),
        AttentionReduceScatter.kind: functools.partial(attention.prepare_backward, functools.partial(prepare, calls)),
    }
    return {
        **{kind: implementation(kind, one) for kind, one in preparing.items()},
        Projections.kind: _projections,
        "after": _after,
        "after_": ops.do_nothing,
        "token_of": ops.new_token,
        "meet": ops.meet_nobody,
        "own_chunk": own_chunk,
        "replicated": replicas.compared,
    }


@functools.cache
def register() -> None:
    """Bind the implementations, once; further calls do nothing."""
    library: Any = ops.define()
    for name, one in implementations().items():
        library.impl(name, one, "CompositeExplicitAutograd")
