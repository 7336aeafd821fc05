"""Gathers whose matmuls contract what is gathered: left alone, as fusing that was measured as no faster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks.deleted import DELETED
from ditron_inductor.options import Options
from ditron_inductor.passes.finish.require_fusions import require_fusions
from ditron_inductor.passes.graph.collectives import ALL_GATHER, collectives
from ditron_inductor.passes.graph.reasons import LEFT_ALONE, ReasonCode
from ditron_inductor.task.nodes import DELETED_KINDS
from tests.passes.graphs import all_gather, assert_same_on_all_ranks, fuse, gather_dim, reasons, text, traced

pytestmark = pytest.mark.usefixtures("group")

X = torch.empty(8, 16)
X3 = torch.empty(2, 8, 16)
G = torch.empty(32, 24)
G3 = torch.empty(2, 32, 24)


def gradient(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """Of a weight, of a batch of sequences."""
    return gather_dim(x, 1).flatten(0, 1).t() @ g.flatten(0, 1)


FORMS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "gradient": (lambda x, g: all_gather(x).t() @ g, (X, G)),
    "gradient_of_batch": (gradient, (X3, G3)),
    "gradient_of_one_sequence": (gradient, (X3[:1], G3[:1])),
    "transposed_gradient": (lambda x, g: g.t() @ all_gather(x), (X, G)),
    "three_dims": (lambda x, g: all_gather(x).view(-1, 16).t() @ g.flatten(0, 1), (X3, torch.empty(8, 8, 5))),
    "last_dim": (lambda x, w: gather_dim(x, 1) @ w, (X, torch.empty(64, 5))),
    "last_dim_of_three": (lambda x, w: gather_dim(x, 2) @ w, (X3, torch.empty(64, 5))),
    "last_dim_second": (lambda x, w: w @ gather_dim(x, 1).t(), (X, torch.empty(5, 64))),
    "bias": (lambda x, w, b: torch.addmm(b, gather_dim(x, 1), w), (X, torch.empty(64, 5), torch.empty(5))),
    "einsum": (lambda x, g: torch.einsum("bsk,bsn->kn", gather_dim(x, 1), g), (X3, G3)),
    "used_elsewhere": (lambda x, g: ((h := gather_dim(x, 1)).flatten(0, 1).t() @ g.flatten(0, 1), h + 1), (X3, G3)),
    "both_sides": (lambda x, g: ((h := all_gather(x)).t() @ g, g.t() @ h, g.sin().t() @ h.relu()), (X, G)),
}


@pytest.mark.parametrize("name", FORMS)
def test_form(name: str) -> None:
    fn, args = FORMS[name]
    after = assert_same_on_all_ranks(fn, *args, fused=0)
    assert reasons(after) == ["no_gain"]


def test_nothing_is_an_error_as_there_is_nothing_to_change() -> None:
    module = traced(gradient, X3, G3)
    fuse(module)
    assert require_fusions(module.graph, options=Options(strict=True)) == 0
    assert not ReasonCode.NO_GAIN.changeable


def test_a_matmul_that_keeps_the_gathered_dimension_takes_the_gather() -> None:
    def fn(x: torch.Tensor, g: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gathered = all_gather(x)
        return gathered.t() @ g, gathered @ w

    after = assert_same_on_all_ranks(fn, X, G, torch.empty(16, 5), fused=1)
    assert "ditron.all_gather_matmul(" in text(after.graph) and "return_gathered" in text(after.graph)


def test_the_figures_that_are_told_are_those_of_the_results() -> None:
    module = traced(gradient, X3, G3)
    fuse(module)
    (node,) = collectives(module.graph, ALL_GATHER)
    auto = next(one for one in DELETED if one.op == "all_gather_contract" and one.below == ("ditron",))
    mean, rows = auto.mean(), len(auto.ratios())
    figure = f"{mean:.3f} of its speed, the mean of {rows} rows"
    assert figure in node.meta[LEFT_ALONE].text and figure in DELETED_KINDS["all_gather_contract"]
