"""How the `chunked` strategies cut their work: which rows move as one piece, and which pieces one product takes.

With small pieces the first product begins early and the last transfer ends soon. Large pieces fill the GPU and need
fewer launches. For a gather and an all-reduce a model decides, which simulates one rank and takes all ranks to be in
step. Products run one after another on one stream, transfers on another stream, and each starts when its input is
there. The products of a gather alternate between two streams, so a wave of tiles need not be full: a product counts by
its tiles, and as half a wave at least. For a reduce-scatter there is a rule (see `scatter_schedule`).

    product  = waves of tiles over the SMs * time of a tile + LAUNCH_US       (the best of a few tile shapes)
    transfer = bytes / LINK_BYTES_US + COPY_US

The numbers are those of an H200. Only their proportions matter, which are about the same on other GPUs.
Schedules are pure functions of sizes. The `parts` of a reduction decide where flags and slots lie, so the peers must
agree on them, and all arguments are sizes that the ranks share. Each rank groups its products as it likes.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

FLOPS_PER_SM_US = {2: 6.0e6, 4: 2.4e6}
"""The operations that one SM does in a microsecond with the largest tile shape, by the bytes of an element."""

TILES = ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.92), (64, 256, 0.85), (64, 128, 0.75), (64, 64, 0.5))
"""(rows, columns, relative speed) of the tile shapes that a matmul library has."""

LINK_BYTES_US = 300e3
MEMORY_BYTES_US = 3.5e6
LAUNCH_US = 4.0
"""The time from the end of a product to the start of the next one."""
COPY_US = 4.0
"""The time from the end of a transfer, or from a signal, to the start of the next transfer."""
READY_US = 10.0
"""The time from the start of a call until a peer's data can be copied."""
PARTS = (1, 2, 4)
LEAST_ROWS = 256
"""A shard is not cut into pieces of fewer rows."""


