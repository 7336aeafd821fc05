"""Attention of this rank alone: the library's fastest kernel for operands of one form, with logarithms of sums.

A `Local` computes (out, lse) of queries and any part of the keys, and from the lse and out of *all* keys the exact
gradients of such a part: what lets keys be taken piece by piece.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.backends.cuda import SDPAParams

from ditron_inductor.task import reference_attention
from ditron_inductor.task.all_gather_attention import Mask

aten = torch.ops.aten


@dataclass(frozen=True)
class Seen:
    """What rows see of keys, as `Block` has it; everything without arguments."""

    causal: bool = False
    lower: int | None = None


Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Seen, float], tuple[torch.Tensor, torch.Tensor]]
"""A function of q, k, v, what is seen, and the scale."""
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Backward = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Seen, float], Gradients
]
"""A function of grad_out, q, k, v, out, lse, and the same."""


@dataclass(frozen=True)
class Local:
    """A kernel of the library, by its name. speed: in that of the fastest, on an H200; windowed_speed: with a lower
    bound.
    """

    name: str
    forward: Forward
    backward: Backward
    speed: float
    windowed_speed: float

    def speed_with(self, mask: Mask) -> float:
        """The speed that counts where such a mask is seen."""
        return self.windowed_speed if mask.window else self.speed


def _visible(q: torch.Tensor, k: torch.Tensor, seen: Seen) -> torch.Tensor | None:
    if seen == Seen():
        return None
    found = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
    if seen.causal:
        found = found.tril()
    return found if seen.lower is None else found.triu(seen.lower)


def _window(q: torch.Tensor, k: torch.Tensor, seen: Seen) -> dict[str, int]:
    """For FlashAttention, which counts from the last row and the last key on."""
    if seen.lower is None:
        return {}
    left = k.shape[2] - q.shape[2] - seen.lower
    return {"window_size_left": left, "window_size_right": 0} if seen.causal else {"window_size_left": left}


def _math(
    softcap: float, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: Seen, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = reference_attention.attend(q, k, v, seen=_visible(q, k, seen), scale=scale, softcap=softcap)
    return out.to(q.dtype), lse.float()


def _math_backward(
    softcap: float,
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    seen: Seen,
    scale: float,
) -> Gradients:
    visible = _visible(q, k, seen)
    grads = reference_attention.attend_backward(grad_out, q, k, v, out, lse, seen=visible, scale=scale, softcap=softcap)
    return grads[0].to(q.dtype), grads[1].to(k.dtype), grads[2].to(v.dtype)


def _flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: Seen, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    if seen.lower is not None:
        rows, keys, values = (one.transpose(1, 2) for one in (q, k, v))
        lengths = None, None, q.shape[2], k.shape[2]
        window = _window(q, k, seen)
        banded = aten._flash_attention_forward.default(
            rows, keys, values, *lengths, 0.0, seen.causal, False, scale=scale, **window
        )
        return banded[0].transpose(1, 2), banded[1]
    found = aten._scaled_dot_product_flash_attention.default(q, k, v, 0.0, seen.causal, False, scale=scale)
    return found[0], found[1]


def _flash_backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    seen: Seen,
    scale: float,
) -> Gradients:
    # Without dropout nobody reads the state of the generator.
    state = torch.empty(2, dtype=torch.uint64, device=q.device)
    unused = torch.empty(0, dtype=torch.uint64, device=q.device)
    lengths = None, None, q.shape[2], k.shape[2]
    if seen.lower is not None:
        given = [one.transpose(1, 2) for one in (grad_out, q, k, v, out)]
        window = _window(q, k, seen)
        banded = aten._flash_attention_backward.default(
            *given, lse, *lengths, 0.0, seen.causal, state, unused, scale=scale, **window
        )
        return banded[0].transpose(1, 2), banded[1].transpose(1, 2), banded[2].transpose(1, 2)
    gradients: Gradients = aten._scaled_dot_product_flash_attention_backward.default(
        grad_out, q, k, v, out, lse, *lengths, 0.0, seen.causal, state, unused, scale=scale
    )
    return gradients


def _cudnn(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: Seen, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    found = aten._scaled_dot_product_cudnn_attention.default(q, k, v, None, True, 0.0, seen.causal, False, scale=scale)
    return found[0], found[1].view(q.shape[:-1])


def _cudnn_backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    seen: Seen,
    scale: float,
) -> Gradients:
    state = torch.empty(2, dtype=torch.int64, device=q.device)
    sizes = q.shape[2], k.shape[2]
    # No bias and no lengths: None stands for an undefined tensor.
    gradients: Gradients = aten._scaled_dot_product_cudnn_attention_backward.default(
        grad_out, q, k, v, out, lse.unsqueeze(-1), state, state, None, None, None, *sizes, 0.0, seen.causal, scale=scale
    )
    return gradients


def _beside(plain: Local, windowed: Local) -> Local:
    """`plain`, and `windowed` for what has a lower bound, which `plain` does not know."""

    def forward(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: Seen, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return (plain if seen.lower is None else windowed).forward(q, k, v, seen, scale)

    def backward(
        grad_out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        seen: Seen,
        scale: float,
    ) -> Gradients:
        return (plain if seen.lower is None else windowed).backward(grad_out, q, k, v, out, lse, seen, scale)

    return Local(plain.name, forward, backward, plain.speed, windowed.windowed_speed)


def in_plain_operations(softcap: float) -> Local:
    """With a soft cap on the scores, or 0 for none."""
    forward, backward = functools.partial(_math, softcap), functools.partial(_math_backward, softcap)
    # Every score is written and read again several times.
    return Local("math", forward, backward, 0.1, 0.1)


MATH = in_plain_operations(0.0)
FLASH = Local("flash", _flash, _flash_backward, 0.52, 0.45)
_CUDNN = Local("cudnn", _cudnn, _cudnn_backward, 1.0, 1.0)
CUDNN = _beside(_CUDNN, FLASH)
CUDNN_AND_MATH = _beside(_CUDNN, MATH)


def choose(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softcap: float = 0.0) -> Local:
    """The fastest that can run q [B, Hq, Sq, D] and k, v [B, Hkv, S, D], and what the user has not switched off.

    cuDNN's, where it can, was measured faster than FlashAttention-2 on Hopper at every size. It has no windows as aten
    calls it: what one cuts is FlashAttention's, or else done in plain operations, all scores in memory. So is what has
    a soft cap, which none of these kernels knows.
    """
    if softcap:
        return in_plain_operations(softcap)
    # The library pads other heads before it calls these.
    if not q.is_cuda or q.shape[3] % 8 != 0:
        return MATH
    params = SDPAParams(q, k, v, None, 0.0, False, q.shape[1] != k.shape[1])
    flash = torch.backends.cuda.flash_sdp_enabled() and torch.backends.cuda.can_use_flash_attention(params)
    if torch.backends.cuda.cudnn_sdp_enabled() and torch.backends.cuda.can_use_cudnn_attention(params):
        return CUDNN if flash else CUDNN_AND_MATH
    return FLASH if flash else MATH
