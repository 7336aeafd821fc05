"""Attention within one rank, by the library's fastest kernel for operands of one form.

A `Local` computes (out, lse) of queries and any part of the keys; lse are the logarithms of the sums of the softmax.
From out and lse of *all* keys it computes the exact gradients for any part of the keys. So keys can be taken part by
part.
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
"""The strides of a bias, in elements, have to be multiples of this for the library's kernels. Torch pads to it too."""
CUDNN_HIDES_BY_INF = 91900
"""The oldest version of cuDNN that was seen to return 0 and -inf for rows that a bias of -inf hides, for any keys."""
CUDNN_HIDDEN = {torch.float16: torch.finfo(torch.float16).min, torch.bfloat16: -1e30}
"""The bias, by dtype, that replaces -inf for older versions of cuDNN, some of which return NaN for -inf. Next to a
score that is larger by a thousand it has no effect.
"""
REACH = 1e30
"""A row whose largest bias is less than -REACH is hidden, because scores have no effect next to it. cuDNN's kernel
takes it for -inf, since its logarithms are of base 2. To the other kernels all keys of such a row are alike.
"""
ANCHORED = 1024.0
"""With biases of at least this size, the logarithms of sums lose digits that matter."""
FAR = 1e8
"""With biases of at least this size, scores have no digits left in fp32, so such a row is not changed."""
LOWEST = {torch.float16: -6.0e4, torch.float32: -1.0e30}
"""A key whose bias is less than the largest one of its row by this much has no effect, by the range of the dtype."""
SUMS_ALIGNMENT = 32
"""The memory-efficient kernel pads its logarithms of sums to a multiple of this number of rows."""


@dataclass(frozen=True)
class ShownBlock:
    """What rows see of keys; for `causal` and `lower` see `Block`. Without arguments they see everything. bias: None,
    or the part of a bias, of bool or floats, for these rows and keys.
    """

    causal: bool = False
    lower: int | None = None
    bias: torch.Tensor | None = field(default=None, compare=False)


Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, ShownBlock, float], tuple[torch.Tensor, torch.Tensor]]
"""A function of (q, k, v, what is seen, the scale)."""
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Given = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""(grad_out, q, k, v, out, lse). The keys and values may be those of any ranks."""
Backward = Callable[[Given, ShownBlock, float], Gradients]

Anchored = tuple[torch.Tensor | None, torch.Tensor | None]
"""(a bias; the anchors [.., Sq] that were subtracted from it, which have to be added to the logarithms of sums)."""


@dataclass(frozen=True)
class Local:
    """A kernel of the library. speed: relative to the fastest kernel, on an H200. windowed_speed: the same with a
    window. hides: whether a bias of less than -REACH hides a row as -inf does.
    """

    name: str
    forward: Forward
    backward: Backward
    speed: float
    windowed_speed: float
    hides: bool = False

    def speed_with(self, mask: Mask) -> float:
        return self.windowed_speed if mask.window else self.speed

    def anchored(self, bias: torch.Tensor | None, dtype: torch.dtype, *, whole: bool = False) -> Anchored:
        """Does `anchored` for a bias of floats. Any other bias is returned as it is, with anchors None. whole: the bias
        is for one call with all keys, like torch's own. Then this does nothing on a GPU unless the kernel gets the bias
        in another dtype, which may have another range.
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
    """Returns the arguments for a window of FlashAttention, which counts from the last row and the last key on."""
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
        rows, keys, values = (x.transpose(1, 2) for x in (q, k, v))
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
    # Without dropout, the state of the generator is not read.
    state = torch.empty(2, dtype=torch.uint64, device=q.device)
    unused = torch.empty(0, dtype=torch.uint64, device=q.device)
    lengths = None, None, q.shape[2], k.shape[2]
    if seen.lower is not None:
        operands = [x.transpose(1, 2) for x in (grad_out, q, k, v, out)]
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
    """Subtracts from each row of a bias of floats [.., keys] its largest value, the row's anchor, if that is far from
    0. Attention does not change, and its logarithms of sums become less by the anchor.

    Returns (the new bias; the anchors, fp32 [..]). If a mask hides all keys of a row by a large number, the logarithm
    would have no digits left for the sum, by which parts are merged. A value that hides one key next to others becomes
    -inf, because all that follows handles -inf, but not numbers at the end of a dtype's range. A row below -FAR is not
    changed, or becomes -inf if it is below -REACH and the kernel `hides` such rows. dtype: that of the queries, in
    which kernels may get the bias.
    """
    if bias.numel() == 0:
        return bias, torch.zeros((), device=bias.device)
    bias = bias.view(1) if bias.ndim == 0 else bias
    most = bias.amax(-1, keepdim=True)
    base = torch.where(most.isfinite() & (most.abs() >= ANCHORED) & (most > -FAR), most, 0.0)
    lowest = LOWEST[torch.float16 if torch.float16 in (dtype, bias.dtype) else torch.float32]
    near = torch.nn.functional.threshold(bias - base, lowest, -math.inf)
    if not hides or lowest > -REACH:
        # The comparison is in a dtype that has the smallest numbers of both.
        kept = bias.to(torch.promote_types(bias.dtype, dtype)).clamp_min(torch.finfo(dtype).min)
        stays = (most <= -FAR) & (most > -REACH) if hides else most <= -FAR
        near = torch.where(stays & bias.isfinite(), kept, near)
    return near, base.squeeze(-1).float()


