"""One output tile of a matrix product, fp32 accumulation, any size by masks; the K loop stays software-pipelined."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def matmul_tile(
    a_rows,
    b,
    stride_bk,
    stride_bn,
    column,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """acc[m, n] = sum_k A[m, k] * B[k, column + n], fp32 [BLOCK_M, BLOCK_N].

    a_rows: pointers [BLOCK_M] to the rows of A, each valid (clamp them) and with contiguous K. b: pointer to B [K, N].
    Columns beyond N come out as 0. EVEN_K: K is a multiple of BLOCK_K, so the K loop needs no mask. UPCAST: multiply in
    fp32, for the interpreter, whose dot takes bf16 for integers.

    Every wait stands before the call: one inside the K loop would end pipelining, or be passed by prefetched loads.
    """
    offs_n = column + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    in_n = (offs_n < N)[None, :]
    a_ptrs = a_rows[:, None] + offs_k[None, :]
    b_ptrs = b + offs_k.to(tl.int64)[:, None] * stride_bk + offs_n.to(tl.int64)[None, :] * stride_bn
    step = tl.full((), BLOCK_K, tl.int64) * stride_bk
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, tl.cdiv(K, BLOCK_K)):
        if EVEN_K:
            a = tl.load(a_ptrs)
            b_tile = tl.load(b_ptrs, mask=in_n, other=0.0)
        else:
            in_k = offs_k < K - k * BLOCK_K
            a = tl.load(a_ptrs, mask=in_k[None, :], other=0.0)
            b_tile = tl.load(b_ptrs, mask=in_k[:, None] & in_n, other=0.0)
        if UPCAST:
            a = a.to(tl.float32)
            b_tile = b_tile.to(tl.float32)
        acc = tl.dot(a, b_tile, acc, input_precision=PRECISION)
        a_ptrs += BLOCK_K
        b_ptrs += step
    return acc
