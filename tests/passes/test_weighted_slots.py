"""Sums of slots whose factors stand behind the index, whose rows are written to their slots, or that are fp32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch

from tests.passes.graphs import all_reduce, assert_no_new_guards, compiled_graphs
from tests.passes.test_combine_experts import (
    OPERANDS,
    D,
    K,
    T,
    any_number,
    calls,
    from_products,
    same_results,
    slots_and_products,
    sorted_slots,
)

__all__ = ["any_number"]
pytestmark = pytest.mark.usefixtures("group", "any_number")
Operands = tuple[torch.Tensor, ...]


def products_of(up: torch.Tensor, x: torch.Tensor, scores: torch.Tensor, down: torch.Tensor) -> Operands:
    """(The products of the sorted slots, the slot at each place, the weights [T, K])."""
    x = all_reduce(x @ up[0].mT @ up[0])
    _, products = slots_and_products(up, x, scores, down)
    weights, chosen = scores.topk(K)
    return products, chosen.reshape(-1).argsort(stable=True), weights


def places_of(order: torch.Tensor) -> torch.Tensor:
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    return places


def summed(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return all_reduce((rows.view(-1, K, D) * weights.unsqueeze(-1)).sum(1).bfloat16())


def behind_the_index(*operands: torch.Tensor) -> torch.Tensor:
    products, order, weights = products_of(*operands)
    return summed(products[places_of(order)], weights)


def behind_a_sort(*operands: torch.Tensor) -> torch.Tensor:
    products, order, weights = products_of(*operands)
    return summed(products[order.argsort()], weights)


def behind_gathered(*operands: torch.Tensor) -> torch.Tensor:
    products, order, weights = products_of(*operands)
    return summed(products.gather(0, places_of(order).unsqueeze(-1).expand(-1, D)), weights)


def written(*operands: torch.Tensor) -> torch.Tensor:
    """As DeepSeek's own code does it."""
    products, order, weights = products_of(*operands)
    slots = torch.empty_like(products)
    slots[order] = products
    terms = slots.view(*weights.shape, D).to(weights.dtype).mul_(weights.unsqueeze(-1))
    return all_reduce(terms.sum(dim=1).to(slots.dtype))


def written_and_masked(*operands: torch.Tensor) -> torch.Tensor:
    """The slots of some experts are left out, and weights are rounded."""
    products, order, weights = products_of(*operands)
    absent = operands[2].topk(K)[1].reshape(-1)[order] >= 2
    return summed(
        torch.zeros_like(products).index_put((order,), products.masked_fill(absent.unsqueeze(-1), 0.0)),
        weights.bfloat16(),
    )


def scaled_and_written(*operands: torch.Tensor) -> torch.Tensor:
    terms, _, x = sorted_slots(*operands)
    order = operands[2].topk(K)[1].view(-1).argsort(stable=True)
    return all_reduce(torch.empty_like(terms).index_put((order,), terms).view(-1, K, D).sum(1) + x.sin())