def _laid_out(bias: torch.Tensor, q: torch.Tensor, keys: int, hidden: float) -> torch.Tensor:
    """Returns a bias as a view [B, Hq, Sq, keys], in the dtype of q, of memory that the library's kernels take. Keys
    that are not seen have the value `hidden`, where a bias of bool is False or a bias of floats is -inf.
    """
    while bias.ndim < 4:
        bias = bias.unsqueeze(0)
    usable = bias.dtype == q.dtype and hidden == -math.inf and bias.shape[3] == keys
    if not usable or not _is_aligned(bias):
        # Dimensions that are broadcast are not copied.
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
    """Returns which rows see no key by this bias, [.., Sq]; it broadcasts like the bias."""
    return ~bias.any(-1) if bias.dtype == torch.bool else bias.amax(-1) == -math.inf


def _hidden_rows(out: torch.Tensor, lse: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (out, lse) with 0 and -inf in the rows that see nothing, for which a kernel may return anything."""
    unseen = _unseen(bias)
    return out.masked_fill_(unseen.unsqueeze(-1), 0.0), lse.masked_fill(unseen, -math.inf)


def _dividing(lse: torch.Tensor) -> torch.Tensor:
    """Returns lse for the library's backward: inf for rows that see nothing, so that all their weights are 0."""
    return lse.masked_fill(lse == -math.inf, math.inf)


def _repeated(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Returns keys or values with every head repeated for its heads of queries, for the efficient kernel."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _together(grad: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Adds up the gradients of repeated heads."""
    heads = like.shape[1]
    return grad if grad.shape[1] == heads else grad.unflatten(1, (heads, -1)).sum(2)


def _efficient(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: ShownBlock, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    assert seen.bias is not None, "this kernel is chosen only with a bias"
    bias = _laid_out(seen.bias, q, k.shape[2], -math.inf)
    keys, values = _repeated(k, q.shape[1]), _repeated(v, q.shape[1])
    found = aten._scaled_dot_product_efficient_attention.default(q, keys, values, bias, True, 0.0, False, scale=scale)
    return _hidden_rows(found[0], found[1].narrow(2, 0, q.shape[2]), seen.bias)


def _efficient_backward(given: Given, seen: ShownBlock, scale: float) -> Gradients:
    grad_out, q, k, v, out, lse = given
    assert seen.bias is not None, "this kernel is chosen only with a bias"
    bias = _laid_out(seen.bias, q, k.shape[2], -math.inf)
    keys, values = _repeated(k, q.shape[1]), _repeated(v, q.shape[1])
    rows = q.shape[2]
    sums = torch.nn.functional.pad(_dividing(lse), (0, round_up(rows, SUMS_ALIGNMENT) - rows), value=math.inf)
    # Without dropout, the state of the generator is not read.
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
    # There are no lengths: None stands for an undefined tensor.
    gradients: Gradients = aten._scaled_dot_product_cudnn_attention_backward.default(
        grad_out, q, k, v, out, sums.unsqueeze(-1), state, state, bias, None, None, *sizes, 0.0, causal, scale=scale
    )
    return gradients


@functools.cache
def cudnn_hides_by_inf() -> bool:
    """Returns whether cuDNN's kernel takes -inf in a bias."""
    version = torch.backends.cudnn.version()
    return version is not None and version >= CUDNN_HIDES_BY_INF


def _bias_for_cudnn(q: torch.Tensor, k: torch.Tensor, seen: ShownBlock) -> torch.Tensor | None:
    if seen.bias is None:
        return None
    return _laid_out(seen.bias, q, k.shape[2], -math.inf if cudnn_hides_by_inf() else CUDNN_HIDDEN[q.dtype])


def _beside(plain: Local, windowed: Local) -> Local:
    """Returns a Local that runs `windowed` for blocks with a lower bound, and `plain` for the others."""

    def forward(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: ShownBlock, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return (plain if seen.lower is None else windowed).forward(q, k, v, seen, scale)

    def backward(given: Given, seen: ShownBlock, scale: float) -> Gradients:
        return (plain if seen.lower is None else windowed).backward(given, seen, scale)

    return Local(plain.name, forward, backward, plain.speed, windowed.windowed_speed)


def in_plain_operations(softcap: float) -> Local:
    """Returns the Local that computes with torch's operations. softcap: 0 for none."""
    forward, backward = functools.partial(_math, softcap), functools.partial(_math_backward, softcap)
    # It is slow, because every score is written to memory and read again several times.
    return Local("math", forward, backward, 0.1, 0.1)


MATH = in_plain_operations(0.0)
FLASH = Local("flash", _flash, _flash_backward, 0.52, 0.45)
_CUDNN = Local("cudnn", _cudnn, _cudnn_backward, 1.0, 1.0)
CUDNN = _beside(_CUDNN, FLASH)
CUDNN_AND_MATH = _beside(_CUDNN, MATH)
# Measured for 4096 and 8192 queries of 32 heads of 128, and twice as many keys: cuDNN's kernel with a bias has 0.52 to
# 0.64 of the speed without one in the forward and 0.50 to 0.66 in the backward; the memory-efficient one 0.19 and 0.21.
CUDNN_BIASED = Local("cudnn with a bias", _cudnn, _cudnn_backward, 0.54, 0.54, hides=True)
EFFICIENT = Local("memory-efficient", _efficient, _efficient_backward, 0.19, 0.19)


def choose(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softcap: float = 0.0, *, biased: bool = False) -> Local:
    """Returns the fastest kernel that can run q [B, Hq, Sq, D] and k, v [B, Hkv, S, D], and that the user has not
    switched off. biased: there is a bias.

    cuDNN's kernel was faster than FlashAttention-2 on Hopper at every size. As aten calls it, it has no windows, so
    FlashAttention computes the blocks that a window cuts, or torch's operations if it cannot. Torch's operations also
    compute attention with a soft cap, which none of the kernels knows.

    The speed of the result is equal on all ranks, even if they have different numbers of queries.
    """
    if softcap:
        return in_plain_operations(softcap)
    if q.shape[2] == 0:
        # No kernel is called without queries. But the plan needs the speed that ranks with queries have.
        row = q.new_empty(q.shape[3]).expand(*q.shape[:2], 1, q.shape[3])
        others = choose(row, k, v, biased=biased)
        return replace(MATH, speed=others.speed, windowed_speed=others.windowed_speed)
    # The kernels take only head sizes that are multiples of 8.
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
    """Returns the fastest kernel that adds a bias. The choice depends only on operands whose sizes all ranks share, and
    not on the memory of a rank's bias, because the plan depends on the kernel's speed.
    """
    like = q.new_empty(k.shape[2]).expand(*q.shape[:3], k.shape[2])
    params = SDPAParams(q, k, v, like, 0.0, False, q.shape[1] != k.shape[1])
    if torch.backends.cuda.cudnn_sdp_enabled() and torch.backends.cuda.can_use_cudnn_attention(params):
        return CUDNN_BIASED
    keys, values = (x[:, :1].expand(-1, q.shape[1], -1, -1) for x in (k, v))
    params = SDPAParams(q, keys, values, like, 0.0, False, False)
    if torch.backends.cuda.mem_efficient_sdp_enabled() and torch.backends.cuda.can_use_efficient_attention(params):
        return EFFICIENT
    return MATH
