"""The K loop of a matrix product whose operands have any strides: for operands that are transposed in memory."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def matmul_steps_strided(
    acc, a, stride_am, stride_ak, offs_m, M, b, stride_bk, stride_bn, offs_n, N, K,
    BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """acc [m, n] plus sum_k A[offs_m, k] * B[k, offs_n]; a, b: pointers to A [M, K] and B [K, N].

    Rows beyond M and columns beyond N come out as they were. EVEN_K: K is a multiple of BLOCK_K. UPCAST: see matmul.py.
    """
    offs_k = tl.arange(0, BLOCK_K)
    # Masked and not clamped: where the rows of A are contiguous, a clamp would hide that from the compiler.
    in_m = (offs_m < M)[:, None]
    in_n = (offs_n < N)[None, :]
    a_ptrs = a + offs_m.to(tl.int64)[:, None] * stride_am + offs_k.to(tl.int64)[None, :] * stride_ak
    b_ptrs = b + offs_k.to(tl.int64)[:, None] * stride_bk + offs_n.to(tl.int64)[None, :] * stride_bn
    a_step = tl.full((), BLOCK_K, tl.int64) * stride_ak
    b_step = tl.full((), BLOCK_K, tl.int64) * stride_bk
    for k in range(0, tl.cdiv(K, BLOCK_K)):
        if EVEN_K:
            a_tile = tl.load(a_ptrs, mask=in_m, other=0.0)
            b_tile = tl.load(b_ptrs, mask=in_n, other=0.0)
        else:
            in_k = offs_k < K - k * BLOCK_K
            a_tile = tl.load(a_ptrs, mask=in_m & in_k[None, :], other=0.0)
            b_tile = tl.load(b_ptrs, mask=in_k[:, None] & in_n, other=0.0)
        if UPCAST:
            a_tile = a_tile.to(tl.float32)
            b_tile = b_tile.to(tl.float32)
        acc = tl.dot(a_tile, b_tile, acc, input_precision=PRECISION)
        a_ptrs += a_step
        b_ptrs += b_step
    return acc
