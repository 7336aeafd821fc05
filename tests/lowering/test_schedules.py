"""How the chunked strategies cut their work: complete, without overlap, the same on all ranks, and as it should be."""

from __future__ import annotations

import itertools

import pytest

from ditron_inductor.lowering import schedules
from ditron_inductor.lowering.schedules import Gathering, Piece, Reduction

NUM_SMS = 132
WORLDS = (2, 3, 4, 8)
ROWS = (1, 7, 128, 511, 512, 1000, 2048, 4096)
SHAPES = ((14336, 8192), (7168, 4096), (1000, 16384), (1, 1))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("rows", ROWS)
def test_a_gather_takes_every_row_once(world: int, rows: int) -> None:
    for (columns, k), rank in itertools.product(SHAPES, range(world)):
        groups = schedules.gather_schedule(world, rank, rows, (columns,), k, 2, NUM_SMS).groups
        pieces = [piece for group in groups for piece in group]
        assert all(groups)
        assert [piece.step for piece in pieces] == sorted(piece.step for piece in pieces)
        found = sorted(
            row
            for group in groups
            for first, last in schedules.runs(group, rank, world, rows)
            for row in range(first, last)
        )
        own = range(rank * rows, (rank + 1) * rows)
        assert found == [row for row in range(world * rows) if row not in own]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("rows", ROWS)
def test_a_reduction_takes_every_piece_once(world: int, rows: int) -> None:
    for columns, _ in SHAPES:
        cut = schedules.scatter_schedule(world, rows, columns, NUM_SMS)
        assert len(schedules.cut(rows, cut.parts)) == cut.parts
        taken = [piece for first, count in cut.groups for piece in range(first, first + count)]
        assert taken == list(range((world - 1) * cut.parts))
        one = schedules.scatter_schedule(world, rows, columns, NUM_SMS, most_parts=1)
        assert one.parts == 1


@pytest.mark.parametrize(
    ("rows", "parts", "expected"), [(10, 4, [3, 3, 3, 1]), (4, 4, [1] * 4), (0, 2, []), (5, 1, [5])]
)
def test_cut(rows: int, parts: int, expected: list[int]) -> None:
    found = schedules.cut(rows, parts)
    assert [last - first for first, last in found] == expected
    assert [row for first, last in found for row in range(first, last)] == list(range(rows))


def test_runs_join_what_lies_together() -> None:
    group = [Piece(1, 0, 10), Piece(2, 0, 10), Piece(3, 0, 5)]
    assert schedules.runs(group, 0, 4, 10) == [(10, 35)]
    # Rank 2: the shards of ranks 3, 0 and 1.
    assert schedules.runs(group, 2, 4, 10) == [(0, 15), (30, 40)]


def test_a_long_transfer_is_cut_on_two_ranks() -> None:
    """Where the product is short, the first part of the peer's shard is not kept waiting for the last one."""
    groups = schedules.gather_schedule(2, 0, 4096, (1024,), 8192, 2, NUM_SMS).groups
    assert len(groups) > 1
    assert schedules.gather_schedule(2, 0, 4096, (14336,), 8192, 2, NUM_SMS) == Gathering(((Piece(1, 0, 4096),),))
    assert schedules.scatter_schedule(2, 4096, 8192, NUM_SMS) == Reduction(2, ((0, 1), (1, 1)))


def test_small_shards_are_multiplied_together() -> None:
    """Products of 256 rows and 7168 columns leave most of the GPU idle."""
    groups = schedules.gather_schedule(4, 0, 256, (7168,), 4096, 2, NUM_SMS).groups
    assert len(groups) < 3
    assert len(schedules.scatter_schedule(4, 512, 4096, NUM_SMS).groups) == 3
    assert len(schedules.scatter_schedule(8, 128, 4096, NUM_SMS).groups) < 7


def test_narrow_weights_are_multiplied_at_once() -> None:
    """Those of keys and values behind those of queries; gate and up, as wide as each other, with every group."""
    queries, keys = 4096, 512
    found = schedules.gather_schedule(2, 0, 1024, (keys, queries, keys), 8192, 2, NUM_SMS)
    assert found.whole == (0, 2) and found.groups
    assert schedules.gather_schedule(2, 0, 1024, (14336, 14336), 8192, 2, NUM_SMS).whole == ()
    # Of long shards they fill the GPU as they are.
    assert schedules.gather_schedule(2, 0, 4096, (queries, keys, keys), 8192, 2, NUM_SMS).whole == ()


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("columns", [(7,), (1024, 128, 128), (64, 64), (0, 24)])
def test_every_weight_is_multiplied_with_all_rows(columns: tuple[int, ...], apart: bool) -> None:
    for world, rows, rank in itertools.product(WORLDS, (0, *ROWS), range(2)):
        found = schedules.gather_schedule(world, rank, rows, columns, 4096, 2, NUM_SMS, apart=apart)
        assert set(found.whole) < set(range(len(columns))) and list(found.whole) == sorted(found.whole)
        narrowest = min(width for i, width in enumerate(columns) if i not in found.whole)
        assert all(columns[i] <= narrowest for i in found.whole)
        assert bool(found.groups) == (rows > 0) and (found.groups or not found.whole)
        if apart and rows > 0:
            assert found.groups == tuple((Piece(step, 0, rows),) for step in range(1, world))


def test_an_all_reduce_has_more_parts_when_it_is_large() -> None:
    parts = [schedules.all_reduce_parts(4, rows, 8192, 7168, 2, NUM_SMS) for rows in (16, 2048, 8192)]
    assert parts[0] == 1 and parts[2] > 1 and parts == sorted(parts)


def test_time_grows_with_the_work() -> None:
    times = [schedules.product_us(rows, (7168, 7168), 4096, 2, NUM_SMS) for rows in (128, 512, 2048, 8192)]
    assert times == sorted(times)
    assert schedules.product_us(0, (7168,), 4096, 2, NUM_SMS) == 0.0
    assert schedules.product_us(512, (7168,), 4096, 4, NUM_SMS) > schedules.product_us(512, (7168,), 4096, 2, NUM_SMS)


def test_a_partition_says_where_each_run_is() -> None:
    assert schedules.partition([(4, 9), (0, 4), (9, 9), (9, 10)]) == ([4, 5, 1], {0: 0, 4: 1, 9: 2})


@pytest.mark.parametrize("runs", [[(0, 4), (5, 9)], [(0, 4), (3, 9)]], ids=["gap", "overlap"])
def test_what_is_no_partition_is_refused(runs: list[tuple[int, int]]) -> None:
    with pytest.raises(AssertionError):
        schedules.partition(runs)
