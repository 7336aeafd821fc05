"""Merges attention to parts of the keys: out = sum_i exp(lse_i - lse) out_i, lse = log(sum_i exp(lse_i)), in one
kernel.

Partial i covers the rows first_i .. last_i - 1 of the queries. Sums are in fp32 and in the order of the partials. A row
that no partial covers, or whose lse are all -inf, becomes 0 and -inf. Without weights the kernel computes out = sum_i
out_i, for the gradient of the queries.
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
"""The rows of one program. They are few, so that there are enough programs to use all of the memory bandwidth."""
MERGE_WARPS = 4


class MergedParts(NamedTuple):
    """The first row, the row behind the last, and the strides of batch, head and row of partials, as tuples."""

    firsts: Any
    lasts: Any
    strides_b: Any
    strides_h: Any
    strides_m: Any


class How(NamedTuple):
    """Values that are known at compile time: the number of heads, the elements D of a head, whether partials have
    weights, the rows of a program, and D rounded up to a power of two.
    """

    HEADS: Any
    D: Any
    WEIGHTED: Any
    BLOCK_M: Any
    BLOCK_D: Any


@triton.jit(do_not_specialize=["queries"])
def merge_kernel(outs, lses, out, lse, queries, parts, HOW: tl.constexpr):
    """See the module. outs[i] is [B, HEADS, lasts[i] - firsts[i], D] with the strides of `parts`; lses[i] is [B, HEADS,
    ..], contiguous, fp32. out has the memory of [B, queries, HEADS, D], and lse is [B, HEADS, queries]. A program has
    BLOCK_M rows of one head.
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
        # The values of a partial that saw no key have no meaning.
        wanted = (covered & (weight != 0.0))[:, None] & (offs_d < HOW.D)[None, :]
        total += weight[:, None] * tl.load(start + places, mask=wanted, other=0.0).to(tl.float32)
        weights += weight
    merged = total / tl.where(weights == 0.0, 1.0, weights)[:, None] if HOW.WEIGHTED else total
    places = ((batch * queries + offs_m) * HOW.HEADS + head % HOW.HEADS)[:, None] * HOW.D + offs_d[None, :]
    tl.store(out + places, merged.to(out.dtype.element_ty), mask=inside[:, None] & (offs_d < HOW.D)[None, :])
    if HOW.WEIGHTED:
        tl.store(lse + head.to(tl.int64) * queries + offs_m, most + tl.log(weights), mask=inside)


Partial = tuple[torch.Tensor, torch.Tensor]
"""(out, lse) of a run of rows."""


class Merge:
    """Merges partials that cover these `rows` of q [B, H, Sq, D]. Their strides have to be the same in all calls.
    merge(stream, partials) returns out and lse of all rows, and merge.add(..) the sum of tensors. The results out and
    sum have the memory of a contiguous [B, Sq, H, D].
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
        device = self._launcher.device
        lse = torch.empty(B, heads, queries, dtype=torch.float32, device=device)
        if not partials:
            lse.fill_(float("-inf"))
        return self._run(stream, [x for x, _ in partials], [x.contiguous() for _, x in partials], lse), lse

    def add(self, stream: int, partials: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        """Returns the sum of the partials. like: any tensor of the dtype of the sum."""
        if len(partials) == 1 and self._rows[0] == (0, self._shape[2]):
            return in_order(partials[0])
        return self._run(stream, partials, [], like)

    def _run(
        self, stream: int, outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor], lse: torch.Tensor
    ) -> torch.Tensor:
        B, heads, queries, D = self._shape
        like = outs[0] if outs else lse
        # There are no partials if no row sees anything.
        dtype = like.dtype if outs else self._dtype
        out = like.new_empty(B, queries, heads, D, dtype=dtype).transpose(1, 2)
        if not outs or out.numel() == 0:
            return out.zero_()
        given = tuple(x if x.stride(3) == 1 else x.contiguous() for x in outs)

        def arguments() -> Arguments:
            return Arguments(
                programs=B * heads * ceil_div(queries, MERGE_ROWS),
                values={
                    "queries": queries,
                    "parts": MergedParts(
                        firsts=tuple(first for first, _ in self._rows),
                        lasts=tuple(last for _, last in self._rows),
                        strides_b=tuple(x.stride(0) for x in given),
                        strides_h=tuple(x.stride(1) for x in given),
                        strides_m=tuple(x.stride(2) for x in given),
                    ),
                    "HOW": How(heads, D, bool(lses), MERGE_ROWS, max(16, triton.next_power_of_2(D))),
                    "num_warps": MERGE_WARPS,
                },
            )

        # Without weights, the kernel does not read `lses`.
        tensors = {"outs": given, "lses": tuple(lses) or given, "out": out, "lse": lse}
        self._launcher(stream, arguments, (), (), tensors)
        return out


def in_order(x: torch.Tensor) -> torch.Tensor:
    """Returns x [B, H, S, D] with the memory of a contiguous [B, S, H, D]; x itself if it has that."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)
