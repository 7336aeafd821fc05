"""Sums over slots that are no `sum`: matmuls with the weights, slots that are added one by one, a number behind them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import expecttest
import pytest
import torch

from ditron_inductor.passes.graph import slot_readings, slot_sums
from tests.passes import test_absorb_sums as few
from tests.passes.graphs import all_reduce, assert_no_new_guards, compiled_graphs, fuse, only_task, scatter_dim, text
from tests.passes.test_combine_experts import OPERANDS as OF_MANY
from tests.passes.test_combine_experts import K as MANY
from tests.passes.test_combine_experts import any_number, calls, same_results, slots_and_products
from tests.passes.test_grouped_matmul_all_reduce import (
    OPERANDS,
    D,
    E,
    K,
    few_tokens,
    fused,
    routed,
    side_by_side,
    sorted_rows,
    sorted_slots,
)

__all__ = ["any_number", "few_tokens"]
pytestmark = pytest.mark.usefixtures("group", "few_tokens")
KIND = "grouped_matmul_all_reduce"
Layer = Callable[..., torch.Tensor]


def by_token(*operands: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(The products [T, K, D], the weights [T, K] in fp32)."""
    rows, ends, weights, order = sorted_rows(*operands)
    return side_by_side(torch._grouped_mm(rows, operands[3].mT, offs=ends), order), weights


def by_einsum(*operands: torch.Tensor) -> torch.Tensor:
    rows, weights = by_token(*operands)
    return torch.einsum("tk,tkd->td", weights.bfloat16(), rows)


def by_einsum_of_rows(*operands: torch.Tensor) -> torch.Tensor:
    rows, weights = by_token(*operands)
    return torch.einsum("tkd,tk->td", rows, weights.bfloat16())


def by_einsum_in_fp32(*operands: torch.Tensor) -> torch.Tensor:
    rows, weights = by_token(*operands)
    return torch.einsum("tk,tkd->td", weights, rows.float()).bfloat16()


def by_einsum_of_sequences(*operands: torch.Tensor) -> torch.Tensor:
    rows, weights = by_token(*operands)
    return torch.einsum("bskd,bsk->bsd", rows.view(2, -1, K, D), weights.bfloat16().view(2, -1, K))


def by_matmul(*operands: torch.Tensor) -> torch.Tensor:
    rows, weights = by_token(*operands)
    return (weights.bfloat16().unsqueeze(1) @ rows).squeeze(1) + operands[1].sin()


def by_bmm(*operands: torch.Tensor) -> torch.Tensor:
    rows, weights = by_token(*operands)
    return torch.bmm(rows.mT, weights.bfloat16().unsqueeze(-1)).view(2, -1, D)


def of_sequences(*operands: torch.Tensor) -> torch.Tensor:
    rows, weights = by_token(*operands)
    terms = rows.view(2, -1, K, D) * weights.view(2, -1, K, 1)
    return terms.sum(2).bfloat16()


def one_by_one(*operands: torch.Tensor) -> torch.Tensor:
    """A loop over the slots that begins with zeros."""
    rows, weights = by_token(*operands)
    total = torch.zeros_like(operands[1])
    for slot in range(K):
        total = total + weights[:, slot : slot + 1].bfloat16() * rows[:, slot]
    return total


def one_by_one_in_fp32(*operands: torch.Tensor) -> torch.Tensor:
    rows, weights = by_token(*operands)
    total = weights[:, 0, None] * rows[:, 0]
    for slot in range(1, K):
        total += rows[:, slot].float() * weights[:, slot, None]
    return total.bfloat16()


def one_by_one_onto_another(*operands: torch.Tensor) -> torch.Tensor:
    """A loop that begins with what a shared expert returns."""
    rows, weights = by_token(*operands)
    total = operands[1].sin()
    for slot in range(K):
        total = total + (weights[:, slot].unsqueeze(-1) * rows[:, slot]).bfloat16()
    return total


def one_by_one_of_splits(*operands: torch.Tensor) -> torch.Tensor:
    rows, weights = by_token(*operands)
    parts = zip(rows.split(1, 1), weights.bfloat16().split(1, 1), strict=True)
    first, second = (row.squeeze(1) * weight for row, weight in parts)
    return second + first


def one_by_one_with_another(*operands: torch.Tensor) -> torch.Tensor:
    """Scaled rows in a different order, and a number and another tensor behind them."""
    slots = routed(*operands).bfloat16()
    return 2.5 * (slots[:, 1] + slots[:, 0]) + operands[1].sin()


