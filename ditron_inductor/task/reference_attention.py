"""Attention in plain operations, with its mask written out. Tests compare with it, and the CPU device runs it."""

from __future__ import annotations

import math

import torch

from ditron_inductor.task.attention_masks import UNPLACED, Mask


def visible(
    mask: Mask,
    rank: int,
    world_size: int,
    queries: int,
    keys: int,
    device: torch.device,
    rows: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Returns which keys all rows, or `rows`, see, as bool [queries, W * keys]; None if they see all."""
    if mask.kind in UNPLACED:
        return None
    row = torch.arange(queries, device=device) if rows is None else rows
    key = torch.arange(world_size * keys, device=device)
    if mask.kind in ("zigzag", "zigzag_keys"):
        source, inside, half = key // keys, key % keys, keys // 2
        key = torch.where(inside < half, source * half, (2 * world_size - 2 - source) * half) + inside
    if mask.kind == "zigzag":
        row = torch.where(row < half, rank * half, (2 * world_size - 2 - rank) * half) + row
    elif mask.kind == "causal_offset":
        row = row + rank * queries
    else:
        row = row + mask.offset + sum(torch.where(row >= first, jump, 0) for first, jump in mask.row_jumps())
    ahead = row[:, None] - key[None, :]
    return (ahead >= 0) & (ahead < mask.window) if mask.window else ahead >= 0


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    seen: torch.Tensor | None,
    scale: float,
    softcap: float = 0.0,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (out, lse) in fp32, or in the operands' dtype if that is wider. seen: bool [queries, keys], or None for
    all. bias: broadcastable to [B, Hq, queries, keys]; floats are added to the scores, and bools say what is seen.
    """
    p, _, lse, rows = _probabilities(q, k, None, seen, scale, softcap, bias)
    return (p @ v.unsqueeze(2).to(p.dtype)).reshape(rows), lse


def attend_backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    seen: torch.Tensor | None,
    scale: float,
    softcap: float = 0.0,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns (grad_q, grad_k, grad_v) of `attend`. out, lse: of all keys, of which k and v may be a part."""
    p, capped, _, rows = _probabilities(q, k, lse, seen, scale, softcap, bias)
    grouped = p.shape[:-1]
    wide = p.dtype
    grad = grad_out.to(wide).reshape(*grouped, grad_out.shape[-1])
    delta = (grad * out.to(wide).reshape(grad.shape)).sum(-1, keepdim=True)
    grad_s = p * (grad @ v.to(wide).unsqueeze(2).mT - delta) * scale
    if capped is not None:
        grad_s = grad_s * (1.0 - capped**2)
    grad_q = (grad_s @ k.to(wide).unsqueeze(2)).reshape(rows)
    grad_k = (grad_s.mT @ q.to(wide).reshape(grad.shape)).sum(2)
    return grad_q, grad_k, (p.mT @ grad).sum(2)


def added(bias: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns what a bias adds to the scores, in this dtype. A bias of bool adds -inf where it is False."""
    if bias.dtype != torch.bool:
        return bias.to(dtype)
    return torch.zeros(bias.shape, dtype=dtype, device=bias.device).masked_fill_(~bias, -math.inf)


def _probabilities(
    q: torch.Tensor,
    k: torch.Tensor,
    lse: torch.Tensor | None,
    seen: torch.Tensor | None,
    scale: float,
    softcap: float,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Size]:
    """Returns (p [B, Hkv, Hq / Hkv, Sq, S], the tanh of a soft cap alike, lse [B, Hq, Sq], the shape of q)."""
    B, heads, queries, _ = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    grouped = q.to(wide).reshape(B, k.shape[1], heads // k.shape[1], queries, q.shape[-1])
    scores = grouped @ k.to(wide).unsqueeze(2).mT * scale
    capped = None
    if softcap:
        capped = torch.tanh(scores / softcap)
        scores = capped * softcap
    if bias is not None:
        whole = added(bias, wide).expand(B, heads, queries, k.shape[2]).unflatten(1, grouped.shape[1:3])
        # Fill once more: autograd makes NaN of a sum of -inf, and 0 of what is filled.
        scores = (scores + whole).masked_fill(whole == -math.inf, -math.inf)
    if seen is not None:
        scores = scores.masked_fill(~seen, -math.inf)
    if lse is not None:
        # A row that sees nothing has no weights.
        base = torch.where(lse == -math.inf, 0.0, lse)
        return torch.exp(scores - base.to(wide).reshape(*scores.shape[:-1], 1)), capped, lse, q.shape
    # Do not subtract the logarithm of the sum, which has no digits left beside a large bias.
    most = scores.detach().amax(-1, keepdim=True) if k.shape[2] else scores.new_zeros(*scores.shape[:-1], 1)
    most = torch.where(most == -math.inf, 0.0, most)
    weights = torch.exp(scores - most)
    total = weights.sum(-1, keepdim=True)
    lse = (most + torch.log(total)).reshape(B, heads, queries)
    return weights / torch.where(total == 0.0, 1.0, total), capped, lse, q.shape
