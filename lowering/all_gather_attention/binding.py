"""Binds the ops of attention to their strategies; see lowering/host/register.py, which hands in what kinds share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from ditron_inductor.lowering.all_gather_attention import chunked, library, local, tile
from ditron_inductor.lowering.attention_reduce_scatter import library as backward_library
from ditron_inductor.lowering.host.launch import Launch
from ditron_inductor.task.all_gather_attention import (
    ALIGNED,
    GIVEN,
    AllGatherAttention,
    AttentionReduceScatter,
    attention_sizes,
    mask_problem,
)
from ditron_inductor.task.attention_ops import BIAS_DTYPES
from ditron_inductor.task.nodes import AttentionNode
from ditron_inductor.task.plan import PlanRequest
from ditron_inductor.task.policy import shared_site

Prepare = Callable[..., Callable[..., Any]]
Node = TypeVar("Node", AllGatherAttention, AttentionReduceScatter)


def prepare_forward(
    prepare: Prepare, key: Hashable, node: AllGatherAttention, operands: Sequence[torch.Tensor]
) -> Callable[..., Any]:
    """What runs a forward. prepare: see lowering/host/prepare.py, with the calls that it keeps."""
    world_size = node.world_size
    q, k, v, *biases = operands
    _check_operands(node, q, k, v)
    _check_bias(node, biases, q, world_size * k.shape[2])
    B, heads, queries, D = q.shape
    key_heads, keys = k.shape[1], k.shape[2]
    node = _without_idle_window(node, keys)

    def possible(
        node: AllGatherAttention, launch: Launch, x: torch.Tensor, m: int, n: int, depth: int
    ) -> tuple[PlanRequest, dict[str, Any]]:
        tiles, chunks = tile.geometry(node, launch, q, k, v), chunked.geometry(node, launch, q, k, v)
        runners = {
            "tile": functools.partial(tile.all_gather_attention, node, launch, tiles),
            "chunked": functools.partial(chunked.all_gather_attention, node, launch, chunks),
        }
        workspace, capabilities = launch.workspace, launch.workspace.capabilities
        tile_reason = capabilities.tile_reason or tile.obstacle(node, q)
        request = replace(
            _request(node, launch, x.dtype, (m, n, depth), chunks.run, biases),
            workspace_bytes=workspace.footprint(tiles.nbytes),
            tile_available=capabilities.tile_available and not tile_reason,
            tile_reason=tile_reason,
            chunked_bytes=workspace.footprint(chunks.nbytes),
            # Its kernels want what those of `tile` want.
            chunked_reason=capabilities.tile_reason,
        )
        return request, runners

    m, n, shared = attention_sizes(node.mask, world_size, B, heads, queries, D, key_heads, keys)
    return prepare(
        key,
        node,
        k,
        library.make(node, q, k, v),
        sizes=k.shape,
        m=m,
        shared=shared,
        local=("columns", n),
        possible=possible,
    )


def prepare_backward(
    prepare: Prepare, key: Hashable, node: AttentionReduceScatter, operands: Sequence[torch.Tensor]
) -> Callable[..., Any]:
    """What runs a backward; see `prepare_forward`."""
    world_size = node.world_size
    grad_out, q, k, v, out, lse, *biases = operands
    if k.shape[2] % world_size:
        raise ValueError(
            f"{node.kind} at site '{node.site}': {k.shape[2]} gathered keys do not divide among {world_size} ranks"
        )
    B, heads, queries, D = q.shape
    key_heads, keys = k.shape[1], k.shape[2] // world_size
    _check_operands(node, q, k[:, :, :keys], v[:, :, :keys])
    _check_bias(node, biases, q, k.shape[2])
    node = _without_idle_window(node, keys)
    given = grad_out, q, k, v, out, lse

    def possible(
        node: AttentionReduceScatter, launch: Launch, x: torch.Tensor, m: int, n: int, depth: int
    ) -> tuple[PlanRequest, dict[str, Any]]:
        run = local.choose(q, k[:, :, :keys], v[:, :, :keys], node.softcap, biased=node.mask.kind == GIVEN)
        return _request(node, launch, x.dtype, (m, n, depth), run, biases), {}

    m, n, shared = attention_sizes(node.mask, world_size, B, heads, queries, D, key_heads, keys)
    return prepare(
        key,
        node,
        k,
        backward_library.make(node, given),
        sizes=(*k.shape[:2], keys, D),
        m=m,
        shared=shared,
        local=("columns", n),
        possible=possible,
    )


def _without_idle_window(node: Node, keys: int) -> Node:
    """Without a window as long as all keys, where every row stands at a key: it hides nothing, and the plan would take
    the library's kernel for slower than it is. The same on all ranks.
    """
    return replace(node, mask=node.mask.within(node.world_size * keys)) if node.mask.kind in ALIGNED else node


def _largest_bytes(node: AttentionNode, launch: Launch, biases: Sequence[torch.Tensor], m: int, depth: int) -> int:
    """Of what has the sizes of a bias, however it lies in memory, on the rank with most queries: agreed on once, like
    these; m, depth: see `attention_sizes`.
    """
    if not biases:
        return 0
    own = sum(bias.numel() * bias.element_size() for bias in biases)
    what = f"bytes of the bias of {shared_site(node.site) or node.kind} {node.kind} beside {depth} columns, {m} rows"
    return launch.workspace.largest(what, own)


def _request(
    node: AttentionNode,
    launch: Launch,
    dtype: torch.dtype,
    sizes: tuple[int, int, int],
    run: local.Local,
    biases: Sequence[torch.Tensor],
) -> PlanRequest:
    """What the plan has to know, but for our strategies."""
    capabilities = launch.workspace.capabilities
    return PlanRequest(
        site=node.site,
        kind=node.kind,
        m=sizes[0],
        n=sizes[1],
        k=sizes[2],
        dtype=dtype,
        world_size=node.world_size,
        strategy=node.policy.strategy,
        workspace_limit=node.policy.workspace_limit,
        device_type=capabilities.device_type,
        device_name=capabilities.device_name,
        launch_us=capabilities.launch_us,
        library_speed=run.speed_with(node.mask),
        bias_bytes=_largest_bytes(node, launch, biases, sizes[0], sizes[2]),
    )


def _check_operands(node: AttentionNode, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Raises ValueError naming the operand that does not fit, and how."""
    where = f"{node.kind} at site '{node.site}'"
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(f"{where}: {name} has {x.dim()} dimensions, not 4: [batch, heads, sequence, head size]")
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(f"{where}: {name} is {x.dtype} on {x.device}, q is {q.dtype} on {q.device}")
    if k.shape != v.shape:
        raise ValueError(f"{where}: k is {list(k.shape)} and v is {list(v.shape)}; they have to be alike")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"{where}: q is {list(q.shape)} and k is {list(k.shape)}: batch and head size have to be alike"
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"{where}: {q.shape[1]} heads of queries cannot share {k.shape[1]} heads of keys evenly")
    problem = mask_problem(node.mask, q.shape[2], k.shape[2])
    if problem:
        raise ValueError(f"{where}: {problem}")


def _check_bias(node: AttentionNode, biases: Sequence[torch.Tensor], q: torch.Tensor, keys: int) -> None:
    """Raises ValueError naming what does not fit of a bias, or of none; keys: of all ranks."""
    where = f"{node.kind} at site '{node.site}'"
    if (node.mask.kind == GIVEN) != bool(biases):
        found = "a bias" if biases else "no bias"
        raise ValueError(f"{where}: {found} beside the mask '{node.mask.kind}'; '{GIVEN}' has one, and no other mask")
    for bias in biases:
        if bias.dtype not in BIAS_DTYPES or bias.device != q.device:
            raise ValueError(
                f"{where}: bias is {bias.dtype} on {bias.device}, not bool, bfloat16, float16 or float32 on {q.device}"
            )
        scores = [*q.shape[:3], keys]
        pairs = zip(reversed(bias.shape), reversed(scores), strict=False)
        if bias.dim() > 4 or any(size not in (1, other) for size, other in pairs):
            raise ValueError(
                f"{where}: bias is {list(bias.shape)}, which cannot be broadcast to {scores}: batch, heads, queries, "
                "and the keys of all ranks"
            )
