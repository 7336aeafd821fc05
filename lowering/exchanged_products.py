"""The kernel that `matmul_all_gather` and `matmul_all_to_all` have in common: it multiplies, and sends whole tiles.

Nothing is added up behind the product, so a tile is stored where it arrives. In an all-gather every tile goes to all
ranks (HOW.TO_ALL). In an all-to-all a tile goes to one rank, its owner.
Algorithm. One queue of work has the tiles of the product, in an all-to-all those for rank + 1 first and the rank's own
tiles last, and then copies of what the peers have sent, in the order in which it is computed. A finished tile for a
peer goes into the program's outbox, and the K loop of the program's next tile carries it into the slots of its readers.
Then it is published. A tile that this rank keeps goes into the output. When the copies begin, the links have worked as
long as the tensor cores, so only the last tiles are still on their way.
Signal protocol. Flag row `tile // chunk_tiles` of a reader has one word for each source. A push waits for the credits
of all peers for the slot's previous use; the next launch gives the credits of this use. Every push precedes every flag
wait in ticket order, and a program carries and publishes what it has before it waits for a flag. All ranks send as much
as they receive, so none runs ahead.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ditron_inductor.core.layout import TILE_TICKET
from ditron_inductor.core.matmul import Carried, carry, factors_of, plus_bias, sum_tile, zeros_of
from ditron_inductor.core.order import grouped, interleaved_row, scatter_order
from ditron_inductor.core.signals import (
    Words,
    credits_due,
    data,
    finish,
    granted,
    healthy,
    request_ticket,
    settle,
    take_tile,
    use_of,
)
from ditron_inductor.core.timed import first_credits, timed_wait
from ditron_inductor.core.trace import COPY, SEND, TILE, event, now
from ditron_inductor.lowering.host.launch import Launch, ceil_div
from ditron_inductor.lowering.partials import (
    Chunks,
    place_of,
    publish_partial,
    publish_to_all,
    put_in_outbox,
    received_block,
)
from ditron_inductor.lowering.sums import Geometry, carrying


@triton.jit
def destinations(use, owner, tile, tiles, dtype: tl.constexpr, HOW: tl.constexpr):
    """Returns pointers to the blocks of this rank's tile `tile` for `owner`, in the slots of the tile's readers."""
    BLOCK: tl.constexpr = HOW.TILES.BLOCK_M * HOW.TILES.BLOCK_N
    if HOW.TO_ALL:
        targets = ()
        for i in tl.static_range(1, HOW.WORLD):
            target = (use.rank + i) % HOW.WORLD
            place = (place_of(use.rank, target, HOW.WORLD) * tiles + tile).to(tl.int64) * BLOCK
            targets = targets + (data(use, target, dtype) + place,)  # type: ignore[assignment]
        return targets
    else:
        place = (place_of(use.rank, owner, HOW.WORLD) * tiles + tile).to(tl.int64) * BLOCK
        return (data(use, owner, dtype) + place,)


@triton.jit
def publish_sent(use, chunks, owner, tile, HOW: tl.constexpr):
    """Tells the readers of the tile `tile` for `owner`, which was carried, that it is in their slots."""
    if HOW.TO_ALL:
        publish_to_all(use, chunks, 0, tile, HOW)
    else:
        publish_partial(use, chunks, owner, tile, HOW)


@triton.jit
def place_of_tile(tile, num_m, N, HOW: tl.constexpr):
    """Returns (first row, part, first column in the part's run of N) of tile `tile` for one rank."""
    TILES: tl.constexpr = HOW.TILES
    blocks = tl.cdiv(N, TILES.BLOCK_N)
    block_row, block_column = grouped(tile, num_m, HOW.PARTS * blocks, TILES.GROUP_M)
    part = 0
    if HOW.PARTS > 1:
        part = block_column // blocks
        block_column = block_column % blocks
    return block_row * TILES.BLOCK_M, part, block_column * TILES.BLOCK_N


@triton.jit
def store_tile(result, out, tile, source, num_m, sizes, HOW: tl.constexpr):
    """Stores `result`, tile `tile` from `source` for this rank, in `out`, without what is beyond its edges."""
    row, part, column = place_of_tile(tile, num_m, sizes.N, HOW)
    offs_m = row + tl.arange(0, HOW.TILES.BLOCK_M)
    offs_n = column + tl.arange(0, HOW.TILES.BLOCK_N)
    to_rows = interleaved_row(offs_m, source, sizes.M, sizes.block, HOW.WORLD, True).to(tl.int64)
    inside = (offs_m < sizes.M)[:, None] & (offs_n < sizes.N)[None, :]
    tl.store(out + to_rows[:, None] * (HOW.PARTS * sizes.N) + (part * sizes.N + offs_n)[None, :], result, mask=inside)


@triton.jit
def multiply_and_exchange(
    lefts, rights, ends, pointers, sizes, rank, slot, site, chunk_tiles, HOW: tl.constexpr, TRACE: tl.constexpr
):
    """See the module. lefts, rights: tuples of pointers to [M, K_i] with contiguous K, and to [K_i, N] in an
    all-gather, [K_i, PARTS * WORLD * N] in an all-to-all; see Terms. The output is [WORLD * M, PARTS * N], contiguous,
    with rows as in interleaved_row.

    A slot has places [peer][tile], and an outbox for each program.
    """
    WORLD: tl.constexpr = HOW.WORLD
    TILES: tl.constexpr = HOW.TILES
    # The ranks for which this rank computes different tiles, and the runs of N columns in its product.
    OWNERS: tl.constexpr = 1 if HOW.TO_ALL else WORLD
    RUNS: tl.constexpr = HOW.PARTS * OWNERS
    use = use_of(Words(pointers.table, pointers.ctl, rank, slot, site))
    alive = healthy(use)
    num_m = tl.cdiv(sizes.M, TILES.BLOCK_M)
    tiles = num_m * HOW.PARTS * tl.cdiv(sizes.N, TILES.BLOCK_N)
    columns = RUNS * sizes.N
    dtype: tl.constexpr = ends.out.dtype.element_ty
    factors = factors_of(lefts, rights, sizes.M, columns, sizes.terms, TILES)
    chunks = Chunks(pointers.counters, tiles, chunk_tiles)
    BLOCK: tl.constexpr = TILES.BLOCK_M * TILES.BLOCK_N
    # The size of a block in 32-bit words, in which it is carried.
    BLOCK_WORDS: tl.constexpr = BLOCK * ends.out.dtype.element_ty.primitive_bitwidth // 32
    outbox = data(use, rank, dtype) + ((WORLD - 1) * tiles + tl.program_id(0)).to(tl.int64) * BLOCK
    # `ok` says whether this program may send; it is -1 until it has asked. The tile `sent` for `sent_owner` waits in
    # the outbox; `sent` is -1 if there is none.
    ok = tl.full((), -1, tl.int32)
    sent_owner = rank + 0 if HOW.TO_ALL else scatter_order(0, rank, WORLD)
    sent = tl.full((), -1, tl.int32)
    ticket = take_tile(use)
    if ticket == 0:
        settle(credits_due(use, alive), use, WORLD)
    while ticket < OWNERS * tiles:
        began = now(TRACE)
        request = request_ticket(use, TILE_TICKET, TILES.THREADS, True)
        owner = rank if HOW.TO_ALL else scatter_order(ticket // tiles, rank, WORLD)
        tile = ticket if HOW.TO_ALL else ticket % tiles
        row, part, column = place_of_tile(tile, num_m, sizes.N, HOW)
        if not HOW.TO_ALL:
            column += (part * WORLD + owner) * sizes.N
        targets = destinations(use, sent_owner, tl.maximum(sent, 0), tiles, dtype, HOW)
        carried = Carried(outbox, targets, tl.where(sent < 0, 0, BLOCK_WORDS), WORLD - 1 if HOW.TO_ALL else 1)
        # Add the bias first, because behind the product there are no registers left for it.
        acc = plus_bias(zeros_of(TILES), ends.bias, column, columns, TILES.BLOCK_N, HOW.HAS_BIAS)
        acc = sum_tile(acc, factors, row, column, carried, TILES)
        if sent >= 0:
            publish_sent(use, chunks, sent_owner, sent, HOW)
        sent = tl.full((), -1, tl.int32)
        ok = first_credits(ok, alive, use, ticket, WORLD, TRACE)
        result = tl.where(ok != 0, acc, float("nan")).to(dtype)
        if (ok != 0) & ((owner != rank) | HOW.TO_ALL):
            put_in_outbox(outbox, result, TILES)
            sent_owner = owner
            sent = tile
        if (owner == rank) | HOW.TO_ALL:
            store_tile(result, ends.out, tile, rank, num_m, sizes, HOW)
        event(use, began, tile, owner, TILE, TRACE)
        ticket = granted(request, TILES.THREADS)
    # Sends come before waits: what is left in the outbox is sent now.
    sending = now(TRACE)
    targets = destinations(use, sent_owner, tl.maximum(sent, 0), tiles, dtype, HOW)
    left = Carried(outbox, targets, tl.where(sent < 0, 0, BLOCK_WORDS), WORLD - 1 if HOW.TO_ALL else 1)
    carry(left, 0, TILES.PIECE)
    if sent >= 0:
        publish_sent(use, chunks, sent_owner, sent, HOW)
        event(use, sending, sent // chunk_tiles, sent_owner, SEND, TRACE)
    # Look this up again, so that no register holds it while tiles are computed.
    own = data(use, rank, dtype)
    while ticket < (OWNERS + WORLD - 1) * tiles:
        copying = now(TRACE)
        request = request_ticket(use, TILE_TICKET, TILES.THREADS, True)
        copy = ticket - OWNERS * tiles
        if HOW.TO_ALL:
            # All peers compute their tiles in one order.
            tile = copy // (WORLD - 1)
            source = (rank + 1 + copy % (WORLD - 1)) % WORLD
        else:
            # Rank - 1 sends to this rank first.
            tile = copy % tiles
            source = (rank + WORLD - 1 - copy // tiles) % WORLD
        block = place_of(source, rank, WORLD) * tiles + tile
        # Acquire: the source has pushed all tiles of the chunk before it published this flag.
        whole = alive & timed_wait(use, tile // chunk_tiles, source, TRACE)
        result = received_block(own, block, whole, TILES)
        store_tile(result, ends.out, tile, source, num_m, sizes, HOW)
        event(use, copying, tile, source, COPY, TRACE)
        ticket = granted(request, TILES.THREADS)
    finish(use)


def geometry_of(launch: Launch, a: torch.Tensor, rows: int, columns: int, *, parts: int, owners: int) -> Geometry:
    """Returns the Geometry for products [rows, parts * columns] for each of `owners` ranks. a: an operand."""
    world = launch.workspace.world_size
    config = launch.config(rows=rows, columns=columns, repeats=owners * parts, dtype=a.dtype)
    tiles = ceil_div(rows, config.block_m) * parts * ceil_div(columns, config.block_n)
    size = rows, columns
    return carrying(launch, a.dtype, config, size, tiles=tiles, computed=owners * tiles, places=(world - 1) * tiles)
