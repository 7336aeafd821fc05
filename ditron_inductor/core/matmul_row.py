"""The product of a single row with columns of a weight, in fp32, without tensor cores.

Tensor cores multiply at least 8 rows, so with one row most of their operands are zeros, and blocks of the weight pass
through shared memory to get there. Here each thread multiplies what it loads, and the threads of a program add up at
the end. Nothing takes room but loads in flight, so a program computes one column and many share an SM, and the weight
comes in at the speed of the memory. It is read once, so the caches drop it first. Its K is contiguous. A launch that
follows another one loads the first steps of the weight while it waits for the row (see core/overlap.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ditron_inductor.core.matmul import matmul_steps_of_few_rows
from ditron_inductor.core.overlap import wait_for_last


@triton.jit
def product_of_few_rows(rows, weight, column, N, K, TILES: tl.constexpr):
    """Returns the transpose [BLOCK_N, BLOCK_M] of A @ B [K, column + BLOCK_N], for these Rows of A and this Weight.
    Tensor cores compute it, but for a single row.
    """
    BLOCK_M: tl.constexpr = TILES.BLOCK_M
    BLOCK_N: tl.constexpr = TILES.BLOCK_N
    if BLOCK_M == 1:
        return product_of_row(rows, weight, column, N, K, TILES)
    else:
        wait_for_last(TILES.OVERLAP)
        acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        return matmul_steps_of_few_rows(acc, rows, weight, column, N, K, TILES)


@triton.jit
def product_of_row(row, weight, column, N, K, TILES: tl.constexpr):
    """Returns the product [BLOCK_N, 1] of a row of A, as Rows [1], with the columns `column`, .. of a Weight [K, N].
    If there is no such row it is 0.
    """
    BLOCK_N: tl.constexpr = TILES.BLOCK_N
    BLOCK_K: tl.constexpr = TILES.BLOCK_K
    AHEAD: tl.constexpr = TILES.AHEAD
    offs_n = (column + tl.arange(0, BLOCK_N)).to(tl.int64)[:, None]
    offs_k = tl.arange(0, BLOCK_K)[None, :]
    in_m, in_n = row.inside[:, None], offs_n < N
    columns = weight.pointer + offs_n * weight.stride_n
    if AHEAD > 0:
        # A thread has the same elements of all these steps.
        ahead = tl.arange(0, AHEAD)[:, None, None] * BLOCK_K + offs_k[None, :, :]
        first_ptrs = columns[None, :, :] + ahead * weight.stride_k
        first = tl.load(first_ptrs, mask=in_n[None, :, :], other=0.0, eviction_policy="evict_first")
    wait_for_last(TILES.OVERLAP)
    total = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    if AHEAD > 0:
        begin = tl.load(row.pointers[None, :, None] + ahead, mask=in_m[None, :, :], other=0.0)
        total += tl.sum(first.to(tl.float32) * begin.to(tl.float32), 0)
    a_ptrs = row.pointers[:, None] + (AHEAD * BLOCK_K + offs_k)
    b_ptrs = columns + (AHEAD * BLOCK_K + offs_k) * weight.stride_k
    step = tl.full((), BLOCK_K, tl.int64) * weight.stride_k
    for k in range(AHEAD, tl.cdiv(K, BLOCK_K)):
        in_k = offs_k < K - k * BLOCK_K
        b = tl.load(b_ptrs, mask=in_n if TILES.EVEN_K else in_n & in_k, other=0.0, eviction_policy="evict_first")
        a = tl.load(a_ptrs, mask=in_m if TILES.EVEN_K else in_m & in_k, other=0.0)
        total += b.to(tl.float32) * a.to(tl.float32)
        a_ptrs += BLOCK_K
        b_ptrs += step
    return tl.sum(total, 1)[:, None]
