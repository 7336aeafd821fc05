"""Binds the ops of the Task level to the strategies: one function a node kind, called once from the backend.

Each function makes the node of a call from the op's arguments, and leaves its first call with operands of one form to
prepare.py; later calls look up what that kept (prepared.py).
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
from ditron_inductor.lowering.flash_decode.op import FlashDecodeOp
from ditron_inductor.lowering.host.launch import is_tf32_allowed
from ditron_inductor.lowering.host.prepare import prepare
from ditron_inductor.lowering.host.prepared import PreparedCalls, form
from ditron_inductor.lowering.projections.kernel import projections
from ditron_inductor.task import ops, reference
from ditron_inductor.task.nodes import (
    EXTRAS,
    SHARD_EXTRAS,
    AllGatherContract,
    AllGatherMatmul,
    AllReduceRmsNorm,
    AllToAllMatmul,
    Contraction,
    FlashDecode,
    MatmulAllGather,
    MatmulAllReduce,
    MatmulAllReduceRmsNorm,
    MatmulAllToAll,
    MatmulReduceScatter,
    NormNode,
    Policy,
    WithEpilogue,
)
from ditron_inductor.task.schemas import required_behind_token

calls = PreparedCalls()
"""Those of this process."""


def _prepare_all_gather_matmul(
    key: Hashable,
    shard: torch.Tensor,
    weights: Sequence[torch.Tensor],
    gather_dim: int,
    return_gathered: bool,
    world_size: int,
    group_name: str,
    site: str,
    *rest: Any,
) -> Callable[..., Any]:
    policy, (extras, epilogue, prologue) = Policy(*rest[:-3]), rest[-3:]
    terms = len(weights), len(extras), epilogue, prologue
    node = AllGatherMatmul(gather_dim, world_size, group_name, return_gathered, site, policy, *terms)
    parsed = node.parsed
    library = functools.partial(
        gather_library,
        make_shard(node, shard.shape, shard.device),
        node=node,
        multiply=None if parsed is None else Finisher(parsed, shard, extras).multiply,
        gather_dim=gather_dim,
        world_size=world_size,
        group_name=group_name,
        return_gathered=return_gathered,
    )
    return prepare(
        calls,
        key,
        node,
        shard,
        library,
        sizes=shard.shape,
        m=world_size * math.prod(shard.shape[:-1]),
        shared=shard.shape[-1],
        local=("columns", sum(weight.shape[1] for weight in weights)),
    )


def _prepare_matmul_reduce_scatter(
    key: Hashable,
    a: Sequence[torch.Tensor],
    b: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    scatter_dim: int,
    reduce_op: str,
    world_size: int,
    group_name: str,
    site: str,
    *rest: Any,
) -> Callable[..., Any]:
    policy, (extras, epilogue) = Policy(*rest[:-2]), rest[-2:]
    terms = len(a), bias is not None, len(extras), epilogue
    node = MatmulReduceScatter(scatter_dim, reduce_op, world_size, group_name, site, policy, *terms)
    reduce = functools.partial(
        reference.matmul_reduce_scatter,
        scatter_dim=scatter_dim,
        reduce_op=reduce_op,
        world_size=world_size,
        group_name=group_name,
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
        m=math.prod(leading) // world_size * world_size,
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
    key: Hashable,
    a: Sequence[torch.Tensor],
    b: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    reduce_op: str,
    world_size: int,
    group_name: str,
    site: str,
    *rest: Any,
) -> Callable[..., Any]:
    policy, (extras, epilogue) = Policy(*rest[:-2]), rest[-2:]
    terms = len(a), bias is not None, len(extras), epilogue
    node = MatmulAllReduce(reduce_op, world_size, group_name, site, policy, *terms)
    reduce = functools.partial(
        reference.matmul_all_reduce, reduce_op=reduce_op, world_size=world_size, group_name=group_name
    )
    library = _finished(reduce, node, a[0])
    M, N = math.prod(a[0].shape[:-1]), b[0].shape[1]
    local = "K", sum(one.shape[0] for one in b)
    return prepare(calls, key, node, a[0], library, sizes=(M, N), m=M, shared=N, local=local)


def _prepare_norm(
    key: Hashable,
    x: torch.Tensor,
    b: Sequence[torch.Tensor] | None,
    product_bias: torch.Tensor | None,
    given: tuple[torch.Tensor | None, ...],
    reduce_op: str,
    *rest: Any,
) -> Callable[..., Any]:
    """x: what is reduced, or (with b) the first of what it is a product of. given: see nodes.EXTRAS."""
    norm, post, saved = ops.norms_of(rest)
    *site_args, extra_tensors, epilogue = rest[ops.NUM_NORM_ARGS :]
    world_size, group_name, site, *policy = site_args
    extras = tuple(name for name, one in zip(EXTRAS, given, strict=True) if one is not None)
    common = reduce_op, norm, extras, world_size, group_name, site, Policy(*policy), post, saved
    node: NormNode
    if b is None:
        node, N, K = AllReduceRmsNorm(*common), x.shape[-1], 1
    else:
        node = MatmulAllReduceRmsNorm(*common, len(b), product_bias is not None, len(extra_tensors), epilogue)
        N, K = b[0].shape[1], sum(one.shape[0] for one in b)
    M = math.prod(x.shape[:-1])
    library = norm_library.make(node, [*x.shape[:-1], N], x.device)
    return prepare(calls, key, node, x, library, sizes=(M, N), m=M, shared=N, local=("K", K))


def _prepare_matmul_all_gather(
    key: Hashable,
    a: Sequence[torch.Tensor],
    b: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    gather_dim: int,
    world_size: int,
    group_name: str,
    site: str,
    *policy: Any,
) -> Callable[..., Any]:
    node = MatmulAllGather(gather_dim, world_size, group_name, site, Policy(*policy), len(a), bias is not None)
    library = functools.partial(
        reference.matmul_all_gather, gather_dim=gather_dim, world_size=world_size, group_name=group_name
    )
    return _prepare_product(key, node, a, b, library)


def _prepare_product(
    key: Hashable,
    node: MatmulAllGather | MatmulAllToAll,
    a: Sequence[torch.Tensor],
    b: Sequence[torch.Tensor],
    library: Callable[..., Any],
) -> Callable[..., Any]:
    """Of a node that sends all rows of its sum of products."""
    leading, N = a[0].shape[:-1], b[0].shape[1]
    local = "K", sum(one.shape[0] for one in b)
    return prepare(calls, key, node, a[0], library, sizes=(*leading, N), m=math.prod(leading), shared=N, local=local)


def _prepare_all_gather_contract(
    key: Hashable,
    shard: torch.Tensor,
    factors: Sequence[torch.Tensor],
    gather_dim: int,
    gathered_first: bool,
    return_gathered: bool,
    world_size: int,
    group_name: str,
    site: str,
    *policy: Any,
) -> Callable[..., Any]:
    node = AllGatherContract(
        gather_dim, gathered_first, world_size, group_name, return_gathered, site, Policy(*policy), len(factors)
    )
    library = functools.partial(
        reference.all_gather_contract,
        gather_dim=gather_dim,
        gathered_first=gathered_first,
        world_size=world_size,
        group_name=group_name,
        return_gathered=return_gathered,
    )
    sizes = Contraction.of(shard.shape, gather_dim)
    return prepare(
        calls,
        key,
        node,
        shard,
        library,
        sizes=shard.shape,
        m=sizes.kept,
        shared=world_size * sizes.depth,
        local=("columns", sum(one.shape[1 if gathered_first else 0] for one in factors)),
    )


def _prepare_matmul_all_to_all(
    key: Hashable,
    a: Sequence[torch.Tensor],
    b: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    gather_dim: int,
    parts: int,
    world_size: int,
    group_name: str,
    site: str,
    *policy: Any,
) -> Callable[..., Any]:
    node = MatmulAllToAll(gather_dim, parts, world_size, group_name, site, Policy(*policy), len(a), bias is not None)
    library = functools.partial(
        reference.matmul_all_to_all, gather_dim=gather_dim, parts=parts, world_size=world_size, group_name=group_name
    )
    return _prepare_product(key, node, a, b, library)


def _prepare_all_to_all_matmul(
    key: Hashable,
    x: torch.Tensor,
    weight: torch.Tensor,
    scatter_dim: int,
    parts: int,
    return_received: bool,
    world_size: int,
    group_name: str,
    site: str,
    *policy: Any,
) -> Callable[..., Any]:
    node = AllToAllMatmul(scatter_dim, parts, return_received, world_size, group_name, site, Policy(*policy))
    library = functools.partial(
        reference.all_to_all_matmul,
        scatter_dim=scatter_dim,
        parts=parts,
        world_size=world_size,
        group_name=group_name,
        return_received=return_received,
    )
    m, local = math.prod(x.shape[:-1]) // world_size, ("columns", weight.shape[1])
    return prepare(calls, key, node, x, library, sizes=x.shape, m=m, shared=world_size * x.shape[-1], local=local)


# The ops themselves. The trailing arguments, `site`, are those of the schemas in task/ops.py, in their order. With the
# operands' forms they are all that a call depends on, but for the precision of fp32.


PROLOGUE_DEFAULTS: tuple[Any, ...] = (None, "", *(None,) * len(SHARD_EXTRAS), *ops.SHARD_NORM_DEFAULTS)
"""Of all arguments of a gather behind those of its site: they come up to the last one that is given."""
SITE_ARGUMENTS: Mapping[str, int] = {
    one.kind: required_behind_token(ops.SCHEMAS[one.kind])
    for one in (AllGatherMatmul, MatmulReduceScatter, MatmulAllReduce, MatmulAllReduceRmsNorm)
}
"""Those behind the token without an epilogue's, which come last and are left out where there is none."""