def scattered_in_fp32(*operands: torch.Tensor) -> torch.Tensor:
    products, order, weights = products_of(*operands)
    terms = products.float() * weights.reshape(-1)[order].unsqueeze(-1)
    x = operands[1]
    total = torch.zeros(x.shape, device=x.device).index_add(0, order // K, terms)
    return all_reduce(total.bfloat16() + x.sin())


FORMS = [
    behind_the_index,
    behind_a_sort,
    behind_gathered,
    written,
    written_and_masked,
    scaled_and_written,
    scattered_in_fp32,
]


@pytest.mark.parametrize("fn", FORMS)
def test_it_becomes_one_call(fn: Callable[..., Any]) -> None:
    same_results(fn, made=1)


@pytest.mark.parametrize("fn", [behind_the_index, written])
def test_any_number_of_tokens(fn: Callable[..., Any]) -> None:
    (module,) = compiled_graphs(fn, *OPERANDS, dynamic=True)
    with assert_no_new_guards(module):
        assert calls(module) == 1


def test_golden_factors_behind_the_index() -> None:
    expecttest.assert_expected_inline(from_products(same_results(behind_the_index, made=1)), """\
_grouped_mm_1 [160, 16] = aten._grouped_mm(getitem_8, permute_2, cumsum)
empty_1 [160] = aten.empty.memory_format([160], dtype=torch.int64, layout=torch.strided, device=device(type='cpu'), pin_memory=False)
iota_1 [160] = prims.iota(160, start=0, step=1, dtype=torch.int64, device=device(type='cpu'), requires_grad=False)
index_put_1 [160] = aten.index_put(empty_1, [getitem_7], iota_1)
unsqueeze_1 [20, 8, 1] = aten.unsqueeze(getitem_4, -1)
reshape_default [160] = aten.reshape(unsqueeze_1, [-1])
empty_memory_format [160] = aten.empty.memory_format([160], dtype=torch.float32, device=device(type='cpu'))
index_put_default [160] = aten.index_put(empty_memory_format, [index_put_1], reshape_default)
combine_experts = ditron.combine_experts([_grouped_mm_1, index_put_1, index_put_default], 'top_k=8', None)
getitem_9 [20, 16] = combine_experts[0]
after__default = ditron.after_(getitem_9, getitem_10)
all_reduce_1 [20, 16] = _c10d_functional.all_reduce(getitem_9, 'sum', '0')
wait_tensor_1 [20, 16] = _c10d_functional.wait_tensor(all_reduce_1)
return (wait_tensor_1,)""")


def test_golden_rows_that_are_written() -> None:
    expecttest.assert_expected_inline(from_products(same_results(written, made=1)), """\
_grouped_mm_1 [160, 16] = aten._grouped_mm(getitem_8, permute_2, cumsum)
unsqueeze_1 [20, 8, 1] = aten.unsqueeze(getitem_4, -1)
reshape_default [160] = aten.reshape(unsqueeze_1, [-1])
index_tensor [160] = aten.index.Tensor(reshape_default, [getitem_7])
iota_default [160] = prims.iota(160, start=0, step=1, dtype=torch.int64, device=device(type='cpu'), requires_grad=False)
empty_memory_format [160] = aten.empty.memory_format([160], dtype=torch.int64, device=device(type='cpu'))
index_put_default [160] = aten.index_put(empty_memory_format, [getitem_7], iota_default)
combine_experts = ditron.combine_experts([_grouped_mm_1, index_put_default, index_tensor], 'top_k=8', None)
getitem_9 [20, 16] = combine_experts[0]
after__default = ditron.after_(getitem_9, getitem_10)
all_reduce_1 [20, 16] = _c10d_functional.all_reduce(getitem_9, 'sum', '0')
wait_tensor_1 [20, 16] = _c10d_functional.wait_tensor(all_reduce_1)
return (wait_tensor_1,)""")


def of_any_places(*operands: torch.Tensor) -> torch.Tensor:
    """One slot may have two factors."""
    products, _, weights = products_of(*operands)
    places = operands[2].argmax(1).repeat(K)
    return summed(products[places], weights)


def by_the_values_of_a_sort(*operands: torch.Tensor) -> torch.Tensor:
    products, _, weights = products_of(*operands)
    return summed(products[operands[2].topk(K)[1].reshape(-1).sort()[0]], weights)


def backwards(*operands: torch.Tensor) -> torch.Tensor:
    """What is written to the places does not count up from 0 by one."""
    products, order, weights = products_of(*operands)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device) // 2
    return summed(products[places], weights)


def written_twice(*operands: torch.Tensor) -> torch.Tensor:
    products, order, weights = products_of(*operands)
    return summed(torch.ones_like(products).index_put((order,), products, accumulate=True), weights)


def written_to_some(*operands: torch.Tensor) -> torch.Tensor:
    """Some rows keep what they were."""
    products, order, weights = products_of(*operands)
    return summed(torch.ones_like(products).index_put((order // 2 * 2,), products), weights)


def written_among_others(*operands: torch.Tensor) -> torch.Tensor:
    products, order, weights = products_of(*operands)
    rows = torch.ones(T * K + K, D, device=products.device, dtype=products.dtype).index_put((order,), products)
    return summed(rows[: T * K], weights)


def weighted_twice(*operands: torch.Tensor) -> torch.Tensor:
    terms, _, _ = sorted_slots(*operands)
    order = operands[2].topk(K)[1].view(-1).argsort(stable=True)
    return summed(terms[places_of(order)], operands[2].topk(K)[0])


def weighted_by_columns(*operands: torch.Tensor) -> torch.Tensor:
    products, order, _ = products_of(*operands)
    return all_reduce((products[places_of(order)].view(-1, K, D) * operands[1][:T].unsqueeze(1)).sum(1))


def kept_in_fp32(*operands: torch.Tensor) -> torch.Tensor:
    terms, rows, x = sorted_slots(*operands)
    return all_reduce(torch.zeros(x.shape, device=x.device).index_add(0, rows, terms.float()))


def added_to_fp32(*operands: torch.Tensor) -> torch.Tensor:
    """What the sums are added to would be rounded before."""
    terms, rows, x = sorted_slots(*operands)
    return all_reduce(x.float().sin().index_add(0, rows, terms.float()).bfloat16())


def used_elsewhere(*operands: torch.Tensor) -> Operands:
    products, order, weights = products_of(*operands)
    rows = products[places_of(order)]
    return summed(rows, weights), rows.amax()


@pytest.mark.parametrize(
    "fn",
    [
        of_any_places,
        by_the_values_of_a_sort,
        backwards,
        written_twice,
        written_to_some,
        written_among_others,
        weighted_twice,
        weighted_by_columns,
        kept_in_fp32,
        added_to_fp32,
        used_elsewhere,
    ],
)
def test_it_must_not_fire(fn: Callable[..., Any]) -> None:
    (module,) = compiled_graphs(fn, *OPERANDS)
    assert calls(module) == 0
