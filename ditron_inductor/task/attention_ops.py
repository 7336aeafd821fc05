"""The two ops of attention at the Task level: what they take and return, and their fake implementations.

`all_gather_attention: q, k, v, (bias) -> out, lse, (gathered_k, gathered_v,) token`
    q [B, Hq, Sq, D], k and v [B, Hkv, S, D], any strides; out [B, Hq, Sq, D] with the memory of a contiguous
    [B, Sq, Hq, D], lse [B, Hq, Sq] contiguous, fp32; gathered_k, gathered_v [B, Hkv, W*S, D] with the memory of a
    contiguous [B, W*S, Hkv, D], present if and only if return_gathered. bias: broadcastable to [B, Hq, Sq, W*S], of
    bool or floats, present if and only if the mask is `given`. Masks: see task/all_gather_attention.py.
`attention_reduce_scatter: grad_out, q, k, v, out, lse, (bias) -> grad_q, grad_k, grad_v, token`
    its backward, from the gathered k and v [B, Hkv, W*S, D]; grad_q [B, Hq, Sq, D] and this rank's part of the sums
    over the ranks, grad_k and grad_v [B, Hkv, S, D], with the memory of a contiguous [B, S, H, D].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ditron_inductor.task.all_gather_attention import AllGatherAttention, AttentionReduceScatter
from ditron_inductor.task.torch_dtypes import ACTIVATION_DTYPES

BIAS_DTYPES: tuple[torch.dtype, ...] = (torch.bool, *ACTIVATION_DTYPES)


def sequence_first(like: torch.Tensor, heads: Any, sequence: Any) -> torch.Tensor:
    """A new [B, heads, sequence, D], B and D of `like`, with the memory of a contiguous [B, sequence, heads, D]."""
    return like.new_empty([like.shape[0], sequence, heads, like.shape[3]]).transpose(1, 2)


def _all_gather_attention(
    node: AllGatherAttention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **others: Any
) -> list[torch.Tensor]:
    outputs = [sequence_first(q, q.shape[1], q.shape[2]), q.new_empty(q.shape[:-1], dtype=torch.float32)]
    if node.return_gathered:
        outputs += [sequence_first(one, one.shape[1], node.world_size * one.shape[2]) for one in (k, v)]
    return outputs


def _attention_reduce_scatter(
    node: AttentionReduceScatter, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **others: Any
) -> list[torch.Tensor]:
    parts = [sequence_first(one, one.shape[1], one.shape[2] // node.world_size) for one in (k, v)]
    return [sequence_first(q, q.shape[1], q.shape[2]), *parts]


OUTPUTS: dict[str, Callable[..., list[torch.Tensor]]] = {
    AllGatherAttention.kind: _all_gather_attention,
    AttentionReduceScatter.kind: _attention_reduce_scatter,
}
"""What the nodes return but for the token, as fake tensors; see ops.py."""
