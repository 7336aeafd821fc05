"""One output tile of a matrix product, with fp32 accumulation; the K loop stays software-pipelined.

There are two ways to load, with one result. With *descriptors* the copy unit (TMA) fetches whole blocks, and elements
outside of the operand are zeros. *Pointers* are for GPUs without this unit, and for operands whose address or strides
are not multiples of 16 bytes. Every wait stands before the call. A wait inside the K loop would end pipelining, or
prefetched loads would pass it.

While the tensor cores work, the loop *carries* finished data to peers: in each step one piece goes from a buffer of
this GPU to `targets`, 16 bytes for each thread, loaded one step ahead. If all programs stored their data at once, they
would wait for the links; carried, it costs next to nothing. The caller publishes the data after the call.

UPCAST: multiply in fp32, for the interpreter, whose dot takes bf16 for integers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Tiles(NamedTuple):
    """How a kernel computes tiles of products, known at compile time: the tile's sizes, GROUP_M of `order.grouped`,
    DESCRIPTORS or pointers, K_MAJOR (one bit for each second operand that has contiguous K), EVEN_K (K is a multiple of
    BLOCK_K, so the K loop needs no mask for it), PRECISION of `tl.dot`, UPCAST, THREADS of a program, PIECE (32-bit
    words that are carried in one step), OVERLAP of the launch (see core/overlap.py), and AHEAD, the steps of a weight
    that a launch which follows loads before it waits: a power of two, or 0. So many steps of all weights are whole.
    """

    BLOCK_M: Any
    BLOCK_N: Any
    BLOCK_K: Any
    GROUP_M: Any
    DESCRIPTORS: Any
    K_MAJOR: Any
    EVEN_K: Any
    PRECISION: Any
    UPCAST: Any
    THREADS: Any
    PIECE: Any
    OVERLAP: Any = 0
    AHEAD: Any = 0


class Weight(NamedTuple):
    """A pointer to B [K, N], and its strides."""

    pointer: Any
    stride_k: Any
    stride_n: Any


class Rows(NamedTuple):
    """Rows of A [.., K] whose K is contiguous: pointers to their first elements, and which of them there are."""

    pointers: Any
    inside: Any


class Terms(NamedTuple):
    """The sizes of products a_i @ b_i that are added up, as tuples with one number for each product: K_i, the row
    stride of a_i (whose K is contiguous), and the strides of b_i [K_i, N].
    """

    depths: Any
    strides_am: Any
    strides_bk: Any
    strides_bn: Any


class SumFactors(NamedTuple):
    """The factors of a sum of products: tuples of pointers to a_i and b_i, or of descriptors of them; and sizes."""

    lefts: Any
    rights: Any
    a_descriptors: Any
    b_descriptors: Any
    M: Any
    N: Any
    terms: Any


class Widths(NamedTuple):
    """The sizes of weights b_i [K, N_i] side by side, as tuples: N_i, and the strides of rows and columns."""

    columns: Any
    strides_bk: Any
    strides_bn: Any


class Carried(NamedTuple):
    """The data that a K loop carries: 32-bit words 0, .., words - 1 of `source`, to the first `num_targets` of a tuple
    of pointers. Nothing is carried if the tuple is empty.
    """

    source: Any
    targets: Any
    words: Any
    num_targets: Any


@triton.jit
def rows_descriptor(a, M, K, stride_am, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """Returns a descriptor of A [M, K], K contiguous, for blocks [BLOCK_M, BLOCK_K]. A is aligned to 16 bytes."""
    return tl.make_tensor_descriptor(a, shape=[M, K], strides=[stride_am, 1], block_shape=[BLOCK_M, BLOCK_K])


@triton.jit
def weight_descriptor(
    b, N, K, stride_bk, stride_bn, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, K_MAJOR: tl.constexpr
):
    """Returns a descriptor of B [K, N], or of its transpose if K_MAJOR (K is contiguous, as in nn.Linear)."""
    if K_MAJOR:
        return tl.make_tensor_descriptor(b, shape=[N, K], strides=[stride_bn, 1], block_shape=[BLOCK_N, BLOCK_K])
    else:
        return tl.make_tensor_descriptor(b, shape=[K, N], strides=[stride_bk, 1], block_shape=[BLOCK_K, BLOCK_N])


@triton.jit
def parts_of(operands):
    """Returns (the a_i, the b_i, the bias or what stands in its place) of the operands of a sum of products, which are
    one flat tuple: the host fills in the addresses of tuples in tuples one by one.
    """
    NUM: tl.constexpr = len(operands) // 2
    return operands[:NUM], operands[NUM : 2 * NUM], operands[2 * NUM]


@triton.jit
def factors_of(lefts, rights, M, N, terms, TILES: tl.constexpr):
    """Returns the SumFactors a_i [M, K_i] and b_i [K_i, N] of a sum of products, of these Terms."""
    a_descriptors = ()
    b_descriptors = ()
    NUM: tl.constexpr = len(lefts) if TILES.DESCRIPTORS else 0
    for i in tl.static_range(NUM):
        K = terms.depths[i]
        a_descriptor = rows_descriptor(lefts[i], M, K, terms.strides_am[i], TILES.BLOCK_M, TILES.BLOCK_K)
        a_descriptors = a_descriptors + (a_descriptor,)  # type: ignore[assignment]
        b_descriptor = weight_descriptor(
            rights[i], N, K, terms.strides_bk[i], terms.strides_bn[i],
            TILES.BLOCK_N, TILES.BLOCK_K, (TILES.K_MAJOR >> i) & 1,
        )  # fmt: skip
        b_descriptors = b_descriptors + (b_descriptor,)  # type: ignore[assignment]
    return SumFactors(lefts, rights, a_descriptors, b_descriptors, M, N, terms)


@triton.jit
def weight_of(weights, widths, i: tl.constexpr):
    """Returns the Weight number `i` of a tuple of pointers to weights of these Widths."""
    return Weight(weights[i], widths.strides_bk[i], widths.strides_bn[i])


@triton.jit
def zeros_of(TILES: tl.constexpr):
    """Returns the zeros that a tile of a product begins with."""
    BLOCK_M: tl.constexpr = TILES.BLOCK_M
    BLOCK_N: tl.constexpr = TILES.BLOCK_N
    return tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)


@triton.jit
def as_words(pointer):
    """Returns a pointer to 32-bit words. Carried data is not unpacked, so no step waits for its load."""
    return pointer.to(tl.pointer_type(tl.int32), bitcast=True)


@triton.jit
def load_piece(source, first, count, PIECE: tl.constexpr):
    """Loads the words first, .., first + PIECE - 1 of `source`, as far as they are below `count`."""
    offsets = first + tl.arange(0, PIECE)
    return tl.load(as_words(source) + offsets, mask=offsets < count)


@triton.jit
def load_next_piece(source, piece, first, count, PIECE: tl.constexpr):
    """Does what `load_piece` does if there is anything to load. It uses no select, which would wait for the load."""
    offsets = first + tl.arange(0, PIECE)
    return tl.load(as_words(source) + offsets, mask=offsets < count, other=piece)


@triton.jit
def store_piece(carried, piece, first, end, PIECE: tl.constexpr):
    """Stores what `load_piece` loaded, the words `first`, .., as far as they are below `end`."""
    offsets = first + tl.arange(0, PIECE)
    NUM_TARGETS: tl.constexpr = len(carried.targets)
    for i in tl.static_range(NUM_TARGETS):
        inside = (offsets < end) & (i < carried.num_targets)
        tl.store(as_words(carried.targets[i]) + offsets, piece, mask=inside)


@triton.jit
def begin_carrying(carried, steps, PIECE: tl.constexpr):
    """Returns (the number of steps for each piece, so that the pieces are spread evenly over `steps` steps; and the
    state of `carry_piece`: the first piece, where it begins, the steps until it is due).
    """
    every = tl.maximum(steps // tl.maximum(tl.cdiv(carried.words, PIECE), 1), 1)
    piece = load_piece(carried.source, 0, carried.words, PIECE)
    return every, piece, tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)


@triton.jit
def carry_piece(carried, every, piece, first, left, PIECE: tl.constexpr):
    """Does one step of a loop that carries a piece in every `every`-th step. Returns the state for the next step. If
    there are too few steps, the rest, from word `first` on, is left to `carry`.
    """
    now = tl.where(left == 0, carried.words, 0)
    store_piece(carried, piece, first, now, PIECE)
    first = tl.where(left == 0, first + PIECE, first)
    left = tl.where(left == 0, every - 1, left - 1)
    return load_next_piece(carried.source, piece, first, now, PIECE), first, left


@triton.jit
def carry(carried, first, PIECE: tl.constexpr):
    """Copies the words from `first` on, at once."""
    for start in range(first, carried.words, 4 * PIECE):
        piece = load_piece(carried.source, start, carried.words, 4 * PIECE)
        store_piece(carried, piece, start, carried.words, 4 * PIECE)


@triton.jit
def matmul_tile_by_descriptors(a, b, row, column, K, carried, TILES: tl.constexpr, K_MAJOR: tl.constexpr):
    """Returns acc[m, n] = sum_k A[row + m, k] * B[k, column + n], fp32 [BLOCK_M, BLOCK_N]. a, b: descriptors, see
    above. It carries `carried` at the same time.
    """
    steps = tl.cdiv(K, TILES.BLOCK_K)
    return matmul_steps_by_descriptors(zeros_of(TILES), 0, steps, a, b, row, column, carried, TILES, K_MAJOR)


@triton.jit
def matmul_steps_by_descriptors(
    acc, begin, end, a, b, row, column, carried, TILES: tl.constexpr, K_MAJOR: tl.constexpr
):
    """Returns acc plus the steps begin, .., end - 1 of matmul_tile_by_descriptors, and carries all at the same time."""
    CARRIES: tl.constexpr = len(carried.targets) > 0
    if CARRIES:
        every, piece, first, left = begin_carrying(carried, end - begin, TILES.PIECE)
    for k in range(begin, end):
        if CARRIES:
            piece, first, left = carry_piece(carried, every, piece, first, left, TILES.PIECE)
        a_tile = a.load([row, k * TILES.BLOCK_K])
        if K_MAJOR:
            b_tile = b.load([column, k * TILES.BLOCK_K]).T
        else:
            b_tile = b.load([k * TILES.BLOCK_K, column])
        if TILES.UPCAST:
            a_tile = a_tile.to(tl.float32)
            b_tile = b_tile.to(tl.float32)
        acc = tl.dot(a_tile, b_tile, acc, input_precision=TILES.PRECISION)
    if CARRIES:
        carry(carried, first, TILES.PIECE)
    return acc


@triton.jit
def matmul_run_by_descriptors(acc, a, b, row, a_first, column, b_first, K, TILES: tl.constexpr):
    """Returns acc[m, n] + sum_k A[row + m, a_first + k] * B[b_first + k, column + n], k < K, a multiple of BLOCK_K."""
    for k in range(0, tl.cdiv(K, TILES.BLOCK_K)):
        a_tile = a.load([row, a_first + k * TILES.BLOCK_K])
        if TILES.K_MAJOR:
            b_tile = b.load([column, b_first + k * TILES.BLOCK_K]).T
        else:
            b_tile = b.load([b_first + k * TILES.BLOCK_K, column])
        if TILES.UPCAST:
            a_tile = a_tile.to(tl.float32)
            b_tile = b_tile.to(tl.float32)
        acc = tl.dot(a_tile, b_tile, acc, input_precision=TILES.PRECISION)
    return acc


@triton.jit
def matmul_tile(a_rows, weight, column, N, K, carried, TILES: tl.constexpr):
    """Returns acc[m, n] = sum_k A[m, k] * B[k, column + n], fp32 [BLOCK_M, BLOCK_N]. It carries as
    matmul_tile_by_descriptors does. a_rows: pointers [BLOCK_M] to the rows of A with contiguous K, which all have to be
    valid (clamp them). weight: B, a Weight. Columns beyond N are 0.
    """
    return matmul_steps(zeros_of(TILES), a_rows, weight, column, N, K, carried, TILES)


@triton.jit
def matmul_steps(acc, a_rows, weight, column, N, K, carried, TILES: tl.constexpr):
    """Returns acc plus what matmul_tile computes."""
    offs_n = column + tl.arange(0, TILES.BLOCK_N)
    offs_k = tl.arange(0, TILES.BLOCK_K)
    in_n = (offs_n < N)[None, :]
    a_ptrs = a_rows[:, None] + offs_k[None, :]
    b_rows = weight.pointer + offs_k.to(tl.int64)[:, None] * weight.stride_k
    b_ptrs = b_rows + offs_n.to(tl.int64)[None, :] * weight.stride_n
    step = tl.full((), TILES.BLOCK_K, tl.int64) * weight.stride_k
    steps = tl.cdiv(K, TILES.BLOCK_K)
    CARRIES: tl.constexpr = len(carried.targets) > 0
    if CARRIES:
        every, piece, first, left = begin_carrying(carried, steps, TILES.PIECE)
    for k in range(0, steps):
        if CARRIES:
            piece, first, left = carry_piece(carried, every, piece, first, left, TILES.PIECE)
        if TILES.EVEN_K:
            a = tl.load(a_ptrs)
            b_tile = tl.load(b_ptrs, mask=in_n, other=0.0)
        else:
            in_k = offs_k < K - k * TILES.BLOCK_K
            a = tl.load(a_ptrs, mask=in_k[None, :], other=0.0)
            b_tile = tl.load(b_ptrs, mask=in_k[:, None] & in_n, other=0.0)
        if TILES.UPCAST:
            a = a.to(tl.float32)
            b_tile = b_tile.to(tl.float32)
        acc = tl.dot(a, b_tile, acc, input_precision=TILES.PRECISION)
        a_ptrs += TILES.BLOCK_K
        b_ptrs += step
    if CARRIES:
        carry(carried, first, TILES.PIECE)
    return acc


@triton.jit
def sum_tile(acc, factors, row, column, carried, TILES: tl.constexpr):
    """Returns acc plus the tile at (row, column) of a sum of products. The first product carries `carried`."""
    if TILES.DESCRIPTORS:
        steps = tl.cdiv(factors.terms.depths[0], TILES.BLOCK_K)
        acc = sum_steps_by_descriptors(acc, 0, steps, factors, row, column, carried, TILES)
        return further_products_by_descriptors(acc, factors, row, column, TILES)
    else:
        rows = tl.minimum(row + tl.arange(0, TILES.BLOCK_M), factors.M - 1).to(tl.int64)
        return sum_of_rows(acc, factors, rows, column, carried, TILES)


@triton.jit
def sum_steps_by_descriptors(acc, begin, end, factors, row, column, carried, TILES: tl.constexpr):
    """Returns acc plus the steps begin, .., end - 1 of the first product of `sum_tile`."""
    a, b = factors.a_descriptors[0], factors.b_descriptors[0]
    return matmul_steps_by_descriptors(acc, begin, end, a, b, row, column, carried, TILES, TILES.K_MAJOR & 1)


@triton.jit
def further_products_by_descriptors(acc, factors, row, column, TILES: tl.constexpr):
    """Returns acc plus all products of `sum_tile` but the first."""
    NUM: tl.constexpr = len(factors.a_descriptors)
    for i in tl.static_range(1, NUM):
        steps = tl.cdiv(factors.terms.depths[i], TILES.BLOCK_K)
        acc = matmul_steps_by_descriptors(
            acc, 0, steps, factors.a_descriptors[i], factors.b_descriptors[i], row, column,
            Carried(None, (), 0, 0), TILES, (TILES.K_MAJOR >> i) & 1,
        )  # fmt: skip
    return acc


@triton.jit
def sum_of_rows(acc, factors, rows, column, carried, TILES: tl.constexpr):
    """`sum_tile` by pointers, of any rows [BLOCK_M] of the a_i, each valid."""
    NUM: tl.constexpr = len(factors.lefts)
    for i in tl.static_range(NUM):
        a_rows = factors.lefts[i] + rows * factors.terms.strides_am[i]
        weight = weight_of(factors.rights, factors.terms, i)
        first = carried if i == 0 else Carried(None, (), 0, 0)
        acc = matmul_steps(acc, a_rows, weight, column, factors.N, factors.terms.depths[i], first, TILES)
    return acc


@triton.jit
def plus_bias(acc, bias, column, N, BLOCK_N: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Returns acc [BLOCK_M, BLOCK_N] plus the row bias[column + n]; acc itself unless HAS_BIAS is 1."""
    if HAS_BIAS == 1:
        offs_n = column + tl.arange(0, BLOCK_N)
        acc += tl.load(bias + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)[None, :]
    return acc


