"""The mutations of masks: of decode attention, and of the slots of experts elsewhere."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

PARTS = "passes/attention/attention_parts.py"
DECODED = "tests/passes/test_flash_decode.py"
REDUCED = "tests/passes/test_grouped_matmul_all_reduce.py"
STAYS = f"{DECODED}::test_other_attention_is_left_alone"

MASKING: tuple[Mutation, ...] = (
    Mutation(
        "a mask that is added keeps what it hides",
        PARTS,
        "return TokenMask(condition, kept, tuple(views)) if same else None",
        "return TokenMask(condition, not kept, tuple(views)) if same else None",
        f"{DECODED}::test_computes_the_same[of_torch_with_mask]",
    ),
    Mutation(
        "a padded mask may be cut anywhere",
        "passes/graph/proofs.py",
        "whole = last and known_equal(part.start, 0)",
        "whole = last",
        "tests/passes/test_cached_attention.py::test_a_mask_whose_rows_torch_pads[1]",
    ),
    Mutation(
        "of two masks the last one counts",
        PARTS,
        "not isinstance(symbol[1], Scores) or symbol[1].lengths is not None",
        "not isinstance(symbol[1], Scores)",
        f"{STAYS}[two masks]",
    ),
    Mutation(
        "a bias of torch's op hides nothing",
        PARTS,
        "if read.added is not None:",
        "if read.mask() is not None:",
        f"{STAYS}[a bias of torch's op]",
    ),
    Mutation(
        "integers that were numbers hide a score",
        PARTS,
        "if proofs.fake(added).dtype not in FLOATS:",
        "if False:",
        f"{STAYS}[integers]",
    ),
    Mutation(
        "masked products that a forward keeps are multiplied again",
        "passes/fuse/grouped_matmul_all_reduce.py",
        "is not None and _keeps_masked(sums.terms):",
        "is None:",
        f"{REDUCED}::test_masked_products_that_the_graph_returns_are_masked_behind_the_node",
    ),
    Mutation(
        "masked products that are read elsewhere are not made",
        "passes/fuse/grouped_matmul_all_reduce.py",
        "{summed: reader, terms.masked: behind[0]}",
        "{summed: reader}",
        f"{REDUCED}::test_it_must_not_fire[masked_read_elsewhere-intermediate_used]",
    ),
)
