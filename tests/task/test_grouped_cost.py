"""What the first matmul of experts is predicted to take, against what was measured on an H100."""

from __future__ import annotations

import pytest

from ditron_inductor.task.grouped_cost import library_wins

MIXTRAL, QWEN, LARGE_QWEN = (
    {"E": 8, "K": 4096, "N": 14336},
    {"E": 128, "K": 2048, "N": 768},
    {"E": 128, "K": 4096, "N": 1536},
)
"""A share on two ranks."""


@pytest.mark.parametrize(
    ("share", "tokens", "top_k", "wins"),
    [
        (MIXTRAL, 8192, 2, True),
        (MIXTRAL, 2048, 2, True),
        (MIXTRAL, 512, 2, False),
        (MIXTRAL, 128, 2, False),
        *[(QWEN, tokens, 8, False) for tokens in (128, 512, 2048, 8192)],
        *[(LARGE_QWEN, tokens, 8, False) for tokens in (128, 512, 2048, 8192)],
    ],
)
def test_the_faster_one_is_predicted(share: dict[str, int], tokens: int, top_k: int, wins: bool) -> None:
    assert library_wins(S=tokens * top_k, **share) == wins


@pytest.mark.parametrize("share", [MIXTRAL, QWEN, LARGE_QWEN])
def test_more_slots_are_for_the_library(share: dict[str, int]) -> None:
    """So a number of slots that is not known yet counts as a very large one."""
    wins = [library_wins(S=share["E"] * mean, **share) for mean in (0, 1, 16, 128, 256, 512, 1024, 4096, 1 << 20)]
    assert wins == sorted(wins) and wins[0] is False


def test_a_copy_that_takes_long_is_saved() -> None:
    """The narrower the weights, the more the copy of the rows weighs."""
    slots = {"S": 8192 * 2, "E": 8, "K": 4096}
    assert [library_wins(N=N, **slots) for N in (128, 1024, 7168, 28672)] == [False, False, True, True]
