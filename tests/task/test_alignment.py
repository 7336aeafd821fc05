"""The rule of padding: what it compares, on numbers that can be followed by hand."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from ditron_inductor.task.alignment import RULE, TENSOR_FLOAT_32, ProductWork, Rule, aligned_bytes, missing, speed_of

BF16 = torch.bfloat16
EASY = Rule(
    flops_per_s={BF16: 100.0, torch.float32: 100.0},
    operand={2: 0.25, 4: 0.5, 8: 0.5, 16: 1.0},
    result={2: 0.5, 4: 1.0, 8: 1.0, 16: 1.0},
    bytes_per_s=10.0,
    launch_s=1.0,
    margin=1.0,
)
WORK = ProductWork(BF16, flops=1000.0, moved_bytes=50.0, operand_bytes=2, result_bytes=16, copied_bytes=100.0, launches=2)


def test_both_times() -> None:
    # 10 s of sums at a quarter of the speed; or those, 10 s of copies and two launches.
    assert EASY.seconds(WORK) == (40.0, 22.0)
    assert EASY.pays(WORK)
    assert not dataclasses.replace(EASY, margin=2.0).pays(WORK)


def test_a_product_that_waits_for_memory_gains_nothing() -> None:
    reads = dataclasses.replace(WORK, moved_bytes=500.0)
    assert EASY.seconds(reads) == (50.0, 62.0) and not EASY.pays(reads)


def test_the_worst_of_operands_and_result_counts() -> None:
    assert EASY.reached(dataclasses.replace(WORK, operand_bytes=16, result_bytes=2)) == (0.5, 1.0)
    assert EASY.reached(dataclasses.replace(WORK, operand_bytes=2, result_bytes=2)) == (0.25, 1.0)
    assert EASY.reached(dataclasses.replace(WORK, operand_bytes=16, result_bytes=16)) == (1.0, 1.0)
    # Where the result cannot be padded.
    kept = dataclasses.replace(WORK, operand_bytes=2, result_bytes=2, padded_result_bytes=2)
    assert EASY.reached(kept) == (0.25, 0.5)


def test_exact_fp32_has_a_part_of_its_own() -> None:
    exact = dataclasses.replace(WORK, speed=torch.float32)
    assert EASY.reached(exact) == (EASY.plain, 1.0) and not EASY.pays(exact)


@pytest.mark.parametrize("speed", [torch.bfloat16, torch.float16, torch.float32, TENSOR_FLOAT_32])
@pytest.mark.parametrize("operand", [2, 4, 8, 16])
@pytest.mark.parametrize("result", [2, 4, 8, 16])
def test_the_shipped_rule_knows_all_forms(speed: torch.dtype | str, operand: int, result: int) -> None:
    work = dataclasses.replace(WORK, speed=speed, operand_bytes=operand, result_bytes=result)
    assert all(0.0 < part <= 1.0 for part in RULE.reached(work))
    assert min(RULE.seconds(work)) > 0.0


def test_alignment_of_sizes() -> None:
    assert [missing(size, BF16) for size in (8, 9, 15, 4097)] == [0, 7, 1, 7]
    assert [missing(size, torch.float32) for size in (8, 9, 15)] == [0, 3, 1]
    assert [aligned_bytes(size * 2) for size in (4097, 4098, 4100, 4096)] == [2, 4, 8, 16]
    assert aligned_bytes(4096, 4) == 4 and aligned_bytes(0) == 16


def test_speed_of_fp32_follows_the_setting() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        assert speed_of(torch.float32) == torch.float32
        torch.set_float32_matmul_precision("high")
        assert speed_of(torch.float32) == TENSOR_FLOAT_32 and speed_of(BF16) == BF16
    finally:
        torch.set_float32_matmul_precision(before)
