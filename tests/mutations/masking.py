"""The mutations of masks of decode attention."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

PARTS = "passes/attention/attention_parts.py"
DECODED = "tests/passes/test_flash_decode.py"
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
)
