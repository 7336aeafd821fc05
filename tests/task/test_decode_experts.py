"""The reductions of a decode step's experts: their text, their shapes, and operands that they do not take."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ditron_inductor.errors import InvalidTaskNode
from ditron_inductor.task import schema
from ditron_inductor.task.nodes import (
    MOST_EXPERT_COLUMNS,
    MOST_EXPERT_TOKENS,
    ExpertsAllReduce,
    ExpertsAllReduceRmsNorm,
    Norm,
    Policy,
)
from ditron_inductor.task.rules import rules_of

SITE: dict[str, Any] = {"world_size": 2, "group_name": "0", "site": "0:a", "policy": Policy()}
ALONE = ExpertsAllReduce("sum", 2, **SITE)
NORMED = ExpertsAllReduceRmsNorm("sum", Norm("rms", 1e-6), ("residual",), **SITE, top_k=2, has_added=True)
T, D, F, E = 3, 8, 5, 4


def given(tokens: int = T, columns: int = D, **others: torch.Tensor) -> dict[str, torch.Tensor]:
    """Operands of two slots for each token."""
    return {
        "x": torch.empty(2 * tokens, F),
        "matrices": torch.empty(E, F, columns),
        "experts": torch.empty(2 * tokens, dtype=torch.int64),
        "factors": torch.empty(2 * tokens),
        **others,
    }


def problems(node: Any, operands: dict[str, torch.Tensor]) -> list[str]:
    """What is wrong with the operands of a call."""
    return [text for holds, text in rules_of(node, operands) if holds is False]


@pytest.mark.parametrize("node", [ALONE, NORMED], ids=lambda node: node.kind)
def test_the_text_reads_back(node: Any) -> None:
    node.verify()
    assert schema.parsed(node.kind, node.text()) == node


def test_the_norm_has_the_reduction_in_it() -> None:
    assert NORMED.reduction == ExpertsAllReduce("sum", 2, **SITE, has_added=True)
    assert ExpertsAllReduceRmsNorm.behind(NORMED.reduction, NORMED.norm, NORMED.extras) == NORMED
    assert NORMED.pattern == (
        "matmul of experts -> weighted sum of 2 experts + all tokens' expert -> all_reduce(sum) + residual -> rms norm"
    )
    assert ALONE.pattern == "matmul of experts -> weighted sum of 2 experts -> all_reduce(sum)"


def test_sizes_are_those_of_the_sums() -> None:
    shapes = schema.shapes_of(given(added=torch.empty(T, D), residual=torch.empty(T, D)))
    sizes = NORMED.sizes(shapes)
    assert (sizes.m, sizes.n, sizes.k, sizes.local, sizes.wire) == (T, D, 2 * F, "k", (T, D))
    assert [tuple(output.shape) for output in NORMED.outputs(shapes)] == [(T, D)] * 2
    assert NORMED.contributed(shapes) == (T, D)


def test_right_operands() -> None:
    assert problems(ALONE, given()) == []
    assert problems(NORMED, given(added=torch.empty(T, D), residual=torch.empty(T, D))) == []
    most = given(MOST_EXPERT_TOKENS, MOST_EXPERT_COLUMNS)
    assert problems(ALONE, most) == []


WRONG: dict[str, tuple[dict[str, torch.Tensor], str]] = {
    "tokens": (given(MOST_EXPERT_TOKENS + 1), "more than 64 tokens"),
    "columns": (given(T, MOST_EXPERT_COLUMNS + 1), "more than 16384 columns"),
    "slots": (given(x=torch.empty(2 * T + 1, F)), "do not fit the slots"),
    "experts": (given(experts=torch.empty(2 * T)), "no int64 vector"),
    "factors": (given(factors=torch.empty(T)), "a scale that does not fit"),
    "inner": (given(matrices=torch.empty(E, F + 1, D)), "do not fit"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_operands(name: str) -> None:
    operands, text = WRONG[name]
    assert any(text in found for found in problems(ALONE, operands))


def test_wrong_fields() -> None:
    with pytest.raises(InvalidTaskNode, match="top_k"):
        ExpertsAllReduce("sum", 0, **SITE).verify()
    with pytest.raises(InvalidTaskNode, match="reduce_op"):
        ExpertsAllReduce("max", 2, **SITE).verify()
