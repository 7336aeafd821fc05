"""Routers multiply shards: what is rewritten, what it computes, and what stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch
import torch.distributed as dist
from torch._inductor import config

from ditron_inductor.options import Options
from ditron_inductor.passes.forms.route_shards import assumed, route_shards
from ditron_inductor.passes.graph.collectives import ALL_GATHER, collectives
from ditron_inductor.passes.graph.replicated_inputs import NESTED
from ditron_inductor.passes.normalize.normalize_collectives import normalize_collectives
from tests.passes.graphs import (
    WORLD_SIZE,
    all_gather,
    assert_no_new_guards,
    c10d,
    compiled_graphs,
    gather_dim,
    rewritten,
    run_ranks,
    text,
    traced,
)

pytestmark = pytest.mark.usefixtures("group")

X = torch.empty(2, 256, 64)
ROWS = torch.empty(512, 64)
ROUTER = torch.empty(8, 64)
BIAS = torch.empty(8)
WIDE = torch.empty(32, 64)


def routed(rows: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """The rows of slots, sorted by expert, with the weights that the router gives them."""
    weights, chosen = logits.float().softmax(-1).topk(2)
    order = chosen.flatten().sort(stable=True)[1]
    return rows[order // 2] * weights.flatten()[order].unsqueeze(-1)


def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    rows = gather_dim(x, 1).flatten(0, 1)
    return routed(rows, rows @ w.t())


def biased(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    rows = all_gather(x)
    return routed(rows, torch.addmm(b, rows, w.t()))


def cast(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    rows = gather_dim(x, 1)
    return routed(rows.flatten(0, 1), rows.float().flatten(0, 1) @ w.float().t())


def two_routers(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    rows = gather_dim(x, 1).flatten(0, 1)
    return routed(rows, rows @ w.t() + rows @ (2 * w.t()).contiguous())


def returned(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    rows = gather_dim(x, 1).flatten(0, 1)
    return routed(rows, rows @ w.t()), rows


def test_golden() -> None:
    _, _, module = rewritten(route_shards, layer, X, ROUTER)
    expecttest.assert_expected_inline(
        text(module.graph),
        """\
