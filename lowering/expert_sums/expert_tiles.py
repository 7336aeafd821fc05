"""Tiles of products with the weight of one of many experts. The copy unit (TMA) loads all weights by one descriptor."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def experts_descriptor(weight, sizes, TILES: tl.constexpr):
    """Returns a descriptor of the weights [E, K, N], or of [E, N, K] if K_MAJOR, for blocks of one expert's matrix."""
    BLOCK_N: tl.constexpr = TILES.BLOCK_N
    BLOCK_K: tl.constexpr = TILES.BLOCK_K
    if TILES.K_MAJOR:
        return tl.make_tensor_descriptor(
            weight, shape=[sizes.E, sizes.N, sizes.K], strides=[sizes.stride_be, sizes.stride_bn, 1],
            block_shape=[1, BLOCK_N, BLOCK_K],
        )  # fmt: skip
    else:
        return tl.make_tensor_descriptor(
            weight, shape=[sizes.E, sizes.K, sizes.N], strides=[sizes.stride_be, sizes.stride_bk, 1],
            block_shape=[1, BLOCK_K, BLOCK_N],
        )  # fmt: skip


@triton.jit
def matmul_of_expert(acc, a, b, row, expert, column, K, TILES: tl.constexpr):
    """Returns acc[m, n] + sum_k A[row + m, k] * B[expert, k, column + n], fp32. What is beyond the matrix is 0."""
    BLOCK_N: tl.constexpr = TILES.BLOCK_N
    BLOCK_K: tl.constexpr = TILES.BLOCK_K
    for k in range(0, tl.cdiv(K, BLOCK_K)):
        a_tile = a.load([row, k * BLOCK_K])
        if TILES.K_MAJOR:
            b_tile = b.load([expert, column, k * BLOCK_K]).reshape(BLOCK_N, BLOCK_K).T
        else:
            b_tile = b.load([expert, k * BLOCK_K, column]).reshape(BLOCK_K, BLOCK_N)
        if TILES.UPCAST:
            a_tile = a_tile.to(tl.float32)
            b_tile = b_tile.to(tl.float32)
        acc = tl.dot(a_tile, b_tile, acc, input_precision=TILES.PRECISION)
    return acc
