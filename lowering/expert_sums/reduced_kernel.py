"""Reductions behind the experts of a mixture, strategy `tile`: grouped matmul, sum and reduction in one launch.

Problem. Every rank holds the slots of all tokens, sorted by expert, and its slice of K of each expert's weight. Rank r
wants the weighted sum over experts and ranks for its own tokens, or all ranks want it for all tokens. Algorithm. The
columns are cut into chunks, and the queue of work into stages. Stage s has the tiles of the grouped matmul of chunk s.
Among them lie, evenly spread, sums of blocks of tokens: of chunk s - 1 for the peers that own them, of chunk s - 2 for
this rank, which waits for the peers' sums, adds all in rank order in fp32, and stores the result. So most programs
multiply while some add up what is still in the L2 cache, and every sum arrives long before it is wanted. If all ranks
want all tokens, the owner sends its results too, and stage s has the copies of those of chunk s - 3 to the output. A
tile of the matmul has rows of one expert; a program finds it by the ends of the experts, which only the device knows.
So all rows of a tile have one bias, which is added to the rounded products.
Signal protocol. Sums are stored in the slot of their owner and results in the slots of all ranks, in rows as they lie
in the output. Flag row c has one word for each peer, about its sums of chunk c, and this rank's own word, about the
products of chunk c in its memory. Flag row C + c has one word for each owner, about its results of chunk c. A
program counts what it has finished for a word when it goes on to another word, or to another stage. The last of a chunk
publishes it. Whoever waits in a stage waits for earlier stages only, of this rank and of its peers. A push waits for
the credits of all peers for the slot's previous use. Limits. The columns of all operands are contiguous, as is one
dimension of the weight.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ditron_inductor.core.layout import MAX_CHUNKS, MAX_WORLD, TILE_TICKET
from ditron_inductor.core.matmul import (
    Carried,
    Tiles,
    Weight,
    matmul_steps,
    rows_descriptor,
    zeros_of,
)
from ditron_inductor.core.signals import (
    arrive_with,
    credits_due,
    data,
    finish,
    granted,
    healthy,
    publish,
    publish_all,
    request_ticket,
    settle,
    take_tile,
    use_of,
    words_of,
)
from ditron_inductor.core.timed import first_credits, timed_wait, timed_wait_all
from ditron_inductor.core.trace import COPY, SEND, SUM, TILE, event, now
from ditron_inductor.lowering.config import Config, select_grouped_config
from ditron_inductor.lowering.expert_sums.expert_tiles import experts_descriptor, matmul_of_expert
from ditron_inductor.lowering.host.launch import Launch, ceil_div, rows_of
from ditron_inductor.lowering.host.launcher import Arguments
from ditron_inductor.task.nodes import ReducedExperts

BLOCK, LOADS, SLOTS = 2048, 2, 64
"""The columns of a chunk, the rows of 16-bit values that each warp has under way, and the slots that a ticket sums."""
INTERPRETED = 64, 2, 32
"""The same for the interpreter."""


class Sizes(NamedTuple):
    """The tokens T and columns N of the sum, K, and the number of experts E. A rank owns `owned` tokens, in runs of
    `run` tokens. The strides of the weights from expert to expert, from row to row and from column to column, and the
    elements from row to row of x, of what is added and of the second x.
    """

    T: Any
    N: Any
    K: Any
    E: Any
    owned: Any
    run: Any
    stride_be: Any
    stride_bk: Any
    stride_bn: Any
    x_pitch: Any
    added_pitch: Any
    second_pitch: Any


class How(NamedTuple):
    """What is known at compile time: WORLD, see `matmul.Tiles`, a power of two of at least E, whether all ranks want
    all tokens, whether the mean is taken, the experts of a token, whether something is added, whether slots are absent,
    whether experts have biases, and whether there is a second product. ROWS tokens are summed at once, and COPIES
    results are copied at once. A chunk has BLOCK columns, and a ticket has TOKENS tokens.
    """

    WORLD: Any
    TILES: Any
    EXPERTS: Any
    GATHERS: Any
    AVERAGE: Any
    TOP_K: Any
    HAS_ADDED: Any
    HAS_ABSENT: Any
    HAS_BIAS: Any
    HAS_SECOND: Any
    ROWS: Any
    COPIES: Any
    BLOCK: Any
    TOKENS: Any


class Slots(NamedTuple):
    """The slots of all tokens: pointers to the products [S, N], to `places`, `scale` and `absent` [S], and to what is
    added, [T, N]; T, N, and the elements from row to row of what is added.
    """

    products: Any
    places: Any
    scale: Any
    absent: Any
    added: Any
    T: Any
    N: Any
    added_pitch: Any


class Done(NamedTuple):
    """What a program has finished and not counted yet: `parts` of the flag `row`, for the rank `target`, or for all
    ranks if that is the number of ranks.
    """

    target: Any
    row: Any
    parts: Any


class TokenBlock(NamedTuple):
    """Tokens of an owner, by their numbers `first`, .., `end` - 1 among its tokens, and columns."""

    owner: Any
    first: Any
    end: Any
    columns: Any


class Stages(NamedTuple):
    """The stages of the queue: the chunks; the tiles of a column, of a row of all chunks, and of a row of a chunk, of
    which the last chunk may have fewer; and the blocks of sums for peers, of sums for this rank, and of copies.
    """

    chunks: Any
    down: Any
    across: Any
    across_chunk: Any
    sent: Any
    owned: Any
    copied: Any


@triton.jit
def nothing_done():
    """Returns the Done of a program that has counted everything."""
    return Done(tl.full((), -1, tl.int32), tl.full((), -1, tl.int32), tl.full((), 0, tl.int32))


@triton.jit
def count(use, counters, done, total, WORLD: tl.constexpr):
    """Counts what is done of `total` parts. With the last ones all are visible, and their target is told so."""
    if done.parts > 0:
        counter = counters + done.row * MAX_WORLD + tl.where(done.target < WORLD, done.target, 0)
        if arrive_with(counter, total, done.parts):
            if done.target == WORLD:
                publish_all(use, done.row, WORLD)
            else:
                publish(use, done.target, done.row)


@triton.jit
def begin_of(stages, stage):
    """Returns the first ticket of a stage."""
    chunks = stages.chunks
    begin = stages.down * tl.minimum(stage * stages.across_chunk, stages.across)
    begin += stages.sent * tl.minimum(tl.maximum(stage - 1, 0), chunks)
    begin += stages.owned * tl.minimum(tl.maximum(stage - 2, 0), chunks)
    return begin + stages.copied * tl.minimum(tl.maximum(stage - 3, 0), chunks)


@triton.jit
def across_of(stages, chunk):
    """Returns the tiles of a row of a chunk; 0 behind the last chunk."""
    return tl.maximum(tl.minimum(stages.across - chunk * stages.across_chunk, stages.across_chunk), 0)


@triton.jit
def work_of(stages, stage, position, first):
    """Returns (the kind, the number) of the work at `position` in a stage: TILE, SEND, SUM or COPY. The tiles up to
    `first` come first, because the products of the chunk before are still being made.
    """
    chunks = stages.chunks
    tiles = stages.down * across_of(stages, stage)
    sent = tl.where((stage >= 1) & (stage <= chunks), stages.sent, 0)
    owned = tl.where((stage >= 2) & (stage <= chunks + 1), stages.owned, 0)
    sums = begin_of(stages, stage + 1) - begin_of(stages, stage) - tiles
    first = tl.minimum(first, tiles)
    place = tl.maximum(position - first, 0).to(tl.int64)
    whole = tl.maximum(tiles - first + sums, 1)
    before = (place * sums // whole).to(tl.int32)
    is_tile = (position < first) | ((place + 1) * sums // whole == before)
    kind = tl.where(before < sent, SEND, tl.where(before < sent + owned, SUM, COPY))
    number = tl.where(before < sent, before, tl.where(before < sent + owned, before - sent, before - sent - owned))
    return tl.where(is_tile, TILE, kind), tl.where(is_tile, position - before, number)


@triton.jit
def token_of(block, place, sizes, WORLD: tl.constexpr):
    """Returns (the number of a token of a TokenBlock among those of its owner, the token). Behind the last one it is
    the last one, which is computed more than once.
    """
    inner = tl.minimum(place, block.end - 1)
    return inner, inner // sizes.run * (sizes.run * WORLD) + block.owner * sizes.run + inner % sizes.run


@triton.jit
def row_of(data, source, inner, sizes):
    """Returns a pointer to the place, in the slot with this data, of what `source` sends for the token with the number
    `inner` among those of an owner. The sources up to WORLD - 1 are ranks, with their sums for the owner of the slot.
    WORLD and more are owners with their results.
    """
    return data + (source * sizes.owned + inner).to(tl.int64) * sizes.N


@triton.jit
def summed_slots(slots, tokens, columns, HOW: tl.constexpr):
    """Returns a tuple with the sum [BLOCK] of the Slots of each of `tokens`, a tuple of numbers, in fp32. The numbers
    of a token and of its slots are the same for all threads, so no thread waits for another one.
    """
    TOP_K: tl.constexpr = HOW.TOP_K
    BLOCK: tl.constexpr = HOW.BLOCK
    NUM: tl.constexpr = len(tokens)
    inside = columns < slots.N
    S = slots.T * TOP_K
    places = ()
    products = ()
    factors = ()
    # All loads are issued before the first product is waited for.
    for i in tl.static_range(NUM * TOP_K):
        place = tl.load(slots.places + tokens[i // TOP_K].to(tl.int64) * TOP_K + i % TOP_K)
        places = places + (tl.where(place < 0, place + S, place),)  # type: ignore[assignment]
    for i in tl.static_range(NUM * TOP_K):
        # What lies outside is not read, and its sum is no number.
        there = (places[i] >= 0) & (places[i] < S)
        factor = tl.load(slots.scale + places[i], mask=there, other=float("nan"))
        if HOW.HAS_ABSENT:
            # Nor is the product of an absent slot, which counts as 0.
            there = there & (tl.load(slots.absent + places[i], mask=there, other=0) == 0)
        product = tl.load(slots.products + places[i] * slots.N + columns, mask=inside & there, other=0.0)
        products = products + (product,)  # type: ignore[assignment]
        factors = factors + (factor,)  # type: ignore[assignment]
    sums = ()
    for t in tl.static_range(NUM):
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        for j in tl.static_range(TOP_K):
            total += products[t * TOP_K + j].to(tl.float32) * factors[t * TOP_K + j].to(tl.float32)
        if HOW.HAS_ADDED:
            row = slots.added + tokens[t].to(tl.int64) * slots.added_pitch
            total += tl.load(row + columns, mask=inside, other=0.0).to(tl.float32)
        sums = sums + (total,)  # type: ignore[assignment]
    return sums


@triton.jit
def copy_results(use, out, block, good, sizes, HOW: tl.constexpr):
    """Copies the results of a TokenBlock, which its owner has sent, to the output; NaN if not `good`."""
    COPIES: tl.constexpr = HOW.COPIES
    WORLD: tl.constexpr = HOW.WORLD
    columns = block.columns
    inside = columns < sizes.N
    own = data(use, use.rank, out.dtype.element_ty)
    for begin in range(block.first, block.end, COPIES):
        values = ()
        for i in tl.static_range(COPIES):
            inner, _ = token_of(block, begin + i, sizes, WORLD)
            row = row_of(own, WORLD + block.owner, inner, sizes)
            value = tl.load(row + columns, mask=inside & (good != 0), other=float("nan"))
            values = values + (value,)  # type: ignore[assignment]
        for i in tl.static_range(COPIES):
            _, token = token_of(block, begin + i, sizes, WORLD)
            tl.store(out + token.to(tl.int64) * sizes.N + columns, values[i], mask=inside)


@triton.jit
def sum_block(use, slots, out, kind, block, sends, good, sizes, HOW: tl.constexpr):
    """Sums the Slots of a TokenBlock. Of kind SEND, the sums go to the slot of the owner if `sends`. Of kind SUM, they
    and those that the peers have sent are added in rank order, each of them rounded; the results go to the output, NaN
    if not `good`, and, if all ranks want them, to the slots of the peers if `sends`.
    """
    ROWS: tl.constexpr = HOW.ROWS
    WORLD: tl.constexpr = HOW.WORLD
    BLOCK: tl.constexpr = HOW.BLOCK
    dtype: tl.constexpr = out.dtype.element_ty
    columns = block.columns
    inside = columns < sizes.N
    sent = inside & (sends != 0)
    arrived = inside & (kind == SUM) & (good != 0)
    own = data(use, use.rank, dtype)
    owners = data(use, block.owner, dtype)
    others = ()
    NUM_OTHERS: tl.constexpr = WORLD - 1 if HOW.GATHERS else 0
    for i in tl.static_range(NUM_OTHERS):
        others = others + (data(use, (use.rank + 1 + i) % WORLD, dtype),)  # type: ignore[assignment]
    for begin in range(block.first, block.end, ROWS):
        tokens = ()
        partials = ()
        for i in tl.static_range(ROWS):
            inner, token = token_of(block, begin + i, sizes, WORLD)
            tokens = tokens + (token,)  # type: ignore[assignment]
            for source in tl.static_range(WORLD):
                row = row_of(own, source, inner, sizes)
                partial = tl.load(row + columns, mask=arrived & (source != use.rank), other=0.0)
                partials = partials + (partial,)  # type: ignore[assignment]
        sums = summed_slots(slots, tokens, columns, HOW)
        for i in tl.static_range(ROWS):
            inner, _ = token_of(block, begin + i, sizes, WORLD)
            mine = sums[i].to(dtype)
            if kind == SEND:
                tl.store(row_of(owners, use.rank, inner, sizes) + columns, mine, mask=sent)
            else:
                total = tl.zeros((BLOCK,), dtype=tl.float32)
                for source in tl.static_range(WORLD):
                    total += tl.where(source == use.rank, mine, partials[i * WORLD + source]).to(tl.float32)
                if HOW.AVERAGE:
                    total = total / WORLD
                result = tl.where(good != 0, total, float("nan")).to(dtype)
                if HOW.GATHERS:
                    tl.store(out + tokens[i].to(tl.int64) * sizes.N + columns, result, mask=inside)
                    for other in tl.static_range(WORLD - 1):
                        row = row_of(others[other], WORLD + use.rank, inner, sizes)
                        tl.store(row + columns, result, mask=sent)
                else:
                    tl.store(out + inner.to(tl.int64) * sizes.N + columns, result, mask=inside)


@triton.jit(do_not_specialize=["rank"])
def reduced_experts_kernel(
    x, weight, bias, routing, added, products, out, pointers, rank, sizes, HOW: tl.constexpr, TRACE: tl.constexpr = 0
):
    """See the module. x: that of both products, [S, K], contiguous K. weight: of both, [E, K, N], in the same strides.
    bias: [E, N]. routing: the ends [E], the places [S], the scale [S], and the marks of
    absent slots [S]. added: [T, N]. The second operands, the bias, the marks and what is added may be anything if HOW
    says that they are not there. products: [S, N], for this launch alone. out: [owned, N], or [T, N] if
    GATHERS.
    """
    WORLD: tl.constexpr = HOW.WORLD
    TILES: tl.constexpr = HOW.TILES
    BLOCK_M: tl.constexpr = TILES.BLOCK_M
    BLOCK_N: tl.constexpr = TILES.BLOCK_N
    BLOCK: tl.constexpr = HOW.BLOCK
    EXPERTS: tl.constexpr = HOW.EXPERTS
    TOKENS: tl.constexpr = HOW.TOKENS
    ACROSS: tl.constexpr = BLOCK // BLOCK_N
    dtype: tl.constexpr = x[0].dtype.element_ty
    use = use_of(words_of(pointers, rank))
    alive = healthy(use)
    ends = routing[0]
    N = sizes.N
    K = sizes.K
    S = sizes.T * HOW.TOP_K
    slots = Slots(products, routing[1], routing[2], routing[3], added, sizes.T, N, sizes.added_pitch)
    experts = tl.arange(0, EXPERTS)
    stops = tl.load(ends + experts, mask=experts < sizes.E, other=0)
    starts = tl.load(ends + experts - 1, mask=(experts > 0) & (experts < sizes.E), other=0)
    # The tiles of an expert and of all experts before it.
    tiles_up_to = tl.cumsum(tl.cdiv(tl.maximum(stops - starts, 0), BLOCK_M), 0)
    num_m = tl.max(tiles_up_to, 0)
    blocks = tl.cdiv(sizes.owned, TOKENS)
    chunks = tl.cdiv(N, BLOCK)
    peers = (WORLD - 1) * blocks
    stages = Stages(chunks, num_m, tl.cdiv(N, BLOCK_N), ACROSS, peers, blocks, peers if HOW.GATHERS else 0)
    if TILES.DESCRIPTORS:
        a = rows_descriptor(x[0], S, K, sizes.x_pitch, BLOCK_M, TILES.BLOCK_K)
        b = experts_descriptor(weight[0], sizes, TILES)
        if HOW.HAS_SECOND:
            second_a = rows_descriptor(x[1], S, K, sizes.second_pitch, BLOCK_M, TILES.BLOCK_K)
            second_b = experts_descriptor(weight[1], sizes, TILES)
    offs_m = tl.arange(0, BLOCK_M)
    # `ok` says whether this program may send; it is -1 until it has asked.
    ok = tl.full((), -1, tl.int32)
    # What it has made of a chunk's products, and what it has summed.
    products_done = nothing_done()
    sums_done = nothing_done()
    # The chunk for whose products, or for whose sums of the peers, this program waited last, and whether they came.
    seen = tl.full((), -1, tl.int32)
    made = tl.full((), 1, tl.int32)
    summed = tl.full((), -1, tl.int32)
    whole = tl.full((), 1, tl.int32)
    stage = tl.full((), 0, tl.int32)
    ticket = take_tile(use)
    if ticket == 0:
        settle(credits_due(use, alive), use, WORLD)
    total_work = begin_of(stages, chunks + 4)
    while ticket < total_work:
        began = now(TRACE)
        request = request_ticket(use, TILE_TICKET, TILES.THREADS, True)
        while ticket >= begin_of(stages, stage + 1):
            stage += 1
        if products_done.row != stage:
            # Counting waits for what the program has stored: a few times in a launch, not once for each tile.
            count(use, pointers.counters, products_done, num_m * across_of(stages, products_done.row), WORLD)
            count(use, pointers.counters, sums_done, blocks, WORLD)
            products_done = Done(rank + 0, stage, tl.full((), 0, tl.int32))
            sums_done = nothing_done()
        kind, number = work_of(stages, stage, ticket - begin_of(stages, stage), 2 * tl.num_programs(0))
        if kind == TILE:
            across = across_of(stages, stage)
            tile = number // across
            column = stage * BLOCK + number % across * BLOCK_N
            # The last expert whose tiles all come before this one; 0 if there is none.
            before = tl.max(tl.where(tiles_up_to <= tile, tiles_up_to.to(tl.int64) * (2 * EXPERTS) + experts + 1, 0), 0)
            expert = (before % (2 * EXPERTS)).to(tl.int32)
            start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
            stop = tl.load(ends + expert)
            row = start + (tile - (before // (2 * EXPERTS)).to(tl.int32)) * BLOCK_M
            if TILES.DESCRIPTORS:
                acc = matmul_of_expert(zeros_of(TILES), a, b, row, expert, column, K, TILES)
                if HOW.HAS_SECOND:
                    acc = matmul_of_expert(acc, second_a, second_b, row, expert, column, K, TILES)
            else:
                rows = tl.minimum(row + offs_m, S - 1).to(tl.int64)
                matrix = expert.to(tl.int64) * sizes.stride_be
                carried = Carried(None, (), 0, 0)
                b = Weight(weight[0] + matrix, sizes.stride_bk, sizes.stride_bn)
                acc = matmul_steps(zeros_of(TILES), x[0] + rows * sizes.x_pitch, b, column, N, K, carried, TILES)
                if HOW.HAS_SECOND:
                    b = Weight(weight[1] + matrix, sizes.stride_bk, sizes.stride_bn)
                    acc = matmul_steps(acc, x[1] + rows * sizes.second_pitch, b, column, N, K, carried, TILES)
            offs_n = column + tl.arange(0, BLOCK_N)
            corner = products + row.to(tl.int64) * N
            in_tile = (row + offs_m < stop)[:, None] & (offs_n < N)[None, :]
            product = acc.to(dtype)
            if HOW.HAS_BIAS:
                of_columns = tl.load(bias + expert.to(tl.int64) * N + offs_n, mask=offs_n < N, other=0.0)[None, :]
                # The same bits in both ways. Values in fp32 do not fit into the registers, and the interpreter has no
                # sums of narrow numbers.
                if TILES.UPCAST:
                    product = (product.to(tl.float32) + of_columns.to(tl.float32)).to(dtype)
                else:
                    product += of_columns
            tl.store(corner + offs_m[:, None] * N + offs_n[None, :], product, mask=in_tile)
            products_done = Done(rank + 0, stage, products_done.parts + 1)
            event(use, began, number, rank, TILE, TRACE)
        else:
            chunk = stage - tl.where(kind == SEND, 1, tl.where(kind == SUM, 2, 3))
            owner = tl.where(kind == SUM, rank, (rank + 1 + number // blocks) % WORLD)
            first = number % blocks * TOKENS
            end = tl.minimum(first + TOKENS, tl.minimum(sizes.owned, sizes.T - owner * sizes.run))
            target = tl.where(kind == SEND, owner, WORLD)
            flag_row = tl.where(kind == SEND, chunk, tl.where(kind == SUM, chunks + chunk, -1))
            if (sums_done.target != target) | (sums_done.row != flag_row):
                count(use, pointers.counters, sums_done, blocks, WORLD)
                sums_done = Done(target, flag_row, tl.full((), 0, tl.int32))
            block = TokenBlock(owner, first, end, chunk * BLOCK + tl.arange(0, BLOCK))
            if kind == COPY:
                # Acquire: the owner's results of the chunk are visible.
                good = alive & timed_wait(use, chunks + chunk, owner, TRACE)
                copy_results(use, out, block, good, sizes, HOW)
                event(use, began, number, owner, COPY, TRACE)
            else:
                if (seen != chunk) & (num_m > 0):
                    # Acquire: the products of the chunk are visible.
                    made = alive & timed_wait(use, chunk, rank, TRACE)
                seen = chunk
                good = made
                if kind == SUM:
                    if summed != chunk:
                        # Acquire: the peers' sums of the chunk are visible.
                        whole = alive & timed_wait_all(use, chunk, WORLD, TRACE)
                    summed = chunk
                    good = made & whole
                if (kind == SEND) | HOW.GATHERS:
                    ok = first_credits(ok, alive, use, ticket, WORLD, TRACE)
                    if ok & good != 0:
                        sums_done = Done(target, flag_row, sums_done.parts + 1)
                sum_block(use, slots, out, kind, block, ok & good, good, sizes, HOW)
                if kind == SEND:
                    event(use, began, number, owner, SEND, TRACE)
                else:
                    event(use, began, number, owner, SUM, TRACE)
        ticket = granted(request, TILES.THREADS)
    count(use, pointers.counters, products_done, num_m * across_of(stages, products_done.row), WORLD)
    count(use, pointers.counters, sums_done, blocks, WORLD)
    finish(use)


class Geometry(NamedTuple):
    """The layout of a call, from sizes that all ranks share: the tokens T and columns N, the tokens that a rank owns,
    the columns of a chunk, and the bytes of the slot; and this rank's tile.
    """

    T: int
    N: int
    owned: int
    gathers: bool
    block: int
    nbytes: int
    config: Config


def sizes_of(launch: Launch) -> tuple[int, int, int]:
    """Returns BLOCK, LOADS and SLOTS."""
    return INTERPRETED if launch.interpreted else (BLOCK, LOADS, SLOTS)


def rows_under_way(loads: int, config: Config, itemsize: int) -> int:
    """Returns the rows of values of `itemsize` bytes that a program has under way; as many bytes for every dtype."""
    return loads * config.num_warps * 2 // itemsize


def geometry(node: ReducedExperts, launch: Launch, x: torch.Tensor, columns: int) -> Geometry:
    """Returns the Geometry for x [S, K]. columns: N."""
    T, world = x.shape[0] // node.top_k, node.world_size
    owned, gathers = ceil_div(T, world), not node.scatters
    config = select_grouped_config(k=node.num_products * x.shape[1], dtype=x.dtype, interpreted=launch.interpreted)
    block, _, _ = sizes_of(launch)
    # Each chunk has a flag row for its sums, and one for its results.
    while (1 + gathers) * ceil_div(columns, block) > MAX_CHUNKS.value:
        block *= 2
    nbytes = (1 + gathers) * world * owned * columns * x.element_size()
    return Geometry(T, columns, owned, gathers, block, nbytes, config.for_arch(launch.workspace.capabilities.arch))


def reduced_experts(
    node: ReducedExperts,
    launch: Launch,
    sizes: Geometry,
    x: torch.Tensor,
    weight: torch.Tensor,
    ends: torch.Tensor,
    second: tuple[torch.Tensor, torch.Tensor] | None,
    bias: torch.Tensor | None,
    places: torch.Tensor,
    scale: torch.Tensor,
    absent: torch.Tensor | None,
    added: torch.Tensor | None,
) -> list[torch.Tensor]:
    """Returns the outputs; see the node for the operands."""
    T, N, owned, gathers, block, nbytes, config = sizes
    E, K, _ = weight.shape
    x, rest = rows_of(x), x if added is None else rows_of(added)
    weight = weight if 1 in weight.stride()[1:] else weight.contiguous()
    second_x, second_weight = (x, weight) if second is None else second
    if second_weight.stride() != weight.stride():
        weight, second_weight = weight.contiguous(), second_weight.contiguous()
    second_x = rows_of(second_x)
    out = x.new_empty(T if gathers else owned, N)
    products = x.new_empty(x.shape[0], N)
    marks = places if absent is None else absent.view(torch.uint8)

    def arguments() -> Arguments:
        tile: Tiles = launch.tile_of_sum(config, [x, second_x], [weight[0], second_weight[0]])
        stride_be, stride_bk, stride_bn = weight.stride()
        # The copy unit wants all strides in units of 16 bytes.
        descriptors = tile.DESCRIPTORS and stride_be * weight.element_size() % 16 == 0
        _, loads, slots = sizes_of(launch)
        rows, tokens = rows_under_way(loads, config, x.element_size()), max(1, slots // node.top_k)
        how = How(
            WORLD=node.world_size,
            TILES=tile._replace(DESCRIPTORS=descriptors),
            EXPERTS=max(triton.next_power_of_2(E), 16),
            GATHERS=gathers,
            AVERAGE=node.reduce_op == "avg",
            TOP_K=node.top_k,
            HAS_ADDED=node.has_added,
            HAS_ABSENT=node.has_absent,
            HAS_BIAS=node.has_bias,
            HAS_SECOND=node.has_second,
            ROWS=max(1, rows // node.top_k),
            COPIES=min(rows, tokens),
            BLOCK=block,
            TOKENS=tokens,
        )
        pitches = x.stride(0), rest.stride(0), second_x.stride(0)
        numbers = Sizes(T, N, K, E, owned, owned // node.runs, stride_be, stride_bk, stride_bn, *pitches)
        programs = launch.programs(ceil_div(x.shape[0], config.block_m) * ceil_div(N, config.block_n), config)
        return Arguments(programs, {"rank": launch.rank, "sizes": numbers, "HOW": how, **config.options})

    tensors: dict[str, Any] = {
        "x": (x, second_x),
        "weight": (weight, second_weight),
        "bias": x if bias is None else bias.contiguous(),
        "routing": tuple(one.contiguous() for one in (ends, places, scale, marks)),
        "added": rest,
        "products": products,
        "out": out,
    }
    launch.run(reduced_experts_kernel, nbytes, arguments, tensors)
    return [out, *[products] * node.returns_products]
