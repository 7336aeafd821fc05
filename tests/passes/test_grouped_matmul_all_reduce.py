"""grouped_matmul_all_reduce: which reductions of experts become a node, and what keeps them as they are."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch
from torch import fx

from benchmarks.tolerances import relative_error
from ditron_inductor import pipeline
from ditron_inductor.errors import DitronNotFused
from ditron_inductor.options import Options
from tests.passes.graphs import WORLD_SIZE, all_reduce, compiled_graphs, fuse, only_task, reasons, run_ranks, text, twin

pytestmark = pytest.mark.usefixtures("group", "few_tokens")
module = importlib.import_module("ditron_inductor.passes.fuse.grouped_matmul_all_reduce")
KIND = "grouped_matmul_all_reduce"
DEFAULT = Options()
T, D, F, E, K = 22, 16, 8, 6, 2
OPERANDS = (
    torch.empty(T, E), torch.empty(T, D).bfloat16(), torch.empty(E, F, D).bfloat16(), torch.empty(E, D, F).bfloat16(),
)  # fmt: skip


@pytest.fixture
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graphs of these tests have few tokens."""
    monkeypatch.setattr(module, "LEAST_TOKENS", T)


def sorted_rows(scores: torch.Tensor, x: torch.Tensor, up: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(The rows of all slots, the ends of the experts, the weights of the slots, the slot at each place)."""
    weights, chosen = scores.topk(K)
    ids, order = chosen.reshape(-1).sort()
    ends = torch.histc(ids.float(), E, 0, E - 1).cumsum(0, dtype=torch.int32)
    return torch._grouped_mm(x[order // K], up.mT, offs=ends), ends, weights, order


def sorted_slots(*operands: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(The scaled products of all slots, the slot at each place)."""
    rows, ends, weights, order = sorted_rows(*operands)
    return torch._grouped_mm(rows, operands[3].mT, offs=ends) * weights.reshape(-1)[order].unsqueeze(-1), order


def routed(*operands: torch.Tensor) -> torch.Tensor:
    """The slots of the tokens, side by side, as `transformers` writes it."""
    return side_by_side(*sorted_slots(*operands))


def side_by_side(terms: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """[T, K, D]: the terms of sorted slots, token by token."""
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    return terms[places].view(-1, K, D)


def experts(*operands: torch.Tensor) -> torch.Tensor:
    return all_reduce(routed(*operands).sum(1).bfloat16())


def with_another(*operands: torch.Tensor) -> torch.Tensor:
    """With what another expert returns, which all tokens use, in another shape; reduced in a third shape."""
    total = routed(*operands).sum(1).bfloat16().view(2, -1, D)
    return all_reduce((operands[1].sin().view(2, -1, D) + total).view(-1, 2, D))


def added_rows(*operands: torch.Tensor) -> torch.Tensor:
    products, order = sorted_slots(*operands)
    return all_reduce(torch.zeros_like(operands[1]).index_add(0, order // K, products.bfloat16()))


def put_rows(*operands: torch.Tensor) -> torch.Tensor:
    products, order = sorted_slots(*operands)
    return all_reduce(operands[1].cos().index_put((order // K,), products.bfloat16(), accumulate=True))


def scattered(*operands: torch.Tensor) -> torch.Tensor:
    """As TorchTitan writes it."""
    products, order = sorted_slots(*operands)
    index = (order // K).reshape(-1, 1).expand(-1, D)
    total = torch.zeros_like(operands[1]).scatter_add(0, index, products.bfloat16())
    return all_reduce(total.view(2, -1, D))


def kept_masked(
    scores: torch.Tensor, x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, fill: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Under expert parallelism: the second half of the experts is elsewhere. With the masked products, as the forward
    of training keeps them for the backward.
    """
    here = E // 2
    weights, chosen = scores.topk(K)
    ids, order = chosen.reshape(-1).sort()
    ends = torch.histc(ids.float(), here, 0, here - 1).cumsum(0, dtype=torch.int32)
    elsewhere = (ids >= here).unsqueeze(-1)
    rows = torch._grouped_mm(x[order // K], up[:here].mT, offs=ends).masked_fill(elsewhere, 0.0)
    products = torch._grouped_mm(rows, down[:here].mT, offs=ends).masked_fill(elsewhere, fill)
    terms = products * weights.reshape(-1)[order].unsqueeze(-1)
    return all_reduce(side_by_side(terms, order).sum(1).bfloat16()), products


def masked(*operands: torch.Tensor) -> torch.Tensor:
    return kept_masked(*operands)[0]


def masked_read_elsewhere(*operands: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    total, products = kept_masked(*operands)
    return total, products.sin()


def masked_by_ones(*operands: torch.Tensor) -> torch.Tensor:
    return kept_masked(*operands, fill=1.0)[0]


def masked_by_columns(*operands: torch.Tensor) -> torch.Tensor:
    rows, ends, weights, order = sorted_rows(*operands)
    even = torch.arange(D, device=order.device) % 2 == 0
    products = torch._grouped_mm(rows, operands[3].mT, offs=ends).masked_fill(even, 0.0)
    terms = products * weights.reshape(-1)[order].unsqueeze(-1)
    return all_reduce(side_by_side(terms, order).sum(1).bfloat16())


def fused(
    fn: Callable[..., Any],
    options: Options = DEFAULT,
    given: tuple[torch.Tensor, ...] = OPERANDS,
    tolerance: float = 1e-2,
) -> fx.GraphModule:
    """The graph after the fusions, which computes on all ranks what it computed before."""
    (after,) = compiled_graphs(fn, *given)
    before = twin(after)
    fuse(after, options)
    assert_same(after, before, given, tolerance)
    return after


def assert_same(
    after: fx.GraphModule, before: fx.GraphModule, given: tuple[torch.Tensor, ...], tolerance: float
) -> None:
    """Both graphs compute the same on all ranks, from operands like those that are given."""

    def inputs() -> list[list[torch.Tensor]]:
        drawn = torch.Generator().manual_seed(0)
        return [[torch.randn(one.shape, generator=drawn).to(one.dtype) for one in given] for _ in range(WORLD_SIZE)]

    # The node rounds once, and the graph several times.
    for got, wanted in zip(run_ranks(after, inputs()), run_ranks(before, inputs()), strict=True):
        assert all(relative_error(one, other) < tolerance for one, other in zip(got, wanted, strict=True))


def made(module: fx.GraphModule) -> int:
    return sum(node.name.startswith(KIND) for node in module.graph.nodes)


def test_golden_experts_of_a_prompt() -> None:
    after = fused(experts)
    _, begin, rest = text(after.graph).partition("_grouped_mm [")
    expecttest.assert_expected_inline(
        begin + rest,
        """\
_grouped_mm [44, 8] = aten._grouped_mm(index, permute, cumsum)
permute_1 [6, 8, 16] = aten.permute(arg3_1, [0, 2, 1])
view_1 [44] = aten.reshape(getitem, [-1])
index_1 [44] = aten.index.Tensor(view_1, [getitem_3])
unsqueeze [44, 1] = aten.unsqueeze(index_1, -1)
empty [44] = aten.empty.memory_format([44], dtype=torch.int64, layout=torch.strided, device=device(type='cpu'), pin_memory=False)
iota [44] = prims.iota(44, start=0, step=1, dtype=torch.int64, device=device(type='cpu'), requires_grad=False)
index_put [44] = aten.index_put(empty, [getitem_3], iota)
reshape_default [44] = aten.reshape(unsqueeze, [-1])
grouped_matmul_all_reduce = ditron.grouped_matmul_all_reduce([_grouped_mm, permute_1, cumsum, index_put, reshape_default], "reduce_op=sum top_k=2 world_size=4 group_name=0 site='' trials", None)
getitem_4 [22, 16] = grouped_matmul_all_reduce[0]
return (getitem_4,)
""",
    )


ADDED = [(experts, False), (with_another, True), (scattered, False), (added_rows, False), (put_rows, True)]


@pytest.mark.parametrize(("fn", "added"), ADDED)
def test_sums_in_any_form_are_reduced_by_one_node(fn: Callable[..., Any], added: bool) -> None:
    task, operands = only_task(fused(fn), KIND)
    assert (task.top_k, task.has_added, task.reduce_op) == (K, added, "sum")
    assert operands["x"].startswith("_grouped_mm") and operands["weight"].startswith("permute")


def kept(*operands: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As the forward of training keeps the products for the backward."""
    rows, ends, weights, order = sorted_rows(*operands)
    products = torch._grouped_mm(rows, operands[3].mT, offs=ends)
    slots = products * weights.reshape(-1)[order].unsqueeze(-1)
    index = (order // K).reshape(-1, 1).expand(-1, D)
    return all_reduce(torch.zeros_like(operands[1]).scatter_add(0, index, slots.bfloat16())), products


def test_products_that_the_graph_returns_are_an_output() -> None:
    after = fused(kept)
    task, _ = only_task(after, KIND)
    assert task.returns_products and "_grouped_mm_1" not in [node.name for node in after.graph.nodes]


def test_slots_of_experts_elsewhere_count_as_nothing() -> None:
    task, operands = only_task(fused(masked), KIND)
    assert task.has_absent and operands["absent"].startswith("reshape") and operands["x"].startswith("where")


def test_masked_products_that_the_graph_returns_are_masked_behind_the_node() -> None:
    after = fused(kept_masked)
    task, _ = only_task(after, KIND)
    assert task.has_absent and task.returns_products
    returned = next(node for node in after.graph.nodes if node.op == "output").args[0][1]
    mask, zero, products = returned.args
    assert returned.target is torch.ops.aten.where.self and products.args[1] == 1
    assert products.args[0].target is torch.ops.ditron.grouped_matmul_all_reduce.default
    assert mask.meta["val"].shape == (T * K, 1) and zero.meta["val"].ndim == 0


@pytest.mark.parametrize("fn", [masked_by_ones, masked_by_columns])
def test_other_masks_are_left_alone(fn: Callable[..., Any]) -> None:
    assert made(fused(fn)) == 0


def used_elsewhere(*operands: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    total = routed(*operands).sum(1).bfloat16()
    return all_reduce(total), total.amax()


def viewed_elsewhere(*operands: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    total = routed(*operands).sum(1).bfloat16().view(2, -1, D)
    return all_reduce(total), total.sin()


def sums_over_tokens(*operands: torch.Tensor) -> torch.Tensor:
    return all_reduce(routed(*operands).view(T, K, D).sum(0).bfloat16())


def summed_in_fp32(*operands: torch.Tensor) -> torch.Tensor:
    return all_reduce(routed(*operands).sum(1))


def scaled_behind(*operands: torch.Tensor) -> torch.Tensor:
    """By a number that is a tensor."""
    return all_reduce(routed(*operands).sum(1).bfloat16() * operands[0].amax().bfloat16())


def products_read_elsewhere(*operands: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As the backward of training does, for the gradients of the router."""
    rows, ends, weights, order = sorted_rows(*operands)
    products = torch._grouped_mm(rows, operands[3].mT, offs=ends)
    terms = products * weights.reshape(-1)[order].unsqueeze(-1)
    return all_reduce(terms[order.argsort()].view(-1, K, D).sum(1).bfloat16()), products.sin()


def of_other_rows(*operands: torch.Tensor) -> torch.Tensor:
    return all_reduce(routed(*operands).sum(1).bfloat16().view(-1, 2 * D))


def of_no_rows(*operands: torch.Tensor) -> torch.Tensor:
    return all_reduce(routed(*operands).sum(1).bfloat16().view(-1))


def sum_of_two(second: Callable[..., torch.Tensor], *operands: torch.Tensor) -> torch.Tensor:
    """The gradient of rows that two weights multiply, for each token: second makes other products of rows."""
    rows, ends, _, order = sorted_rows(*operands)
    weight = operands[3]
    products = torch._grouped_mm(rows, weight.mT, offs=ends) + second(rows, weight, ends)
    return all_reduce(torch.zeros_like(operands[1]).index_put((order // K,), products, accumulate=True))


def other_weight(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return torch._grouped_mm(rows.sin(), (2 * weight).mT, offs=ends)


def two(*operands: torch.Tensor) -> torch.Tensor:
    return sum_of_two(other_weight, *operands)


def with_other_ends(*operands: torch.Tensor) -> torch.Tensor:
    return sum_of_two(lambda rows, weight, ends: other_weight(rows, weight, ends // 2 * 2), *operands)


def of_wide_rows(*operands: torch.Tensor) -> torch.Tensor:
    return sum_of_two(
        lambda rows, weight, ends: other_weight(rows.repeat(1, 2), weight.repeat(1, 1, 2), ends), *operands
    )


def by_rows(*operands: torch.Tensor) -> torch.Tensor:
    """The second weight lies row by row."""
    return sum_of_two(
        lambda rows, weight, ends: torch._grouped_mm(rows.sin(), weight.mT.contiguous(), offs=ends), *operands
    )


def twice_the_same(*operands: torch.Tensor) -> torch.Tensor:
    rows, ends, _, order = sorted_rows(*operands)
    products = torch._grouped_mm(rows, operands[3].mT, offs=ends)
    return all_reduce(torch.zeros_like(operands[1]).index_put((order // K,), products + products, accumulate=True))


def second_read_elsewhere(*operands: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    kept: list[torch.Tensor] = []

    def second(*given: torch.Tensor) -> torch.Tensor:
        kept.append(other_weight(*given))
        return kept[0]

    return sum_of_two(second, *operands), kept[0].cos()


def test_products_of_two_weights_are_added_in_the_node() -> None:
    after = fused(two)
    task, operands = only_task(after, KIND)
    assert task.has_second and not any(node.name.startswith("add") for node in after.graph.nodes)
    assert operands["second_x"].startswith("sin") and operands["second_weight"].startswith("permute")


REFUSED = {
    with_other_ends: "grouped_matmul",
    of_wide_rows: "grouped_matmul",
    by_rows: "grouped_matmul",
    twice_the_same: "no_matmul",
    second_read_elsewhere: "intermediate_used",
    of_other_rows: "grouped_matmul",
    of_no_rows: "grouped_matmul",
    used_elsewhere: "intermediate_used",
    products_read_elsewhere: "intermediate_used",
    masked_read_elsewhere: "intermediate_used",
    viewed_elsewhere: "intermediate_used",
    sums_over_tokens: "no_matmul",
    summed_in_fp32: "no_matmul",
    scaled_behind: "no_matmul",
}


@pytest.mark.parametrize(("fn", "reason"), REFUSED.items())
def test_it_must_not_fire(fn: Callable[..., Any], reason: str) -> None:
    after = fused(fn)
    assert made(after) == 0 and reasons(after) == [reason]


@pytest.mark.parametrize("options", [DEFAULT, Options()])
def test_other_additions_are_no_sums_of_experts(options: Options) -> None:
    def one_row(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        rows = torch.zeros(4, 8).scatter_add(0, index.expand(16, 8), x)
        return all_reduce(rows.index_put((index.expand(16),), x, accumulate=True))

    (after,) = compiled_graphs(one_row, torch.empty(16, 8), torch.tensor(3))
    fuse(after, options)
    assert made(after) == 0 and reasons(after) == ["no_matmul"]


def test_few_tokens_are_left_to_the_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAST_TOKENS", T + 1)
    after = fused(experts)
    assert made(after) == 0 and reasons(after) == ["few_tokens"]


def test_a_dynamic_number_of_tokens_is_left_alone() -> None:
    (after,) = compiled_graphs(experts, *OPERANDS, dynamic=True)
    fuse(after, DEFAULT)
    assert made(after) == 0 and reasons(after) == ["dynamic_tokens"]


def test_a_reduction_that_goes_with_its_norm_is_enough_for_strict() -> None:
    def normed(*operands: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(experts(*operands), (D,), eps=1e-5)

    (after,) = compiled_graphs(normed, *OPERANDS, dynamic=True)
    pipeline.run(after.graph, Options(strict=True))
    assert sum(node.name.startswith("all_reduce_rms_norm") for node in after.graph.nodes) == 1


def test_a_dynamic_number_of_tokens_is_not_enough_for_strict() -> None:
    (after,) = compiled_graphs(experts, *OPERANDS, dynamic=True)
    with pytest.raises(DitronNotFused, match="dynamic_tokens"):
        pipeline.run(after.graph, Options(strict=True))
