"""Merges attention to parts of the keys: out = sum_i exp(lse_i - lse) out_i, lse = log(sum_i exp(lse_i)), in one
kernel.

Partial i covers rows first_i .. last_i of the queries, ends excluded. The sums are in fp32 and in the order of the
partials, whatever order they came in. A row that no partial covers, or whose lse are all -inf, becomes 0 and -inf.
Without weights: out = sum_i out_i, the gradient of the queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ditron_inductor.lowering.host.launch import ceil_div
from ditron_inductor.lowering.host.launcher import Arguments, local_launcher

MERGE_ROWS = 32
"""Rows of one program. A rank has as many programs as heads times this many rows: enough to fill a GPU's memory
pipes."""
MERGE_WARPS = 4


class MergedParts(NamedTuple):
    """Of each partial: its first row and the one behind its last, and strides of batch, head and row; tuples."""

    firsts: Any
    lasts: Any
    strides_b: Any
    strides_h: Any
    strides_m: Any


class How(NamedTuple):
    """What is known at compile time: heads, and elements of one; WEIGHTED: partials have weights; rows of a program,
    and places of a row.
    """

    HEADS: Any
    D: Any
    WEIGHTED: Any
    BLOCK_M: Any
    BLOCK_D: Any


@triton.jit(do_not_specialize=["queries"])
def merge_kernel(outs, lses, out, lse, queries, parts, HOW: tl.constexpr):
    """outs[i] [B, HEADS, lasts[i] - firsts[i], D] with these strides, lses[i] [B, HEADS, ..] contiguous, fp32.

    out: the memory of [B, queries, HEADS, D]; lse [B, HEADS, queries]. A program has BLOCK_M rows of one head.
    """
    BLOCK_D: tl.constexpr = HOW.BLOCK_D
    BLOCK_M: tl.constexpr = HOW.BLOCK_M
    NUM: tl.constexpr = len(outs)
    num_m = tl.cdiv(queries, BLOCK_M)
    head = tl.program_id(0) // num_m
    offs_m = tl.program_id(0) % num_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    batch = (head // HOW.HEADS).to(tl.int64)
    inside = offs_m < queries
    most = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    if HOW.WEIGHTED:
        for i in tl.static_range(NUM):
            covered = (offs_m >= parts.firsts[i]) & (offs_m < parts.lasts[i])
            rows = head.to(tl.int64) * (parts.lasts[i] - parts.firsts[i]) + offs_m - parts.firsts[i]
            most = tl.maximum(most, tl.load(lses[i] + rows, mask=covered, other=float("-inf")))
    base = tl.where(most == float("-inf"), 0.0, most)
    weights = tl.zeros((BLOCK_M,), dtype=tl.float32)
    total = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    for i in tl.static_range(NUM):
        covered = (offs_m >= parts.firsts[i]) & (offs_m < parts.lasts[i])
        if HOW.WEIGHTED:
            rows = head.to(tl.int64) * (parts.lasts[i] - parts.firsts[i]) + offs_m - parts.firsts[i]
            weight = tl.exp(tl.load(lses[i] + rows, mask=covered, other=float("-inf")) - base)
        else:
            weight = tl.full((BLOCK_M,), 1.0, tl.float32)
        start = outs[i] + batch * parts.strides_b[i] + (head % HOW.HEADS).to(tl.int64) * parts.strides_h[i]
        places = (offs_m - parts.firsts[i]).to(tl.int64)[:, None] * parts.strides_m[i] + offs_d[None, :]
        # A partial that saw no key holds anything.
        wanted = (covered & (weight != 0.0))[:, None] & (offs_d < HOW.D)[None, :]
        total += weight[:, None] * tl.load(start + places, mask=wanted, other=0.0).to(tl.float32)
        weights += weight
    merged = total / tl.where(weights == 0.0, 1.0, weights)[:, None] if HOW.WEIGHTED else total
    places = ((batch * queries + offs_m) * HOW.HEADS + head % HOW.HEADS)[:, None] * HOW.D + offs_d[None, :]
    tl.store(out + places, merged.to(out.dtype.element_ty), mask=inside[:, None] & (offs_d < HOW.D)[None, :])
    if HOW.WEIGHTED:
        tl.store(lse + head.to(tl.int64) * queries + offs_m, most + tl.log(weights), mask=inside)


Partial = tuple[torch.Tensor, torch.Tensor]
"""(out, lse) of some rows."""


class Merge:
    """Merges partials of these `rows` of q [B, H, Sq, D], always of the same strides.

    Called as merge(stream, partials): out and lse of all rows; `add` adds tensors up. Both results have the memory of a
    contiguous [B, Sq, H, D].
    """

    def __init__(self, q: torch.Tensor, rows: Sequence[tuple[int, int]]) -> None:
        self._shape = q.shape
        self._dtype = q.dtype
        self._rows = list(rows)
        self._launcher = local_launcher(merge_kernel, q.device)

    def __call__(self, stream: int, partials: Sequence[Partial]) -> Partial:
        B, heads, queries, _ = self._shape
        if len(partials) == 1 and self._rows[0] == (0, queries):
            out, lse = partials[0]
            return in_order(out), lse.contiguous()
        outs = [one for one, _ in partials]
        device = self._launcher.device
        lse = torch.empty(B, heads, queries, dtype=torch.float32, device=device)
        if not partials:
            lse.fill_(float("-inf"))
        return self._run(stream, outs, [one.contiguous() for _, one in partials], lse), lse

    def add(self, stream: int, partials: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        """The sum of the partials, in the dtype of `like`."""
        if len(partials) == 1 and self._rows[0] == (0, self._shape[2]):
            return in_order(partials[0])
        return self._run(stream, partials, [], like)

    def _run(
        self, stream: int, outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor], lse: torch.Tensor
    ) -> torch.Tensor:
        B, heads, queries, D = self._shape
        like = outs[0] if outs else lse
        # Where no row sees anything there are no partials.
        dtype = like.dtype if outs else self._dtype
        out = like.new_empty(B, queries, heads, D, dtype=dtype).transpose(1, 2)
        if not outs or out.numel() == 0:
            return out.zero_()
        given = tuple(one if one.stride(3) == 1 else one.contiguous() for one in outs)

        def arguments() -> Arguments:
            return Arguments(
                programs=B * heads * ceil_div(queries, MERGE_ROWS),
                values={
                    "queries": queries,
                    "parts": MergedParts(
                        firsts=tuple(first for first, _ in self._rows),
                        lasts=tuple(last for _, last in self._rows),
                        strides_b=tuple(one.stride(0) for one in given),
                        strides_h=tuple(one.stride(1) for one in given),
                        strides_m=tuple(one.stride(2) for one in given),
                    ),
                    "HOW": How(heads, D, bool(lses), MERGE_ROWS, max(16, triton.next_power_of_2(D))),
                    "num_warps": MERGE_WARPS,
                },
            )

        # Without weights it gets sums that it does not look at.
        tensors = {"outs": given, "lses": tuple(lses) or given, "out": out, "lse": lse}
        self._launcher(stream, arguments, (), (), tensors)
        return out


def in_order(x: torch.Tensor) -> torch.Tensor:
    """x [B, H, S, D] with the memory of a contiguous [B, S, H, D]; itself if it has that."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)