def _split_epilogue(kind: str, site: tuple[Any, ...]) -> tuple[tuple[Any, ...], Sequence[torch.Tensor], str]:
    """(the other arguments, extra tensors, the epilogue's text)."""
    count = SITE_ARGUMENTS[kind]
    if len(site) <= count:
        return site, (), ""
    return site[:count], site[count] or (), site[count + 1]


def lookup(
    kind: str,
    site: tuple[Any, ...],
    operands: Sequence[torch.Tensor],
    *others: torch.Tensor | None,
) -> tuple[Hashable, Callable[..., Any] | None]:
    """The key of a call, and what runs it if that is known. operands: all of them, in the order of the schema; others:
    those that there may be.
    """
    rest = [None if other is None else form(other) for other in others]
    key = kind, site, is_tf32_allowed(), *rest, *[form(one) for one in operands]
    return key, calls.find(key)


def _all_gather_matmul(
    shard: torch.Tensor, weights: Sequence[torch.Tensor], token: torch.Tensor | None, *site: Any
) -> list[torch.Tensor]:
    count = SITE_ARGUMENTS[AllGatherMatmul.kind]
    given, norm = site[:0], site[:0]
    if len(site) > count + 2:
        site = (*site, *PROLOGUE_DEFAULTS[len(site) - count :])
        behind = count + 2 + len(SHARD_EXTRAS)
        site, given, norm = site[: count + 2], site[count + 2 : behind], site[behind:]
    site, extras, epilogue = _split_epilogue(AllGatherMatmul.kind, site)
    key, run = lookup(AllGatherMatmul.kind, (*site, epilogue, *norm), (shard, *weights, *extras), *given)
    if run is None:
        prologue = ops.shard_norm_of(given, norm)
        run = _prepare_all_gather_matmul(key, shard, weights, *site, extras, epilogue, prologue)
    return [*run(shard, weights, extras, given), ops.new_token(shard)]


