"""What a plan has to know of a node beyond its sizes."""

from __future__ import annotations

from dataclasses import replace

import torch

from ditron_inductor.lowering.costs import epilogue_bytes, pair_bytes
from ditron_inductor.task.nodes import AllGatherMatmul, MatmulReduceScatter, Policy


def gather(dim: int, weights: int) -> AllGatherMatmul:
    return AllGatherMatmul(dim, 4, "group", False, "site", Policy(), weights)


def test_a_gather_in_chunks_multiplies_each_source_with_each_weight() -> None:
    assert gather(0, 1).more_products((64, 32)) == 0
    assert gather(0, 3).more_products((64, 32)) == 4 * 2
    # Of one sequence all rows of a rank lie together.
    assert gather(1, 1).more_products((1, 64, 32)) == 0


def test_rows_that_lie_apart_count_twice() -> None:
    assert gather(1, 1).more_products((2, 64, 32)) == 4
    assert gather(1, 2).more_products((2, 64, 32)) == 4 * 3


def test_a_reduction_multiplies_once() -> None:
    assert MatmulReduceScatter(0, "sum", 4, "group", "site", Policy()).more_products((64, 32)) == 0


def test_an_epilogue_of_two_products_and_what_it_stores() -> None:
    plain, size = gather(0, 2), (64, 48, torch.bfloat16)
    swiglu = replace(plain, epilogue="cast(silu(mm0), bf16) * mm1")
    training = replace(plain, epilogue="cast(silu(mm0), bf16) * mm1; mm0; mm1")
    apart = replace(plain, epilogue="cast(silu(mm0), bf16); mm1")
    one = 64 * 24 * 2
    assert [pair_bytes(node, *size) for node in (plain, apart, swiglu, training)] == [0, 0, 3 * one, 5 * one]
    assert [epilogue_bytes(node, *size) for node in (swiglu, training)] == [3 * one, 3 * one]
    assert pair_bytes(MatmulReduceScatter(0, "sum", 4, "group", "site", Policy()), *size) == 0
