"""Attention in `python -m benchmarks.host`: one op of each node kind, at sizes whose kernels take hardly any time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ditron_inductor.task.nodes import ATTENTION_KINDS, FlashDecode

KINDS: tuple[str, ...] = (*ATTENTION_KINDS, FlashDecode.kind)
STRATEGIES = ("tile", "chunked", "library")
KEYS = 128
"""Of a rank."""
HEADS, KEY_HEADS, HEAD_DIM = 4, 2, 64

Call = Callable[[], object]


@dataclass(frozen=True)
class AttentionBench:
    """One op: what it takes before the token, its arguments from there to those of the site, and its group. baselines:
    what a program calls without it.
    """

    kind: str
    operands: tuple[Any, ...]
    arguments: tuple[Any, ...]
    group: tuple[int, str]
    limits: tuple[int, float]
    baselines: dict[str, Call] = field(default_factory=dict)

    def op(self, strategy: str) -> Call:
        """The op with a forced strategy, as a model calls it."""
        import torch

        op = getattr(torch.ops.ditron, self.kind).default
        site = (*self.group, f"host/0:{self.kind}", strategy, *self.limits)
        return lambda: op(*self.operands, None, *self.arguments, *site)


def attention_benches(device: Any, rank: int, world_size: int, limits: tuple[int, float]) -> list[AttentionBench]:
    """The ops, one sequence, causal where there is a mask. limits: of the workspace, and of a wait in seconds."""
    import torch
    import torch.distributed as dist

    world = dist.group.WORLD
    assert world is not None
    torch.manual_seed(rank)
    group, scale = (world_size, world.group_name), HEAD_DIM**-0.5

    def draw(heads: int, length: int = KEYS) -> torch.Tensor:
        """[1, heads, length, HEAD_DIM], as a projection's output lies."""
        return torch.randn(1, length, heads, HEAD_DIM, device=device).bfloat16().transpose(1, 2)

    q, k, v, grad_out, out = draw(HEADS), draw(KEY_HEADS), draw(KEY_HEADS), draw(HEADS), draw(HEADS)
    keys, values = (draw(KEY_HEADS, world_size * KEYS) for _ in range(2))
    lse = torch.zeros(1, HEADS, KEYS, device=device)
    rows = torch.randn(1, HEADS, HEAD_DIM, device=device).bfloat16()
    cache = k.transpose(1, 2), v.transpose(1, 2)
    lengths = torch.full([1], KEYS, dtype=torch.int32, device=device)

    def gathered_attention() -> torch.Tensor:
        gathered = [one.new_empty(world_size * KEYS, KEY_HEADS, HEAD_DIM) for one in cache]
        for whole, own in zip(gathered, cache, strict=True):
            dist.all_gather_into_tensor(whole, own[0])
        whole_k, whole_v = (one[None].transpose(1, 2) for one in gathered)
        return torch.nn.functional.scaled_dot_product_attention(q, whole_k, whole_v, enable_gqa=True)

    forward, backward, decode = KINDS
    mask = "causal_offset", 0, 0, ""
    return [
        AttentionBench(forward, (q, k, v), (*mask, scale, 0.0, False), group, limits, {"library": gathered_attention}),
        AttentionBench(backward, (grad_out, q, keys, values, out, lse), (*mask, scale, 0.0), group, limits),
        AttentionBench(decode, (rows, *cache, lengths, None), (scale, 0.0), group, limits),
    ]