def _all_gather_contract(
    shard: torch.Tensor, factors: Sequence[torch.Tensor], token: torch.Tensor | None, *site: Any
) -> list[torch.Tensor]:
    key, run = lookup(AllGatherContract.kind, site, (shard, *factors))
    if run is None:
        run = _prepare_all_gather_contract(key, shard, factors, *site)
    return [*run(shard, factors), ops.new_token(shard)]


def _reduction(kind: str, prepare: Callable[..., Callable[..., Any]]) -> Callable[..., Any]:
    """The op of a kind that reduces a sum of products and a bias."""

    def op(
        a: Sequence[torch.Tensor],
        b: Sequence[torch.Tensor],
        bias: torch.Tensor | None,
        token: torch.Tensor | None,
        *site: Any,
    ) -> list[torch.Tensor]:
        site, extras, epilogue = _split_epilogue(kind, site)
        key, run = lookup(kind, (*site, epilogue), (*a, *b, *extras), bias)
        if run is None:
            run = prepare(key, a, b, bias, *site, extras, epilogue)
        return [*run(a, b, bias, extras), ops.new_token(a[0])]

    return op


def _of_products(kind: str, prepare: Callable[..., Callable[..., Any]]) -> Callable[..., Any]:
    """The op of a kind whose operands are a sum of products and a bias, without an epilogue."""

    def op(
        a: Sequence[torch.Tensor],
        b: Sequence[torch.Tensor],
        bias: torch.Tensor | None,
        token: torch.Tensor | None,
        *site: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        key, run = lookup(kind, site, (*a, *b), bias)
        if run is None:
            run = prepare(key, a, b, bias, *site)
        return run(a, b, bias), ops.new_token(a[0])

    return op


def _all_to_all_matmul(
    x: torch.Tensor, weight: torch.Tensor, token: torch.Tensor | None, *site: Any
) -> list[torch.Tensor]:
    key, run = lookup(AllToAllMatmul.kind, site, (x, weight))
    if run is None:
        run = _prepare_all_to_all_matmul(key, x, weight, *site)
    return [*run(x, weight), ops.new_token(x)]


def _all_reduce_rms_norm(x: torch.Tensor, *others: Any) -> list[torch.Tensor]:
    given, site = others[: len(EXTRAS)], others[len(EXTRAS) + 1 :]
    key, run = lookup(AllReduceRmsNorm.kind, site, (x,), *given)
    if run is None:
        run = _prepare_norm(key, x, None, None, given, *site, (), "")
    return [*run(x, given), ops.new_token(x)]


def _matmul_all_reduce_rms_norm(
    a: Sequence[torch.Tensor], b: Sequence[torch.Tensor], bias: torch.Tensor | None, *others: Any
) -> list[torch.Tensor]:
    given, site = others[: len(EXTRAS)], others[len(EXTRAS) + 1 :]
    site, extras, epilogue = _split_epilogue(MatmulAllReduceRmsNorm.kind, site)
    key, run = lookup(MatmulAllReduceRmsNorm.kind, (*site, epilogue), (*a, *b, *extras), bias, *given)
    if run is None:
        run = _prepare_norm(key, a[0], b, bias, given, *site, extras, epilogue)
    return [*run(a, b, bias, given, extras), ops.new_token(a[0])]


def _on_device(implementation: Callable[..., Any]) -> Callable[..., Any]:
    """Run with the GPU of the first operand as the current one: kernels are launched there."""

    @functools.wraps(implementation)
    def run(first: torch.Tensor | Sequence[torch.Tensor], *args: Any) -> Any:
        x = first if isinstance(first, torch.Tensor) else first[0]
        if not x.is_cuda or x.get_device() == torch.cuda.current_device():
            return implementation(first, *args)
        with torch.cuda.device(x.get_device()):
            return implementation(first, *args)

    return run


def _after(x: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    return x.view_as(x)


@functools.cache
def implementations() -> Mapping[str, Callable[..., Any]]:
    """What the ops run, by name."""
    return {
        AllGatherMatmul.kind: _on_device(_all_gather_matmul),
        MatmulReduceScatter.kind: _on_device(_reduction(MatmulReduceScatter.kind, _prepare_matmul_reduce_scatter)),
        MatmulAllReduce.kind: _on_device(_reduction(MatmulAllReduce.kind, _prepare_matmul_all_reduce)),
        AllReduceRmsNorm.kind: _on_device(_all_reduce_rms_norm),
        MatmulAllReduceRmsNorm.kind: _on_device(_matmul_all_reduce_rms_norm),
        MatmulAllGather.kind: _on_device(_of_products(MatmulAllGather.kind, _prepare_matmul_all_gather)),
        MatmulAllToAll.kind: _on_device(_of_products(MatmulAllToAll.kind, _prepare_matmul_all_to_all)),
        AllToAllMatmul.kind: _on_device(_all_to_all_matmul),
        FlashDecode.kind: _on_device(FlashDecodeOp(calls)),
        AllGatherContract.kind: _on_device(_all_gather_contract),
        "after": _after,
        "after_": ops.do_nothing,
        "token_of": ops.new_token,
        "meet": ops.meet_nobody,
        "own_chunk": own_chunk,
        "replicated": replicas.compared,
        "projections": _on_device(projections),
        **{kind: _on_device(op) for kind, op in attention.make_ops(lookup, functools.partial(prepare, calls)).items()},
    }


@functools.cache
def register() -> None:
    """Bind the implementations, once; further calls do nothing."""
    library: Any = ops.define()
    for name, implementation in implementations().items():
        library.impl(name, implementation, "CompositeExplicitAutograd")
