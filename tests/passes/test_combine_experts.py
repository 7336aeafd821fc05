"""combine_experts: which sums of what experts return become a call, and what keeps them as they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import expecttest
import pytest
import torch
from torch import fx
from torch._inductor import config as inductor_config

from benchmarks.tolerances import relative_error
from ditron_inductor import pipeline
from ditron_inductor.options import Options
from ditron_inductor.passes.fuse import combine_experts as fuse
from tests.cases import rare
from tests.passes.graphs import WORLD_SIZE, all_reduce, assert_no_new_guards, compiled_graphs, run_ranks, text, twin
from tests.passes.titan import ADD_OF_TITAN

pytestmark = pytest.mark.usefixtures("group", "any_number")
KIND = "combine_experts"
DEFAULT = Options()
T, D, F, E, K = 20, 16, 8, 10, 8
X = torch.empty(T, D).bfloat16()
SCORES = torch.empty(T, E)
UP = torch.empty(E, F, D).bfloat16()
DOWN = torch.empty(E, D, F).bfloat16()
OPERANDS = (UP, X, SCORES, DOWN)


@pytest.fixture
def any_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graphs of these tests have few tokens."""
    monkeypatch.setattr(fuse, "LEAST_SCATTERED", 0)


def routed(up: torch.Tensor, x: torch.Tensor, scores: torch.Tensor, down: torch.Tensor, here: int = E) -> torch.Tensor:
    """The products of all slots, scaled, with the places of the slots of each token: as `transformers` writes it."""
    # A reduction that is fused, without which nothing is.
    return slots(up, all_reduce(x @ up[0].mT @ up[0]), scores, down, here)


def slots(*operands: Any, **how: bool) -> torch.Tensor:
    """The first of what `slots_and_products` returns."""
    return slots_and_products(*operands, **how)[0]


