"""Attention of this rank alone: the library's fastest kernel for operands of one form, with logarithms of sums.

A `Local` computes (out, lse) of queries and any part of the keys, and from the lse and out of *all* keys the exact
gradients of such a part: what lets keys be taken piece by piece.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch.backends.cuda import SDPAParams

from ditron_inductor.lowering.host.launch import round_up
from ditron_inductor.task import reference_attention
from ditron_inductor.task.attention_masks import Mask

aten = torch.ops.aten


BIAS_ALIGNMENT = 8
"""Elements: what the library's kernels want of a bias' strides, and as torch pads one for them."""
CUDNN_HIDES_BY_INF = 91900
"""The oldest version of cuDNN seen to make 0 and -inf of rows that a bias of -inf hides, wherever their keys are."""
CUDNN_HIDDEN = {torch.float16: torch.finfo(torch.float16).min, torch.bfloat16: -1e30}
"""By dtype: what is not seen gets in the place of -inf for others, some of which make NaN of it. Beside a score that is
larger by a thousand it counts for nothing.
"""
REACH = 1e30
"""A row whose largest bias lies so far below 0 is hidden: scores do not show beside it. cuDNN's kernel sees -inf there,
as its logarithms are of base 2, the others see all keys alike.
"""
ANCHORED = 1024.0
"""Biases from which on logarithms of sums lose digits that show."""
FAR = 1e8
"""From there on scores beside a bias have no digits in fp32: a row stays what it is for the kernel."""
LOWEST = {torch.float16: -6.0e4, torch.float32: -1.0e30}
"""Less than the largest bias of a row by so much, a key counts for nothing, by the range of the dtypes."""
SUMS_ALIGNMENT = 32
"""Rows: what the memory-efficient kernel fills its logarithms of sums up to."""


@dataclass(frozen=True)
class ShownBlock:
    """What rows see of keys, as `Block` has it; everything without arguments. bias: None, or the part for these rows
    and keys of one that can be broadcast to the scores, of bool or floats.
    """

    causal: bool = False
    lower: int | None = None
    bias: torch.Tensor | None = field(default=None, compare=False)


Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, ShownBlock, float], tuple[torch.Tensor, torch.Tensor]]
"""A function of q, k, v, what is seen, and the scale."""
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Given = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""grad_out, q, k, v, out, lse: keys and values of any ranks."""
Backward = Callable[[Given, ShownBlock, float], Gradients]


Anchored = tuple[torch.Tensor | None, torch.Tensor | None]
"""A bias, and how much of it is to be added to logarithms of sums beside it, [.., Sq]."""


@dataclass(frozen=True)
class Local:
    """A kernel of the library, by its name. speed: in that of the fastest, on an H200; windowed_speed: with a lower
    bound. hides: whether a bias of less than -REACH hides a row like -inf.
    """

    name: str
    forward: Forward
    backward: Backward
    speed: float
    windowed_speed: float
    hides: bool = False

    def speed_with(self, mask: Mask) -> float:
        """The speed that counts where such a mask is seen."""
        return self.windowed_speed if mask.window else self.speed

    def anchored(self, bias: torch.Tensor | None, dtype: torch.dtype, *, whole: bool = False) -> Anchored:
        """See `anchored`; what is no bias of floats stays as it is, with no anchors.

        whole: for one call with all keys, as torch's own is. Then it is done only where the kernel gets the bias in
        another dtype, which may have another range, and on the CPU, where a time does not count, but a digit does.
        """
        if bias is None or bias.dtype == torch.bool or (whole and bias.is_cuda and bias.dtype == dtype):
            return bias, None
        return anchored(bias, dtype, self.hides)


def _visible(q: torch.Tensor, k: torch.Tensor, seen: ShownBlock) -> torch.Tensor | None:
    if seen == ShownBlock():
        return None
    found = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
    if seen.causal:
        found = found.tril()
    return found if seen.lower is None else found.triu(seen.lower)


def _window(q: torch.Tensor, k: torch.Tensor, seen: ShownBlock) -> dict[str, int]:
    """For FlashAttention, which counts from the last row and the last key on."""
    if seen.lower is None:
        return {}
    left = k.shape[2] - q.shape[2] - seen.lower
    return {"window_size_left": left, "window_size_right": 0} if seen.causal else {"window_size_left": left}


