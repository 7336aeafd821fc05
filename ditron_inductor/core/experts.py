"""The sum of what its experts return for each of a few tokens, one tile of columns of it.

    total[t, n] = sum_j factors[t * TOP_K + j] * (x[t * TOP_K + j] @ weight[experts[t * TOP_K + j]])[n]

A token takes TOP_K experts, each in a *slot*, and its experts differ. The tokens are the rows of one tile, see
`matmul_tile_of_few_rows`. One loop goes over all steps of K of all experts that some token takes, so the weights of the
next expert are on their way while the present one is multiplied, however short K is. Where an expert begins, the loop
finds its slots; where it ends, its products are rounded as a matmul rounds its result, scaled, and added in fp32. Each
weight is read once, whoever takes it, and nothing is sorted, copied or added atomically.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Routing(NamedTuple):
    """How tokens take experts, known at compile time: TOP_K experts each. EXPERTS, RANKS and SLOTS are powers of two of
    at least the number of experts, TOP_K and the number of slots. SINGLE: there is one token, so no two slots share an
    expert.
    """

    TOP_K: Any
    EXPERTS: Any
    RANKS: Any
    SLOTS: Any
    SINGLE: Any


class Routed(NamedTuple):
    """The slots of a launch: pointers to their experts and factors, which experts [EXPERTS] some token takes, and how
    many these are.
    """

    experts: Any
    factors: Any
    taken: Any
    count: Any


class Matrices(NamedTuple):
    """A pointer to the weights [E, K, N] of all experts, and their strides."""

    pointer: Any
    stride_be: Any
    stride_bk: Any
    stride_bn: Any


@triton.jit
def routed_of(experts, factors, M, ROUTING: tl.constexpr):
    """Returns the Routed of M tokens. experts: int64 [M * TOP_K], token by token. factors: as many numbers."""
    EXPERTS: tl.constexpr = ROUTING.EXPERTS
    numbers = tl.arange(0, EXPERTS)
    if ROUTING.SINGLE:
        taken = numbers >= 0
        count = M * ROUTING.TOP_K
    else:
        slots = tl.arange(0, ROUTING.SLOTS)
        inside = slots < M * ROUTING.TOP_K
        found = tl.load(experts + slots, mask=inside, other=0).to(tl.int32)
        taken = tl.histogram(found, EXPERTS, mask=inside) > 0
        count = tl.sum(taken.to(tl.int32))
    return Routed(experts, factors, taken, count)


@triton.jit
def next_expert(routed, expert, number, M, BLOCK_M: tl.constexpr, ROUTING: tl.constexpr):
    """Returns (the expert number `number` of those that are taken; for each token its slot with this expert, or -1).
    expert: the one before.
    """
    TOP_K: tl.constexpr = ROUTING.TOP_K
    tokens = tl.arange(0, BLOCK_M)
    if ROUTING.SINGLE:
        # Every slot has an expert of its own.
        following = tl.load(routed.experts + number).to(tl.int32)
        places = tl.where(tokens == 0, number, -1)
    else:
        EXPERTS: tl.constexpr = ROUTING.EXPERTS
        numbers = tl.arange(0, EXPERTS)
        following = tl.min(tl.where(routed.taken & (numbers > expert), numbers, EXPERTS))
        ranks = tl.arange(0, ROUTING.RANKS)
        inside = (tokens < M)[:, None] & (ranks < TOP_K)[None, :]
        slots = tokens[:, None] * TOP_K + ranks[None, :]
        hits = tl.load(routed.experts + slots, mask=inside, other=-1) == following
        places = tl.max(tl.where(hits, slots, -1), 1)
    return following, places


@triton.jit
def experts_tile_of_few_rows(
    x, stride_x, M, matrices, routed, column, N, K, TILES: tl.constexpr, ROUTING: tl.constexpr
):  # fmt: skip
    """Returns the columns column, .., column + BLOCK_N - 1 of the total of the module, fp32 [BLOCK_M, BLOCK_N], for all
    M <= BLOCK_M tokens. x: pointer to a row for each slot, with contiguous K. matrices: Matrices.
    """
    BLOCK_M: tl.constexpr = TILES.BLOCK_M
    BLOCK_N: tl.constexpr = TILES.BLOCK_N
    BLOCK_K: tl.constexpr = TILES.BLOCK_K
    offs_n = column + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    in_n = (offs_n < N)[:, None]
    columns = matrices.pointer + offs_n.to(tl.int64)[:, None] * matrices.stride_bn
    rows_of_b = offs_k.to(tl.int64)[None, :] * matrices.stride_bk
    steps = tl.cdiv(K, BLOCK_K)
    # The transpose is computed, as for a few rows of one matrix.
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    expert = tl.full((), -1, tl.int32)
    number = tl.full((), 0, tl.int32)
    step = tl.full((), 0, tl.int32)
    places = tl.full((BLOCK_M,), -1, tl.int32)
    for _ in range(0, routed.count * steps):
        if step == 0:
            expert, places = next_expert(routed, expert, number, M, BLOCK_M, ROUTING)
        first = step * BLOCK_K
        in_m = (places >= 0)[None, :]
        a_ptrs = x + places.to(tl.int64)[None, :] * stride_x + (first + offs_k)[:, None]
        begin = expert.to(tl.int64) * matrices.stride_be + first.to(tl.int64) * matrices.stride_bk
        b_ptrs = columns + begin + rows_of_b
        if TILES.EVEN_K:
            b_tile = tl.load(b_ptrs, mask=in_n, other=0.0)
            a_tile = tl.load(a_ptrs, mask=in_m, other=0.0)
        else:
            in_k = offs_k < K - first
            b_tile = tl.load(b_ptrs, mask=in_n & in_k[None, :], other=0.0)
            a_tile = tl.load(a_ptrs, mask=in_m & in_k[:, None], other=0.0)
        if TILES.UPCAST:
            b_tile = b_tile.to(tl.float32)
            a_tile = a_tile.to(tl.float32)
        acc = tl.dot(b_tile, a_tile, acc, input_precision=TILES.PRECISION)
        last = step == steps - 1
        # The next step depends on what its loads need, and not on the product: so it is requested early.
        number += last.to(tl.int32)
        step = tl.where(last, 0, step + 1)
        if last:
            factor = tl.load(routed.factors + places, mask=places >= 0, other=0.0).to(tl.float32)
            products = acc.to(x.dtype.element_ty).to(tl.float32) * factor[None, :]
            # A token that does not take the expert has nothing of it, not even 0 times an infinite weight.
            total += tl.where((places >= 0)[None, :], products, 0.0)
            acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    return total.T
