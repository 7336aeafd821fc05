"""What is done with whole rows that have been added up: bias, residual and norm, in registers, rounded as eager does.

    total = round(round(reduced + bias) + residual)
    scaled = (total - mean) * rsqrt(variance + eps), in fp32            (mean: 0 for an RMS norm)
    normed = round(round?(scaled) * weight + shift)

Every kernel with a norm calls the two functions here: `extras` before it waits for anything, `finish` after.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from ditron_inductor.task.nodes import EXTRAS, NormNode

HAS_BIAS = tl.constexpr(1)
HAS_RESIDUAL = tl.constexpr(2)
HAS_WEIGHT = tl.constexpr(4)
HAS_SHIFT = tl.constexpr(8)
LAYER = tl.constexpr(16)
PLUS_ONE = tl.constexpr(32)
ROUND_FIRST = tl.constexpr(64)
"""The bits of FORM."""


@triton.jit
def extras(bias, residual, weight, shift, at, cols, inside, N, FORM: tl.constexpr):
    """(bias, residual, weight, shift) as they lie in memory: the residual [ROWS, BLOCK], the others [1, BLOCK].

    at, inside: places of the rows' elements in a tensor of rows of N, and which of them there are. cols [1, BLOCK].
    What FORM has not is anything, and is not looked at.
    """
    bias_row = cols
    if HAS_BIAS & FORM:
        bias_row = tl.load(bias + cols, mask=cols < N, other=0.0)
    residual_rows = cols
    if HAS_RESIDUAL & FORM:
        residual_rows = tl.load(residual + at, mask=inside, other=0.0)
    weight_row = cols
    if HAS_WEIGHT & FORM:
        weight_row = tl.load(weight + cols, mask=cols < N, other=0.0)
    shift_row = cols
    if HAS_SHIFT & FORM:
        shift_row = tl.load(shift + cols, mask=cols < N, other=0.0)
    return bias_row, residual_rows, weight_row, shift_row


@triton.jit
def finish(
    reduced, bias_row, residual_rows, weight_row, shift_row, normed, total, at, inside, N,
    FORM: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Stores the sum and the norm of whole rows. reduced [ROWS, BLOCK], in their dtype; the rest as by `extras`."""
    dtype: tl.constexpr = reduced.dtype
    value = reduced.to(tl.float32)
    if HAS_BIAS & FORM:
        value = (value + bias_row.to(tl.float32)).to(dtype).to(tl.float32)
    if HAS_RESIDUAL & FORM:
        value = (value + residual_rows.to(tl.float32)).to(dtype).to(tl.float32)
    tl.store(total + at, value.to(dtype), mask=inside)
    value = tl.where(inside, value, 0.0)
    if LAYER & FORM:
        mean = tl.sum(value, axis=1) / N
        value = tl.where(inside, value - mean[:, None], 0.0)
    variance = tl.sum(value * value, axis=1) / N
    scaled = value * tl.rsqrt(variance + EPS)[:, None]
    if ROUND_FIRST & FORM:
        scaled = scaled.to(dtype).to(tl.float32)
    if HAS_WEIGHT & FORM:
        factor = weight_row.to(tl.float32)
        if PLUS_ONE & FORM:
            factor = factor + 1.0
        scaled = scaled * factor
    if HAS_SHIFT & FORM:
        scaled = scaled + shift_row.to(tl.float32)
    tl.store(normed + at, scaled.to(dtype), mask=inside)


@triton.jit
def finish_all(
    total, bias, residual, weight, shift, normed, M, N, BLOCK: tl.constexpr, FORM: tl.constexpr, EPS: tl.constexpr
):
    """`finish`, by one program, for M rows of N that lie reduced in `total`, one after the other."""
    cols = tl.arange(0, BLOCK)[None, :]
    for row in range(M):
        at = cols + row * N
        inside = cols < N
        reduced = tl.load(total + at, mask=inside, other=0.0)
        bias_row, residual_rows, weight_row, shift_row = extras(
            bias, residual, weight, shift, at, cols, inside, N, FORM
        )
        finish(reduced, bias_row, residual_rows, weight_row, shift_row, normed, total, at, inside, N, FORM, EPS)


def form_of(node: NormNode) -> int:
    """FORM of a node."""
    norm = node.norm
    bits = {
        "bias": HAS_BIAS,
        "residual": HAS_RESIDUAL,
        "weight": HAS_WEIGHT,
        "shift": HAS_SHIFT,
    }
    form = sum(bits[name].value for name in node.extras)
    form += LAYER.value if norm.form == "layer" else 0
    return form + norm.plus_one * PLUS_ONE.value + norm.round_first * ROUND_FIRST.value


def pointers(given: tuple[torch.Tensor | None, ...], other: torch.Tensor) -> Mapping[str, Any]:
    """The tensors of a node by name, `other` for those that it has not; their elements lie as a kernel wants them."""
    found = {name: one for name, one in zip(EXTRAS, given, strict=True)}
    return {name: other if one is None else one.contiguous() for name, one in found.items()}


def block_of(columns: int) -> int:
    """BLOCK: a power of two that is at least `columns`."""
    return max(16, 1 << (columns - 1).bit_length())


def warps_of(elements: int) -> int:
    """Warps of a program whose tile has so many elements: 16 of them for each thread, as long as 16 warps do."""
    return max(1, min(elements // (32 * 16), 16))
