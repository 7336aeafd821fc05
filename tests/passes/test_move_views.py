"""Views that hide a gathered tensor's rows: which move in front of the gather, and which stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch

from ditron_inductor.options import Options
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

HEADS = torch.empty(2, 8, 4, 5)
OUT = torch.empty(4, 5, 24)
FLAT = torch.empty(20, 24)
X = torch.empty(2, 8, 16)
W = torch.empty(16, 24)


def heads(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.einsum("bshd,hdn->bsn", gather_dim(x, 1), w)


def test_golden_heads() -> None:
    module = traced(heads, HEADS, OUT)
    normalize_collectives(module.graph, options=Options())
    expecttest.assert_expected_inline(
        text(module.graph),
        """\
x_1 [2, 8, 4, 5]
w_1 [4, 5, 24]
all_gather_into_tensor [8, 8, 4, 5] = _c10d_functional.all_gather_into_tensor(x_1, 4, '0')
wait_tensor [8, 8, 4, 5] = _c10d_functional.wait_tensor(all_gather_into_tensor)
split = aten.split.Tensor(wait_tensor, 2)
getitem [2, 8, 4, 5] = split[0]
getitem_1 [2, 8, 4, 5] = split[1]
getitem_2 [2, 8, 4, 5] = split[2]
getitem_3 [2, 8, 4, 5] = split[3]
cat [2, 32, 4, 5] = aten.cat([getitem, getitem_1, getitem_2, getitem_3], 1)
unsqueeze [2, 32, 4, 5, 1] = aten.unsqueeze(cat, 4)
permute [2, 32, 1, 5, 4] = aten.permute(unsqueeze, [0, 1, 4, 3, 2])
unsqueeze_1 [4, 5, 24, 1] = aten.unsqueeze(w_1, 3)
unsqueeze_2 [4, 5, 24, 1, 1] = aten.unsqueeze(unsqueeze_1, 4)
permute_1 [1, 1, 24, 5, 4] = aten.permute(unsqueeze_2, [3, 4, 2, 1, 0])
permute_2 [2, 32, 5, 4, 1] = aten.permute(permute, [0, 1, 3, 4, 2])
clone [2, 32, 5, 4, 1] = aten.clone(permute_2, memory_format=torch.contiguous_format)
_unsafe_view [1, 64, 20] = aten.reshape(clone, [1, 64, 20])
permute_3 [5, 4, 24, 1, 1] = aten.permute(permute_1, [3, 4, 2, 0, 1])
clone_1 [5, 4, 24, 1, 1] = aten.clone(permute_3, memory_format=torch.contiguous_format)
_unsafe_view_1 [1, 20, 24] = aten._unsafe_view(clone_1, [1, 20, 24])
bmm [1, 64, 24] = aten.bmm(_unsafe_view, _unsafe_view_1)
view [2, 32, 1, 1, 24] = aten.view(bmm, [2, 32, 1, 1, 24])
permute_4 [2, 32, 24, 1, 1] = aten.permute(view, [0, 1, 4, 2, 3])
view_1 [2, 32, 24] = aten.view(permute_4, [2, 32, 24])
return view_1
""",
    )
    fuse(module)
    expecttest.assert_expected_inline(
        text(module.graph),
        """\
