"""ditron.strict: what could be fused and is not is an error that names it; what needs no change is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ditron_inductor.errors import DitronNotFused
from ditron_inductor.options import Options
from ditron_inductor.passes.finish.require_fusions import require_fusions
from ditron_inductor.pipeline import PASSES, run
from tests.passes.graphs import all_gather, all_reduce, reduce_scatter, text, traced

STRICT = Options(strict=True)
X = torch.empty(8, 16)
A = torch.empty(32, 16)
W = torch.empty(16, 24)


def used_elsewhere(a: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    product = a @ w
    return [all_reduce(product), product.exp(), reduce_scatter(product)]


@pytest.mark.usefixtures("group")
def test_all_sites_are_named_with_node_and_reason() -> None:
    module = traced(used_elsewhere, A, W)
    with pytest.raises(DitronNotFused) as error:
        run(module.graph, STRICT)
    lines = str(error.value).splitlines()
    assert error.value.fields["count"] == 2 and "'ditron.strict'" in lines[0]
    assert [lines[1].strip().split(",")[0], lines[4].strip().split(",")[0]] == ["all_reduce", "reduce_scatter_tensor"]
    assert lines[2].startswith("    intermediate_used: exp (aten.exp.default, [32, 24] float32)")
    assert "use the collective's result there instead" in lines[3]


NO_NEED: dict[str, tuple[Callable[..., Any], Options]] = {
    "fused": (lambda x, w: all_gather(x) @ w, STRICT),
    "no matmul": (lambda x, w: all_gather(x.exp()).sin(), STRICT),
    "another reduction, no matmul": (lambda x, w: all_reduce(x.exp(), "max"), STRICT),
    "weight gradient": (lambda x, w: all_gather(x).t() @ all_gather(x.exp()), STRICT),
    "switched off": (lambda x, w: all_gather(x) @ w, Options(strict=True, fusions=())),
    "switched off, and no match": (lambda x, w: all_reduce((x @ w).sin()), Options(strict=True, fusions=())),
    "not asked for": (lambda x, w: all_reduce((x @ w).sin()), Options()),
}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(("fn", "options"), NO_NEED.values(), ids=NO_NEED)
def test_no_error_without_need(fn: Callable[..., Any], options: Options) -> None:
    strict, plain = traced(fn, X, W), traced(fn, X, W)
    run(strict.graph, options)
    run(plain.graph, Options(fusions=options.fusions))
    assert text(strict.graph) == text(plain.graph)


@pytest.mark.usefixtures("group")
def test_it_stands_behind_everything_that_gives_reasons() -> None:
    module = traced(lambda a, w: all_reduce((a @ w).sin()), A, W)
    assert require_fusions(module.graph, options=STRICT) == 0
    names = [one.__name__ for one in PASSES]
    assert names[names.index("require_fusions") - 1] == "review_left_alone"
