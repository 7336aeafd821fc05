"""The computation on whole rows that have been added up: bias, residual and norm, in registers, rounded like eager
mode.

    total = round(round(post(round(round(reduced + bias) + second bias)) * scale) + residual)
    scaled = (total - mean) * rsqrt(variance + eps), in fp32            (mean: 0 for an RMS norm)
    normed = round(round?(scaled) * weight + shift)

`post` is another norm, or the identity. If there is a `post`, the last norm may be missing (NO_NORM). The scale is a
number or a row. A norm that is UNROUNDED is that of the total before the total is rounded. A second normed result, with
another weight and shift, may be returned too.

Every kernel with a norm calls `extras` before it waits for anything, and `finish` afterwards. A kernel that stores the
norm in its own way calls `normalised` instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import torch
import triton
import triton.language as tl

from ditron_inductor.task import nodes
from ditron_inductor.task.nodes import (
    EXTRAS,
    MOST_NORM_COLUMNS,
    SAVED,
    SHARD_EXTRAS,
    Norm,
    ReductionWithNorm,
    ShardNorm,
    norm_returns,
)
from ditron_inductor.task.schema import norm_output

HAS_BIAS = tl.constexpr(1)
HAS_RESIDUAL = tl.constexpr(2)
HAS_WEIGHT = tl.constexpr(4)
HAS_SHIFT = tl.constexpr(8)
LAYER = tl.constexpr(16)
PLUS_ONE = tl.constexpr(32)
ROUND_FIRST = tl.constexpr(64)
HAS_SECOND_BIAS = tl.constexpr(1 << 7)
POST = tl.constexpr(1 << 8)
HAS_POST_WEIGHT = tl.constexpr(1 << 9)
HAS_POST_SHIFT = tl.constexpr(1 << 10)
POST_LAYER = tl.constexpr(1 << 11)
POST_PLUS_ONE = tl.constexpr(1 << 12)
POST_ROUND_FIRST = tl.constexpr(1 << 13)
SAVES_REDUCED = tl.constexpr(1 << 14)
SAVES_POST_MEAN = tl.constexpr(1 << 15)
SAVES_POST_RSTD = tl.constexpr(1 << 16)
SAVES_MEAN = tl.constexpr(1 << 17)
SAVES_RSTD = tl.constexpr(1 << 18)
SAVES_SCALED = tl.constexpr(1 << 19)
TOTAL_KNOWN = tl.constexpr(1 << 20)
NO_NORM = tl.constexpr(1 << 21)
HAS_OTHER_WEIGHT = tl.constexpr(1 << 22)
HAS_OTHER_SHIFT = tl.constexpr(1 << 23)
SAVES_OTHER = tl.constexpr(1 << 24)
UNROUNDED = tl.constexpr(1 << 25)
HAS_SCALE = tl.constexpr(1 << 26)
TIMES_FACTOR = tl.constexpr(1 << 27)
"""The bits of FORM."""

T = TypeVar("T")
WithNorm = ReductionWithNorm | ShardNorm

FORM_OF_EXTRAS: Mapping[str, int] = {
    "bias": HAS_BIAS.value,
    "second_bias": HAS_SECOND_BIAS.value,
    "post_weight": HAS_POST_WEIGHT.value,
    "post_shift": HAS_POST_SHIFT.value,
    "residual": HAS_RESIDUAL.value,
    "weight": HAS_WEIGHT.value,
    "shift": HAS_SHIFT.value,
    "other_weight": HAS_OTHER_WEIGHT.value,
    "other_shift": HAS_OTHER_SHIFT.value,
    "scale": HAS_SCALE.value,
}
FORM_OF_SAVED: Mapping[str, int] = {
    "reduced": SAVES_REDUCED.value,
    "post_mean": SAVES_POST_MEAN.value,
    "post_rstd": SAVES_POST_RSTD.value,
    "mean": SAVES_MEAN.value,
    "rstd": SAVES_RSTD.value,
    "scaled": SAVES_SCALED.value,
    "other": SAVES_OTHER.value,
}


class Norms(NamedTuple):
    """The norms of a kernel, known at compile time: the FORM, what the last norm and `post` add to the variance, and
    the factor of the rows, if the FORM has TIMES_FACTOR.
    """

    FORM: Any
    EPS: Any
    POST_EPS: Any
    FACTOR: Any = 1.0


@triton.jit
def row_of(pointer, cols, N, PRESENT: tl.constexpr):
    """Loads [1, BLOCK] of a tensor [N]. The result has no meaning if the tensor is not PRESENT."""
    row = cols
    if PRESENT:
        row = tl.load(pointer + cols, mask=cols < N, other=0.0)
    return row


@triton.jit
def extras(given, at, cols, inside, N, FORM: tl.constexpr):
    """Loads the tensors that a node has besides its operands: the residual as [ROWS, BLOCK], the others as [1, BLOCK].
    given: pointers in the order of nodes.EXTRAS. at, inside: the places of the rows' elements in a tensor with rows of
    N columns, and which of them exist. cols: [1, BLOCK]. The values of tensors that FORM does not have are not used.
    """
    return with_rows(residual_of(given, at, cols, inside, FORM), given, cols, N, FORM)


@triton.jit
def residual_of(given, at, cols, inside, FORM: tl.constexpr):
    """Loads the part of `extras` that differs from row to row."""
    residual_rows = cols
    if HAS_RESIDUAL & FORM:
        residual_rows = tl.load(given[4] + at, mask=inside, other=0.0)
    return residual_rows


@triton.jit
def with_rows(residual_rows, given, cols, N, FORM: tl.constexpr):
    """Returns `extras`. residual_rows: the result of `residual_of`."""
    return (
        row_of(given[0], cols, N, HAS_BIAS & FORM),
        row_of(given[1], cols, N, HAS_SECOND_BIAS & FORM),
        row_of(given[2], cols, N, HAS_POST_WEIGHT & FORM),
        row_of(given[3], cols, N, HAS_POST_SHIFT & FORM),
        residual_rows,
        row_of(given[5], cols, N, HAS_WEIGHT & FORM),
        row_of(given[6], cols, N, HAS_SHIFT & FORM),
        row_of(given[7], cols, N, HAS_OTHER_WEIGHT & FORM),
        row_of(given[8], cols, N, HAS_OTHER_SHIFT & FORM),
        row_of(given[9], cols, N, HAS_SCALE & FORM),
    )


@triton.jit
def scale(value, inside, N, IS_LAYER: tl.constexpr, EPS: tl.constexpr):
    """Returns (scaled [ROWS, BLOCK], mean [ROWS], rstd [ROWS]), fp32, of whole rows; RMS norms ignore mean."""
    value = tl.where(inside, value, 0.0)
    mean = tl.sum(value, axis=1) / N
    if IS_LAYER:
        value = tl.where(inside, value - mean[:, None], 0.0)
    variance = tl.sum(value * value, axis=1) / N
    rstd = tl.rsqrt(variance + EPS)
    return value * rstd[:, None], mean, rstd


@triton.jit
def weigh(
    scaled, weight_row, shift_row, dtype: tl.constexpr,
    ROUND: tl.constexpr, HAS_FACTOR: tl.constexpr, ONE_MORE: tl.constexpr, HAS_TERM: tl.constexpr,
):  # fmt: skip
    """Returns round?(scaled) * weight + shift in `dtype`."""
    if ROUND:
        scaled = scaled.to(dtype).to(tl.float32)
    if HAS_FACTOR:
        factor = weight_row.to(tl.float32)
        if ONE_MORE:
            factor = factor + 1.0
        scaled = scaled * factor
    if HAS_TERM:
        scaled = scaled + shift_row.to(tl.float32)
    return scaled.to(dtype)


@triton.jit
def normalised(reduced, loaded, outputs, rows, at, inside, M, N, NORMS: tl.constexpr):
    """Returns the norm of whole rows. It stores their total, unless that is TOTAL_KNOWN, and what is saved of them.
    reduced: [ROWS, BLOCK] in the node's dtype. loaded: the result of `extras`. outputs: pointers to normed and total,
    then in the order of nodes.SAVED. rows: [ROWS, 1], the numbers of the rows, below M if they exist. at, inside: see
    `extras`.
    """
    dtype: tl.constexpr = reduced.dtype
    FORM: tl.constexpr = NORMS.FORM
    if SAVES_REDUCED & FORM:
        tl.store(outputs[2] + at, reduced, mask=inside)
    value = reduced.to(tl.float32)
    if HAS_BIAS & FORM:
        value = (value + loaded[0].to(tl.float32)).to(dtype).to(tl.float32)
    if HAS_SECOND_BIAS & FORM:
        value = (value + loaded[1].to(tl.float32)).to(dtype).to(tl.float32)
    if POST & FORM:
        scaled, mean, rstd = scale(value, inside, N, POST_LAYER & FORM, NORMS.POST_EPS)
        if SAVES_POST_MEAN & FORM:
            tl.store(outputs[3] + rows, mean[:, None], mask=rows < M)
        if SAVES_POST_RSTD & FORM:
            tl.store(outputs[4] + rows, rstd[:, None], mask=rows < M)
        value = weigh(
            scaled, loaded[2], loaded[3], dtype,
            POST_ROUND_FIRST & FORM, HAS_POST_WEIGHT & FORM, POST_PLUS_ONE & FORM, HAS_POST_SHIFT & FORM,
        ).to(tl.float32)  # fmt: skip
    if TIMES_FACTOR & FORM:
        value = (value * NORMS.FACTOR).to(dtype).to(tl.float32)
    if HAS_SCALE & FORM:
        value = (value * loaded[9].to(tl.float32)).to(dtype).to(tl.float32)
    if HAS_RESIDUAL & FORM:
        value = value + loaded[4].to(tl.float32)
        if not (UNROUNDED & FORM):
            value = value.to(dtype).to(tl.float32)
    if not (TOTAL_KNOWN & FORM):
        tl.store(outputs[1] + at, value.to(dtype), mask=inside)
    result = value.to(dtype)
    if not (NO_NORM & FORM):
        scaled, mean, rstd = scale(value, inside, N, LAYER & FORM, NORMS.EPS)
        if SAVES_MEAN & FORM:
            tl.store(outputs[5] + rows, mean[:, None], mask=rows < M)
        if SAVES_RSTD & FORM:
            tl.store(outputs[6] + rows, rstd[:, None], mask=rows < M)
        if SAVES_SCALED & FORM:
            tl.store(outputs[7] + at, scaled, mask=inside)
        if SAVES_OTHER & FORM:
            other = weigh(
                scaled, loaded[7], loaded[8], dtype,
                ROUND_FIRST & FORM, HAS_OTHER_WEIGHT & FORM, PLUS_ONE & FORM, HAS_OTHER_SHIFT & FORM,
            )  # fmt: skip
            tl.store(outputs[8] + at, other, mask=inside)
        result = weigh(
            scaled, loaded[5], loaded[6], dtype,
            ROUND_FIRST & FORM, HAS_WEIGHT & FORM, PLUS_ONE & FORM, HAS_SHIFT & FORM,
        )  # fmt: skip
    return result


@triton.jit
def finish(reduced, loaded, outputs, rows, at, inside, M, N, NORMS: tl.constexpr):
    """Does `normalised`, and stores the norm too."""
    normed = normalised(reduced, loaded, outputs, rows, at, inside, M, N, NORMS)
    if not (NO_NORM & NORMS.FORM):
        tl.store(outputs[0] + at, normed, mask=inside)


@triton.jit
def finish_all(reduced, given, outputs, M, N, BLOCK: tl.constexpr, NORMS: tl.constexpr):
    """Does `finish` in one program for M rows of N columns, one by one. `reduced` may be the total."""
    cols = tl.arange(0, BLOCK)[None, :]
    for row in range(M):
        rows = row + tl.arange(0, 1)[:, None]
        at = cols + row * N
        inside = cols < N
        value = tl.load(reduced + at, mask=inside, other=0.0)
        loaded = extras(given, at, cols, inside, N, NORMS.FORM)
        finish(value, loaded, outputs, rows, at, inside, M, N, NORMS)


def form_of(node: WithNorm, *, stores_reduced: bool) -> int:
    """Returns the FORM of a node. stores_reduced: whether the kernel stores the reduced rows if they are saved."""
    form = sum(FORM_OF_EXTRAS[name] for name in node.extras)
    form += sum(FORM_OF_SAVED[name] for name in node.saved if stores_reduced or name != "reduced")
    form += NO_NORM.value * (node.norm.form == nodes.NO_NORM)
    form += _norm_bits(node.norm, LAYER.value, PLUS_ONE.value, ROUND_FIRST.value)
    form += UNROUNDED.value * node.norm.unrounded + TIMES_FACTOR.value * (node.factor != 1.0)
    if node.post is not None:
        form += POST.value + _norm_bits(node.post, POST_LAYER.value, POST_PLUS_ONE.value, POST_ROUND_FIRST.value)
    if isinstance(node, ShardNorm) and "residual" not in node.extras:
        form += TOTAL_KNOWN.value
    return form


def _norm_bits(norm: Norm, layer: int, plus_one: int, round_first: int) -> int:
    return layer * (norm.form == "layer") + plus_one * norm.plus_one + round_first * norm.round_first


def constants_of(node: WithNorm, *, stores_reduced: bool) -> dict[str, Any]:
    """Returns the Norms of a kernel and an option of its compilation, as arguments of a launch. See `form_of`."""
    post_eps = 0.0 if node.post is None else node.post.eps
    norms = Norms(form_of(node, stores_reduced=stores_reduced), node.norm.eps, post_eps, node.factor)
    multiplied = node.post is not None or node.factor != 1.0 or "scale" in node.extras
    # Otherwise one operation would multiply and add the residual, without rounding the product.
    exact = {"enable_fp_fusion": False} if multiplied and "residual" in node.extras else {}
    return {"NORMS": norms, **exact}


def allocate(node: WithNorm, x: torch.Tensor, given: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Allocates normed, total and what is saved, for rows like x. given: the outputs that exist already, by name."""
    names = norm_returns(node.norm, node.saved)
    return tuple(given[name] if name in given else norm_output(x, x.shape, name) for name in names)


