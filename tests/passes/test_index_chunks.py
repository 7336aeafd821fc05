"""Rows that are picked from gathered chunks: which are picked where they lie, and what stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch

from ditron_inductor.passes.forms.index_chunks import index_chunks
from tests.passes.graphs import WORLD_SIZE, all_gather, gather_dim, rewritten, run_ranks, text

pytestmark = pytest.mark.usefixtures("group")

X = torch.empty(3, 5, 4)
SCORES = torch.empty(3 * 5 * WORLD_SIZE * 2)


def picked(x: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return gather_dim(x, 1).flatten(0, -2)[scores.sort()[1] // 2]


def picked_of_dimension_2(x: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return gather_dim(x, 2).flatten(0, -2)[scores.sort()[1] // 2]


def picked_from_two_views(x: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """The view that is made last is read first."""
    rows, picked_rows = gather_dim(x, 1), scores.sort()[1] // 2
    first, last = rows.flatten(0, 1), rows.view(-1, 4)
    return last[picked_rows] * first[picked_rows]


def test_golden() -> None:
    _, _, module = rewritten(index_chunks, picked, X, SCORES)
    expecttest.assert_expected_inline(
        text(module.graph),
        """\
x_1 [3, 5, 4]
scores_1 [120]
all_gather_into_tensor [12, 5, 4] = _c10d_functional.all_gather_into_tensor(x_1, 4, '0')
wait_tensor [12, 5, 4] = _c10d_functional.wait_tensor(all_gather_into_tensor)
sort = aten.sort(scores_1)
getitem_5 [120] = sort[1]
floor_divide [120] = aten.floor_divide(getitem_5, 2)
reshape_default [60, 4] = aten.reshape(wait_tensor, [60, 4])
div_tensor_mode [120] = aten.div.Tensor_mode(floor_divide, 5, rounding_mode='floor')
remainder_scalar [120] = aten.remainder.Scalar(floor_divide, 5)
div_tensor_mode_1 [120] = aten.div.Tensor_mode(div_tensor_mode, 4, rounding_mode='floor')
remainder_scalar_1 [120] = aten.remainder.Scalar(div_tensor_mode, 4)
mul_tensor [120] = aten.mul.Tensor(remainder_scalar_1, 3)
add_tensor [120] = aten.add.Tensor(mul_tensor, div_tensor_mode_1)
mul_tensor_1 [120] = aten.mul.Tensor(add_tensor, 5)
add_tensor_1 [120] = aten.add.Tensor(mul_tensor_1, remainder_scalar)
index_tensor [120, 4] = aten.index.Tensor(reshape_default, [add_tensor_1])
return index_tensor
""",
    )


FORMS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "batch": (picked, (X, SCORES)),
    "two_dimensions_before": (picked_of_dimension_2, (X.view(3, 1, 5, 4).expand(3, 2, 5, 4), SCORES.repeat(2))),
    "one_behind": (picked, (X.view(3, 5, 1, 4).expand(3, 5, 2, 4), SCORES.repeat(2))),
    "two_views": (picked_from_two_views, (X, SCORES)),
    "twice": (lambda x, s: picked(x, s) + picked(x, -s), (X, SCORES)),
}


@pytest.mark.parametrize("name", FORMS)
def test_all_ranks_pick_the_same(name: str) -> None:
    fn, args = FORMS[name]
    count, before, after = rewritten(index_chunks, fn, *(arg.contiguous() for arg in args))
    assert count == (2 if name == "twice" else 1)
    assert not after.graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default)
    generator = torch.Generator().manual_seed(0)
    inputs = [[torch.randn(arg.shape, generator=generator) for arg in args] for _ in range(WORLD_SIZE)]
    torch.testing.assert_close(run_ranks(after, inputs), run_ranks(before, inputs), rtol=0, atol=0)


def read_too(x: torch.Tensor, scores: torch.Tensor) -> tuple[torch.Tensor, ...]:
    rows = gather_dim(x, 1).flatten(0, 1)
    return rows[scores.sort()[1] // 2], rows.sin()


def any_numbers(x: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return gather_dim(x, 1).flatten(0, 1)[scores.long()]


def halves(x: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return gather_dim(x, 1).reshape(-1, 2)[scores.sort()[1] // 2]


def behind_the_last(x: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return gather_dim(x, 1).flatten(0, 1)[scores.sort()[1] // 1]


def of_dimension_0(x: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return all_gather(x).flatten(0, 1)[scores.sort()[1] // 2]


@pytest.mark.parametrize("fn", [read_too, any_numbers, halves, behind_the_last, of_dimension_0])
def test_it_must_not_fire(fn: Callable[..., Any]) -> None:
    count, before, after = rewritten(index_chunks, fn, X, SCORES)
    assert count == 0 and text(after.graph) == text(before.graph)
