"""How decode attention is cut for its kernel, and what its benchmark says of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.ops.flash_decode import MOST_BYTES, SETS, Cell, table, verdict
from benchmarks.records import Row
from ditron_inductor.lowering.decode_attention.decode_config import BY_HEAD_DIM, count_splits, deal, merged_splits
from ditron_inductor.lowering.flash_decode.local_decode import Shape
from ditron_inductor.lowering.flash_decode.tile import in_two_launches


@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "expected"),
    [(1, 32, 8, (8, 4, 1)), (64, 64, 8, (512, 8, 1)), (2, 128, 1, (4, 64, 2)), (1, 67, 1, (67, 1, 67))],
)
def test_heads_are_dealt(batch: int, heads: int, kv_heads: int, expected: tuple[int, int, int]) -> None:
    found = deal(batch, heads, kv_heads)
    assert (found.heads, found.rows, found.parts) == expected
    assert found.heads * found.rows == batch * heads and found.block_rows >= found.merged_rows >= found.rows


def test_splits_fill_the_gpu() -> None:
    config = BY_HEAD_DIM[128]
    programs = config.programs(8, 132)
    assert programs == 132 and config.programs(512, 132) == 264
    assert count_splits(8, 1 << 17, programs, config) == 16
    # One round that leaves a few programs idle, not two of all: they read no faster, and their parts have to be merged.
    assert count_splits(8, 1 << 20, programs, config) == 16
    # But not one in which many are idle.
    assert count_splits(48, 1 << 20, programs, config) == 8
    assert count_splits(8, 4096, programs, config) * 8 <= programs
    # There are as many pieces of heads as there is room for twice: nothing is gained by splits.
    assert count_splits(512, 4096, config.programs(512, 132), config) == 1
    assert count_splits(8, 1, programs, config) == 1
    # Rounds that are asked for.
    assert count_splits(8, 1 << 18, programs, replace(config, least_rounds=2)) == 32
    assert count_splits(256, 1 << 18, 264, replace(config, least_rounds=4)) == 4
    assert count_splits(8, 64, programs, replace(config, least_rounds=4)) == 1


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "splits", "expected"),
    [(32, 8, 128, 16, 16), (64, 8, 128, 16, 16), (64, 8, 128, 33, 16), (64, 8, 256, 33, 4), (64, 8, 64, 3, 4),
     (64, 1, 128, 33, 1), (8, 8, 16, 66, 16), (32, 8, 128, 1, 1)],
)  # fmt: skip
def test_parts_are_merged_in_few_rounds(heads: int, kv_heads: int, head_dim: int, splits: int, expected: int) -> None:
    assert merged_splits(deal(1, heads, kv_heads), head_dim, splits, interpreted=False) == expected


def shape_of(batch: int, capacity: int) -> Shape:
    sizes = batch, 32, 8, 128, capacity, batch, 0
    return Shape(*sizes, torch.bfloat16, (1, 1), (1, 1, 1), (1, 1, 1), 0, 1.0, 0.0, 132, "")


@pytest.mark.parametrize(
    ("batch", "capacity", "expected"), [(1, 1 << 20, False), (32, 1 << 18, False), (64, 512, False), (64, 4096, True)]
)
def test_only_many_tickets_of_many_tokens_take_two_launches(batch: int, capacity: int, expected: bool) -> None:
    shape = shape_of(batch, capacity)
    config = shape.config(interpreted=False)
    programs = config.programs(shape.heads.heads, shape.num_sms)
    splits = count_splits(shape.heads.heads, capacity, programs, config)
    assert in_two_launches(shape, splits, programs, interpreted=False) == expected


@pytest.mark.parametrize(
    ("batch", "capacity", "expected"), [(8, 1 << 20, 64), (32, 1 << 16, 128), (64, 4096, 128), (64, 1024, 64)]
)
def test_many_programs_with_long_caches_read_larger_blocks(batch: int, capacity: int, expected: int) -> None:
    assert shape_of(batch, capacity).config(interpreted=False).block_n == expected


@pytest.mark.parametrize(
    ("page", "strides", "far"),
    [
        (0, (1 << 40, 128, 1), False),
        (0, (1, 1 << 26, 1), True),
        (8, (128, 1 << 27, 1), False),
        (8, (128, 306783440, 1), True),
        (16, (1 << 20, 128, 1), True),
        (16, (1 << 18, 128, 1), False),
    ],
)
def test_what_lies_far_apart_is_reached_by_64_bits(page: int, strides: tuple[int, int, int], far: bool) -> None:
    """A block of tokens of a dense cache, or all pages."""
    shape = replace(shape_of(32, 4096), page=page, pages=4096, strides_v=strides)
    assert shape.how(shape.config(interpreted=False), 1, False).FAR == far


def test_benchmark_shapes() -> None:
    cells = [cell for cell in SETS["decode"](4) if cell.local_bytes(4) <= MOST_BYTES]
    assert {cell.B for cell in cells} == {1, 8, 32, 64}
    assert {cell.T for cell in cells if cell.B == 1} >= {65536, 1048576}
    assert all(cell.T // 4 == 1 << 20 for cell in SETS["hbm"](4))


def test_benchmark_targets() -> None:
    row = Row("attention", "flash_decode", "nccl", Cell(1, 65536).shape, "bfloat16", 4, 1, *[28.0] * 3, 0.0, None,
              "GPU", "2.11", "3.6", "abc", "2026-01-31")  # fmt: skip
    ours = replace(row, contestant="ditron", p50_us=20.0)
    assert verdict([row, ours]) == "1.40 PASS"
    assert verdict([row, replace(ours, p50_us=21.0)]) == "1.33 FAIL"
    # Two ranks have no target but to be no slower.
    assert verdict([replace(row, world=2), replace(ours, p50_us=21.0, world=2)]) == "1.33 PASS"
    long = replace(row, shape=Cell(1, 4 << 20).shape, p50_us=1000.0)
    ours, read = replace(long, contestant="ditron"), replace(long, contestant="read", p50_us=840.0)
    assert verdict([long, ours, read]) == "1.00 FAIL"
    assert verdict([long, ours, replace(read, p50_us=860.0)]) == "1.00 PASS"
    # 4 GiB of keys and values in a millisecond.
    assert table([long, ours]).splitlines()[-1].endswith("1.00 PASS  4.29 TB/s")
