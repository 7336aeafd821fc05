"""The two ops of attention at the Task level: schemas, fake implementations, and the node that a call stands for.

`all_gather_attention(q, k, v, token, ..., bias) -> [out, lse, (gathered_k, gathered_v,) token]`
    q [B, Hq, Sq, D], k and v [B, Hkv, S, D], any strides; out [B, Hq, Sq, D] with the memory of a contiguous
    [B, Sq, Hq, D], lse [B, Hq, Sq] contiguous, fp32; gathered_k, gathered_v [B, Hkv, W*S, D] with the memory of a
    contiguous [B, W*S, Hkv, D], present if and only if return_gathered. bias: broadcastable to [B, Hq, Sq, W*S], of
    bool or floats, present if and only if the mask is `given`. Masks: see task/all_gather_attention.py.
`attention_reduce_scatter(grad_out, q, k, v, out, lse, token, ..., bias) -> (grad_q, grad_k, grad_v, token)`
    its backward, from the gathered k and v [B, Hkv, W*S, D]; grad_q [B, Hq, Sq, D] and this rank's part of the sums
    over the ranks, grad_k and grad_v [B, Hkv, S, D], with the memory of a contiguous [B, S, H, D].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ditron_inductor.task.all_gather_attention import AllGatherAttention, AttentionReduceScatter, Mask
from ditron_inductor.task.policy import Policy
from ditron_inductor.task.schemas import SITE, required_behind_token

BIAS_DTYPES: tuple[torch.dtype, ...] = (torch.bool, torch.bfloat16, torch.float16, torch.float32)
_SCORES = "str mask, int window, int offset, str jumps, float scale, float softcap"


def schemas() -> dict[str, str]:
    """By kind."""
    return {
        AllGatherAttention.kind: (
            f"(Tensor q, Tensor k, Tensor v, Tensor? token, {_SCORES}, bool return_gathered, {SITE}, "
            "Tensor? bias=None) -> Tensor[]"
        ),
        AttentionReduceScatter.kind: (
            "(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? token, "
            f"{_SCORES}, {SITE}, Tensor? bias=None) -> (Tensor, Tensor, Tensor, Tensor)"
        ),
    }


SITE_ARGUMENTS = {kind: required_behind_token(schema) for kind, schema in schemas().items()}
"""How many stand between the token and the bias, which comes last and is left out where there is none."""


def split_bias(kind: str, site: tuple[Any, ...]) -> tuple[tuple[Any, ...], torch.Tensor | None]:
    """(the arguments between token and bias, the bias) of what a call has behind the token."""
    count = SITE_ARGUMENTS[kind]
    return site[:count], site[count] if len(site) > count else None


def sequence_first(like: torch.Tensor, heads: Any, sequence: Any) -> torch.Tensor:
    """A new [B, heads, sequence, D], B and D of `like`, with the memory of a contiguous [B, sequence, heads, D]."""
    return like.new_empty([like.shape[0], sequence, heads, like.shape[3]]).transpose(1, 2)


def fakes(new_token: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Callable[..., object]]:
    """The fake implementations by kind."""

    def all_gather_attention(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, token: torch.Tensor | None, *site: Any
    ) -> list[torch.Tensor]:
        return_gathered, world_size = site[6:8]
        outputs = [sequence_first(q, q.shape[1], q.shape[2]), q.new_empty(q.shape[:-1], dtype=torch.float32)]
        if return_gathered:
            outputs += [sequence_first(one, one.shape[1], world_size * one.shape[2]) for one in (k, v)]
        return [*outputs, new_token(q)]

    def attention_reduce_scatter(*args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        _, q, k, v, *_ = args
        world_size = args[13]
        parts = [sequence_first(one, one.shape[1], one.shape[2] // world_size) for one in (k, v)]
        return sequence_first(q, q.shape[1], q.shape[2]), parts[0], parts[1], new_token(q)

    return {AllGatherAttention.kind: all_gather_attention, AttentionReduceScatter.kind: attention_reduce_scatter}


def node_of(kind: str, value: dict[str, Any], site: Sequence[Any], policy: Policy) -> Any:
    """The node that a call stands for, by the values of its arguments. site: world size, group and name."""
    scale, softcap = value["scale"], value["softcap"]
    assert isinstance(scale, (int, float)) and isinstance(softcap, (int, float)), f"{kind}: {scale!r}, {softcap!r}"
    mask = Mask(str(value["mask"]), int(value["window"]), int(value["offset"]), str(value["jumps"]))
    world_size, group_name, name = site
    common = mask, float(scale), float(softcap), world_size, group_name, name, policy
    if kind == AttentionReduceScatter.kind:
        return AttentionReduceScatter(*common)
    return AllGatherAttention(*common, bool(value["return_gathered"]))
