"""flash_decode: its operands, and what it computes, in plain collectives.

`flash_decode: q, k, v, lengths, (block_table) -> out, token`
    q [B, Hq, D], the same on all ranks; out [B, Hq, D] contiguous, of its dtype, bit-identical on every rank.
    k, v: this rank's cache, of the dtype of q. Without a block table [B, S, Hkv, D], in any strides (a cache [B, Hkv,
    S, D] comes transposed); with one [blocks, tokens, Hkv, D], where block_table[b, i] (int32 [B, most blocks]) says
    which block has the i-th run of `tokens` tokens of sequence b. Hq is a multiple of Hkv; head h of q attends to head
    h // (Hq / Hkv).
    lengths: int32 [B], how many tokens this rank holds of every sequence, 0 to S. They are read when the kernel runs;
    what lies behind them in the cache is never used.
    A sequence without tokens on any rank has an output of zeros.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ditron_inductor.errors import InvalidOperands
from ditron_inductor.task.watch import communicate

OP = "flash_decode"


def check_operands(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor, block_table: torch.Tensor | None
) -> None:
    """Checks the operands. Raises InvalidOperands, which names the tensor that does not fit."""
    _check(q.dim() == 3, "q", q, "[B, Hq, D]")
    B, Hq, D = q.shape
    expected = f"{'[B' if block_table is None else '[blocks'}, tokens, Hkv, D] with D = {D}"
    for name, cache in (("k_cache", k), ("v_cache", v)):
        _check(cache.dim() == 4 and cache.shape[3] == D, name, cache, expected)
        _check(cache.dtype == q.dtype, name, cache, f"of the dtype of q, {q.dtype}")
        _check(cache.device == q.device, name, cache, f"on the device of q, {q.device}")
    _check(v.shape == k.shape, "v_cache", v, f"of the shape of k_cache, {list(k.shape)}")
    Hkv = k.shape[2]
    _check(Hkv > 0 and Hq % Hkv == 0, "q", q, f"with a number of heads that is a multiple of Hkv = {Hkv}")
    _check(lengths.shape == (B,) and lengths.dtype == torch.int32, "lengths", lengths, f"int32 [{B}]")
    _check(lengths.device == q.device, "lengths", lengths, f"on the device of q, {q.device}")
    if block_table is None:
        _check(k.shape[0] == B, "k_cache", k, f"of B = {B} sequences, or blocks with a block_table")
        return
    fits = block_table.dim() == 2 and block_table.shape[0] == B and block_table.dtype == torch.int32
    _check(fits, "block_table", block_table, f"int32 [{B}, most blocks]")
    _check(block_table.device == q.device, "block_table", block_table, f"on the device of q, {q.device}")


def _check(holds: bool, name: str, x: torch.Tensor, expected: str) -> None:
    if not holds:
        raise InvalidOperands(op=OP, tensor=name, found=f"{list(x.shape)} {x.dtype} on {x.device}", expected=expected)


def local_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: torch.Tensor,
    block_table: torch.Tensor | None = None,
    *,
    scale: float,
    softcap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns this rank's part: o [B, Hq, D] and the natural log-sum-exp lse [B, Hq], in fp32 or the wider dtype of q.
    Without tokens they are 0 and -inf. It uses torch alone, and copies the cache.
    """
    B, Hq, D = q.shape
    if block_table is not None:
        tokens = k.shape[1] * block_table.shape[1]
        used = torch.arange(tokens, device=q.device).view(1, -1, k.shape[1])[..., 0] < lengths[:, None]
        # Behind a sequence's blocks a table may hold any numbers.
        blocks = torch.where(used, block_table, 0).long()
        k, v = (cache[blocks].reshape(B, tokens, *cache.shape[2:]) for cache in (k, v))
    dtype = torch.promote_types(q.dtype, torch.float32)
    group = Hq // k.shape[2]
    there = torch.arange(k.shape[1], device=q.device) < lengths[:, None]
    keys, values = (torch.where(there[:, :, None, None], cache, 0).to(dtype) for cache in (k, v))
    queries = q.to(dtype).view(B, -1, group, D)
    scores = torch.einsum("bhgd,bshd->bhgs", queries, keys) * scale
    if softcap > 0.0:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~there[:, None, None, :], -math.inf)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - torch.where(lse == -math.inf, 0.0, lse)[..., None])
    return torch.einsum("bhgs,bshd->bhgd", weights, values).reshape(B, Hq, D), lse.reshape(B, Hq)


def merge(os: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the attention [B, Hq, D] over the tokens of all parts, added up in order; 0 without tokens."""
    most = torch.stack(list(lses)).amax(0)
    known = torch.where(most == -math.inf, 0.0, most)
    total = torch.zeros_like(most)
    acc = torch.zeros_like(os[0])
    for o, lse in zip(os, lses, strict=True):
        weight = torch.exp(lse - known)
        total = total + weight
        acc = acc + weight[..., None] * o
    return torch.where((total != 0)[..., None], acc / torch.where(total != 0, total, 1.0)[..., None], 0.0)


def flash_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: torch.Tensor,
    block_table: torch.Tensor | None = None,
    *,
    scale: float,
    softcap: float = 0.0,
    world_size: int,
    group_name: str,
) -> torch.Tensor:
    """Returns the attention [B, Hq, D], computed by plain collectives (see the module)."""
    o, lse = local_attention(q, k, v, lengths, block_table, scale=scale, softcap=softcap)
    part = torch.cat([o.reshape(-1), lse.reshape(-1)])
    parts = part.new_empty(world_size, part.numel())
    group = distributed_c10d._resolve_process_group(group_name)  # type: ignore[arg-type]
    communicate(dist.all_gather_into_tensor, parts.view(-1), part, group=group)
    os = [buffer[: o.numel()].view(o.shape) for buffer in parts]
    lses = [buffer[o.numel() :].view(lse.shape) for buffer in parts]
    return merge(os, lses).to(q.dtype)
