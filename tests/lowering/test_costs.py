"""What a plan has to know of a node beyond its sizes."""

from __future__ import annotations

from ditron_inductor.lowering.costs import more_products
from ditron_inductor.task.nodes import AllGatherMatmul, MatmulReduceScatter, Policy


def gather(dim: int, weights: int) -> AllGatherMatmul:
    return AllGatherMatmul(dim, 4, "group", False, "site", Policy(), weights)


def test_a_gather_in_chunks_multiplies_each_source_with_each_weight() -> None:
    assert more_products(gather(0, 1), (64, 32)) == 0
    assert more_products(gather(0, 3), (64, 32)) == 4 * 2
    # Of one sequence all rows of a rank lie together.
    assert more_products(gather(1, 1), (1, 64, 32)) == 0


def test_rows_that_lie_apart_count_twice() -> None:
    assert more_products(gather(1, 1), (2, 64, 32)) == 4
    assert more_products(gather(1, 2), (2, 64, 32)) == 4 * 3


def test_a_reduction_multiplies_once() -> None:
    assert more_products(MatmulReduceScatter(0, "sum", 4, "group", "site", Policy()), (64, 32)) == 0
