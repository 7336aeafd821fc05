"""Prepares calls of the two attention ops: checks their operands, and lets the plan choose a strategy."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from ditron_inductor.lowering.all_gather_attention import chunked, library, tile
from ditron_inductor.lowering.attention import local_attention
from ditron_inductor.lowering.attention_reduce_scatter import library as backward_library
from ditron_inductor.lowering.host.launch import Launch
from ditron_inductor.lowering.host.planning import name_of, plan_request, requirement
from ditron_inductor.lowering.host.prepare import prepare
from ditron_inductor.lowering.host.prepared import PreparedCalls
from ditron_inductor.task import schema
from ditron_inductor.task.attention_masks import ALIGNED, GIVEN, mask_problem
from ditron_inductor.task.node import Sizes
from ditron_inductor.task.nodes import AllGatherAttention, AttentionNode, AttentionReduceScatter
from ditron_inductor.task.plan import PlanRequest
from ditron_inductor.task.problem import Problem
from ditron_inductor.task.torch_dtypes import BIAS_DTYPES, precision_of

Node = TypeVar("Node", AllGatherAttention, AttentionReduceScatter)


def prepare_forward(
    calls: PreparedCalls, key: Hashable, node: AllGatherAttention, operands: Sequence[torch.Tensor]
) -> Callable[..., Any]:
    """Returns what runs a forward call; see host/prepare.py. Raises ValueError if the operands do not fit."""
    world_size = node.world_size
    q, k, v, *biases = operands
    _check_operands(node, q, k, v)
    _check_bias(node, biases, q, world_size * k.shape[2])
    node = _without_idle_window(node, k.shape[2])

    def possible(
        node: AllGatherAttention, launch: Launch, x: torch.Tensor, agreed: Sizes
    ) -> tuple[PlanRequest, dict[str, Any]]:
        tiles, chunks = tile.geometry(node, launch, q, k, v), chunked.geometry(node, launch, q, k, v)
        runners = {
            "tile": functools.partial(tile.all_gather_attention, node, launch, tiles),
            "chunked": functools.partial(chunked.all_gather_attention, node, launch, chunks),
        }
        problem = Problem(
            node.kind,
            agreed.m,
            agreed.n,
            agreed.k,
            precision_of(x.dtype),
            world_size,
            captured=False,
            library_speed=chunks.run.speed_with(node.mask),
            bias_bytes=_largest_bytes(node, launch, biases, agreed),
        )
        reason = launch.workspace.capabilities.tile_reason
        in_tiles = requirement(launch, tiles.nbytes, reason or tile.obstacle(node, q))
        # The kernels of `chunked` have the same requirements as those of `tile`, except the limits of its kernel.
        in_chunks = requirement(launch, chunks.nbytes, reason)
        return plan_request(launch, node, problem, tile=in_tiles, chunked=in_chunks), runners

    sizes = node.sizes(schema.shapes_of(node.named(operands)))
    return prepare(calls, key, node, k, library.make(node, q, k, v), sizes, possible, rows_decide=True)


def prepare_backward(
    calls: PreparedCalls, key: Hashable, node: AttentionReduceScatter, operands: Sequence[torch.Tensor]
) -> Callable[..., Any]:
    """Returns what runs a backward call; see `prepare_forward`."""
    world_size = node.world_size
    grad_out, q, k, v, out, lse, *biases = operands
    if k.shape[2] % world_size:
        raise ValueError(
            f"{node.kind} at site '{node.site}': {k.shape[2]} gathered keys do not divide among {world_size} ranks"
        )
    keys = k.shape[2] // world_size
    _check_operands(node, q, k[:, :, :keys], v[:, :, :keys])
    _check_bias(node, biases, q, k.shape[2])
    node = _without_idle_window(node, keys)
    given = grad_out, q, k, v, out, lse

    def possible(
        node: AttentionReduceScatter, launch: Launch, x: torch.Tensor, agreed: Sizes
    ) -> tuple[PlanRequest, dict[str, Any]]:
        run = local_attention.choose(q, k[:, :, :keys], v[:, :, :keys], node.softcap, biased=node.mask.kind == GIVEN)
        problem = Problem(
            node.kind,
            agreed.m,
            agreed.n,
            agreed.k,
            precision_of(x.dtype),
            world_size,
            captured=False,
            library_speed=run.speed_with(node.mask),
            bias_bytes=_largest_bytes(node, launch, biases, agreed),
        )
        return plan_request(launch, node, problem), {}

    sizes = node.sizes(schema.shapes_of(node.named(operands)))
    return prepare(calls, key, node, k, backward_library.make(node, given), sizes, possible, rows_decide=True)


def _without_idle_window(node: Node, keys: int) -> Node:
    """Returns the node without its window if the window is as long as all keys and every row stands at a key. Such a
    window hides nothing, and with it the plan would count the library's kernel as slower than it is.
    """
    return replace(node, mask=node.mask.within(node.world_size * keys)) if node.mask.kind in ALIGNED else node


def _largest_bytes(node: AttentionNode, launch: Launch, biases: Sequence[torch.Tensor], sizes: Sizes) -> int:
    """Returns the bytes of a tensor with the sizes of the bias, the largest on any rank; 0 without a bias."""
    if not biases:
        return 0
    own = sum(bias.numel() * bias.element_size() for bias in biases)
    what = f"bytes of the bias of {name_of(node)} beside {sizes.k} columns, {sizes.m} rows"
    return launch.workspace.largest(what, own)


def _check_operands(node: AttentionNode, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Raises ValueError if an operand does not fit; the message names it."""
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
    """Raises ValueError if a bias is missing, superfluous or does not fit. keys: the number of keys on all ranks."""
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
