"""What a `CachedAttention` computes, in operations of torch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ditron_inductor.task.decode_node import HIDDEN, CachedAttention


def bounds(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (the first place, one behind the last place), int32 [B], of what a mask [B, S] shows: bools, or a bias of
    scores. They are S and 0 if it shows nothing.
    """
    seen = mask if mask.dtype == torch.bool else ~(mask <= HIDDEN)
    places = torch.arange(mask.shape[1], dtype=torch.int32, device=mask.device)
    return torch.where(seen, places, mask.shape[1]).amin(1), torch.where(seen, places + 1, 0).amax(1)


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Returns x [B, heads, D] turned by angles [B, W] or [1, W], computed in fp32 or wider and rounded once."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    repeats = x.shape[-1] // cos.shape[-1]
    cos, sin = (angle.to(dtype).repeat(1, repeats)[:, None] for angle in (cos, sin))
    first, second = x.to(dtype).chunk(2, -1)
    return (x.to(dtype) * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)


def cached_attention(node: CachedAttention, *operands: Any) -> torch.Tensor:
    """Returns the attention [B, Hq, D] of operands as `CachedAttention.split` returns them, and writes the new token
    into the caches, which are not copied. Raises an IndexError if the caches have no such place, or no such block.
    """
    q, keys, values, table, lengths, shown, bias, _, _, sinks, position, key, value, cos, sin = operands
    if node.rotated:
        q, key = turned(q, cos, sin), turned(key, cos, sin) if node.appends else None
    if position is not None:
        sequences, places = torch.arange(len(q), device=q.device), position.expand(len(q))
        keys[sequences, :, places], values[sequences, :, places] = key, value
    if table is not None:
        keys, values = (_in_order(cache, table) for cache in (keys, values))
    if lengths is not None:
        places = torch.arange(keys.shape[2], device=q.device)
        # The largest number of 64 bits may stand for no limit, so nothing is added to it.
        shown = places < (lengths.long().clamp(max=keys.shape[2]) + (1 if node.appends else node.added))[:, None]
    if sinks is not None:
        return _with_sinks(node, q, keys, values, shown, bias, sinks)
    mask = None if shown is None else shown[:, None, None, :]
    out = F.scaled_dot_product_attention(q[:, :, None], keys, values, mask, scale=node.scale, enable_gqa=True)[:, :, 0]
    # Without any token, what torch returns differs from device to device.
    return (out if shown is None else out.where(shown.any(1)[:, None, None], 0.0)).contiguous()


def _in_order(blocks: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Returns the keys or values [B, Hkv, N P, D] that a table [B, N] finds in blocks [blocks, Hkv, P, D]."""
    return blocks[table].transpose(1, 2).flatten(2, 3)


def _with_sinks(
    node: CachedAttention,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    shown: torch.Tensor | None,
    bias: torch.Tensor | None,
    sinks: torch.Tensor,
) -> torch.Tensor:
    """Returns the attention [B, Hq, D] with one more score for each head, computed in fp32 or wider."""
    (B, heads, D), dtype = q.shape, torch.promote_types(q.dtype, torch.float32)
    by_key = q.to(dtype).view(B, keys.shape[1], -1, D) * node.scale
    scores = (by_key @ keys.to(dtype).transpose(2, 3)).view(B, heads, -1)
    if bias is not None:
        scores = scores + bias.to(dtype)[:, None]
    if shown is not None:
        scores = scores.where(shown[:, None], -torch.inf)
    weights = torch.cat([scores, sinks.to(dtype).view(1, heads, 1).expand(B, -1, 1)], -1).softmax(-1)[..., :-1]
    out = weights.view(B, keys.shape[1], -1, keys.shape[2]) @ values.to(dtype)
    return out.view(B, heads, D).to(q.dtype)
