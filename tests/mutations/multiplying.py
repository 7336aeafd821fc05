"""The mutations of products that nothing is communicated for."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

ROW = "ditron_inductor/core/matmul_row.py"
PROJECTIONS = "lowering/projections/projections_kernel.py"
PROJECTED = "tests/lowering/test_projections.py"
AHEAD = "tests/lowering/test_overlap.py::test_what_is_loaded_ahead_is_added_up"
THREE = f"{PROJECTED}::test_near_the_reference_in_the_interpreter[1x70-33-17-5-float16]"

MULTIPLYING: tuple[Mutation, ...] = (
    Mutation(
        "several rows are projected by a weight alone",
        "passes/fuse/projections.py",
        "return x.shape[0] == 1 and",
        "return",
        "tests/passes/test_projections.py::test_one_row_and_a_large_weight_alone[2-0-0]",
    ),
    Mutation(
        "the last step of a row goes beyond K",
        ROW,
        "return in_k < left",
        "return left > 0",
        THREE,
    ),
    Mutation(
        "a row begins anew in each step",
        ROW,
        "a_ptrs += BLOCK_K\n            b_ptrs += length\n    return",
        "a_ptrs += 0\n            b_ptrs += length\n    return",
        f"{AHEAD}[200-2-]",
    ),
    Mutation(
        "the row of a pair is multiplied by the same weight twice",
        ROW,
        "_, other_ptrs, other_length = columns_of(other,",
        "_, other_ptrs, other_length = columns_of(weight,",
        f"{PROJECTED}::test_near_the_reference_in_the_interpreter[1x33-50-50-17-bfloat16-epilogue]",
    ),
    Mutation(
        "the other weight of a pair begins anew in each step",
        ROW,
        "other_ptrs += other_length",
        "other_ptrs += 0",
        f"{AHEAD}[200-2-cast(silu(mm0), bf16) * mm1]",
    ),
    Mutation(
        "the first tile of a weight is that of the one before",
        PROJECTIONS,
        "reached = tile >= begin",
        "reached = tile > begin",
        THREE,
    ),
    Mutation(
        "tiles of a weight are counted from the first weight on",
        PROJECTIONS,
        "column = (tile - first) * BLOCK_N",
        "column = tile * BLOCK_N",
        THREE,
    ),
    Mutation(
        "few rows are divided into tiles of a single row",
        "lowering/config.py",
        "most >= rows or most > 1 and programs(most)",
        "most >= rows or programs(most)",
        f"{PROJECTED}::test_only_a_single_row_has_its_own_tile[dtype0]",
    ),
)
