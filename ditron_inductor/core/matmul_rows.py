"""Products of any rows and any columns by pointers, as experts have them: one tile of a product, or of two in one.

The rows are taken where they lie, and those that do not exist are not loaded. See core/matmul.py for the other ways.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ditron_inductor.core.matmul import zeros_of


@triton.jit
def matmul_rows(rows, columns, inside, stride_k, K, TILES: tl.constexpr):
    """Returns acc[m, n] = sum_k A[m, k] * B[k, n], fp32 [BLOCK_M, BLOCK_N], of these Rows of A and of any columns of B:
    [BLOCK_N] pointers to their first elements, `inside` where there are such. The others are 0.
    """
    offs_k = tl.arange(0, TILES.BLOCK_K)
    # Do not clamp: otherwise all programs would read the same few lines at once.
    in_m, in_n = rows.inside[:, None], inside[None, :]
    a_ptrs = rows.pointers[:, None] + offs_k[None, :]
    b_ptrs = columns[None, :] + offs_k.to(tl.int64)[:, None] * stride_k
    step = tl.full((), TILES.BLOCK_K, tl.int64) * stride_k
    acc = zeros_of(TILES)
    for k in range(0, tl.cdiv(K, TILES.BLOCK_K)):
        if TILES.EVEN_K:
            a_tile = tl.load(a_ptrs, mask=in_m, other=0.0)
            b_tile = tl.load(b_ptrs, mask=in_n, other=0.0)
        else:
            in_k = offs_k < K - k * TILES.BLOCK_K
            a_tile = tl.load(a_ptrs, mask=in_m & in_k[None, :], other=0.0)
            b_tile = tl.load(b_ptrs, mask=in_k[:, None] & in_n, other=0.0)
        if TILES.UPCAST:
            a_tile = a_tile.to(tl.float32)
            b_tile = b_tile.to(tl.float32)
        acc = tl.dot(a_tile, b_tile, acc, input_precision=TILES.PRECISION)
        a_ptrs += TILES.BLOCK_K
        b_ptrs += step
    return acc


@triton.jit
def matmul_pair_in_one(rows, weight, other, column, N, K, TILES: tl.constexpr, APART: tl.constexpr):
    """Returns (A @ B, A @ other) of these Rows of A, each [BLOCK_M, BLOCK_N / 2] as `matmul_rows` computes it. Runs of
    8 columns of B and of the other weight alternate in one product of BLOCK_N columns, which tensor cores compute
    faster than two products. One thread has the columns of both products. Both weights have the same strides, and begin
    a multiple of APART elements apart, by which the compiler knows that loads of both are aligned.
    """
    BLOCK_M: tl.constexpr = TILES.BLOCK_M
    BLOCK_N: tl.constexpr = TILES.BLOCK_N
    ITEMSIZE: tl.constexpr = weight.pointer.dtype.element_ty.primitive_bitwidth // 8
    runs = tl.arange(0, BLOCK_N)
    offs_n = column + runs // 16 * 8 + runs % 8
    apart = (other.pointer.to(tl.int64) - weight.pointer.to(tl.int64)) // ITEMSIZE
    of_weight = tl.multiple_of(tl.where(runs % 16 < 8, 0, apart), APART)
    columns = weight.pointer + (of_weight + offs_n.to(tl.int64) * weight.stride_n)
    acc = matmul_rows(rows, columns, offs_n < N, weight.stride_k, K, TILES)
    acc, other_acc = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, BLOCK_N // 16, 2, 8)), (0, 1, 3, 2)))
    return tl.reshape(acc, (BLOCK_M, BLOCK_N // 2)), tl.reshape(other_acc, (BLOCK_M, BLOCK_N // 2))


@triton.jit
def matmul_interleaved_pair(rows, weight, column, N, K, TILES: tl.constexpr):
    """Does what `matmul_pair_in_one` does for a weight of 2 N columns: those of B and of the other one in turns."""
    BLOCK_M: tl.constexpr = TILES.BLOCK_M
    BLOCK_N: tl.constexpr = TILES.BLOCK_N
    offs_n = 2 * column + tl.arange(0, BLOCK_N)
    columns = weight.pointer + offs_n.to(tl.int64) * weight.stride_n
    acc = matmul_rows(rows, columns, offs_n < 2 * N, weight.stride_k, K, TILES)
    return tl.split(tl.reshape(acc, (BLOCK_M, BLOCK_N // 2, 2)))