def reduced_outputs(node: WithNorm, reduced: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Does `allocate`, and uses the memory of the reduced rows for the total, unless the reduced rows themselves are
    saved. The shard of a gather is an input, so it becomes the total only if nothing is added to it.
    """
    if isinstance(node, ShardNorm):
        return allocate(node, reduced, {} if "residual" in node.extras else {"total": reduced})
    return allocate(node, reduced, {"reduced" if "reduced" in node.saved else "total": reduced})


def pointers(given: tuple[torch.Tensor | None, ...], other: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns the tensors of a node, contiguous, as a kernel takes them, with `other` for missing ones."""
    return tuple(other if tensor is None else tensor.contiguous() for tensor in given)


def shard_extras(given: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...]:
    """Returns the tensors `SHARD_EXTRAS` in the order of `EXTRAS`, with None for the others."""
    named = dict(zip(SHARD_EXTRAS, given, strict=True))
    return tuple(named.get(name) for name in EXTRAS)


def all_outputs(node: WithNorm, outputs: tuple[T, ...]) -> tuple[T, ...]:
    """Returns the outputs (or what belongs to each) as `finish` takes them, the total's for missing ones."""
    made = dict(zip(norm_returns(node.norm, node.saved), outputs, strict=True))
    return tuple(made.get(name, made["total"]) for name in ("normed", "total", *SAVED))


def obstacle(columns: int) -> str:
    """Returns why no kernel can normalise rows with this number of columns, or ''."""
    return "" if columns <= MOST_NORM_COLUMNS else f"rows of {columns} elements do not fit into one program"


def block_of(columns: int) -> int:
    """Returns BLOCK, a power of two that is at least `columns`."""
    return max(16, 1 << (columns - 1).bit_length())


def warps_of(elements: int) -> int:
    """Returns the warps of a program whose tile has `elements` elements: 16 for each thread, at most 16 warps."""
    return max(1, min(elements // (32 * 16), 16))