def slots_and_products(
    up: torch.Tensor,
    x: torch.Tensor,
    scores: torch.Tensor,
    down: torch.Tensor,
    here: int = E,
    *,
    behind: bool = False,
    columns: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (the scaled products of all slots, token by token, the products of the sorted slots). here: the products
    of the experts from this one on are set to 0. behind: some terms are, or with `columns` some columns of all.
    """
    weights, chosen = scores.topk(K)
    ids, order = chosen.reshape(-1).sort()
    ends = torch.histc(ids.float(), E, 0, E - 1).cumsum(0, dtype=torch.int32)
    rows = torch._grouped_mm(x[order // K], up.mT, offs=ends)
    products = torch._grouped_mm(rows, down.mT, offs=ends)
    if here < E:
        products = products.masked_fill((ids >= here).unsqueeze(-1), 0.0)
    terms = products * weights.reshape(-1)[order].unsqueeze(-1)
    if behind:
        terms = terms.masked_fill(torch.arange(D) > D // 2 if columns else (ids >= E // 2).unsqueeze(-1), 0.0)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    return terms[places], products


def experts(*operands: torch.Tensor) -> torch.Tensor:
    return all_reduce(routed(*operands).view(-1, K, D).sum(1).bfloat16())


def with_another(*operands: torch.Tensor) -> torch.Tensor:
    """With what another expert returns, which all tokens use, in another shape."""
    total = routed(*operands).view(-1, K, D).sum(1).bfloat16().view(2, -1, D)
    return all_reduce(total + operands[1].sin().view(2, -1, D))


def masked(*operands: torch.Tensor) -> torch.Tensor:
    """Products that are 0 in some rows, as under expert parallelism those of slots of other ranks' experts."""
    return all_reduce(routed(*operands, here=E // 2).view(-1, K, D).sum(1).bfloat16())


def masked_behind_the_weights(*operands: torch.Tensor, before: int = E, columns: bool = False) -> torch.Tensor:
    """before: products of the experts from this one on are 0, too. columns: the mask has a number for each column."""
    up, x, scores, down = operands
    x = all_reduce(x @ up[0].mT @ up[0])
    return all_reduce(slots(up, x, scores, down, before, behind=True, columns=columns).view(-1, K, D).sum(1).bfloat16())


def masked_twice(*operands: torch.Tensor) -> torch.Tensor:
    return masked_behind_the_weights(*operands, before=E // 4)


def masked_columns(*operands: torch.Tensor) -> torch.Tensor:
    return masked_behind_the_weights(*operands, columns=True)


def masked_and_kept(*operands: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As a forward keeps the masked products for its backward."""
    up, x, scores, down = operands
    x = all_reduce(x @ up[0].mT @ up[0])
    terms, products = slots_and_products(up, x, scores, down, E // 2)
    return all_reduce(terms.view(-1, K, D).sum(1).bfloat16()), products


def masked_and_read(*operands: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    total, products = masked_and_kept(*operands)
    return total, products.sin()


def calls(module: fx.GraphModule, options: Options = DEFAULT) -> int:
    """Runs all passes; how many calls were made."""
    made = pipeline.run(module.graph, options)[KIND]
    module.graph.lint()
    module.recompile()
    return made


def same_results(fn: Callable[..., Any], *, made: int, options: Options = DEFAULT) -> fx.GraphModule:
    """The graph after all passes, which computes on all ranks what it computed before."""
    (after,) = compiled_graphs(fn, *OPERANDS)
    before = twin(after)
    assert calls(after, options) == made

    def inputs() -> list[list[torch.Tensor]]:
        generator = torch.Generator().manual_seed(0)
        return [[torch.randn(one.shape, generator=generator).to(one.dtype) for one in OPERANDS]] * WORLD_SIZE

    # The node rounds once, and the graph several times.
    for got, wanted in zip(run_ranks(after, inputs()), run_ranks(before, inputs()), strict=True):
        assert all(relative_error(one, other) < 1e-2 for one, other in zip(got, wanted, strict=True))
    return after


def from_products(module: fx.GraphModule) -> str:
    """The text of a graph from the products of the experts on."""
    _, begin, rest = text(module.graph).partition("_grouped_mm_1 ")
    return (begin + rest).rstrip()


def test_golden_experts_of_a_prompt() -> None:
    expecttest.assert_expected_inline(
        from_products(same_results(experts, made=1)),
        """\
_grouped_mm_1 [160, 16] = aten._grouped_mm(getitem_5, permute_2, cumsum)
view_1 [160] = aten.reshape(getitem, [-1])
index_1 [160] = aten.index.Tensor(view_1, [getitem_3])
unsqueeze [160, 1] = aten.unsqueeze(index_1, -1)
empty [160] = aten.empty.memory_format([160], dtype=torch.int64, layout=torch.strided, device=device(type='cpu'), pin_memory=False)
iota [160] = prims.iota(160, start=0, step=1, dtype=torch.int64, device=device(type='cpu'), requires_grad=False)
index_put [160] = aten.index_put(empty, [getitem_3], iota)
reshape_default [160] = aten.reshape(unsqueeze, [-1])
combine_experts = ditron.combine_experts([_grouped_mm_1, index_put, reshape_default], 'top_k=8', None)
getitem_6 [20, 16] = combine_experts[0]
after__default = ditron.after_(getitem_6, getitem_7)
all_reduce_1 [20, 16] = _c10d_functional.all_reduce(getitem_6, 'sum', '0')
wait_tensor_1 [20, 16] = _c10d_functional.wait_tensor(all_reduce_1)
return (wait_tensor_1,)""",
    )


@pytest.mark.parametrize("fn", [masked, masked_behind_the_weights, masked_and_kept, masked_and_read])
def test_masked_rows_are_marked(fn: Callable[..., Any]) -> None:
    call = "ditron.combine_experts([_grouped_mm_1, index_put, reshape_default, reshape_default_1], 'top_k=8 has_absent'"
    assert call in from_products(same_results(fn, made=1))


def test_a_mask_behind_the_weights_hides_them() -> None:
    """Here they are no numbers where the mask is, as quotients of 0 and 0 are."""

    def layer(up: torch.Tensor, x: torch.Tensor, scores: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        x = all_reduce(x @ up[0].mT @ up[0])
        ids, order = scores.topk(K).indices.reshape(-1).sort()
        ends = torch.histc(ids.float(), E, 0, E - 1).cumsum(0, dtype=torch.int32)
        products = torch._grouped_mm(torch._grouped_mm(x[order // K], up.mT, offs=ends), down.mT, offs=ends)
        absent = (ids >= E // 2).unsqueeze(-1)
        weights = torch.where(absent, torch.nan, scores.topk(K).values.reshape(-1)[order].unsqueeze(-1))
        terms = (products * weights).masked_fill(absent, 0.0)
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=order.device)
        return all_reduce(terms[places].view(-1, K, D).sum(1).bfloat16())

    same_results(layer, made=1)


def sorted_slots(
    up: torch.Tensor, x: torch.Tensor, scores: torch.Tensor, down: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(the scaled products of all slots, the tokens of these, x), as TorchTitan makes them."""
    x = all_reduce(x @ up[0].mT @ up[0])
    weights, chosen = scores.topk(K)
    ids = chosen.view(-1)
    order = torch.argsort(ids, stable=True)
    rows = order // K
    ends = torch.histc(ids.float(), E, 0, E - 1).cumsum(0, dtype=torch.int32)
    products = torch._grouped_mm(torch._grouped_mm(x[rows], up.mT, offs=ends), down.mT, offs=ends)
    return (products.float() * weights.view(-1)[order].reshape(-1, 1)).bfloat16(), rows, x


def scattered(*operands: torch.Tensor) -> torch.Tensor:
    terms, rows, x = sorted_slots(*operands)
    return all_reduce(torch.zeros_like(x).scatter_add(0, rows.reshape(-1, 1).expand(-1, D), terms).view(2, -1, D))


def added_rows(*operands: torch.Tensor) -> torch.Tensor:
    terms, rows, x = sorted_slots(*operands)
    return all_reduce(torch.zeros_like(x).index_add(0, rows, terms) + x.sin())


def put_rows(*operands: torch.Tensor) -> torch.Tensor:
    terms, rows, x = sorted_slots(*operands)
    return all_reduce(x.cos().index_put((rows,), terms, accumulate=True))


def unscaled(up: torch.Tensor, x: torch.Tensor, scores: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """As in a backward."""
    x = all_reduce(x @ up[0].mT @ up[0])
    ids, order = scores.topk(K).indices.view(-1).sort()
    ends = torch.histc(ids.float(), E, 0, E - 1).cumsum(0, dtype=torch.int32)
    products = torch._grouped_mm(torch._grouped_mm(x[order // K], up.mT, offs=ends), down.mT, offs=ends)
    return all_reduce(torch.zeros_like(x).index_put((order // K,), products, accumulate=True))


def test_a_sum_without_a_scale_has_one_of_ones() -> None:
    after = text(same_results(unscaled, made=1).graph)
    assert "[160] = aten.full([160], 1.0, dtype=torch.bfloat16" in after
    (module,) = compiled_graphs(unscaled, *OPERANDS, dynamic=True)
    assert calls(module) == 0


def of_two_weights(up: torch.Tensor, x: torch.Tensor, scores: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """As in a backward, where two weights multiply the rows."""
    x = all_reduce(x @ up[0].mT @ up[0])
    ids, order = scores.topk(K).indices.view(-1).sort()
    ends = torch.histc(ids.float(), E, 0, E - 1).cumsum(0, dtype=torch.int32)
    rows = torch._grouped_mm(x[order // K], up.mT, offs=ends)
    products = torch._grouped_mm(rows, down.mT, offs=ends) + torch._grouped_mm(rows.sin(), down.mT * 2, offs=ends)
    return all_reduce(torch.zeros_like(x).index_put((order // K,), products, accumulate=True))


def test_the_products_of_two_weights_are_added_in_front_of_the_call() -> None:
    after = text(same_results(of_two_weights, made=1).graph)
    assert "ditron.combine_experts([add" in after


def test_golden_sums_by_scatter() -> None:
    expecttest.assert_expected_inline(
        from_products(same_results(scattered, made=1)),
        """\
_grouped_mm_1 [160, 16] = aten._grouped_mm(getitem_5, permute_2, cumsum)
view_1 [160] = aten.reshape(getitem, [-1])
index_1 [160] = aten.index.Tensor(view_1, [getitem_3])
view_2 [160, 1] = aten.reshape(index_1, [-1, 1])
reshape_default [160] = aten.reshape(view_2, [-1])
iota_default [160] = prims.iota(160, start=0, step=1, dtype=torch.int64, device=device(type='cpu'), requires_grad=False)
empty_memory_format [160] = aten.empty.memory_format([160], dtype=torch.int64, device=device(type='cpu'))
index_put_default [160] = aten.index_put(empty_memory_format, [getitem_3], iota_default)
combine_experts = ditron.combine_experts([_grouped_mm_1, index_put_default, reshape_default], 'top_k=8', None)
getitem_6 [20, 16] = combine_experts[0]
view_4 [2, 10, 16] = aten.reshape(getitem_6, [2, -1, 16])
after__default = ditron.after_(view_4, getitem_7)
all_reduce_1 [2, 10, 16] = _c10d_functional.all_reduce(view_4, 'sum', '0')
wait_tensor_1 [2, 10, 16] = _c10d_functional.wait_tensor(all_reduce_1)
return (wait_tensor_1,)""",
    )


def test_few_tokens_are_left_to_atomic_additions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuse, "LEAST_SCATTERED", T)
    same_results(scattered, made=1)
    monkeypatch.setattr(fuse, "LEAST_SCATTERED", T + 1)
    same_results(scattered, made=0)
    same_results(by_titan, made=1)
    (module,) = compiled_graphs(scattered, *OPERANDS, dynamic=True)
    assert calls(module) == 0


@pytest.mark.parametrize("fn", [added_rows, put_rows])
def test_what_is_added_to_scattered_sums_goes_into_the_node(fn: Callable[..., Any]) -> None:
    (line,) = [one for one in text(same_results(fn, made=1).graph).splitlines() if "ditron.combine" in one]
    assert "has_added" in line


def by_titan(*operands: torch.Tensor) -> torch.Tensor:
    terms, rows, x = sorted_slots(*operands)
    return all_reduce(ADD_OF_TITAN(torch.zeros_like(x), rows.reshape(-1, 1).expand(-1, D), terms))


def test_the_op_of_torchtitan() -> None:
    same_results(by_titan, made=1)


def test_what_is_added_goes_into_the_node() -> None:
    (line,) = [one for one in text(same_results(with_another, made=1).graph).splitlines() if "ditron.combine" in one]
    assert "has_added" in line


def with_an_integer(*operands: torch.Tensor) -> torch.Tensor:
    """What is added has another dtype, as the result has where it is of fp32."""
    total = routed(*operands).view(-1, K, D).sum(1).bfloat16()
    return all_reduce(total + operands[1].to(torch.int64))


def with_fp32(*operands: torch.Tensor) -> torch.Tensor:
    total = routed(*operands).view(-1, K, D).sum(1).bfloat16()
    return all_reduce(total + operands[1].float().sin())


@pytest.mark.parametrize("fn", [with_an_integer, with_fp32])
def test_another_dtype_is_added_behind_the_node(fn: Callable[..., Any]) -> None:
    (line,) = [one for one in text(same_results(fn, made=1).graph).splitlines() if "ditron.combine" in one]
    assert "has_added" not in line


def by_size(up: torch.Tensor, x: torch.Tensor, scores: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """A view by a size of the graph's inputs, which nothing else reads."""
    return all_reduce(routed(up, x, scores, down).view(x.shape[0], K, D).sum(1).bfloat16())


@pytest.mark.parametrize("fn", [experts, with_another, by_size, scattered, put_rows])
def test_any_number_of_tokens(fn: Callable[..., Any]) -> None:
    (module,) = compiled_graphs(fn, *OPERANDS, dynamic=True)
    inputs = [node.name for node in module.graph.find_nodes(op="placeholder")]
    with assert_no_new_guards(module):
        assert calls(module) == 1
    (call,) = [node for node in module.graph.nodes if node.name == KIND]
    assert isinstance(call.meta["val"][0].shape[0], torch.SymInt)
    assert [node.name for node in module.graph.find_nodes(op="placeholder")] == inputs


def two_mixtures(up: torch.Tensor, x: torch.Tensor, scores: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    x = all_reduce(x @ up[0].mT @ up[0])
    first = slots(up, x, scores, down).view(-1, K, D).sum(1).bfloat16()
    return all_reduce(first + slots(up, x, scores.cos(), down).view(-1, K, D).sum(1).bfloat16())


def a_stream(up: torch.Tensor, x: torch.Tensor, scores: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """What is added to the second sum holds the first one."""
    x = all_reduce(x @ up[0].mT @ up[0])
    for one in (scores, scores.cos()):
        x = x + slots(up, x, one, down).view(-1, K, D).sum(1).bfloat16()
    return all_reduce(x)


@pytest.mark.parametrize("fn", [two_mixtures, a_stream])
@pytest.mark.parametrize("dynamic", [None, *rare(True)])
def test_sums_that_are_added_to_each_other(fn: Callable[..., Any], dynamic: bool | None) -> None:
    same_results(fn, made=2)
    (module,) = compiled_graphs(fn, *OPERANDS, dynamic=dynamic)
    assert calls(module) == 2


@pytest.mark.parametrize("fn", [experts, scattered])
def test_the_forward_of_training_has_it_too(fn: Callable[..., Any]) -> None:
    trained = [one.requires_grad_() for one in (UP.clone(), X.clone(), SCORES.clone(), DOWN.clone())]
    forward, backward = compiled_graphs(fn, *trained)
    assert (calls(forward), calls(backward)) == (1, 0)


def test_it_can_be_left_out_and_leaves_the_library_alone() -> None:
    others = tuple(name for name in DEFAULT.fusions if name != KIND)
    same_results(experts, made=0, options=replace(DEFAULT, fusions=others))
    same_results(experts, made=0, options=replace(DEFAULT, strategy="library"))


def test_sums_that_inductor_unrolls_are_left_to_it() -> None:
    with inductor_config.patch(unroll_reductions_threshold=K + 1):
        same_results(experts, made=0)


def used_elsewhere(*operands: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    terms = routed(*operands)
    return all_reduce(terms.view(T, K, D).sum(1).bfloat16()), terms.amax()


def slots_of_others(*operands: torch.Tensor) -> torch.Tensor:
    """The slots of a token are not side by side."""
    return all_reduce(routed(*operands).view(K, T, D).sum(0).bfloat16())


def fewer_places(*operands: torch.Tensor) -> torch.Tensor:
    return all_reduce(routed(*operands)[: (T - 1) * K].view(T - 1, K, D).sum(1).bfloat16())


def scaled_columns(up: torch.Tensor, x: torch.Tensor, scores: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """The factors are not of slots."""
    x = all_reduce(x @ up[0].mT @ up[0])
    places, scale = torch.cat([scores[:, 0].argsort()] * K), scores[:1].repeat(1, D // 2)[:, :D]
    ends = (torch.arange(E, device=x.device, dtype=torch.int32) + 1) * (T * K // E)
    products = torch._grouped_mm(torch.cat([x @ up[0].mT] * K), down.mT, offs=ends) * scale
    return all_reduce(products[places].view(T, K, D).sum(1).bfloat16())


def summed_as_integers(*operands: torch.Tensor) -> torch.Tensor:
    return all_reduce(routed(*operands).view(T, K, D).sum(1, dtype=torch.int64).bfloat16())


def in_other_strides(*operands: torch.Tensor) -> torch.Tensor:
    """The result would lie in memory as what is added does."""
    total = routed(*operands).view(T, K, D).sum(1).bfloat16()
    return all_reduce(operands[1].sin().mT.contiguous().mT + total)


def summed_in_fp32(*operands: torch.Tensor) -> torch.Tensor:
    return all_reduce(routed(*operands).view(T, K, D).sum(1))


def scaled_by_a_number(up: torch.Tensor, x: torch.Tensor, scores: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    x = all_reduce(x @ up[0].mT @ up[0])
    places = torch.cat([scores[:, 0].argsort()] * K)
    ends = (torch.arange(E, device=x.device, dtype=torch.int32) + 1) * (T * K // E)
    products = torch._grouped_mm(torch.cat([x @ up[0].mT] * K), down.mT, offs=ends) * 0.5
    return all_reduce(products[places].view(T, K, D).sum(1).bfloat16())


def alone(up: torch.Tensor, x: torch.Tensor, scores: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Beside no collective."""
    x = x @ up[0].mT @ up[0]
    ids, order = scores.topk(K)[1].reshape(-1).sort()
    ends = torch.histc(ids.float(), E, 0, E - 1).cumsum(0, dtype=torch.int32)
    products = torch._grouped_mm(torch._grouped_mm(x[order // K], up.mT, offs=ends), down.mT, offs=ends)
    return (products * scores.view(-1)[order].unsqueeze(-1))[order.argsort()].view(T, K, D).sum(1).bfloat16()


def to_other_tokens(*operands: torch.Tensor) -> torch.Tensor:
    """Tokens have more slots than the experts that they take, and others none."""
    terms, rows, x = sorted_slots(*operands)
    return all_reduce(torch.zeros_like(x).index_add(0, rows // 2, terms))


def to_unsorted_tokens(*operands: torch.Tensor) -> torch.Tensor:
    """Nobody knows how many slots a token has."""
    terms, rows, x = sorted_slots(*operands)
    return all_reduce(torch.zeros_like(x).index_add(0, operands[2].argmax(1).repeat(K) // K, terms))


def to_ranked_values(*operands: torch.Tensor) -> torch.Tensor:
    """The values of a sort, not its indices."""
    terms, rows, x = sorted_slots(*operands)
    values = operands[2].topk(K)[1].reshape(-1).sort()[0]
    return all_reduce(torch.zeros_like(x).index_add(0, values // K, terms))


def to_some_columns(*operands: torch.Tensor) -> torch.Tensor:
    terms, rows, x = sorted_slots(*operands)
    return all_reduce(torch.zeros_like(x).scatter_add(0, rows.reshape(-1, 1).expand(-1, D // 2), terms))


def along_columns(*operands: torch.Tensor) -> torch.Tensor:
    terms, rows, x = sorted_slots(*operands)
    index = (rows % D).reshape(-1, 1).expand(-1, D)
    return all_reduce(x.new_zeros(T * K, D).scatter_add(1, index, terms))


def added_twice(*operands: torch.Tensor) -> torch.Tensor:
    terms, rows, x = sorted_slots(*operands)
    return all_reduce(torch.zeros_like(x).index_add(0, rows, terms, alpha=2))


def put_and_replaced(*operands: torch.Tensor) -> torch.Tensor:
    """Not added up: which slot of a token stays is not said. The slots of a token are made equal here."""
    terms, rows, x = sorted_slots(*operands)
    return all_reduce(torch.zeros_like(x).index_put((rows,), terms * 0))


def scattered_and_read(*operands: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    terms, rows, x = sorted_slots(*operands)
    return all_reduce(torch.zeros_like(x).index_add(0, rows, terms)), terms.amax()


def true_quotient(*operands: torch.Tensor) -> torch.Tensor:
    """The quotients are rounded up."""
    terms, rows, x = sorted_slots(*operands)
    order = operands[2].topk(K)[1].reshape(-1).argsort()
    return all_reduce(x.new_zeros(T + 1, D).index_add(0, (order / K).ceil().long(), terms))


REFUSED = (
    to_other_tokens,
    to_unsorted_tokens,
    to_ranked_values,
    to_some_columns,
    along_columns,
    added_twice,
    put_and_replaced,
    scattered_and_read,
    true_quotient,
    used_elsewhere,
    slots_of_others,
    fewer_places,
    masked_twice,
    masked_columns,
    scaled_columns,
    scaled_by_a_number,
    summed_as_integers,
    in_other_strides,
    summed_in_fp32,
    alone,
)


@pytest.mark.parametrize("fn", REFUSED)
def test_it_must_not_fire(fn: Callable[..., Any]) -> None:
    same_results(fn, made=0)


def test_what_is_written_later_is_copied_before() -> None:
    def written(*operands: torch.Tensor) -> torch.Tensor:
        out = experts(*operands)
        operands[2].zero_()
        return out

    same_results(written, made=1)


def test_masked_products_that_are_written_are_left_alone() -> None:
    (after,) = compiled_graphs(masked_and_kept, *OPERANDS)
    products = next(node for node in after.graph.nodes if node.op == "output").args[0][1]
    with after.graph.inserting_after(products):
        written = after.graph.call_function(torch.ops.aten.add_.Tensor, (products, 1.0))
    written.meta["val"] = products.meta["val"]
    assert calls(after) == 0