@triton.jit
def plus_column(acc, bias, row, last, BLOCK_M: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Returns acc [BLOCK_M, BLOCK_N], plus the column bias[row + m] for rows up to `last` if HAS_BIAS is 2."""
    if HAS_BIAS == 2:
        offs_m = row + tl.arange(0, BLOCK_M)
        acc += tl.load(bias + offs_m, mask=offs_m <= last, other=0.0).to(tl.float32)[:, None]
    return acc


@triton.jit
def matmul_tile_of_few_rows(a, M, b, terms, column, N, TILES: tl.constexpr):
    """Returns acc[m, n] = sum_i sum_k A_i[m, k] * B_i[k, column + n], fp32 [BLOCK_M, BLOCK_N], for all M <= BLOCK_M
    rows. It takes as long as reading B does. The transpose is computed: tensor cores need many rows, and B has many
    columns, so the blocks of B go from shared memory directly into the tensor cores. a: pointers to A_i [M, K_i] with
    contiguous K, b: pointers to B_i [K_i, N], both as tuples with these Terms.
    """
    BLOCK_M: tl.constexpr = TILES.BLOCK_M
    BLOCK_N: tl.constexpr = TILES.BLOCK_N
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    NUM: tl.constexpr = len(terms.depths)
    for i in tl.static_range(NUM):
        weight = Weight(b[i], terms.strides_bk[i], terms.strides_bn[i])
        rows = first_rows(a[i], terms.strides_am[i], M, BLOCK_M)
        acc = matmul_steps_of_few_rows(acc, rows, weight, column, N, terms.depths[i], TILES)
    return acc.T


@triton.jit
def first_rows(a, stride_am, M, BLOCK_M: tl.constexpr):
    """Returns the Rows 0, .., M - 1 of A."""
    offs_m = tl.arange(0, BLOCK_M)
    return Rows(a + offs_m.to(tl.int64) * stride_am, offs_m < M)


@triton.jit
def matmul_steps_of_few_rows(acc, rows, weight, column, N, K, TILES: tl.constexpr):
    """Returns acc [BLOCK_N, BLOCK_M] plus the transpose of A @ B [K, column + BLOCK_N], for these Rows of A."""
    offs_n = column + tl.arange(0, TILES.BLOCK_N)
    offs_k = tl.arange(0, TILES.BLOCK_K)
    # Do not clamp: otherwise all programs would read the same few lines at once.
    in_m = rows.inside[None, :]
    in_n = (offs_n < N)[:, None]
    a_ptrs = rows.pointers[None, :] + offs_k[:, None]
    b_columns = weight.pointer + offs_n.to(tl.int64)[:, None] * weight.stride_n
    b_ptrs = b_columns + offs_k.to(tl.int64)[None, :] * weight.stride_k
    step = tl.full((), TILES.BLOCK_K, tl.int64) * weight.stride_k
    for k in range(0, tl.cdiv(K, TILES.BLOCK_K)):
        if TILES.EVEN_K:
            b_tile = tl.load(b_ptrs, mask=in_n, other=0.0)
            a_tile = tl.load(a_ptrs, mask=in_m, other=0.0)
        else:
            in_k = offs_k < K - k * TILES.BLOCK_K
            b_tile = tl.load(b_ptrs, mask=in_n & in_k[None, :], other=0.0)
            a_tile = tl.load(a_ptrs, mask=in_m & in_k[:, None], other=0.0)
        if TILES.UPCAST:
            b_tile = b_tile.to(tl.float32)
            a_tile = a_tile.to(tl.float32)
        acc = tl.dot(b_tile, a_tile, acc, input_precision=TILES.PRECISION)
        a_ptrs += TILES.BLOCK_K
        b_ptrs += step
    return acc
