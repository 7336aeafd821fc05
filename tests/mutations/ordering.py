"""The mutations of what keeps rows, or slots, in another order."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

ROWS = "passes/forms/rows_by_rank.py"
ORDER = "lowering/expert_projections/slot_order.py"
EXPERTS = "lowering/expert_projections/experts_kernel.py"
OF_ROWS = "tests/passes/test_rows_by_rank.py::test_where_the_order_of_rows_matters_it_stays"
OF_EXPERTS = "tests/lowering/test_expert_projections.py"

ORDERING: tuple[Mutation, ...] = (
    Mutation(
        "rows in the order of ranks meet rows of the program's order",
        ROWS,
        "return all(proofs.known_equal(length, 1) for length in own)",
        "return True",
        f"{OF_ROWS}[places]",
    ),
    Mutation(
        "tokens are added up in the order of ranks",
        ROWS,
        "dim % ndim >= lead for dim in dims",
        "dim % ndim >= 0 for dim in dims",
        f"{OF_ROWS}[sums_that_look_like_rows]",
    ),
    Mutation(
        "some rows in the order of ranks are taken for all",
        ROWS,
        "return lead if dim >= lead else None",
        "return lead",
        f"{OF_ROWS}[one_sequence_that_looks_like_all]",
    ),
    Mutation(
        "rows in the order of ranks are taken for columns",
        ROWS,
        "proofs.permutation(node)[:lead] == list(range(lead))",
        "True",
        f"{OF_ROWS}[columns_that_look_like_rows]",
    ),
    Mutation(
        "slots of one expert are put in one place",
        ORDER,
        "key = named * S + mine",
        "key = named * S",
        f"{OF_EXPERTS}::test_slots_are_ordered_by_expert[33-5]",
    ),
    Mutation(
        "slots that a tile has no row for are left out",
        EXPERTS,
        "for first in range(tl.load(ends), end, TILES.BLOCK_M):",
        "for first in range(tl.load(ends), tl.minimum(end, tl.load(ends) + 1), TILES.BLOCK_M):",
        f"{OF_EXPERTS}::test_near_the_reference_in_the_interpreter[77x3of5-41-40-17-float16-one]",
    ),
    Mutation(
        "slots elsewhere have no zeros if there are many",
        EXPERTS,
        "store_zeros(tl.where(absent, tile, -1), slots, inside,",
        "store_zeros(-1, slots, inside,",
        f"{OF_EXPERTS}::test_near_the_reference_in_the_interpreter[66x2of4-32-16-bfloat16-elsewhere-slots-absent]",
    ),
)
