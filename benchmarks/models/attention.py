"""Attention between the projections of a layer, to the tokens of one rank: what a decoder's layers are built with."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

Core = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Attention itself: q [B, Hq, S, D], k and v [B, Hkv, S, D] of this rank -> [B, Hq, S, D]."""

QUERIES = 256
"""In a block of `plain_attention`."""


def plain_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None,
    first: int | None,
    window: int = 0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(scale * q @ k^T) @ v in plain operations, for q [B, Hq, S, D], k and v [B, Hkv, T, D]: what attention is
    compared with. first: where the first query stands among the keys, of which it sees none behind it; None: every
    query sees all keys. window: how many keys a query sees at most, the last ones; 0 for any number. sinks: a score of
    each head [Hq] that has no value. A block of queries at a time, so that the scores of all of them need not fit into
    memory.
    """
    scale, (heads, length) = scale or q.shape[-1] ** -0.5, (k.shape[1], k.shape[2])
    grouped, found = q.unflatten(1, (heads, -1)), []
    for begin in range(0, q.shape[2], QUERIES):
        block = grouped[:, :, :, begin : begin + QUERIES]
        # Heads that share keys are rows of one product.
        scores = (block.flatten(2, 3) @ k.transpose(-1, -2) * scale).unflatten(2, block.shape[2:4])
        if first is not None:
            last = torch.arange(begin, begin + block.shape[3], device=q.device)[:, None] + first
            keys = torch.arange(length, device=q.device)
            hidden = (keys > last) | (keys <= last - window) if window else keys > last
            scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            sink = sinks.to(scores.dtype).view(1, heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
            scores = torch.cat((scores, sink), -1)
        shares = torch.softmax(scores, -1)[..., :length]
        out = shares.flatten(2, 3) @ v
        found.append(out.unflatten(2, block.shape[2:4]).flatten(1, 2))
    return torch.cat(found, 2)


class AttentionCore(nn.Module):
    """A `Core`. plain: it is computed by `plain_attention`, as in the model that all results are compared with."""

    plain = False


class CausalAttention(AttentionCore):
    """The tokens of this rank are all there are."""

    def __init__(self, scale: float | None) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if self.plain:
            return plain_attention(q, k, v, self.scale, 0)
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=grouped)


class SinkAttention(AttentionCore):
    """Causal attention as GPT-OSS has it: each head has a *sink*, a score without a value, and a layer may have a
    window. Compiled for a GPU it is `flex_attention`, whose result is scaled by the share of the weight that the sinks
    leave it, as `transformers` writes it. A single token, the CPU, and eager mode, which would need memory for all
    scores at once, have plain operations.

    heads: of all ranks. tokens: of a sequence. window: see `plain_attention`.
    """

    def __init__(self, heads: int, tokens: int, window: int, scale: float | None) -> None:
        super().__init__()
        self.scale, self.tokens, self.window = scale, tokens, window
        seen = min(tokens, window or tokens)
        # About what the scores of the gate's inputs add up to: the sinks have a good part of the weight.
        self.sinks = nn.Parameter(torch.full((heads,), 1.5 * math.log(seen)))
        self.mask = self.mask_of(self.sinks.device) if self.sinks.is_cuda and tokens > 1 else None

    def cut(self, mesh: DeviceMesh) -> None:
        """Keeps the sinks of this rank's heads."""
        self.sinks = nn.Parameter(self.sinks.detach().chunk(mesh.size())[mesh.get_rank()].clone())

    def mask_of(self, device: torch.device) -> BlockMask:
        """Which keys each query sees."""
        window = self.window or self.tokens

        def sees(batch: Any, head: Any, query: Any, key: Any) -> Any:
            return (key <= query) & (key > query - window)

        return create_block_mask(sees, None, None, self.tokens, self.tokens, device=device)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if self.plain or self.mask is None or not torch.compiler.is_compiling():
            return plain_attention(q, k, v, self.scale, 0, self.window, self.sinks)
        return self.by_flex(q, k, v, self.mask)

    def by_flex(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: BlockMask) -> torch.Tensor:
        """`forward` by torch's `flex_attention`."""
        asked = AuxRequest(lse=True)
        found: Any = flex_attention(q, k, v, block_mask=mask, scale=self.scale, enable_gqa=True, return_aux=asked)
        out, more = found
        share = torch.sigmoid(more.lse - self.sinks.to(more.lse.dtype)[:, None])
        return (out * share[..., None]).to(q.dtype)
