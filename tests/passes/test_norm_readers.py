"""all_reduce_rms_norm where other rows than those of the norm are made of its result, as for experts."""

from __future__ import annotations

import pytest
import torch

from tests.passes.graphs import all_reduce
from tests.passes.test_all_reduce_rms_norm import BF16, LlamaNorm, frozen, fused, graph_of, tensors

pytestmark = pytest.mark.usefixtures("group")


def test_rows_that_are_picked_behind_the_norm() -> None:
    """As for experts: these are another kernel's, whatever follows."""
    norm = frozen(LlamaNorm, BF16)
    module = graph_of(
        lambda x, places: norm(all_reduce(x)).flatten(0, -2)[places].relu(), tensors()[2], torch.arange(3)
    )
    assert fused(module) == 1


def test_rows_that_are_repeated_behind_the_norm() -> None:
    """As for each expert of a token; an op on as many elements is computed with the norm."""
    norm = frozen(LlamaNorm, BF16)

    def repeated(x: torch.Tensor, times: int) -> torch.Tensor:
        rows = norm(all_reduce(x)).flatten(0, -2)
        return rows.unsqueeze(1).expand(-1, times, -1).relu()

    for times, count in ((3, 1), (1, 0)):
        assert fused(graph_of(repeated, tensors()[2], times)) == count
    wider = graph_of(lambda x: norm(all_reduce(x)).unsqueeze(-1).expand(-1, -1, -1, 9).relu(), tensors()[2])
    assert fused(wider) == 0, "elements are repeated, not rows"
