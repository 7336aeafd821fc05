"""One tile of two matrix products with the same rows: every block of A is loaded once for both. See core/matmul.py.

Two accumulators of half the columns need the registers of one whole accumulator, and a step loads as many bytes for as
many products. A single row needs no accumulators of tensor cores (see core/matmul_row.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ditron_inductor.core.matmul import begin_carrying, carry, carry_piece
from ditron_inductor.core.matmul_row import pair_of_row, product_of_few_rows
from ditron_inductor.core.overlap import wait_for_last


@triton.jit
def weight_block(b, k, column, BLOCK_K: tl.constexpr, K_MAJOR: tl.constexpr, UPCAST: tl.constexpr):
    """Loads block [BLOCK_K, BLOCK_N] number k, from `column` on, by a `weight_descriptor`."""
    if K_MAJOR:
        b_tile = b.load([column, k * BLOCK_K]).T
    else:
        b_tile = b.load([k * BLOCK_K, column])
    if UPCAST:
        b_tile = b_tile.to(tl.float32)
    return b_tile


@triton.jit
def matmul_pair_by_descriptors(
    a, b, other, row, column, K, carried, TILES: tl.constexpr, K_MAJOR: tl.constexpr, OTHER_K_MAJOR: tl.constexpr
):
    """Returns (A @ B, A @ other), each as `matmul_tile_by_descriptors` computes it, and carries as that does."""
    BLOCK_M: tl.constexpr = TILES.BLOCK_M
    BLOCK_N: tl.constexpr = TILES.BLOCK_N
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    other_acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    steps = tl.cdiv(K, TILES.BLOCK_K)
    CARRIES: tl.constexpr = len(carried.targets) > 0
    if CARRIES:
        every, piece, first, left = begin_carrying(carried, steps, TILES.PIECE)
    for k in range(0, steps):
        if CARRIES:
            piece, first, left = carry_piece(carried, every, piece, first, left, TILES.PIECE)
        a_tile = a.load([row, k * TILES.BLOCK_K])
        if TILES.UPCAST:
            a_tile = a_tile.to(tl.float32)
        b_tile = weight_block(b, k, column, TILES.BLOCK_K, K_MAJOR, TILES.UPCAST)
        acc = tl.dot(a_tile, b_tile, acc, input_precision=TILES.PRECISION)
        other_tile = weight_block(other, k, column, TILES.BLOCK_K, OTHER_K_MAJOR, TILES.UPCAST)
        other_acc = tl.dot(a_tile, other_tile, other_acc, input_precision=TILES.PRECISION)
    if CARRIES:
        carry(carried, first, TILES.PIECE)
    return acc, other_acc


@triton.jit
def matmul_pair(a_rows, weight, other, column, N, K, TILES: tl.constexpr):
    """Returns (A @ B, A @ other), each as `matmul_tile` computes it, without carrying."""
    BLOCK_M: tl.constexpr = TILES.BLOCK_M
    BLOCK_N: tl.constexpr = TILES.BLOCK_N
    offs_n = column + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, TILES.BLOCK_K)
    in_n = (offs_n < N)[None, :]
    a_ptrs = a_rows[:, None] + offs_k[None, :]
    down, across = offs_k.to(tl.int64)[:, None], offs_n.to(tl.int64)[None, :]
    b_ptrs = weight.pointer + down * weight.stride_k + across * weight.stride_n
    other_ptrs = other.pointer + down * other.stride_k + across * other.stride_n
    step = tl.full((), TILES.BLOCK_K, tl.int64) * weight.stride_k
    other_step = tl.full((), TILES.BLOCK_K, tl.int64) * other.stride_k
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    other_acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, tl.cdiv(K, TILES.BLOCK_K)):
        if TILES.EVEN_K:
            a = tl.load(a_ptrs)
            b_tile = tl.load(b_ptrs, mask=in_n, other=0.0)
            other_tile = tl.load(other_ptrs, mask=in_n, other=0.0)
        else:
            in_k = offs_k < K - k * TILES.BLOCK_K
            a = tl.load(a_ptrs, mask=in_k[None, :], other=0.0)
            b_tile = tl.load(b_ptrs, mask=in_k[:, None] & in_n, other=0.0)
            other_tile = tl.load(other_ptrs, mask=in_k[:, None] & in_n, other=0.0)
        if TILES.UPCAST:
            a = a.to(tl.float32)
            b_tile = b_tile.to(tl.float32)
            other_tile = other_tile.to(tl.float32)
        acc = tl.dot(a, b_tile, acc, input_precision=TILES.PRECISION)
        other_acc = tl.dot(a, other_tile, other_acc, input_precision=TILES.PRECISION)
        a_ptrs += TILES.BLOCK_K
        b_ptrs += step
        other_ptrs += other_step
    return acc, other_acc


@triton.jit
def interleaved_pair_of_few_rows(rows, weight, column, N, K, TILES: tl.constexpr, WIDE: tl.constexpr):
    """Returns (A @ B, A @ other) of these Rows of A, each as `product_of_few_rows` computes it. Column n of B and
    of the other one are columns 2 n and 2 n + 1 of `weight`, which is read once. WIDE: TILES with twice the columns.
    """
    BLOCK_M: tl.constexpr = TILES.BLOCK_M
    BLOCK_N: tl.constexpr = TILES.BLOCK_N
    acc = product_of_few_rows(rows, weight, 2 * column, 2 * N, K, WIDE)
    first, second = tl.split(tl.reshape(acc.T, (BLOCK_M, BLOCK_N, 2)))
    return first, second


@triton.jit
def matmul_pair_of_few_rows(rows, weight, other, column, N, K, TILES: tl.constexpr):
    """Returns (A @ B, A @ other) of these Rows of A, each as `product_of_few_rows` computes it."""
    if TILES.BLOCK_M == 1:
        first, second = pair_of_row(rows, weight, other, column, N, K, TILES)
        return first.T, second.T
    else:
        return matmul_pair_by_tensor_cores(rows, weight, other, column, N, K, TILES)


@triton.jit
def matmul_pair_by_tensor_cores(rows, weight, other, column, N, K, TILES: tl.constexpr):
    """Returns what `matmul_pair_of_few_rows` does, of any number of rows but one."""
    wait_for_last(TILES.OVERLAP)
    BLOCK_M: tl.constexpr = TILES.BLOCK_M
    BLOCK_N: tl.constexpr = TILES.BLOCK_N
    offs_n = (column + tl.arange(0, BLOCK_N)).to(tl.int64)[:, None]
    offs_k = tl.arange(0, TILES.BLOCK_K)
    in_m = rows.inside[None, :]
    in_n = offs_n < N
    a_ptrs = rows.pointers[None, :] + offs_k[:, None]
    b_ptrs = weight.pointer + offs_n * weight.stride_n + offs_k.to(tl.int64)[None, :] * weight.stride_k
    other_ptrs = other.pointer + offs_n * other.stride_n + offs_k.to(tl.int64)[None, :] * other.stride_k
    step = tl.full((), TILES.BLOCK_K, tl.int64) * weight.stride_k
    other_step = tl.full((), TILES.BLOCK_K, tl.int64) * other.stride_k
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    other_acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for k in range(0, tl.cdiv(K, TILES.BLOCK_K)):
        if TILES.EVEN_K:
            b_tile = tl.load(b_ptrs, mask=in_n, other=0.0)
            other_tile = tl.load(other_ptrs, mask=in_n, other=0.0)
            a_tile = tl.load(a_ptrs, mask=in_m, other=0.0)
        else:
            in_k = offs_k < K - k * TILES.BLOCK_K
            b_tile = tl.load(b_ptrs, mask=in_n & in_k[None, :], other=0.0)
            other_tile = tl.load(other_ptrs, mask=in_n & in_k[None, :], other=0.0)
            a_tile = tl.load(a_ptrs, mask=in_m & in_k[:, None], other=0.0)
        if TILES.UPCAST:
            b_tile = b_tile.to(tl.float32)
            other_tile = other_tile.to(tl.float32)
            a_tile = a_tile.to(tl.float32)
        acc = tl.dot(b_tile, a_tile, acc, input_precision=TILES.PRECISION)
        other_acc = tl.dot(other_tile, a_tile, other_acc, input_precision=TILES.PRECISION)
        a_ptrs += TILES.BLOCK_K
        b_ptrs += step
        other_ptrs += other_step
    return acc.T, other_acc.T
