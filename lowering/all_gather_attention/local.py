"""Attention of this rank alone: the library's fastest kernel for operands of one form, with logarithms of sums.

A `Local` computes (out, lse) of queries and any part of the keys, and from the lse and out of *all* keys the exact
gradients of such a part: what lets keys be taken piece by piece.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.backends.cuda import SDPAParams

from ditron_inductor.task import reference_attention

aten = torch.ops.aten

Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool, float], tuple[torch.Tensor, torch.Tensor]]
"""A function of q, k, v, whether it is causal (square), and the scale."""
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Backward = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, bool, float], Gradients
]
"""A function of grad_out, q, k, v, out, lse, and the same."""


@dataclass(frozen=True)
class Local:
    """A kernel of the library, by its name."""

    name: str
    forward: Forward
    backward: Backward


def _seen(q: torch.Tensor, k: torch.Tensor, causal: bool) -> torch.Tensor | None:
    if not causal:
        return None
    return torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()


def _math(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = reference_attention.attend(q, k, v, seen=_seen(q, k, causal), scale=scale)
    return out.to(q.dtype), lse.float()


def _math_backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    scale: float,
) -> Gradients:
    grads = reference_attention.attend_backward(grad_out, q, k, v, out, lse, seen=_seen(q, k, causal), scale=scale)
    return grads[0].to(q.dtype), grads[1].to(k.dtype), grads[2].to(v.dtype)


def _flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    found = aten._scaled_dot_product_flash_attention.default(q, k, v, 0.0, causal, False, scale=scale)
    return found[0], found[1]


def _flash_backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    scale: float,
) -> Gradients:
    # Without dropout nobody reads the state of the generator.
    state = torch.empty(2, dtype=torch.uint64, device=q.device)
    unused = torch.empty(0, dtype=torch.uint64, device=q.device)
    gradients: Gradients = aten._scaled_dot_product_flash_attention_backward.default(
        grad_out, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, state, unused, scale=scale
    )
    return gradients


def _cudnn(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    found = aten._scaled_dot_product_cudnn_attention.default(q, k, v, None, True, 0.0, causal, False, scale=scale)
    return found[0], found[1].view(q.shape[:-1])


def _cudnn_backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    scale: float,
) -> Gradients:
    state = torch.empty(2, dtype=torch.int64, device=q.device)
    sizes = q.shape[2], k.shape[2]
    # No bias and no lengths: None stands for an undefined tensor.
    gradients: Gradients = aten._scaled_dot_product_cudnn_attention_backward.default(
        grad_out, q, k, v, out, lse.unsqueeze(-1), state, state, None, None, None, *sizes, 0.0, causal, scale=scale
    )
    return gradients


MATH = Local("math", _math, _math_backward)
FLASH = Local("flash", _flash, _flash_backward)
CUDNN = Local("cudnn", _cudnn, _cudnn_backward)


def choose(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Local:
    """The fastest that can run q [B, Hq, Sq, D] and k, v [B, Hkv, S, D], and what the user has not switched off.

    cuDNN's, where it can, was measured faster than FlashAttention-2 on Hopper at every size.
    """
    # The library pads other heads before it calls these.
    if not q.is_cuda or q.shape[3] % 8 != 0:
        return MATH
    params = SDPAParams(q, k, v, None, 0.0, False, q.shape[1] != k.shape[1])
    if torch.backends.cuda.cudnn_sdp_enabled() and torch.backends.cuda.can_use_cudnn_attention(params):
        return CUDNN
    if torch.backends.cuda.flash_sdp_enabled() and torch.backends.cuda.can_use_flash_attention(params):
        return FLASH
    return MATH
