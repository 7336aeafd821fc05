"""Generation with a KV cache that is sharded over the ranks along the sequence: a layer of attention, in plain torch.

Token t of every sequence lies in the cache of rank t % W. All ranks compute the same queries, keys and values; the
owner keeps the last two. With one rank it is the loop without sharding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(q [B, Hq, D], keys and values [B, S, Hkv, D], lengths [B] int32) -> [B, Hq, D]."""


def plain_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor, first: int = 0
) -> torch.Tensor:
    """Attention over all ranks' tokens in functional collectives, as one writes it; NaN where a rank has no tokens.
    first: the place of this rank's first token, if the lengths count the tokens of all ranks.
    """
    B, Hq, D = q.shape
    Hkv = k.shape[2]
    scores = torch.einsum("bhgd,bshd->bhgs", q.view(B, Hkv, Hq // Hkv, D), k) / math.sqrt(D)
    there = torch.arange(first, first + k.shape[1], device=k.device) < lengths[:, None]
    scores = scores.masked_fill(~there[:, None, None], -math.inf)
    o = torch.einsum("bhgs,bshd->bhgd", torch.softmax(scores, -1), v)
    group = dist.group.WORLD
    assert group is not None
    os = functional.all_gather_tensor(o, 0, group).view(group.size(), *o.shape)
    lses = functional.all_gather_tensor(torch.logsumexp(scores, -1), 0, group).view(group.size(), *o.shape[:-1])
    return (torch.softmax(lses, 0)[..., None] * os).sum(0).view(q.shape)


def torch_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention over all ranks' tokens by torch's op for heads that share keys: q [B, Hq, D], caches [B, Hkv, S, D]."""
    aten, rows = torch.ops.aten, q.unsqueeze(2)
    if q.is_cuda:
        o, lse = aten._scaled_dot_product_cudnn_attention(rows, k, v, None, True)[:2]
    else:
        o, lse = aten._scaled_dot_product_flash_attention_for_cpu(rows, k, v)[:2]
    part = torch.cat([o[:, :, 0], lse.view(*q.shape[:2], 1)], -1)
    group = dist.group.WORLD
    assert group is not None
    parts = functional.all_gather_tensor(part, 0, group).view(group.size(), *part.shape)
    weights = torch.softmax(parts[..., -1], 0)
    return (weights[..., None] * parts[..., :-1]).sum(0).to(q.dtype)


@dataclass(frozen=True)
class Layer:
    """Weights of embedding, attention and head, the same on all ranks."""

    embedding: torch.Tensor
    project: torch.Tensor
    out: torch.Tensor
    heads: int
    kv_heads: int

    @staticmethod
    def random(vocabulary: int, width: int, heads: int, kv_heads: int, head_dim: int, device: torch.device) -> Layer:
        generator = torch.Generator().manual_seed(7)

        def draw(*shape: int) -> torch.Tensor:
            return (torch.randn(shape, generator=generator) / math.sqrt(shape[0])).to(device)

        embedding = draw(vocabulary, width) * math.sqrt(vocabulary)
        return Layer(
            embedding, draw(width, (heads + 2 * kv_heads) * head_dim), draw(heads * head_dim, width), heads, kv_heads
        )

    def split(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query [B, Hq, D], key and value [B, Hkv, D] of the tokens [B]."""
        projected = (self.embedding[tokens] @ self.project).unflatten(-1, (self.heads + 2 * self.kv_heads, -1))
        q, k, v = projected.split([self.heads, self.kv_heads, self.kv_heads], 1)
        return q.contiguous(), k, v

    def next_tokens(self, attended: torch.Tensor) -> torch.Tensor:
        """[B], of the attention [B, Hq, D]."""
        return (attended.flatten(1) @ self.out @ self.embedding.t()).argmax(-1)


def generate(layer: Layer, first: torch.Tensor, steps: int, rank: int, world_size: int, attend: Attend) -> torch.Tensor:
    """The tokens [B, steps] behind `first` [B]. rank 0, world_size 1: with the whole cache here."""
    tokens, found = first, []
    capacity = math.ceil(steps / world_size)
    keys, values = (torch.zeros(len(first), capacity, *x.shape[1:], device=x.device) for x in layer.split(first)[1:])
    lengths = torch.zeros(len(first), dtype=torch.int32, device=first.device)
    for step in range(steps):
        q, k, v = layer.split(tokens)
        if step % world_size == rank:
            keys[:, step // world_size], values[:, step // world_size] = k, v
            lengths += 1
        tokens = layer.next_tokens(attend(q, keys, values, lengths))
        found.append(tokens)
    return torch.stack(found, 1)
