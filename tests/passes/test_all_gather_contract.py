"""all_gather_contract: what it fuses, into which graph, and every guard that keeps it from fusing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch

from ditron_inductor.options import Options
from ditron_inductor.passes.fuse.all_gather_contract import Match, find_all_gather_contract
from ditron_inductor.passes.graph.collectives import ALL_GATHER, collectives
from ditron_inductor.passes.normalize.normalize_collectives import normalize_collectives
from tests.passes.graphs import (
    all_gather,
    assert_no_new_guards,
    assert_same_on_all_ranks,
    fuse,
    gather_dim,
    reasons,
    text,
    traced,
)

pytestmark = pytest.mark.usefixtures("group")

X = torch.empty(8, 16)
X3 = torch.empty(2, 8, 16)
G = torch.empty(32, 24)
G3 = torch.empty(2, 32, 24)


def gradient(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """Of a weight, of a batch of sequences."""
    return gather_dim(x, 1).flatten(0, 1).t() @ g.flatten(0, 1)


def test_golden_weight_gradient() -> None:
    module = traced(lambda x, g: all_gather(x).t() @ g, X, G)
    fuse(module)
    expecttest.assert_expected_inline(
        text(module.graph),
        """\
x_1 [8, 16]
g_1 [32, 24]
all_gather_contract = ditron.all_gather_contract([x_1, g_1], "gather_dim=0 gathered_first world_size=4 group_name=0 site=''", None)
getitem [16, 24] = all_gather_contract[0]
return getitem
""",
    )


def test_golden_gradient_of_a_batch() -> None:
    module = traced(gradient, X3, G3)
    fuse(module)
    expecttest.assert_expected_inline(
        text(module.graph),
        """\
x_1 [2, 8, 16]
g_1 [2, 32, 24]
view_1 [64, 24] = aten.view(g_1, [64, 24])
all_gather_contract = ditron.all_gather_contract([x_1, view_1], "gather_dim=1 gathered_first world_size=4 group_name=0 site=''", None)
getitem_4 [16, 24] = all_gather_contract[0]
return getitem_4
""",
    )


def test_golden_second_operand_and_used_elsewhere() -> None:
    def fn(x: torch.Tensor, a: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gathered = all_gather(x)
        return a @ gathered, gathered.sum()

    module = traced(fn, X, G.t())
    fuse(module)
    expecttest.assert_expected_inline(
        text(module.graph),
        """\
x_1 [8, 16]
a_1 [24, 32]
all_gather_contract = ditron.all_gather_contract([x_1, a_1], "gather_dim=0 world_size=4 group_name=0 return_gathered site=''", None)
getitem [24, 16] = all_gather_contract[0]
getitem_1 [32, 16] = all_gather_contract[1]
sum_1 [] = aten.sum(getitem_1)
return (getitem, sum_1)
""",
    )


def test_golden_last_dim() -> None:
    module = traced(lambda x, w: gather_dim(x, 2) @ w, X3, torch.empty(64, 5))
    fuse(module)
    expecttest.assert_expected_inline(
        text(module.graph),
        """\
