"""all_reduce_rms_norm where other rows than those of the norm are made of its result, as for experts."""

from __future__ import annotations

from collections.abc import Callable

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


Repeated = Callable[[torch.Tensor], torch.Tensor]


def _for_experts(rows: torch.Tensor) -> torch.Tensor:
    """Each row three times, multiplied with a weight of its own."""
    repeated = rows.unsqueeze(1).expand(-1, 3, -1).reshape(-1, rows.shape[-1])
    return torch.bmm(repeated.new_ones(len(repeated), 8, rows.shape[-1]), repeated.unsqueeze(-1))


def _for_all_experts(rows: torch.Tensor, times: int = 3) -> torch.Tensor:
    """As in Llama 4: every expert has all rows, each multiplied by its score."""
    scaled = rows.repeat(times, 1) * rows.new_full((times * len(rows), 1), 2.0)
    return torch.bmm(scaled.view(times, *rows.shape), rows.new_ones(times, rows.shape[-1], 8))


@pytest.mark.parametrize(
    ("behind", "count"),
    [
        (_for_experts, 1),
        (_for_all_experts, 1),
        # Then there are as many rows as the norm has, and the compiler scales them in its kernel.
        (lambda rows: _for_all_experts(rows, 1), 0),
        (lambda rows: rows.unsqueeze(1).expand(-1, 3, -1).relu(), 0),
        # The compiler computes these with the norm.
        (lambda rows: rows.unsqueeze(1).expand(-1, 4, -1).amax(1), 0),
        (lambda rows: rows.unsqueeze(0).expand(3, -1, -1)[0].relu(), 0),
        (lambda rows: rows.unsqueeze(1).expand(-1, 1, -1).relu(), 0),
        (lambda rows: rows.unsqueeze(-1).expand(-1, -1, 9).relu(), 0),
    ],
    ids=["experts", "all_experts", "one_expert", "elements", "largest", "one_of_them", "once", "columns"],
)
def test_rows_that_are_repeated_behind_the_norm(behind: Repeated, count: int) -> None:
    norm = frozen(LlamaNorm, BF16)
    assert fused(graph_of(lambda x: behind(norm(all_reduce(x)).flatten(0, -2)), tensors()[2])) == count


def test_a_row_of_one_element_is_repeated() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        reduced = all_reduce(x)
        normed = reduced * torch.rsqrt(reduced.pow(2).mean(-1, keepdim=True) + 1e-6)
        return normed.reshape(()).expand(3).relu()

    assert fused(graph_of(fn, torch.randn(1, 1))) == 0