x_1 [2, 8, 4, 5]
w_1 [4, 5, 24]
unsqueeze_default [2, 8, 4, 5, 1] = aten.unsqueeze(x_1, 4)
permute_default [2, 8, 1, 5, 4] = aten.permute(unsqueeze_default, [0, 1, 4, 3, 2])
clone_default [2, 8, 1, 5, 4] = aten.clone(permute_default, memory_format=torch.contiguous_format)
reshape_default_2 [2, 8, 1, 20] = aten.reshape(clone_default, [2, 8, 1, 20])
unsqueeze_1 [4, 5, 24, 1] = aten.unsqueeze(w_1, 3)
unsqueeze_2 [4, 5, 24, 1, 1] = aten.unsqueeze(unsqueeze_1, 4)
permute_1 [1, 1, 24, 5, 4] = aten.permute(unsqueeze_2, [3, 4, 2, 1, 0])
permute_3 [5, 4, 24, 1, 1] = aten.permute(permute_1, [3, 4, 2, 0, 1])
clone_1 [5, 4, 24, 1, 1] = aten.clone(permute_3, memory_format=torch.contiguous_format)
_unsafe_view_1 [1, 20, 24] = aten._unsafe_view(clone_1, [1, 20, 24])
squeeze_dim [20, 24] = aten.squeeze.dim(_unsafe_view_1, 0)
all_gather_matmul = ditron.all_gather_matmul([reshape_default_2, squeeze_dim], "gather_dim=1 world_size=4 group_name=0 site='' trials num_weights=1", None)
getitem_8 [64, 24] = all_gather_matmul[0]
reshape_default_1 [1, 64, 24] = aten.reshape(getitem_8, [1, 64, 24])
view [2, 32, 1, 1, 24] = aten.view(reshape_default_1, [2, 32, 1, 1, 24])
permute_4 [2, 32, 24, 1, 1] = aten.permute(view, [0, 1, 4, 2, 3])
view_1 [2, 32, 24] = aten.view(permute_4, [2, 32, 24])
return view_1
""",
    )


FUSED: dict[str, tuple[Callable[..., Any], torch.Tensor, torch.Tensor]] = {
    "einsum": (heads, HEADS, OUT),
    "flattened": (lambda x, w: gather_dim(x, 1).flatten(2) @ w, HEADS, FLAT),
    "flattened_twice": (lambda x, w: ((g := gather_dim(x, 1).flatten(2)) @ w, g @ w.cos()), HEADS, FLAT),
    "transposed_heads": (lambda x, w: gather_dim(x, 1).transpose(2, 3).flatten(2) @ w, HEADS, FLAT),
    "heads_first": (lambda x, w: gather_dim(x, 2).transpose(1, 2).reshape(2, 32, 20) @ w, HEADS.transpose(1, 2), FLAT),
    "sequence_first": (lambda x, w: gather_dim(x, 1).transpose(0, 1).reshape(-1, 16) @ w, X, W),
    "einsum_sequence_first": (lambda x, w: torch.einsum("bsk,kn->sbn", gather_dim(x, 1), w), X, W),
    "dim_0": (lambda x, w: all_gather(x).transpose(0, 1).reshape(-1, 16) @ w, X, W),
    "used_behind": (lambda x, w: ((g := gather_dim(x, 1).flatten(2)) @ w, g.sin()), HEADS, FLAT),
}


@pytest.mark.parametrize("name", FUSED)
def test_moves(name: str) -> None:
    fn, x, w = FUSED[name]
    after = assert_same_on_all_ranks(fn, x.contiguous(), w, fused=1)
    assert not list(collectives(after.graph, ALL_GATHER))


def test_dynamic_shapes_are_fused_without_a_guard() -> None:
    for name in ("flattened", "transposed_heads", "sequence_first"):
        fn, x, w = FUSED[name]
        module = traced(fn, x, w, dynamic=True)
        with assert_no_new_guards(module):
            assert fuse(module) == 1


def used(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (g := gather_dim(x, 1)).transpose(0, 1).reshape(-1, 16) @ w, g.sin()


def two_orders(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    g = gather_dim(x, 1)
    return g.transpose(2, 3).reshape(64, 20) @ w, g.transpose(1, 2).sin()


def moved(x: torch.Tensor) -> torch.Tensor:
    return gather_dim(x, 1).transpose(1, 2)


GUARDS: list[Any] = [
    pytest.param("layout", used, X, W, id="used_in_its_own_order"),
    pytest.param("layout", two_orders, HEADS, FLAT, id="used_in_another_order"),
    pytest.param("layout", lambda x, w: moved(x).reshape(-1, 32) @ w, X, torch.empty(32, 3), id="contracted"),
    pytest.param("layout", lambda x, w: gather_dim(x, 1).reshape(-1, 10) @ w, HEADS, torch.empty(10, 3), id="part"),
    pytest.param("layout", lambda x, w: gather_dim(x, 2).reshape(-1, 80) @ w, HEADS, torch.empty(80, 3), id="among"),
]


@pytest.mark.parametrize(("code", "fn", "x", "w"), GUARDS)
def test_left_alone(code: str, fn: Callable[..., Any], x: torch.Tensor, w: torch.Tensor) -> None:
    module = traced(fn, x, w)
    normalize_collectives(module.graph, options=Options())
    before = text(module.graph)
    assert fuse(module) == 0
    assert text(module.graph) == before
    assert reasons(module) == [code]