x_1 [2, 8, 16]
w_1 [64, 5]
all_gather_contract = ditron.all_gather_contract([x_1, w_1], "gather_dim=2 gathered_first world_size=4 group_name=0 site=''", None)
getitem_4 [16, 5] = all_gather_contract[0]
_unsafe_view [2, 8, 5] = aten._unsafe_view(getitem_4, [2, 8, 5])
return _unsafe_view
""",
    )


FORMS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "gradient": (lambda x, g: all_gather(x).t() @ g, (X, G)),
    "gradient_of_batch": (gradient, (X3, G3)),
    "gradient_of_one_sequence": (gradient, (X3[:1], G3[:1])),
    "transposed_gradient": (lambda x, g: g.t() @ all_gather(x), (X, G)),
    "strided_factor": (lambda x, g: all_gather(x).t() @ g[:, ::2], (X, G)),
    "three_dims": (lambda x, g: all_gather(x).view(-1, 16).t() @ g.flatten(0, 1), (X3, torch.empty(8, 8, 5))),
    "last_dim": (lambda x, w: gather_dim(x, 1) @ w, (X, torch.empty(64, 5))),
    "last_dim_of_three": (lambda x, w: gather_dim(x, 2) @ w, (X3, torch.empty(64, 5))),
    "last_dim_second": (lambda x, w: w @ gather_dim(x, 1).t(), (X, torch.empty(5, 64))),
    "rows_of_a_weight": (lambda w, x: x @ all_gather(w), (X, G3[..., :1].transpose(1, 2).expand(2, 3, 32))),
    "bias": (lambda x, w, b: torch.addmm(b, gather_dim(x, 1), w), (X, torch.empty(64, 5), torch.empty(5))),
    "einsum": (lambda x, g: torch.einsum("bsk,bsn->kn", gather_dim(x, 1), g), (X3, G3)),
    "used_elsewhere": (lambda x, g: ((h := gather_dim(x, 1)).flatten(0, 1).t() @ g.flatten(0, 1), h + 1), (X3, G3)),
    "two_products": (lambda x, g: ((h := all_gather(x)).t() @ g, h.t() @ g.cos()), (X, G)),
    "both_sides": (lambda x, g: ((h := all_gather(x)).t() @ g, g.t() @ h, g.sin().t() @ h.relu()), (X, G)),
}


@pytest.mark.parametrize("name", FORMS)
def test_form(name: str) -> None:
    fn, args = FORMS[name]
    after = assert_same_on_all_ranks(fn, *args, fused=1)
    assert "ditron.all_gather_contract" in text(after.graph)
    assert not list(collectives(after.graph, ALL_GATHER))
    assert fuse(after) == 0


def test_both_sides_are_one_node() -> None:
    module = traced(lambda x, g: ((h := all_gather(x)).t() @ g, g.t() @ h), X, G)
    (node,) = collectives(module.graph, ALL_GATHER)
    match = find_all_gather_contract(node)
    assert isinstance(match, Match) and match.gathered_first and not match.feeds.return_gathered
    assert [one.transposed for one in match.feeds.matmuls] == [False, True]


def test_a_matmul_that_keeps_the_gathered_dimension_takes_the_gather() -> None:
    def fn(x: torch.Tensor, g: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gathered = all_gather(x)
        return gathered.t() @ g, gathered @ w

    after = assert_same_on_all_ranks(fn, X, G, torch.empty(16, 5), fused=1)
    assert "all_gather_matmul(" in text(after.graph) and "all_gather_contract" not in text(after.graph)


@pytest.mark.parametrize("fn", [gradient, lambda x, g: gather_dim(x, 2) @ g.flatten(0, 1)], ids=["rows", "last_dim"])
def test_dynamic_shapes_are_fused_without_a_guard(fn: Callable[..., torch.Tensor]) -> None:
    module = traced(fn, X3, G3, dynamic=True)
    with assert_no_new_guards(module):
        assert fuse(module) == 1


def chunks(order: list[int]) -> Callable[..., torch.Tensor]:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        parts = torch.chunk(all_gather(x), 4)
        return torch.cat([parts[index] for index in order], 1) @ w

    return fn


W = torch.empty(64, 5)
GUARDS: list[Any] = [
    pytest.param("chunks_permuted", chunks([1, 0, 2, 3]), (X, W), id="permuted"),
    pytest.param("chunks_permuted", chunks([0, 0, 2, 3]), (X, W), id="repeated"),
    pytest.param("chunks_partial", chunks([0, 1, 2]), (X, W[:48]), id="partial"),
    pytest.param("layout", lambda x, g: all_gather(x).reshape(64, 8).t() @ g, (X, W), id="other_rows"),
    pytest.param("uneven_shards", lambda x, g: all_gather(x)[:30].t() @ g[:30], (X, G), id="uneven"),
    pytest.param("cast_between", lambda x, g: all_gather(x).double().t() @ g, (X, G.double()), id="cast"),
    pytest.param("dtype", lambda x, g: all_gather(x).t() @ g, (X.double(), G.double()), id="dtype"),
    pytest.param("operand_depends", lambda x: (g := all_gather(x)).t() @ g.cos(), (X,), id="depends"),
    pytest.param("operand_depends", lambda x: (g := all_gather(x)).t() @ g, (X,), id="itself"),
    pytest.param(
        "bias", lambda x, g, b: torch.addmm(b, all_gather(x).t(), g), (X, G, torch.empty(16, 24)), id="accumulated"
    ),
    pytest.param("layout", lambda x, g: gather_dim(x, 1).transpose(1, 2) @ g, (X3, G3), id="a_matrix_for_each_batch"),
]


@pytest.mark.parametrize(("code", "fn", "args"), GUARDS)
def test_guard(code: str, fn: Callable[..., Any], args: tuple[torch.Tensor, ...]) -> None:
    module = traced(fn, *args)
    normalize_collectives(module.graph, options=Options())
    before = text(module.graph)
    assert fuse(module) == 0
    assert text(module.graph) == before
    assert reasons(module) == [code]


def test_mutated_gathered_tensor() -> None:
    def fn(x: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gathered = all_gather(x)
        gathered.add_(1)
        return gathered.t() @ g, gathered

    module = traced(fn, X, G)
    before = text(module.graph)
    assert fuse(module) == 0, text(module.graph)
    assert text(module.graph) == before


def test_disabled_by_option() -> None:
    module = traced(gradient, X3, G3)
    assert fuse(module, Options(fusions=("all_gather_matmul",))) == 0
    assert reasons(module) == ["disabled"]


def test_another_group_size() -> None:
    module = traced(gradient, X3, G3)
    for node in collectives(module.graph, ALL_GATHER):
        node.args = (node.args[0], 2, node.args[2])
    assert fuse(module) == 0
    assert reasons(module) == ["world_size"]
