"""One output tile of a matrix product, fp32 accumulation; the K loop stays software-pipelined.

Two ways to load, one result. *Descriptors*: the copy unit (TMA) fetches whole blocks, and what lies outside of the
operand comes as zeros. *Pointers*: for GPUs without it, and operands whose address or strides are no multiples of 16
bytes. Every wait stands before the call: one inside the K loop would end pipelining, or be passed by prefetched loads.

While the tensor cores work, the loop *carries* finished data to peers: in each step one piece goes from a buffer of
this GPU to `targets`, 16 bytes for each thread, loaded one step ahead. Stored all at once, by all programs at the same
time, it would wait for the links; so it costs next to nothing. The caller publishes it after the call.

UPCAST: multiply in fp32, for the interpreter, whose dot takes bf16 for integers.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rows_descriptor(a, M, K, stride_am, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """Descriptor of A [M, K] with contiguous K, for blocks [BLOCK_M, BLOCK_K]. The base is a multiple of 16 bytes."""
    return tl.make_tensor_descriptor(a, shape=[M, K], strides=[stride_am, 1], block_shape=[BLOCK_M, BLOCK_K])


@triton.jit
def weight_descriptor(
    b, N, K, stride_bk, stride_bn, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, K_MAJOR: tl.constexpr
):
    """Descriptor of B [K, N]: of its transpose if K_MAJOR (contiguous K, as nn.Linear holds it), else of B itself."""
    if K_MAJOR:
        return tl.make_tensor_descriptor(b, shape=[N, K], strides=[stride_bn, 1], block_shape=[BLOCK_N, BLOCK_K])
    else:
        return tl.make_tensor_descriptor(b, shape=[K, N], strides=[stride_bk, 1], block_shape=[BLOCK_K, BLOCK_N])


@triton.jit
def as_words(pointer):
    """The pointer to 32-bit words: what is carried is never unpacked, and so a step does not wait for its load."""
    return pointer.to(tl.pointer_type(tl.int32), bitcast=True)


@triton.jit
def load_piece(source, first, count, PIECE: tl.constexpr):
    """Words first, .., first + PIECE - 1 of `source`, as far as they are below `count`."""
    offsets = first + tl.arange(0, PIECE)
    return tl.load(as_words(source) + offsets, mask=offsets < count)


@triton.jit
def load_next_piece(source, piece, first, count, PIECE: tl.constexpr):
    """`load_piece`, or `piece` as it is where there is nothing to load: no select, which would wait for the load."""
    offsets = first + tl.arange(0, PIECE)
    return tl.load(as_words(source) + offsets, mask=offsets < count, other=piece)


@triton.jit
def store_piece(targets, piece, first, count, num_targets, NUM_TARGETS: tl.constexpr, PIECE: tl.constexpr):
    """Store what `load_piece` loaded to the first `num_targets` of a tuple of NUM_TARGETS pointers."""
    offsets = first + tl.arange(0, PIECE)
    for i in tl.static_range(NUM_TARGETS):
        tl.store(as_words(targets[i]) + offsets, piece, mask=(offsets < count) & (i < num_targets))


@triton.jit
def begin_carrying(source, count, steps, PIECE: tl.constexpr):
    """(every how many of `steps` steps one piece of `count` words is due, so that they are spread evenly; the first
    piece, where it begins, steps until it is due: the state of `carry_piece`).
    """
    every = tl.maximum(steps // tl.maximum(tl.cdiv(count, PIECE), 1), 1)
    return every, load_piece(source, 0, count, PIECE), tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)


@triton.jit
def carry_piece(
    source, targets, every, piece, first, left, count, num_targets, NUM_TARGETS: tl.constexpr, PIECE: tl.constexpr
):
    """One step of a loop that carries `count` words, a piece in every `every`-th step.

    Returns the state for the next step. Where steps are too few, the rest, from word `first` on, is left to `carry`.
    """
    now = tl.where(left == 0, count, 0)
    store_piece(targets, piece, first, now, num_targets, NUM_TARGETS, PIECE)
    first = tl.where(left == 0, first + PIECE, first)
    left = tl.where(left == 0, every - 1, left - 1)
    return load_next_piece(source, piece, first, now, PIECE), first, left


@triton.jit
def carry(source, targets, first, count, num_targets, NUM_TARGETS: tl.constexpr, PIECE: tl.constexpr):
    """Copy words first, .., count - 1 of `source` to the first `num_targets` of NUM_TARGETS pointers, now."""
    for start in range(first, count, 4 * PIECE):
        store_piece(
            targets, load_piece(source, start, count, 4 * PIECE), start, count, num_targets, NUM_TARGETS, 4 * PIECE
        )


@triton.jit
def matmul_tile_by_descriptors(
    a, b, row, column, K, source, targets, count, num_targets,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    K_MAJOR: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    NUM_TARGETS: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """acc[m, n] = sum_k A[row + m, k] * B[k, column + n], fp32 [BLOCK_M, BLOCK_N]; a, b: descriptors, see above.

    Carries `count` 32-bit words from `source` to the first `num_targets` of `targets`, a tuple of NUM_TARGETS pointers.
    """
    return matmul_steps_by_descriptors(
        tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32), 0, tl.cdiv(K, BLOCK_K),
        a, b, row, column, source, targets, count, num_targets,
        BLOCK_K, K_MAJOR, PRECISION, UPCAST, NUM_TARGETS, PIECE,
    )  # fmt: skip


@triton.jit
def matmul_steps_by_descriptors(
    acc, begin, end, a, b, row, column, source, targets, count, num_targets,
    BLOCK_K: tl.constexpr, K_MAJOR: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    NUM_TARGETS: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """acc plus the steps begin, .., end - 1 of matmul_tile_by_descriptors, carrying all of `count` meanwhile."""
    if NUM_TARGETS > 0:
        every, piece, first, left = begin_carrying(source, count, end - begin, PIECE)
    for k in range(begin, end):
        if NUM_TARGETS > 0:
            piece, first, left = carry_piece(
                source, targets, every, piece, first, left, count, num_targets, NUM_TARGETS, PIECE
            )
        a_tile = a.load([row, k * BLOCK_K])
        if K_MAJOR:
            b_tile = b.load([column, k * BLOCK_K]).T
        else:
            b_tile = b.load([k * BLOCK_K, column])
        if UPCAST:
            a_tile = a_tile.to(tl.float32)
            b_tile = b_tile.to(tl.float32)
        acc = tl.dot(a_tile, b_tile, acc, input_precision=PRECISION)
    if NUM_TARGETS > 0:
        carry(source, targets, first, count, num_targets, NUM_TARGETS, PIECE)
    return acc


@triton.jit
def matmul_run_by_descriptors(
    acc, a, b, row, a_first, column, b_first, K,
    BLOCK_K: tl.constexpr, K_MAJOR: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """acc[m, n] plus sum_k A[row + m, a_first + k] * B[b_first + k, column + n] of K steps, a multiple of BLOCK_K."""
    for k in range(0, tl.cdiv(K, BLOCK_K)):
        a_tile = a.load([row, a_first + k * BLOCK_K])
        if K_MAJOR:
            b_tile = b.load([column, b_first + k * BLOCK_K]).T
        else:
            b_tile = b.load([b_first + k * BLOCK_K, column])
        if UPCAST:
            a_tile = a_tile.to(tl.float32)
            b_tile = b_tile.to(tl.float32)
        acc = tl.dot(a_tile, b_tile, acc, input_precision=PRECISION)
    return acc


@triton.jit
def matmul_tile(
    a_rows, b, stride_bk, stride_bn, column, N, K, source, targets, count, num_targets,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    NUM_TARGETS: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """acc[m, n] = sum_k A[m, k] * B[k, column + n], fp32 [BLOCK_M, BLOCK_N]; carries as matmul_tile_by_descriptors.

    a_rows: pointers [BLOCK_M] to the rows of A with contiguous K, each valid (clamp them). b: pointer to B [K, N].
    Columns beyond N come out as 0. EVEN_K: K is a multiple of BLOCK_K, so the K loop needs no mask for it.
    """
    return matmul_steps(
        tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32),
        a_rows, b, stride_bk, stride_bn, column, N, K, source, targets, count, num_targets,
        BLOCK_N, BLOCK_K, EVEN_K, PRECISION, UPCAST, NUM_TARGETS, PIECE,
    )  # fmt: skip


@triton.jit
def matmul_steps(
    acc, a_rows, b, stride_bk, stride_bn, column, N, K, source, targets, count, num_targets,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    NUM_TARGETS: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """acc plus what matmul_tile computes."""
    offs_n = column + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    in_n = (offs_n < N)[None, :]
    a_ptrs = a_rows[:, None] + offs_k[None, :]
    b_ptrs = b + offs_k.to(tl.int64)[:, None] * stride_bk + offs_n.to(tl.int64)[None, :] * stride_bn
    step = tl.full((), BLOCK_K, tl.int64) * stride_bk
    steps = tl.cdiv(K, BLOCK_K)
    if NUM_TARGETS > 0:
        every, piece, first, left = begin_carrying(source, count, steps, PIECE)
    for k in range(0, steps):
        if NUM_TARGETS > 0:
            piece, first, left = carry_piece(
                source, targets, every, piece, first, left, count, num_targets, NUM_TARGETS, PIECE
            )
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
    if NUM_TARGETS > 0:
        carry(source, targets, first, count, num_targets, NUM_TARGETS, PIECE)
    return acc


@triton.jit
def further_products_by_descriptors(
    acc, a, b, row, column, depths, source,
    BLOCK_K: tl.constexpr, K_MAJOR: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    PIECE: tl.constexpr, NUM_PRODUCTS: tl.constexpr,
):  # fmt: skip
    """acc plus all products but the first of tuples of descriptors, of K = depths[i]. K_MAJOR: one bit for each."""
    for i in tl.static_range(1, NUM_PRODUCTS):
        acc = matmul_steps_by_descriptors(
            acc, 0, tl.cdiv(depths[i], BLOCK_K), a[i], b[i], row, column, source, (), 0, 0,
            BLOCK_K, (K_MAJOR >> i) & 1, PRECISION, UPCAST, 0, PIECE,
        )  # fmt: skip
    return acc


@triton.jit
def further_products(
    acc, a, rows, strides_am, b, strides_bk, strides_bn, column, N, depths, source,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    PIECE: tl.constexpr, NUM_PRODUCTS: tl.constexpr,
):  # fmt: skip
    """acc plus all products but the first of tuples of pointers, of K = depths[i]. rows: [BLOCK_M], each valid."""
    for i in tl.static_range(1, NUM_PRODUCTS):
        acc = matmul_steps(
            acc, a[i] + rows * strides_am[i], b[i], strides_bk[i], strides_bn[i], column, N, depths[i],
            source, (), 0, 0, BLOCK_N, BLOCK_K, EVEN_K, PRECISION, UPCAST, 0, PIECE,
        )  # fmt: skip
    return acc


@triton.jit
def plus_bias(acc, bias, column, N, BLOCK_N: tl.constexpr, HAS_BIAS: tl.constexpr):
    """acc [BLOCK_M, BLOCK_N] plus the row bias[column + n]; acc itself unless HAS_BIAS is 1."""
    if HAS_BIAS == 1:
        offs_n = column + tl.arange(0, BLOCK_N)
        acc += tl.load(bias + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)[None, :]
    return acc


@triton.jit
def plus_column(acc, bias, row, last, BLOCK_M: tl.constexpr, HAS_BIAS: tl.constexpr):
    """acc [BLOCK_M, BLOCK_N] plus the column bias[row + m], of rows up to `last`; acc itself unless HAS_BIAS is 2."""
    if HAS_BIAS == 2:
        offs_m = row + tl.arange(0, BLOCK_M)
        acc += tl.load(bias + offs_m, mask=offs_m <= last, other=0.0).to(tl.float32)[:, None]
    return acc


@triton.jit
def matmul_tile_of_few_rows(
    a, strides_am, M, b, strides_bk, strides_bn, column, N, depths,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr, NUM_PRODUCTS: tl.constexpr,
):  # fmt: skip
    """acc[m, n] = sum_i sum_k A_i[m, k] * B_i[k, column + n], fp32 [BLOCK_M, BLOCK_N], for all M <= BLOCK_M rows.

    It takes as long as reading B does. Computed as its transpose: tensor cores want many rows, and columns of B there
    are, so its blocks go from shared memory straight into them. a: pointers to A_i [M, K_i] with contiguous K, b:
    pointers to B_i [K_i, N], depths: K_i, and strides, as tuples.
    """
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for i in tl.static_range(NUM_PRODUCTS):
        acc = matmul_steps_of_few_rows(
            acc, a[i], strides_am[i], M, b[i], strides_bk[i], strides_bn[i], column, N, depths[i],
            BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, PRECISION, UPCAST,
        )  # fmt: skip
    return acc.T


@triton.jit
def matmul_steps_of_few_rows(
    acc, a, stride_am, M, b, stride_bk, stride_bn, column, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """acc [BLOCK_N, BLOCK_M] plus the transpose of A [M, K] @ B [K, column + BLOCK_N]."""
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = column + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    # Not clamped: else all programs read the same few lines at once.
    in_m = (offs_m < M)[None, :]
    in_n = (offs_n < N)[:, None]
    a_ptrs = a + offs_m.to(tl.int64)[None, :] * stride_am + offs_k[:, None]
    b_ptrs = b + offs_n.to(tl.int64)[:, None] * stride_bn + offs_k.to(tl.int64)[None, :] * stride_bk
    step = tl.full((), BLOCK_K, tl.int64) * stride_bk
    for k in range(0, tl.cdiv(K, BLOCK_K)):
        if EVEN_K:
            b_tile = tl.load(b_ptrs, mask=in_n, other=0.0)
            a_tile = tl.load(a_ptrs, mask=in_m, other=0.0)
        else:
            in_k = offs_k < K - k * BLOCK_K
            b_tile = tl.load(b_ptrs, mask=in_n & in_k[None, :], other=0.0)
            a_tile = tl.load(a_ptrs, mask=in_m & in_k[:, None], other=0.0)
        if UPCAST:
            b_tile = b_tile.to(tl.float32)
            a_tile = a_tile.to(tl.float32)
        acc = tl.dot(b_tile, a_tile, acc, input_precision=PRECISION)
        a_ptrs += BLOCK_K
        b_ptrs += step
    return acc