def multiplied_in_fp32(*operands: torch.Tensor) -> torch.Tensor:
    return (routed(*operands).sum(1) * 2.5).bfloat16()


def multiplied(*operands: torch.Tensor) -> torch.Tensor:
    """As DeepSeek's `routed_scaling_factor` stands in serving engines, in front of a shared expert's rows."""
    return routed(*operands).sum(1).bfloat16().view(2, -1, D) * 2.5 + operands[1].sin().view(2, -1, D)


def multiplied_onto_another(*operands: torch.Tensor) -> torch.Tensor:
    """Of weights in bf16."""
    return by_einsum(*operands) / 3 + operands[1].sin()


def multiplied_and_scattered(*operands: torch.Tensor) -> torch.Tensor:
    products, order = sorted_slots(*operands)
    return torch.zeros_like(operands[1]).index_add(0, order // K, products.bfloat16()) * -2.5


def multiplied_twice(*operands: torch.Tensor) -> torch.Tensor:
    return ((routed(*operands).sum(1) * 3).bfloat16() * 0.75).view(-1, 2, D)


FORMS = [
    by_einsum,
    by_einsum_of_rows,
    by_einsum_in_fp32,
    by_einsum_of_sequences,
    by_matmul,
    by_bmm,
    of_sequences,
    one_by_one,
    one_by_one_in_fp32,
    one_by_one_onto_another,
    one_by_one_of_splits,
    one_by_one_with_another,
    multiplied_in_fp32,
    multiplied,
    multiplied_onto_another,
    multiplied_and_scattered,
    multiplied_twice,
]


def reduced(fn: Layer) -> Layer:
    return lambda *operands: all_reduce(fn(*operands))


@pytest.mark.parametrize("fn", FORMS)
def test_it_becomes_one_node(fn: Layer) -> None:
    module = fused(reduced(fn))
    only_task(module, KIND)
    assert not list(module.graph.find_nodes(op="call_function", target=torch.ops.aten.bmm.default))


def test_it_becomes_one_node_with_a_scatter() -> None:
    given = (torch.empty(24, E), torch.empty(24, D).bfloat16(), *OPERANDS[2:])
    module = fused(lambda *operands: scatter_dim(multiplied(*operands), 1), given=given)
    only_task(module, "grouped_matmul_reduce_scatter")


def test_golden_a_number_behind_the_sum() -> None:
    """The factors of the slots are multiplied by it, in fp32."""
    _, begin, rest = text(fused(reduced(multiplied_onto_another)).graph).partition("_grouped_mm ")
    expecttest.assert_expected_inline(
        (begin + rest).rstrip(),
        """\
_grouped_mm [44, 8] = aten._grouped_mm(index, permute, cumsum)
permute_1 [6, 8, 16] = aten.permute(arg3_1, [0, 2, 1])
empty [44] = aten.empty.memory_format([44], dtype=torch.int64, layout=torch.strided, device=device(type='cpu'), pin_memory=False)
iota [44] = prims.iota(44, start=0, step=1, dtype=torch.int64, device=device(type='cpu'), requires_grad=False)
index_put [44] = aten.index_put(empty, [getitem_3], iota)
sin [22, 16] = aten.sin(arg1_1)
reshape_default [44] = aten.reshape(view_2, [-1])
empty_memory_format [44] = aten.empty.memory_format([44], dtype=torch.bfloat16, device=device(type='cpu'))
index_put_default [44] = aten.index_put(empty_memory_format, [index_put], reshape_default)
reshape_default_1 [22, 16] = aten.reshape(sin, [-1, 16])
convert_element_type_default [44] = prims.convert_element_type(index_put_default, torch.float32)
mul_tensor [44] = aten.mul.Tensor(convert_element_type_default, 0.3333333333333333)
grouped_matmul_all_reduce = ditron.grouped_matmul_all_reduce([_grouped_mm, permute_1, cumsum, index_put, mul_tensor, reshape_default_1], "reduce_op=sum top_k=2 world_size=4 group_name=0 site='' trials has_added", None)
getitem_4 [22, 16] = grouped_matmul_all_reduce[0]
return (getitem_4,)""",
    )


def not_all_slots(*operands: torch.Tensor) -> torch.Tensor:
    slots = routed(*operands).bfloat16()
    return slots[:, 0] + slots[:, 0]


def a_slot_twice(*operands: torch.Tensor) -> torch.Tensor:
    slots = routed(*operands).bfloat16()
    return slots[:, 0] + slots[:, 1] + slots[:, 1]


def weights_of_other_slots(*operands: torch.Tensor) -> torch.Tensor:
    rows, weights = by_token(*operands)
    return (weights[:, 1:] * rows[:, 0] + weights[:, :1] * rows[:, 1]).bfloat16()


def weights_of_other_choices(*operands: torch.Tensor) -> torch.Tensor:
    rows, weights = by_token(*operands)
    return (weights[:, :1] * rows[:, 0] + weights.sin()[:, 1:] * rows[:, 1]).bfloat16()


def one_weight_alone(*operands: torch.Tensor) -> torch.Tensor:
    rows, weights = by_token(*operands)
    return (weights[:, :1] * rows[:, 0] + rows[:, 1]).bfloat16()


def columns_one_by_one(*operands: torch.Tensor) -> torch.Tensor:
    slots = routed(*operands).bfloat16()
    return (slots[..., :1] + slots[..., 1:2]).expand(-1, -1, D // K).reshape(-1, D)


def onto_two_others(*operands: torch.Tensor) -> torch.Tensor:
    slots, x = routed(*operands).bfloat16(), operands[1]
    return (slots[:, 0] + x.sin()) + (slots[:, 1] + x.cos())


def onto_fp32(*operands: torch.Tensor) -> torch.Tensor:
    """What is in front of the slots would be rounded."""
    slots = routed(*operands)
    return (slots[:, 0] + operands[1].float().sin() + slots[:, 1]).bfloat16()


def a_slot_subtracted(*operands: torch.Tensor) -> torch.Tensor:
    slots = routed(*operands).bfloat16()
    return torch.add(slots[:, 0], slots[:, 1], alpha=-1)


def weighted_twice(*operands: torch.Tensor) -> torch.Tensor:
    _, weights = by_token(*operands)
    return torch.einsum("tk,tkd->td", weights, routed(*operands)).bfloat16()


def a_matrix_for_each_token(*operands: torch.Tensor) -> torch.Tensor:
    rows, weights = by_token(*operands)
    return (torch.stack((weights, weights.sin()), 1).bfloat16() @ rows).view(-1, 2 * D)


def of_tokens_in_another_order(*operands: torch.Tensor) -> torch.Tensor:
    rows, weights = by_token(*operands)
    across = rows.view(2, -1, K, D).permute(1, 0, 3, 2).reshape(-1, D, K)
    return torch.bmm(across, weights.bfloat16().unsqueeze(-1)).view(-1, D)


def very_large(*operands: torch.Tensor) -> torch.Tensor:
    return multiplied_in_fp32(*operands) * 65536.0


def by_a_tensor(*operands: torch.Tensor) -> torch.Tensor:
    return routed(*operands).sum(1).bfloat16() * operands[2].amax()


def in_fp32(*operands: torch.Tensor) -> torch.Tensor:
    return routed(*operands).sum(1) * 2.5


def rounded_to_eight_bits(*operands: torch.Tensor) -> torch.Tensor:
    rows, weights = by_token(*operands)
    return (rows.to(torch.float8_e5m2).float() * weights.unsqueeze(-1)).sum(1).bfloat16()


def slots_of_eight_bits(*operands: torch.Tensor) -> torch.Tensor:
    slots = routed(*operands).to(torch.float8_e5m2)
    return slots[:, 0].bfloat16() + slots[:, 1].bfloat16()


OTHERS: tuple[Layer, ...] = (
    not_all_slots,
    a_slot_twice,
    weights_of_other_slots,
    weights_of_other_choices,
    one_weight_alone,
    columns_one_by_one,
    onto_two_others,
    onto_fp32,
    a_slot_subtracted,
    weighted_twice,
    a_matrix_for_each_token,
    of_tokens_in_another_order,
    very_large,
    by_a_tensor,
    in_fp32,
    rounded_to_eight_bits,
    slots_of_eight_bits,
)


@pytest.mark.parametrize("fn", OTHERS)
def test_it_must_not_fire(fn: Layer) -> None:
    (graph,) = compiled_graphs(reduced(fn), *OPERANDS)
    fuse(graph)
    assert KIND not in text(graph.graph)


def test_a_tensor_that_is_read_twice_is_one_candidate() -> None:
    def doubled(*operands: torch.Tensor) -> torch.Tensor:
        y = operands[1]
        for step in range(60):
            y = y + y * (1.5 + step)
        return y

    (graph,) = compiled_graphs(doubled, *OPERANDS)
    (last,) = graph.graph.find_nodes(op="output")[0].args[0]
    assert len(list(slot_sums.candidates(last))) == 121


def test_a_long_sum_is_read_up_to_the_most_slots() -> None:
    def long(*operands: torch.Tensor) -> torch.Tensor:
        y, weights = operands[1], operands[1][:, :16]
        for step in range(300):
            y = y + weights[:, step % 16, None] * operands[1]
        return y

    (graph,) = compiled_graphs(long, *OPERANDS)
    (last,) = graph.graph.find_nodes(op="output")[0].args[0]
    with mock.patch.object(slot_readings, "_slot", wraps=slot_readings._slot) as read:
        assert not list(slot_readings.readings(last))
    assert read.call_count <= 2 * slot_readings.MOST_SLOTS + 2


def test_a_slot_that_is_read_elsewhere() -> None:
    def fn(*operands: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        slots = routed(*operands).bfloat16()
        first = slots[:, 0]
        return all_reduce(first + slots[:, 1]), first.sin()

    (graph,) = compiled_graphs(fn, *OPERANDS)
    fuse(graph)
    assert KIND not in text(graph.graph)


def of_many(by: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Layer:
    """The sum of as many slots as a call of its own is made for, behind a reduction that is fused."""

    def layer(up: torch.Tensor, x: torch.Tensor, scores: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        x = all_reduce(x @ up[0].mT @ up[0])
        _, products = slots_and_products(up, x, scores, down)
        weights, chosen = scores.topk(MANY)
        order = chosen.reshape(-1).argsort(stable=True)
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=order.device)
        return all_reduce(by(products[places].view(-1, MANY, D), weights.bfloat16()))

    return layer


def einsum_of_many(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return torch.einsum("tk,tkd->td", weights, rows) * 2.5


def loop_of_many(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    total = weights[:, :1] * rows[:, 0]
    for slot in range(1, MANY):
        total = total + weights[:, slot : slot + 1] * rows[:, slot]
    return total


@pytest.mark.usefixtures("any_number")
def test_a_sum_by_a_matmul_is_a_call_of_its_own() -> None:
    same_results(of_many(einsum_of_many), made=1)
    (module,) = compiled_graphs(of_many(einsum_of_many), *OF_MANY, dynamic=True)
    with assert_no_new_guards(module):
        assert calls(module) == 1


@pytest.mark.usefixtures("any_number")
def test_slots_that_are_added_one_by_one_are_inductors_kernel() -> None:
    same_results(of_many(loop_of_many), made=0)


def of_few(by: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    """A decode step, whose sum goes into the reduction with its norm."""

    def layer(*operands: torch.Tensor) -> torch.Tensor:
        rows, weights = few.products(*operands)
        return by(rows.view(-1, few.K, few.D), weights)

    return few.layer(layer)


def few_by_einsum(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return torch.einsum("tkd,tk->td", rows, weights.bfloat16())


def few_one_by_one(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return (weights[:, :1] * rows[:, 0] + weights[:, 1:] * rows[:, 1]).bfloat16()


def few_multiplied(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return (rows * weights.bfloat16().unsqueeze(-1)).sum(1) * 2.5


def few_multiplied_in_fp32(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return ((rows * weights.unsqueeze(-1)).sum(1) * 2.5).bfloat16()


OF_FEW = [few_by_einsum, few_one_by_one, few_multiplied, few_multiplied_in_fp32]


@pytest.mark.parametrize("by", OF_FEW)
@pytest.mark.parametrize("tokens", [few.T, 1])
def test_a_decode_step_adds_them_up_in_its_reduction(by: Callable[..., torch.Tensor], tokens: int) -> None:
    given = (few.SCORES[:tokens], few.X[:tokens], few.UP, few.DOWN)
    task, _ = only_task(few.compiled(of_few(by), given), "all_reduce_rms_norm")
    assert task.top_k == few.K


def test_a_number_out_of_range_stays_behind_the_sum_of_a_decode_step() -> None:
    def by(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return few_multiplied(rows, weights) * 65536.0

    task, _ = only_task(few.compiled(of_few(by)), "all_reduce_rms_norm")
    assert not task.top_k