def _math(
    softcap: float, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: ShownBlock, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    visible = _visible(q, k, seen)
    out, lse = reference_attention.attend(q, k, v, seen=visible, scale=scale, softcap=softcap, bias=seen.bias)
    return out.to(q.dtype), lse.float()


def _math_backward(softcap: float, given: Given, seen: ShownBlock, scale: float) -> Gradients:
    _, q, k, v, *_ = given
    visible = _visible(q, k, seen)
    grads = reference_attention.attend_backward(*given, seen=visible, scale=scale, softcap=softcap, bias=seen.bias)
    return grads[0].to(q.dtype), grads[1].to(k.dtype), grads[2].to(v.dtype)


def _flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: ShownBlock, scale: float
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


def _flash_backward(given: Given, seen: ShownBlock, scale: float) -> Gradients:
    grad_out, q, k, v, out, lse = given
    # Without dropout nobody reads the state of the generator.
    state = torch.empty(2, dtype=torch.uint64, device=q.device)
    unused = torch.empty(0, dtype=torch.uint64, device=q.device)
    lengths = None, None, q.shape[2], k.shape[2]
    if seen.lower is not None:
        operands = [one.transpose(1, 2) for one in (grad_out, q, k, v, out)]
        window = _window(q, k, seen)
        banded = aten._flash_attention_backward.default(
            *operands, lse, *lengths, 0.0, seen.causal, state, unused, scale=scale, **window
        )
        return banded[0].transpose(1, 2), banded[1].transpose(1, 2), banded[2].transpose(1, 2)
    gradients: Gradients = aten._scaled_dot_product_flash_attention_backward.default(
        grad_out, q, k, v, out, lse, *lengths, 0.0, seen.causal, state, unused, scale=scale
    )
    return gradients


def anchored(bias: torch.Tensor, dtype: torch.dtype, hides: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """(a bias of floats less the largest one of each row, where that is far from 0; these, fp32, [..] of [.., keys]):
    attention is the same, and its logarithms of sums are so much less.

    Where a mask hides all keys of a row by a large number the logarithm would have no digits left for the sum, by which
    parts are merged. What hides beside other keys becomes -inf: of that, and not of numbers at the end of a dtype's
    range, all that follows takes care. A row below -FAR stays as it is, or becomes -inf if it is below -REACH and the
    kernel `hides` it. dtype: of the queries, in which kernels may get the bias.
    """
    if bias.numel() == 0:
        return bias, torch.zeros((), device=bias.device)
    bias = bias.view(1) if bias.ndim == 0 else bias
    most = bias.amax(-1, keepdim=True)
    base = torch.where(most.isfinite() & (most.abs() >= ANCHORED) & (most > -FAR), most, 0.0)
    lowest = LOWEST[torch.float16 if torch.float16 in (dtype, bias.dtype) else torch.float32]
    near = torch.nn.functional.threshold(bias - base, lowest, -math.inf)
    if not hides or lowest > -REACH:
        # In a dtype that has both of their least numbers.
        kept = bias.to(torch.promote_types(bias.dtype, dtype)).clamp_min(torch.finfo(dtype).min)
        stays = (most <= -FAR) & (most > -REACH) if hides else most <= -FAR
        near = torch.where(stays & bias.isfinite(), kept, near)
    return near, base.squeeze(-1).float()


def _laid_out(bias: torch.Tensor, q: torch.Tensor, keys: int, hidden: float) -> torch.Tensor:
    """A bias as a view [B, Hq, Sq, keys] of memory that the library's kernels take, in the dtype of q: of bool, and
    where it is -inf, with `hidden` for what is not seen.
    """
    while bias.ndim < 4:
        bias = bias.unsqueeze(0)
    usable = bias.dtype == q.dtype and hidden == -math.inf and bias.shape[3] == keys
    if not usable or not _is_aligned(bias):
        # What is repeated stays one.
        given = bias
        for dim, stride in enumerate(bias.stride()[:3]):
            given = given.narrow(dim, 0, 1) if stride == 0 and bias.shape[dim] else given
        padded = q.new_empty(*given.shape[:3], round_up(keys, BIAS_ALIGNMENT)).narrow(3, 0, keys)
        if bias.dtype == torch.bool:
            padded.zero_().masked_fill_(~given, hidden)
        else:
            padded.copy_(given)
            if hidden != -math.inf:
                padded.masked_fill_(given == -math.inf, hidden)
        bias = padded
    return bias.expand(*q.shape[:3], keys)


def _is_aligned(bias: torch.Tensor) -> bool:
    strides = all(stride % BIAS_ALIGNMENT == 0 for stride in bias.stride()[:3])
    return strides and bias.stride(3) == 1 and bias.data_ptr() % (BIAS_ALIGNMENT * bias.element_size()) == 0


def _unseen(bias: torch.Tensor) -> torch.Tensor:
    """Which rows a bias hides all keys from, [.., Sq], broadcastable as it is."""
    return ~bias.any(-1) if bias.dtype == torch.bool else bias.amax(-1) == -math.inf


def _hidden_rows(out: torch.Tensor, lse: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) with 0 and -inf in the rows that see nothing, of which kernels make what they like."""
    unseen = _unseen(bias)
    return out.masked_fill_(unseen.unsqueeze(-1), 0.0), lse.masked_fill(unseen, -math.inf)


def _dividing(lse: torch.Tensor) -> torch.Tensor:
    """Logarithms for the library's backward: of rows that see nothing inf, by which all weights are 0, also where the
    forward saw -inf in what a bias has there.
    """
    return lse.masked_fill(lse == -math.inf, math.inf)


def _repeated(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Keys or values with every head as often as queries want it: what the memory-efficient kernel takes."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _together(grad: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The gradient of repeated heads as that of the heads themselves."""
    heads = like.shape[1]
    return grad if grad.shape[1] == heads else grad.unflatten(1, (heads, -1)).sum(2)


def _efficient(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: ShownBlock, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    assert seen.bias is not None, "only what has a bias comes here"
    bias = _laid_out(seen.bias, q, k.shape[2], -math.inf)
    keys, values = _repeated(k, q.shape[1]), _repeated(v, q.shape[1])
    found = aten._scaled_dot_product_efficient_attention.default(q, keys, values, bias, True, 0.0, False, scale=scale)
    return _hidden_rows(found[0], found[1].narrow(2, 0, q.shape[2]), seen.bias)


def _efficient_backward(given: Given, seen: ShownBlock, scale: float) -> Gradients:
    grad_out, q, k, v, out, lse = given
    assert seen.bias is not None, "only what has a bias comes here"
    bias = _laid_out(seen.bias, q, k.shape[2], -math.inf)
    keys, values = _repeated(k, q.shape[1]), _repeated(v, q.shape[1])
    rows = q.shape[2]
    sums = torch.nn.functional.pad(_dividing(lse), (0, round_up(rows, SUMS_ALIGNMENT) - rows), value=math.inf)
    # Without dropout nobody reads the state of the generator.
    state = torch.empty((), dtype=torch.int64, device=q.device)
    wanted = [True, True, True, False]
    found = aten._scaled_dot_product_efficient_attention_backward.default(
        grad_out, q, keys, values, bias, out, sums, state, state, 0.0, wanted, False, scale=scale
    )
    return found[0], _together(found[1], k), _together(found[2], v)


def _cudnn(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: ShownBlock, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    bias = _bias_for_cudnn(q, k, seen)
    found = aten._scaled_dot_product_cudnn_attention.default(q, k, v, bias, True, 0.0, seen.causal, False, scale=scale)
    out, lse = found[0], found[1].view(q.shape[:-1])
    return (out, lse) if seen.bias is None or cudnn_hides_by_inf() else _hidden_rows(out, lse, seen.bias)


def _cudnn_backward(given: Given, seen: ShownBlock, scale: float) -> Gradients:
    grad_out, q, k, v, out, lse = given
    bias, sums = _bias_for_cudnn(q, k, seen), lse if seen.bias is None else _dividing(lse)
    state = torch.empty(2, dtype=torch.int64, device=q.device)
    sizes, causal = (q.shape[2], k.shape[2]), seen.causal
    # No lengths: None stands for an undefined tensor.
    gradients: Gradients = aten._scaled_dot_product_cudnn_attention_backward.default(
        grad_out, q, k, v, out, sums.unsqueeze(-1), state, state, bias, None, None, *sizes, 0.0, causal, scale=scale
    )
    return gradients


@functools.cache
def cudnn_hides_by_inf() -> bool:
    """Whether cuDNN's kernel takes -inf in a bias as it is."""
    version = torch.backends.cudnn.version()
    return version is not None and version >= CUDNN_HIDES_BY_INF


def _bias_for_cudnn(q: torch.Tensor, k: torch.Tensor, seen: ShownBlock) -> torch.Tensor | None:
    if seen.bias is None:
        return None
    return _laid_out(seen.bias, q, k.shape[2], -math.inf if cudnn_hides_by_inf() else CUDNN_HIDDEN[q.dtype])


def _beside(plain: Local, windowed: Local) -> Local:
    """`plain`, and `windowed` for what has a lower bound, which `plain` does not know."""

    def forward(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: ShownBlock, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return (plain if seen.lower is None else windowed).forward(q, k, v, seen, scale)

    def backward(given: Given, seen: ShownBlock, scale: float) -> Gradients:
        return (plain if seen.lower is None else windowed).backward(given, seen, scale)

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
# 4096 and 8192 queries of 32 heads of 128, twice as many keys: forward 0.52 to 0.64 and 0.19, backward 0.50 to 0.66
# and 0.21.
CUDNN_BIASED = Local("cudnn with a bias", _cudnn, _cudnn_backward, 0.54, 0.54, hides=True)
EFFICIENT = Local("memory-efficient", _efficient, _efficient_backward, 0.19, 0.19)


def choose(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softcap: float = 0.0, *, biased: bool = False) -> Local:
    """The fastest that can run q [B, Hq, Sq, D] and k, v [B, Hkv, S, D], and what the user has not switched off.
    biased: with a bias.

    cuDNN's, where it can, was measured faster than FlashAttention-2 on Hopper at every size. It has no windows as aten
    calls it: what one cuts is FlashAttention's, or else done in plain operations, all scores in memory. So is what has
    a soft cap, which none of these kernels knows.

    Its speed is the same on all ranks, however many queries each of them has.
    """
    if softcap:
        return in_plain_operations(softcap)
    if q.shape[2] == 0:
        # None of the kernels takes these, and none is called. But the plan is that of ranks that have queries.
        row = q.new_empty(q.shape[3]).expand(*q.shape[:2], 1, q.shape[3])
        others = choose(row, k, v, biased=biased)
        return replace(MATH, speed=others.speed, windowed_speed=others.windowed_speed)
    # The library pads other heads before it calls these.
    if not q.is_cuda or q.shape[3] % 8 != 0:
        return MATH
    if biased:
        return _choose_biased(q, k, v)
    params = SDPAParams(q, k, v, None, 0.0, False, q.shape[1] != k.shape[1])
    flash = torch.backends.cuda.flash_sdp_enabled() and torch.backends.cuda.can_use_flash_attention(params)
    if torch.backends.cuda.cudnn_sdp_enabled() and torch.backends.cuda.can_use_cudnn_attention(params):
        return CUDNN if flash else CUDNN_AND_MATH
    return FLASH if flash else MATH


def _choose_biased(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Local:
    """Of those that add a bias. From operands that all ranks have alike, and not from how a rank's bias lies in memory:
    the plan follows from the kernel's speed.
    """
    like = q.new_empty(k.shape[2]).expand(*q.shape[:3], k.shape[2])
    params = SDPAParams(q, k, v, like, 0.0, False, q.shape[1] != k.shape[1])
    if torch.backends.cuda.cudnn_sdp_enabled() and torch.backends.cuda.can_use_cudnn_attention(params):
        return CUDNN_BIASED
    keys, values = (one[:, :1].expand(-1, q.shape[1], -1, -1) for one in (k, v))
    params = SDPAParams(q, keys, values, like, 0.0, False, False)
    if torch.backends.cuda.mem_efficient_sdp_enabled() and torch.backends.cuda.can_use_efficient_attention(params):
        return EFFICIENT
    return MATH
