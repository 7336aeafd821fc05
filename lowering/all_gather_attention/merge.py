"""Merges attention to parts of the keys: out = sum_i exp(lse_i - lse) out_i, lse = log(sum_i exp(lse_i)), in one
kernel.

Partial i covers rows first_i .. last_i of the queries, ends excluded. The sums are in fp32 and in the order of the
partials, whatever order they came in. A row that no partial covers, or whose lse are all -inf, becomes 0 and -inf.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl

from ditron_inductor.lowering.launch import ceil_div
from ditron_inductor.lowering.launcher import Arguments, local_launcher
from ditron_inductor.task.ops import sequence_first

MERGE_ROWS = 32
"""Rows of one program. A rank has as many programs as heads times this many rows: enough to fill a GPU's memory
pipes."""
MERGE_WARPS = 4


@triton.jit(do_not_specialize=["queries"])
def merge_kernel(
    outs, lses, out, lse, queries, firsts, lasts, strides_b, strides_h, strides_m,
    HEADS: tl.constexpr, D: tl.constexpr, NUM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """outs[i] [B, HEADS, lasts[i] - firsts[i], D] with these strides, lses[i] [B, HEADS, ..] contiguous, fp32.

    out: the memory of [B, queries, HEADS, D]; lse [B, HEADS, queries]. A program has BLOCK_M rows of one head.
    """
    num_m = tl.cdiv(queries, BLOCK_M)
    head = tl.program_id(0) // num_m
    offs_m = tl.program_id(0) % num_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    batch = (head // HEADS).to(tl.int64)
    inside = offs_m < queries
    most = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    for i in tl.static_range(NUM):
        covered = (offs_m >= firsts[i]) & (offs_m < lasts[i])
        rows = head.to(tl.int64) * (lasts[i] - firsts[i]) + offs_m - firsts[i]
        most = tl.maximum(most, tl.load(lses[i] + rows, mask=covered, other=float("-inf")))
    base = tl.where(most == float("-inf"), 0.0, most)
    weights = tl.zeros((BLOCK_M,), dtype=tl.float32)
    total = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    for i in tl.static_range(NUM):
        covered = (offs_m >= firsts[i]) & (offs_m < lasts[i])
        rows = head.to(tl.int64) * (lasts[i] - firsts[i]) + offs_m - firsts[i]
        weight = tl.exp(tl.load(lses[i] + rows, mask=covered, other=float("-inf")) - base)
        start = outs[i] + batch * strides_b[i] + (head % HEADS).to(tl.int64) * strides_h[i]
        places = (offs_m - firsts[i]).to(tl.int64)[:, None] * strides_m[i] + offs_d[None, :]
        # A partial that saw no key holds anything.
        wanted = (covered & (weight != 0.0))[:, None] & (offs_d < D)[None, :]
        total += weight[:, None] * tl.load(start + places, mask=wanted, other=0.0).to(tl.float32)
        weights += weight
    merged = total / tl.where(weights == 0.0, 1.0, weights)[:, None]
    places = ((batch * queries + offs_m) * HEADS + head % HEADS)[:, None] * D + offs_d[None, :]
    tl.store(out + places, merged.to(out.dtype.element_ty), mask=inside[:, None] & (offs_d < D)[None, :])
    tl.store(lse + head.to(tl.int64) * queries + offs_m, most + tl.log(weights), mask=inside)


Partial = tuple[torch.Tensor, torch.Tensor]
"""(out, lse) of some rows."""
Merge = Callable[[int, Sequence[Partial]], Partial]
"""A function of the stream and of the partials."""


def make_merge(q: torch.Tensor, rows: Sequence[tuple[int, int]]) -> Merge:
    """Merges partials of these rows of q [B, H, Sq, D], always of the same strides; returns out and lse of all of them,
    out with the memory of a contiguous [B, Sq, H, D].
    """
    B, heads, queries, D = q.shape
    launcher = local_launcher(merge_kernel, q.device)

    def arguments(strides: Sequence[tuple[int, ...]]) -> Arguments:
        return Arguments(
            programs=B * heads * ceil_div(queries, MERGE_ROWS),
            values={
                "queries": queries,
                "firsts": tuple(first for first, _ in rows),
                "lasts": tuple(last for _, last in rows),
                "strides_b": tuple(stride[0] for stride in strides),
                "strides_h": tuple(stride[1] for stride in strides),
                "strides_m": tuple(stride[2] for stride in strides),
                "HEADS": heads,
                "D": D,
                "NUM": len(rows),
                "BLOCK_M": MERGE_ROWS,
                "BLOCK_D": max(16, triton.next_power_of_2(D)),
                "num_warps": MERGE_WARPS,
            },
        )

    def merge(stream: int, partials: Sequence[Partial]) -> Partial:
        if len(partials) == 1 and rows[0] == (0, queries):
            out, lse = partials[0]
            return in_order(out), lse.contiguous()
        out = sequence_first(q, heads, queries)
        lse = torch.empty(B, heads, queries, dtype=torch.float32, device=q.device)
        if out.numel() == 0:
            return out, lse
        if not partials:
            return out.zero_(), lse.fill_(float("-inf"))
        outs = tuple(one if one.stride(3) == 1 else one.contiguous() for one, _ in partials)
        tensors = {"outs": outs, "lses": tuple(one.contiguous() for _, one in partials), "out": out, "lse": lse}
        launcher(stream, functools.partial(arguments, [one.stride() for one in outs]), (), (), tensors)
        return out, lse

    return merge


def in_order(x: torch.Tensor) -> torch.Tensor:
    """x [B, H, S, D] with the memory of a contiguous [B, S, H, D]; itself if it has that."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)
