"""Biases of attention as programs have them, by name: what a rank adds to its scores, or which of them it keeps."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from ditron_inductor.lowering.attention import local_attention
from tests.rank_process import RankContext


def _alibi(ctx: RankContext, B: int, heads: int, queries: int, keys: int) -> torch.Tensor:
    """Causal, in a sequence that is sharded in rank order."""
    ahead = (
        torch.arange(queries, device=ctx.device)[:, None] + ctx.rank * queries - torch.arange(keys, device=ctx.device)
    )
    slopes = 2.0 ** -torch.arange(1.0, heads + 1, device=ctx.device)
    return torch.where(ahead >= 0, -slopes[:, None, None] * ahead, -math.inf)


def _documents(ctx: RankContext, B: int, heads: int, queries: int, keys: int) -> torch.Tensor:
    """Of many lengths, other ones in each sequence; rows see nothing of a rank, and some nothing at all."""
    places = torch.arange(keys, device=ctx.device)[None] + 3 * torch.arange(B, device=ctx.device)[:, None]
    found = (places // 11)[:, None, :queries, None] == (places // 11)[:, None, None]
    found[..., : queries // 4, :] = False
    return found


def _padding(ctx: RankContext, B: int, heads: int, queries: int, keys: int) -> torch.Tensor:
    """[B, 1, 1, W * S]: all keys of the last rank, and more of the first sequence."""
    lengths = keys // ctx.world_size - torch.arange(B, device=ctx.device)[:, None, None, None] - 1
    return torch.arange(keys, device=ctx.device) < lengths.clamp(min=1)


def _steep(ctx: RankContext, B: int, heads: int, queries: int, keys: int) -> torch.Tensor:
    """[H, Sq, 1], the same for all keys, repeated: no softmax sees it, but the logarithm of its sum."""
    return torch.linspace(-3.0, 3.0, heads * queries, device=ctx.device).view(heads, queries, 1).expand(-1, -1, keys)


def _unaligned(ctx: RankContext, B: int, heads: int, queries: int, keys: int) -> torch.Tensor:
    """Of any values, sequences inside of the keys in memory."""
    return torch.randn(keys, heads, queries, B, device=ctx.device).permute(3, 1, 2, 0)


def _lowest(ctx: RankContext, B: int, heads: int, queries: int, keys: int) -> torch.Tensor:
    """Hides by numbers, causally and more: rows that see nothing see all keys alike, or those that are not -inf."""
    found = _alibi(ctx, B, heads, queries, keys).clamp_min(torch.finfo(torch.float16).min)
    found[:, 1::4] = torch.finfo(torch.float16).min
    found[:, 2::4, ::2] = -math.inf
    found[:, 3::4] = -3.0e4
    return found


def _least(ctx: RankContext, B: int, heads: int, queries: int, keys: int) -> torch.Tensor:
    """Hides by the least number of bfloat16, causally, and all keys from some rows."""
    found = _alibi(ctx, B, heads, queries, keys).clamp_min(torch.finfo(torch.bfloat16).min)
    found[:, 1::4] = torch.finfo(torch.bfloat16).min
    return found


def as_seen(bias: torch.Tensor | None) -> torch.Tensor | None:
    """A bias as cuDNN's kernel sees it in bfloat16: its least numbers hide."""
    if bias is None or not bias.is_cuda or bias.dtype != torch.bfloat16:
        return bias
    return bias.masked_fill(bias <= -local_attention.REACH, -math.inf)


BIASES: dict[str, Callable[..., torch.Tensor]] = {
    "alibi": _alibi,
    "documents": _documents,
    "padding": _padding,
    "steep": _steep,
    "unaligned": _unaligned,
    "lowest": _lowest,
    "least": _least,
    "rows": lambda ctx, B, heads, queries, keys: torch.randn(queries, 1, device=ctx.device),
    "keys": lambda ctx, B, heads, queries, keys: torch.randn(keys, device=ctx.device),
    "nothing": lambda ctx, *shape: torch.zeros(1, 1, 1, shape[3], dtype=torch.bool, device=ctx.device),
}
