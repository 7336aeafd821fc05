"""Attention in `python -m benchmarks.host`: one op of each node kind, at sizes whose kernels take hardly any time."""

from __future__ import annotations

from typing import Any

from benchmarks.host_calls import Bench, fields_of_site
from ditron_inductor.task.attention_masks import Mask
from ditron_inductor.task.nodes import ATTENTION_KINDS, AllGatherAttention, AttentionReduceScatter, FlashDecode

KINDS: tuple[str, ...] = (*ATTENTION_KINDS, FlashDecode.kind)
STRATEGIES = ("tile", "chunked", "library")
KEYS = 128
"""Of a rank."""
HEADS, KEY_HEADS, HEAD_DIM = 4, 2, 64


def attention_benches(device: Any, rank: int, world_size: int, limits: tuple[int, float]) -> list[Bench]:
    """The ops, one sequence, causal where there is a mask. limits: of the workspace, and of a wait in seconds."""
    import torch
    import torch.distributed as dist

    world = dist.group.WORLD
    assert world is not None
    torch.manual_seed(rank)
    scale = HEAD_DIM**-0.5

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

    def site(kind: str) -> dict[str, Any]:
        return fields_of_site(kind, world_size, world.group_name, limits)

    mask = Mask("causal_offset")
    forward = AllGatherAttention(mask, scale, 0.0, **site(AllGatherAttention.kind))
    backward = AttentionReduceScatter(mask, scale, 0.0, **site(AttentionReduceScatter.kind))
    decode = FlashDecode(scale, 0.0, **site(FlashDecode.kind))
    of_backward = {"grad_out": grad_out, "q": q, "k": keys, "v": values, "out": out, "lse": lse}
    return [
        Bench(forward, {"q": q, "k": k, "v": v}, {"library": gathered_attention}),
        Bench(backward, of_backward),
        Bench(decode, {"q": rows, "k": cache[0], "v": cache[1], "lengths": lengths}),
    ]