def product_us(
    rows: int, columns: Sequence[int], k: int, itemsize: int, num_sms: int, *, overlapped: bool = False
) -> float:
    """Returns the predicted microseconds of products with weights [k, columns[i]], on two streams if overlapped."""
    if rows == 0:
        return 0.0
    rate = FLOPS_PER_SM_US.get(itemsize, FLOPS_PER_SM_US[2])

    def waves(tiles: int) -> float:
        return max(tiles / num_sms, 0.5) if overlapped else -(-tiles // num_sms)

    total = 0.0
    for n in columns:
        shapes = (
            waves(-(-rows // m) * -(-n // tile_n)) * (2.0 * m * tile_n * k / (rate * speed))
            for m, tile_n, speed in TILES
        )
        total += min(shapes) + LAUNCH_US
    return total


def transfer_us(nbytes: float) -> float:
    """Returns the predicted time, in microseconds, of one copy of `nbytes` bytes from a peer."""
    return nbytes / LINK_BYTES_US + COPY_US


@dataclass(frozen=True)
class Piece:
    """The rows from `first` up to, but without, `last` of the shard of rank + `step`."""

    step: int
    first: int
    last: int


def cut(rows: int, parts: int) -> list[tuple[int, int]]:
    """Returns `rows` rows as at most `parts` runs (first, last), not empty, equal but for a shorter last one."""
    length = -(-rows // parts)
    return [(first, min(first + length, rows)) for first in range(0, rows, length)] if rows else []


WHOLE_GAIN = 0.97
"""Whole products with wide weights must be predicted to take at most this fraction of the time of products in groups,
because the model has an error. For narrow weights, any gain is enough.
"""
NARROW = 0.5
"""A weight is narrow if it has at most this fraction of the columns of the widest weight."""


@dataclass(frozen=True)
class Gathering:
    """The pieces that are copied and multiplied after the rank's own shard. The `groups` are in the order of time. Each
    is one product for every weight, or two products if its rows lie at both ends of the output. The weights whose
    indices are in `whole` are multiplied only once, with all rows, after the last rows have arrived.
    """

    groups: tuple[tuple[Piece, ...], ...]
    whole: tuple[int, ...] = ()


@functools.lru_cache(maxsize=1024)
def gather_schedule(
    world_size: int,
    rank: int,
    rows: int,
    columns: tuple[int, ...],
    k: int,
    itemsize: int,
    num_sms: int,
    *,
    apart: bool = False,
) -> Gathering:
    """Returns the fastest Gathering of shards of `rows` rows for weights with these `columns`, by the model. apart: the
    rows of a shard do not lie together, so shards are multiplied one by one. Narrow weights, such as those of keys and
    values, have few tiles in a group of rows. While the products with wide weights hide the transfer, the narrow
    products can wait until they fill the GPU.
    """
    widest_first = sorted(range(len(columns)), key=lambda i: -columns[i])
    ways: list[tuple[float, Gathering]] = []
    for count in range(len(columns), 0 if rows > 0 else len(columns) - 1, -1):
        in_groups = tuple(columns[i] for i in widest_first[:count])
        whole = tuple(sorted(widest_first[count:]))
        us, groups = _in_groups(world_size, rank, rows, in_groups, k, itemsize, num_sms, apart=apart)
        at_once = tuple(columns[i] for i in whole)
        us += product_us(world_size * rows, at_once, k, itemsize, num_sms, overlapped=True)
        if whole:
            # The rank's own rows are put beside the others, on their way into the slot or by a copy.
            us += (2 if apart else 1) * rows * k * itemsize / MEMORY_BYTES_US + (LAUNCH_US if apart else 0.0)
            is_narrow = max(at_once) <= NARROW * max(columns)
            us = us if is_narrow else us / WHOLE_GAIN
        ways.append((us, Gathering(groups, whole)))
    # If two ways are equally fast, take the one with fewer launches.
    return min(reversed(ways), key=lambda way: way[0])[1]


def _in_groups(
    world_size: int,
    rank: int,
    rows: int,
    columns: tuple[int, ...],
    k: int,
    itemsize: int,
    num_sms: int,
    *,
    apart: bool,
) -> tuple[float, tuple[tuple[Piece, ...], ...]]:
    """Returns (when the last product ends, in microseconds; the best groups) for weights with these columns."""

    def cost(group: Sequence[Piece]) -> float:
        lengths = [last - first for first, last in runs(group, rank, world_size, rows)]
        return sum(product_us(length, columns, k, itemsize, num_sms, overlapped=True) for length in lengths)

    best: tuple[float, tuple[tuple[Piece, ...], ...]] | None = None
    own = product_us(rows, columns, k, itemsize, num_sms, overlapped=True)
    for parts in (1,) if apart else PARTS:
        if parts > 1 and rows < parts * LEAST_ROWS:
            break
        pieces = [Piece(step, *run) for step in range(1, world_size) for run in cut(rows, parts)]
        arrivals = list(
            itertools.accumulate((transfer_us((p.last - p.first) * k * itemsize) for p in pieces), initial=READY_US)
        )[1:]
        # ends[i]: the earliest end of the products of the first i pieces, and the first piece of their last group.
        ends: list[tuple[float, int]] = [(own, 0)]
        for end in range(1, len(pieces) + 1):
            begins = range(end - 1 if apart else 0, end)
            ends.append(
                min((max(ends[begin][0], arrivals[end - 1]) + cost(pieces[begin:end]), begin) for begin in begins)
            )
        groups: list[tuple[Piece, ...]] = []
        end = len(pieces)
        while end > 0:
            begin = ends[end][1]
            groups.append(tuple(pieces[begin:end]))
            end = begin
        if best is None or ends[-1][0] < best[0]:
            best = ends[-1][0], tuple(reversed(groups))
    assert best is not None
    return best


def runs(group: Sequence[Piece], rank: int, world_size: int, rows: int) -> list[tuple[int, int]]:
    """Returns the rows of the gathered tensor that are in `group`, as few runs (first, last) as possible."""
    found: list[tuple[int, int]] = []
    for piece in sorted(group, key=lambda piece: (rank + piece.step) % world_size * rows + piece.first):
        base = (rank + piece.step) % world_size * rows
        if found and found[-1][1] == base + piece.first:
            found[-1] = found[-1][0], base + piece.last
        else:
            found.append((base + piece.first, base + piece.last))
    return found


def joined(products: Iterable[tuple[int, int, int]], columns: int) -> list[tuple[int, int, int]]:
    """Joins products (first row, last row, element of the slot) that are adjacent in rows and in the slot."""
    found: list[tuple[int, int, int]] = []
    for begin, end, place in products:
        if found and found[-1][1] == begin and found[-1][2] + (begin - found[-1][0]) * columns == place:
            found[-1] = found[-1][0], end, found[-1][2]
        else:
            found.append((begin, end, place))
    return found


def partition(runs: Iterable[tuple[int, int]]) -> tuple[list[int], dict[int, int]]:
    """Returns (the lengths of the runs that are not empty, in the tensor's order; the index of each of them, by its
    first row). The runs (first, last) come in any order and have every row of the tensor once.
    """
    in_order = sorted(run for run in runs if run[0] < run[1])
    assert all(before[1] == after[0] for before, after in itertools.pairwise(in_order)), in_order
    return [last - first for first, last in in_order], {first: place for place, (first, _) in enumerate(in_order)}


@dataclass(frozen=True)
class Reduction:
    """How partial products are cut. The rows of every owner are cut into `parts` pieces, on all ranks alike. Pieces are
    numbered by owner, rank + 1 first, and then by part. Each of `groups` is (first, count) of consecutive pieces that
    one product computes. The rank's own rows are one more product, the last.
    """

    parts: int
    groups: tuple[tuple[int, int], ...]


def scatter_schedule(world_size: int, rows: int, columns: int, num_sms: int, most_parts: int = 2) -> Reduction:
    """Returns the cut of a reduce-scatter with `rows` output rows on each rank. All arguments are equal on all ranks.
    There is one product for each owner, and products alternate between two streams, so the rows that an owner waits for
    leave as early as possible. (On 4 H200s joined products, which need fewer launches, were up to 20 % slower.)
    Products of less than half a wave of tiles are joined, but only as far as two groups are left. With a single peer
    the peer's rows are cut, because otherwise the rank's own product would not hide their whole transfer.
    """
    parts = 2 if world_size == 2 and most_parts >= 2 and rows >= 2 * LEAST_ROWS else 1
    pieces = (world_size - 1) * parts
    tile_m, tile_n, _ = TILES[0]
    tiles = -(-rows // (parts * tile_m)) * -(-columns // tile_n)
    count = max(1, min(-(-num_sms // (2 * max(tiles, 1))), pieces // 2))
    groups = tuple((first, min(count, pieces - first)) for first in range(0, pieces, count))
    return Reduction(parts, groups)


RESULT_PARTS = (1, 2, 4, 8)


@functools.lru_cache(maxsize=1024)
def all_reduce_parts(world_size: int, rows: int, columns: int, k: int, itemsize: int, num_sms: int) -> int:
    """Returns into how many parts an all-reduce of [rows, columns] is cut. All arguments are equal on all ranks. Each
    part is a reduce-scatter, and its results go to all ranks while the next part is computed.
    """

    def rows_of(parts: int) -> int:
        return math.ceil(rows / (parts * world_size))

    def end_us(parts: int) -> float:
        product = product_us(rows_of(parts), (columns,), k, itemsize, num_sms)
        piece = rows_of(parts) * columns * itemsize
        reduction = COPY_US + piece * (world_size + 2) / MEMORY_BYTES_US
        results = (world_size - 1) * transfer_us(piece)
        computed = copied = 0.0
        for part in range(parts):
            for _ in range(world_size - 1):
                computed += product
                copied = max(copied, computed) + transfer_us(piece)
            computed += product
            copied += results if part > 0 else 0.0
            copied = max(copied, computed) + reduction
        return copied + results

    possible = (parts for parts in RESULT_PARTS if parts == 1 or rows_of(parts) >= LEAST_ROWS // 2)
    return min(possible, key=end_us)
