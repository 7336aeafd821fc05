"""How the `chunked` strategies cut their work: which rows move as one piece, and which pieces one product takes.

Small pieces start the first product early and end the last transfer soon; large ones fill the GPU and cost fewer
launches. For a gather and an all-reduce a model of one rank decides, with all ranks in step: products one after another
on one stream, transfers on another, each no earlier than what it needs. The products of a gather take turns on two
streams, so that only the tiles count and not the waves: at least half a wave, since two of them share the GPU. For a
reduce-scatter it is a rule, see `scatter_schedule`.

    product  = waves of tiles over the SMs * time of a tile + LAUNCH_US       (the best of a few tile shapes)
    transfer = bytes / LINK + COPY_US

Its numbers are an H200's. Other GPUs have other numbers in about the same proportion, and only proportions matter.
Schedules are pure functions of sizes. Where peers have to agree (`parts` of a reduction, since flags and slots are laid
out by them) all the arguments are sizes that they share; the grouping of products is each rank's own business.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

FLOPS_PER_SM_US = {2: 6.0e6, 4: 2.4e6}
"""By size of an element: of one SM in a microsecond, in the largest tile shape."""

TILES = ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.92), (64, 256, 0.85), (64, 128, 0.75), (64, 64, 0.5))
"""(rows, columns, speed) of the tile shapes that a library has."""

LINK_BYTES_US = 300e3
MEMORY_BYTES_US = 3.5e6
LAUNCH_US = 4.0
"""From the end of a product to the start of the next one."""
COPY_US = 4.0
"""From the end of a transfer, or a signal, to the start of the next one."""
READY_US = 10.0
"""From the start of a call until a peer's data can be copied."""
PARTS = (1, 2, 4)
LEAST_ROWS = 256
"""Nobody wants pieces of fewer rows."""


def product_us(
    rows: int, columns: Sequence[int], k: int, itemsize: int, num_sms: int, *, overlapped: bool = False
) -> float:
    """Predicted time of the products of [rows, k] with weights [k, columns[i]]; overlapped: with others in turns."""
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
    """Predicted time of one copy from a peer."""
    return nbytes / LINK_BYTES_US + COPY_US


@dataclass(frozen=True)
class Piece:
    """Rows `first` to `last` of the shard of rank + `step`."""

    step: int
    first: int
    last: int


def cut(rows: int, parts: int) -> list[tuple[int, int]]:
    """`rows` as at most `parts` runs (first, last) of equal length, the last one shorter; none of them empty."""
    length = -(-rows // parts)
    return [(first, min(first + length, rows)) for first in range(0, rows, length)] if rows else []


WHOLE_GAIN = 0.97
"""What making products with wide weights whole has to take of the time without: the model is no better than that."""
NARROW = 0.5
"""Weights of at most so much of the widest one's columns: of theirs fewer launches are gain enough."""


@dataclass(frozen=True)
class Gathering:
    """What is copied and multiplied after the own shard: `groups` in order, each for one product (or for two, where its
    rows lie at both ends of the output) with every weight but those in `whole`, by number: these are multiplied once,
    with all rows, when the last of them are there.
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
    """See Gathering. rows: of a shard; columns: of each weight. apart: the rows of a shard do not lie together, so the
    shards are multiplied one by one.

    Narrow weights, such as those of keys and values, have few tiles in a group of rows. While the products with wide
    ones hide the transfer, theirs can wait until they fill the GPU.
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
            # The own rows are put beside the others, on the way into the slot or by a copy.
            us += (2 if apart else 1) * rows * k * itemsize / MEMORY_BYTES_US + (LAUNCH_US if apart else 0.0)
            is_narrow = max(at_once) <= NARROW * max(columns)
            us = us if is_narrow else us / WHOLE_GAIN
        ways.append((us, Gathering(groups, whole)))
    # Of two that are as fast the one with fewer launches.
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
    """The best groups for products with all these columns, and when the last product ends, in microseconds."""

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
        # ends[i]: the earliest end of the first i pieces, and the group that it takes for the last of them.
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
    """The rows (first, last) of the gathered tensor that `group` holds, what lies together as one run."""
    found: list[tuple[int, int]] = []
    for piece in sorted(group, key=lambda piece: (rank + piece.step) % world_size * rows + piece.first):
        base = (rank + piece.step) % world_size * rows
        if found and found[-1][1] == base + piece.first:
            found[-1] = found[-1][0], base + piece.last
        else:
            found.append((base + piece.first, base + piece.last))
    return found


def joined(products: Iterable[tuple[int, int, int]], columns: int) -> list[tuple[int, int, int]]:
    """Products (first row, last row, element of the slot) of `columns` columns; those that follow each other in both as
    one.
    """
    found: list[tuple[int, int, int]] = []
    for begin, end, place in products:
        if found and found[-1][1] == begin and found[-1][2] + (begin - found[-1][0]) * columns == place:
            found[-1] = found[-1][0], end, found[-1][2]
        else:
            found.append((begin, end, place))
    return found


def partition(runs: Iterable[tuple[int, int]]) -> tuple[list[int], dict[int, int]]:
    """Runs of rows (first, last) that cover a tensor, each row once, in any order: lengths of those that are not empty,
    in the tensor's order, and the place of each among them by its first row.
    """
    in_order = sorted(run for run in runs if run[0] < run[1])
    assert all(before[1] == after[0] for before, after in itertools.pairwise(in_order)), in_order
    return [last - first for first, last in in_order], {first: place for place, (first, _) in enumerate(in_order)}


@dataclass(frozen=True)
class Reduction:
    """How partial products are cut. parts: of every owner's rows, equal on all ranks.

    groups: (first, count) of consecutive pieces that one product makes; pieces are numbered by owner, rank + 1 first,
    then by part. The own rows are one more product, the last.
    """

    parts: int
    groups: tuple[tuple[int, int], ...]


def scatter_schedule(world_size: int, rows: int, columns: int, num_sms: int, most_parts: int = 2) -> Reduction:
    """The cut of a reduce-scatter with `rows` output rows on each rank. All arguments are equal on all ranks.

    One product for each owner, in turns on two streams, so that what an owner waits for leaves as early as can be: to
    join products for fewer launches cost up to 20 % on 4 H200s. But products of less than half a wave are joined, if
    two turns are left. With one peer its rows are cut, or the own product would not hide their transfer.
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
    """In how many parts an all-reduce of [rows, columns] runs. All arguments are equal on all ranks.

    A part is a reduce-scatter whose results go to everybody while the next part is computed.
    """
    best: tuple[float, int] | None = None
    for parts in RESULT_PARTS:
        length = math.ceil(rows / (parts * world_size))
        if parts > 1 and length < LEAST_ROWS // 2:
            break
        one = product_us(length, (columns,), k, itemsize, num_sms)
        piece = length * columns * itemsize
        reduction = COPY_US + piece * (world_size + 2) / MEMORY_BYTES_US
        results = (world_size - 1) * transfer_us(piece)
        computed = copied = 0.0
        for part in range(parts):
            for _ in range(world_size - 1):
                computed += one
                copied = max(copied, computed) + transfer_us(piece)
            computed += one
            copied += results if part > 0 else 0.0
            copied = max(copied, computed) + reduction
        end = copied + results
        if best is None or end < best[0]:
            best = end, parts
    assert best is not None
    return best[1]
