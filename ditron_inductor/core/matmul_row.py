"""The product of a single row with columns of a weight, in fp32, without tensor cores.

Tensor cores multiply at least 8 rows, so with one row most of their operands are zeros, and blocks of the weight pass
through shared memory to get there. Here each thread multiplies what it loads, and the threads of a program add up at
the end. Nothing takes room but loads in flight, so a program computes one column and many share an SM, and the weight
comes in at the speed of the memory. It is read once, so the caches drop it first. Its K is contiguous. Short steps are
taken four at a time, whose loads are under way together. A launch that follows another one loads the first steps of the
weight while it waits for the row (see core/overlap.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ditron_inductor.core.matmul import matmul_steps_of_few_rows
from ditron_inductor.core.overlap import wait_for_last

SHORT_STEP, SHORT_STEPS = 256, 4
"""The most elements of a step that is taken with others in one turn of the loop, and how many these are then."""


@triton.constexpr_function
def steps_in_a_turn(block_k: int) -> int:
    """Returns how many steps of so many elements are taken in one turn of the loop."""
    return SHORT_STEPS if block_k <= SHORT_STEP else 1


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
    in_n, b_ptrs, length = columns_of(weight, column, N, TILES)
    BLOCK_N: tl.constexpr = TILES.BLOCK_N
    BLOCK_K: tl.constexpr = TILES.BLOCK_K
    AHEAD: tl.constexpr = TILES.AHEAD
    TURN: tl.constexpr = steps_in_a_turn(BLOCK_K)
    if AHEAD > 0:
        first = load_ahead(b_ptrs, in_n, weight.stride_k, TILES)
    wait_for_last(TILES.OVERLAP)
    total = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    if AHEAD > 0:
        total += product_ahead(first, row, TILES)
        b_ptrs += AHEAD * length
    in_m, in_k, a_ptrs = steps_of(row, TILES)
    for turn in range(AHEAD, tl.cdiv(K, BLOCK_K), TURN):
        for step in tl.static_range(TURN):
            inside = inside_of(K - (turn + step) * BLOCK_K, in_k, TILES)
            b = tl.load(b_ptrs, mask=in_n & inside, other=0.0, eviction_policy="evict_first")
            a = tl.load(a_ptrs, mask=in_m & inside, other=0.0)
            total += b.to(tl.float32) * a.to(tl.float32)
            a_ptrs += BLOCK_K
            b_ptrs += length
    return tl.sum(total, 1)[:, None]


@triton.jit
def pair_of_row(row, weight, other, column, N, K, TILES: tl.constexpr):
    """Returns (A @ B, A @ other), each as `product_of_row` computes it. A step loads both weights."""
    in_n, b_ptrs, length = columns_of(weight, column, N, TILES)
    _, other_ptrs, other_length = columns_of(other, column, N, TILES)
    BLOCK_N: tl.constexpr = TILES.BLOCK_N
    BLOCK_K: tl.constexpr = TILES.BLOCK_K
    AHEAD: tl.constexpr = TILES.AHEAD
    TURN: tl.constexpr = steps_in_a_turn(BLOCK_K)
    if AHEAD > 0:
        first = load_ahead(b_ptrs, in_n, weight.stride_k, TILES)
        second = load_ahead(other_ptrs, in_n, other.stride_k, TILES)
    wait_for_last(TILES.OVERLAP)
    total = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    other_total = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    if AHEAD > 0:
        total += product_ahead(first, row, TILES)
        other_total += product_ahead(second, row, TILES)
        b_ptrs += AHEAD * length
        other_ptrs += AHEAD * other_length
    in_m, in_k, a_ptrs = steps_of(row, TILES)
    for turn in range(AHEAD, tl.cdiv(K, BLOCK_K), TURN):
        for step in tl.static_range(TURN):
            inside = inside_of(K - (turn + step) * BLOCK_K, in_k, TILES)
            b = tl.load(b_ptrs, mask=in_n & inside, other=0.0, eviction_policy="evict_first")
            c = tl.load(other_ptrs, mask=in_n & inside, other=0.0, eviction_policy="evict_first")
            a = tl.load(a_ptrs, mask=in_m & inside, other=0.0).to(tl.float32)
            total += b.to(tl.float32) * a
            other_total += c.to(tl.float32) * a
            a_ptrs += BLOCK_K
            b_ptrs += length
            other_ptrs += other_length
    return tl.sum(total, 1)[:, None], tl.sum(other_total, 1)[:, None]


@triton.jit
def columns_of(weight, column, N, TILES: tl.constexpr):
    """Returns which of the columns [BLOCK_N, 1] from `column` on there are, the pointers [BLOCK_N, BLOCK_K] to their
    first step, and the elements from one step to the next.
    """
    BLOCK_N: tl.constexpr = TILES.BLOCK_N
    BLOCK_K: tl.constexpr = TILES.BLOCK_K
    offs_n = (column + tl.arange(0, BLOCK_N)).to(tl.int64)[:, None]
    offs_k = tl.arange(0, BLOCK_K)[None, :]
    length = tl.full((), BLOCK_K, tl.int64) * weight.stride_k
    return offs_n < N, weight.pointer + offs_n * weight.stride_n + offs_k * weight.stride_k, length


@triton.jit
def steps_of(row, TILES: tl.constexpr):
    """Returns whether there is this row of A, as Rows [1], the places [1, BLOCK_K] in a step, and the pointers
    [1, BLOCK_K] to its first step that is not loaded ahead.
    """
    BLOCK_K: tl.constexpr = TILES.BLOCK_K
    AHEAD: tl.constexpr = TILES.AHEAD
    offs_k = tl.arange(0, BLOCK_K)[None, :]
    return row.inside[:, None], offs_k, row.pointers[:, None] + (AHEAD * BLOCK_K + offs_k)


@triton.jit
def inside_of(left, in_k, TILES: tl.constexpr):
    """Returns which of the places `in_k` in a step there are, where `left` elements are left. They are all there or
    none if steps are whole.
    """
    if TILES.EVEN_K:
        return left > 0
    else:
        return in_k < left


@triton.jit
def load_ahead(b_ptrs, in_n, stride_k, TILES: tl.constexpr):
    """Loads the first AHEAD steps [AHEAD, BLOCK_N, BLOCK_K] of columns, of which a thread has the same elements."""
    AHEAD: tl.constexpr = TILES.AHEAD
    BLOCK_K: tl.constexpr = TILES.BLOCK_K
    steps = tl.arange(0, AHEAD)[:, None, None] * BLOCK_K
    pointers = b_ptrs[None, :, :] + steps * stride_k
    return tl.load(pointers, mask=in_n[None, :, :], other=0.0, eviction_policy="evict_first")


@triton.jit
def product_ahead(first, row, TILES: tl.constexpr):
    """Returns the products [BLOCK_N, BLOCK_K] of what `load_ahead` has loaded, added up over the steps."""
    AHEAD: tl.constexpr = TILES.AHEAD
    BLOCK_K: tl.constexpr = TILES.BLOCK_K
    steps = tl.arange(0, AHEAD)[:, None, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, None, :]
    a = tl.load(row.pointers[None, :, None] + steps, mask=row.inside[None, :, None], other=0.0)
    return tl.sum(first.to(tl.float32) * a.to(tl.float32), 0)