x_1 [2, 256, 64]
w_1 [8, 64]
replicated_default [8, 64] = ditron.replicated(w_1, [w_1], '0', 'route_shards/12fe52e07ea8', '', '')
t [64, 8] = aten.t(replicated_default)
reshape_default [512, 64] = aten.reshape(x_1, [512, 64])
mm_default [512, 8] = aten.mm(reshape_default, t)
reshape_default_1 [2, 256, 8] = aten.reshape(mm_default, [2, 256, 8])
all_gather_into_tensor_default [8, 256, 8] = _c10d_functional.all_gather_into_tensor(reshape_default_1, 4, '0')
wait_tensor_default [8, 256, 8] = _c10d_functional.wait_tensor(all_gather_into_tensor_default)
split_tensor = aten.split.Tensor(wait_tensor_default, 2, 0)
getitem_8 [2, 256, 8] = split_tensor[0]
getitem_9 [2, 256, 8] = split_tensor[1]
getitem_10 [2, 256, 8] = split_tensor[2]
getitem_11 [2, 256, 8] = split_tensor[3]
cat_default [2, 1024, 8] = aten.cat([getitem_8, getitem_9, getitem_10, getitem_11], 1)
reshape_default_2 [2048, 8] = aten.reshape(cat_default, [2048, 8])
all_gather_into_tensor [8, 256, 64] = _c10d_functional.all_gather_into_tensor(x_1, 4, '0')
_softmax [2048, 8] = aten._softmax(reshape_default_2, -1, False)
topk = aten.topk(_softmax, 2)
getitem_4 [2048, 2] = topk[0]
getitem_5 [2048, 2] = topk[1]
view_1 [4096] = aten.view(getitem_5, [4096])
sort = aten.sort.stable(view_1, stable=True)
getitem_7 [4096] = sort[1]
floor_divide [4096] = aten.floor_divide(getitem_7, 2)
wait_tensor [8, 256, 64] = _c10d_functional.wait_tensor(all_gather_into_tensor)
split = aten.split.Tensor(wait_tensor, 2)
getitem [2, 256, 64] = split[0]
getitem_1 [2, 256, 64] = split[1]
getitem_2 [2, 256, 64] = split[2]
getitem_3 [2, 256, 64] = split[3]
cat [2, 1024, 64] = aten.cat([getitem, getitem_1, getitem_2, getitem_3], 1)
view [2048, 64] = aten.reshape(cat, [2048, 64])
index [4096, 64] = aten.index.Tensor(view, [floor_divide])
view_2 [4096] = aten.view(getitem_4, [4096])
index_1 [4096] = aten.index.Tensor(view_2, [getitem_7])
unsqueeze [4096, 1] = aten.unsqueeze(index_1, -1)
mul [4096, 64] = aten.mul.Tensor(index, unsqueeze)
return mul
""",
    )
    assert assumed(module.graph) == {"0": ["w_1"]}


FORMS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "inner_dimension": (layer, (X, ROUTER)),
    "rows_with_a_bias": (biased, (ROWS, ROUTER, BIAS)),
    "cast": (cast, (X.bfloat16(), ROUTER[:4].bfloat16())),
    "returned_too": (returned, (X, ROUTER)),
}


@pytest.mark.parametrize("name", FORMS)
def test_all_ranks_compute_the_same(name: str) -> None:
    fn, args = FORMS[name]
    count, before, after = rewritten(route_shards, fn, *args)
    assert count == 1
    # The products are sent first, and the rows are waited for behind what comes of them.
    products, rows = collectives(after.graph, ALL_GATHER)
    assert products.meta["val"].shape[-1] < rows.meta["val"].shape[-1]
    (sort,) = after.graph.find_nodes(op="call_function", target=torch.ops.aten.sort.stable)
    (wait,) = rows.users
    assert rows < sort < wait
    generator = torch.Generator().manual_seed(0)
    routers = [torch.randn(arg.shape, generator=generator).to(arg.dtype) for arg in args[1:]]
    inputs = [
        [torch.randn(args[0].shape, generator=generator).to(args[0].dtype), *routers] for _ in range(WORLD_SIZE)
    ]
    torch.testing.assert_close(run_ranks(after, inputs), run_ranks(before, inputs))


def test_rows_are_waited_for_before_the_shard_is_written() -> None:
    def updated(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = gather_dim(x, 1).flatten(0, 1)
        weights = (rows @ w.t()).softmax(-1)
        x.copy_(x * 2)
        return rows, weights

    count, _, after = rewritten(route_shards, updated, X, ROUTER)
    _, rows = collectives(after.graph, ALL_GATHER)
    (wait,) = rows.users
    (copy,) = after.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    assert count == 1 and rows < wait < copy


def test_groups_with_one_router_compare_the_input() -> None:
    group = dist.new_group(range(WORLD_SIZE))
    assert isinstance(group, dist.ProcessGroup)
    name = str(group.group_name)

    def layers(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        chunks = c10d.wait_tensor(c10d.all_gather_into_tensor(x, WORLD_SIZE, name)).chunk(WORLD_SIZE)
        rows = torch.cat(chunks, 1).flatten(0, 1)
        return layer(x, w) + routed(rows, rows @ w.t())

    count, _, after = rewritten(route_shards, layers, X, ROUTER)
    assert count == 2 and assumed(after.graph) == {"0": ["w_1"], name: ["w_1"]}


@pytest.mark.parametrize("nested", [True, False])
def test_code_that_does_not_meet_routes_what_was_gathered(nested: bool) -> None:
    module = traced(layer, X, ROUTER)
    normalize_collectives(module.graph, options=Options())
    module.meta[NESTED] = nested
    with config.patch(cpp_wrapper=not nested):
        assert route_shards(module.graph, options=Options()) == 0


def test_dynamic_rows_are_routed_without_a_guard() -> None:
    x = torch.empty(2, 600, 64)
    torch._dynamo.mark_dynamic(x, 1, min=512, max=4096)
    with torch.no_grad():
        (module,) = compiled_graphs(layer, x, ROUTER)
    normalize_collectives(module.graph, options=Options())
    with assert_no_new_guards(module):
        assert route_shards(module.graph, options=Options()) == 1
    module.graph.lint()


def with_another_matmul(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    rows = gather_dim(x, 1).flatten(0, 1)
    return routed(rows, rows @ w.t()), rows @ v.t()


def read_before(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    rows = gather_dim(x, 1).flatten(0, 1)
    return routed(rows, rows @ w.t()), rows.sin()


def read_by_nobody_else(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return gather_dim(x, 1).flatten(0, 1) @ w.t()


def of_the_rows(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    rows = gather_dim(x, 1).flatten(0, 1)
    return routed(rows, rows @ rows[:8].t())


def computed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    rows = gather_dim(x, 1).flatten(0, 1)
    return routed(rows, rows @ w.sin().t())


def with_added_matrix(x: torch.Tensor, w: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    rows = all_gather(x)
    return routed(rows, torch.addmm(m, rows, w.t()))


def padded(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    rows = all_gather(x)[:2046]
    return routed(rows, rows @ w.t())


def written(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    rows = gather_dim(x, 1).flatten(0, 1)
    w.view(-1).mul_(2)
    return routed(rows, rows @ w.t())


GUARDS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "another_matmul": (with_another_matmul, (X, ROUTER, WIDE)),
    "wide_products": (layer, (X, WIDE)),
    "few_rows": (layer, (X[:, :128], ROUTER)),
    "read_before": (read_before, (X, ROUTER)),
    "read_by_nobody_else": (read_by_nobody_else, (X, ROUTER)),
    "of_the_rows": (of_the_rows, (X, ROUTER)),
    "a_computed_router": (computed, (X, ROUTER)),
    "two_routers_of_which_one_is_computed": (two_routers, (X, ROUTER)),
    "a_written_router": (written, (X, ROUTER)),
    "an_added_matrix": (with_added_matrix, (ROWS, ROUTER, torch.empty(2048, 8))),
    "a_part": (padded, (ROWS, ROUTER)),
}


@pytest.mark.parametrize("name", GUARDS)
def test_it_must_not_fire(name: str) -> None:
    fn, args = GUARDS[name]
    count, before, after = rewritten(route_shards, fn, *args)
    assert count == 0 and text(after.graph) == text(before.graph) and not assumed(after.graph)


def test_without_the_fusion_of_the_products_nothing_moves() -> None:
    module = traced(layer, X, ROUTER)
    normalize_collectives(module.graph, options=Options())
    assert route_shards(module.graph, options=Options(fusions=("all_gather_matmul",))) == 0
