"""Biases of experts: operands of the reductions where each row provably gets the bias of its expert, and of the sums
that are made on one rank in any case.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch
from torch import fx

from ditron_inductor import pipeline
from ditron_inductor.options import Options
from ditron_inductor.passes.fuse import combine_experts as sums
from ditron_inductor.passes.graph import expert_rows
from ditron_inductor.passes.graph.expert_rows import Range, range_of
from ditron_inductor.passes.normalize.keep_roundings import KEPT_BY_TORCH
from ditron_inductor.task.nodes import CombineExperts
from ditron_inductor.task.verify import local_calls
from tests.passes import test_grouped_matmul_all_reduce as plain
from tests.passes.graphs import (
    all_reduce,
    compiled_graphs,
    fuse,
    only_task,
    reasons,
    reduce_scatter,
    text,
    traced,
    twin,
)
from tests.passes.test_grouped_matmul_all_reduce import D, E, F, K, side_by_side

pytestmark = pytest.mark.usefixtures("group", "few_tokens")
REDUCED = "grouped_matmul_all_reduce"
T, HERE = 24, 3
OPERANDS = (
    torch.empty(T, E), torch.empty(T, D).bfloat16(), torch.empty(E, F, D).bfloat16(), torch.empty(E, D, F).bfloat16(),
    torch.empty(E, D).bfloat16(),
)  # fmt: skip


@pytest.fixture
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graphs of these tests have few tokens."""
    monkeypatch.setattr(plain.module, "LEAST_TOKENS", T)


@dataclasses.dataclass(frozen=True)
class Form:
    """How a layer finds its experts. elsewhere: only the first HERE experts are on this rank; the other ids become HERE
    and more, by `marked`, and their rows are set to 0. clamped: to what the ids of biases are clamped. counted: the
    ids of which the ends are the cumulative histogram. named: the experts whose biases are added. parts: in which the
    histogram is summed up.
    """

    elsewhere: bool = False
    marked: Callable[[torch.Tensor], torch.Tensor] = lambda chosen: chosen
    clamped: Callable[[torch.Tensor], torch.Tensor] = lambda ids: ids
    counted: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = lambda ids, chosen: ids.float()
    named: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = lambda ids, chosen: ids
    scale: float = 1.0
    wide: bool = False
    descending: bool = False
    first: int = 0
    parts: int = 1

    def products(self, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(The products of all slots, these with their biases, the weights of the slots, the slot at each place)."""
        scores, x, up, down, bias = operands
        num = HERE if self.elsewhere else E
        weights, chosen = scores.topk(K)
        marked = self.marked(chosen)
        ids, order = marked.reshape(-1).sort(descending=self.descending)
        histogram = torch.histc(self.counted(ids, marked), num, self.first, num - 1 + self.first)
        if self.parts > 1:
            ends = histogram.view(self.parts, -1).cumsum(-1, dtype=torch.int32).view(-1)
        else:
            ends = histogram.cumsum(0, dtype=torch.int32)
        rows = torch._grouped_mm(x[order // K], up[:num].mT, offs=ends)
        absent = (ids >= num).unsqueeze(-1)
        if self.elsewhere:
            rows = rows.masked_fill(absent, 0.0)
        raw = torch._grouped_mm(rows, down[:num].mT, offs=ends)
        added = bias[: E if self.wide else num][self.clamped(self.named(ids, marked.reshape(-1)))]
        products = raw + (added if self.scale == 1.0 else added * self.scale)
        if self.elsewhere:
            products = products.masked_fill(absent, 0.0)
        return raw, products, weights.reshape(-1)[order].unsqueeze(-1), order

    def sums(self, *operands: torch.Tensor) -> torch.Tensor:
        _, products, weights, order = self.products(*operands)
        return side_by_side(products * weights, order).sum(1).bfloat16()

    def __call__(self, *operands: torch.Tensor) -> torch.Tensor:
        return all_reduce(self.sums(*operands))

    def scattered(self, *operands: torch.Tensor) -> torch.Tensor:
        """With the sums written by scatter_add, and scattered over the ranks."""
        _, products, weights, order = self.products(*operands)
        index = (order // K).reshape(-1, 1).expand(-1, D)
        return reduce_scatter(torch.zeros_like(operands[1]).scatter_add(0, index, (products * weights).bfloat16()))


def of_a_rank(chosen: torch.Tensor, rank: int = 1) -> torch.Tensor:
    """As `transformers` marks the experts of other ranks."""
    return torch.where(chosen // HERE != rank, HERE, chosen % HERE)


OURS = Form(elsewhere=True, marked=of_a_rank, clamped=lambda ids: ids.clamp(max=HERE - 1))


def fused(fn: Callable[..., Any], given: tuple[torch.Tensor, ...] = OPERANDS) -> fx.GraphModule:
    return plain.fused(fn, Options(), given, 2e-2)


def test_golden_experts_of_a_rank() -> None:
    after = fused(OURS)
    _, begin, rest = text(after.graph).partition("_grouped_mm [")
    expecttest.assert_expected_inline((begin + rest).rstrip(), """\
_grouped_mm [48, 8] = aten._grouped_mm(index, permute, cumsum)
where_1 [48, 8] = aten.where.self(unsqueeze, full_default_1, _grouped_mm)
slice_2 [3, 16, 8] = aten.slice.Tensor(arg3_1, 0, 0, 3)
permute_1 [3, 8, 16] = aten.permute(slice_2, [0, 2, 1])
slice_3 [3, 16] = aten.slice.Tensor(arg4_1, 0, 0, 3)
clamp_max [48] = aten.clamp_max(getitem_2, 2)
view_2 [48] = aten.reshape(getitem, [-1])
index_2 [48] = aten.index.Tensor(view_2, [getitem_3])
unsqueeze_1 [48, 1] = aten.unsqueeze(index_2, -1)
empty [48] = aten.empty.memory_format([48], dtype=torch.int64, layout=torch.strided, device=device(type='cpu'), pin_memory=False)
iota [48] = prims.iota(48, start=0, step=1, dtype=torch.int64, device=device(type='cpu'), requires_grad=False)
index_put [48] = aten.index_put(empty, [getitem_3], iota)
reshape_default [48] = aten.reshape(unsqueeze_1, [-1])
reshape_default_1 [48] = aten.reshape(unsqueeze, [-1])
grouped_matmul_all_reduce = ditron.grouped_matmul_all_reduce([where_1, permute_1, cumsum, slice_3, index_put, reshape_default, reshape_default_1], "reduce_op=sum top_k=2 world_size=4 group_name=0 site='' trials has_absent has_bias", None)
getitem_4 [24, 16] = grouped_matmul_all_reduce[0]
return (getitem_4,)""")


FIRES = {
    "all experts": (Form(), False),
    "experts of a rank": (OURS, True),
    "counted in order of tokens": (Form(counted=lambda ids, chosen: chosen.float()), False),
    "clamped to more": (Form(clamped=lambda ids: ids.clamp(0, E)), False),
    "clamped twice": (Form(clamped=lambda ids: ids.clamp(min=0).clamp(max=E - 1)), False),
}


@pytest.mark.parametrize("name", FIRES)
def test_biases_of_rows_are_an_operand(name: str) -> None:
    form, absent = FIRES[name]
    task, operands = only_task(fused(form), REDUCED)
    assert task.has_bias and task.has_absent == absent and not task.returns_products
    assert operands["bias"].startswith(("arg", "slice"))


def test_a_reduce_scatter_takes_them_too() -> None:
    task, _ = only_task(fused(OURS.scattered), "grouped_matmul_reduce_scatter")
    assert task.has_bias and task.has_absent


def test_products_that_the_graph_returns_have_their_biases() -> None:
    def kept(*operands: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        _, products, weights, order = Form().products(*operands)
        return all_reduce(side_by_side(products * weights, order).sum(1).bfloat16()), products

    task, _ = only_task(fused(kept), REDUCED)
    assert task.has_bias and task.returns_products


def with_raw_products(*operands: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    raw, products, weights, order = Form().products(*operands)
    return all_reduce(side_by_side(products * weights, order).sum(1).bfloat16()), raw


def used_twice(*operands: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    _, products, weights, order = Form().products(*operands)
    return all_reduce(side_by_side(products * weights, order).sum(1).bfloat16()), products.sin()


REFUSED = {
    # Whose ids they are.
    "experts in order of tokens": Form(named=lambda ids, chosen: chosen),
    "next experts": Form(named=lambda ids, chosen: (ids + 1) % E),
    "experts from the end": Form(named=lambda ids, chosen: ids - E),
    # How they are clamped.
    "clamped to fewer": Form(clamped=lambda ids: ids.clamp(max=E - 2)),
    "clamped from below": Form(clamped=lambda ids: ids.clamp(min=1)),
    # What the ends count, and in which order.
    "ends of other ids": Form(counted=lambda ids, chosen: ((ids + 1) % E).float()),
    "negative ids": Form(marked=lambda chosen: torch.where(chosen > 2, -1, chosen), clamped=lambda ids: ids.clamp(0)),
    "unknown ids": Form(marked=lambda chosen: chosen + 1, clamped=lambda ids: ids.clamp(max=E - 1)),
    "ids of any number": Form(marked=lambda chosen: chosen * 2, clamped=lambda ids: ids.clamp(max=E - 1)),
    "descending ids": Form(descending=True),
    "counted from one": Form(first=1),
    "counts summed up in two parts": Form(parts=2),
    "rounded ids": Form(counted=lambda ids, chosen: ids.bfloat16().float()),
    # Which biases they are.
    "scaled biases": Form(scale=0.5),
    "more biases than matrices": dataclasses.replace(OURS, wide=True),
    "products without biases are returned": with_raw_products,
    "products with biases are used": used_twice,
}


REASONS = {
    "counted from one": "expert_ends",
    "counts summed up in two parts": "expert_ends",
    "rounded ids": "expert_ends",
    "scaled biases": "no_matmul",
    "products without biases are returned": "intermediate_used",
    "products with biases are used": "intermediate_used",
}
"""Those of what is not refused for whose biases they are."""


@pytest.mark.parametrize("name", REFUSED)
def test_it_must_not_fire(name: str) -> None:
    if name == "rounded ids" and not KEPT_BY_TORCH:
        pytest.skip("this torch leaves out a rounding of whole numbers")
    (after,) = compiled_graphs(REFUSED[name], *OPERANDS)
    # What it computes is not compared: some of these ends leave rows behind, in which anything may lie.
    fuse(after)
    assert plain.made(after) == 0 and reasons(after) == [REASONS.get(name, "expert_bias")]


def test_one_expert_is_left_alone() -> None:
    """torch.histc takes its bounds from the data if they are equal."""

    def one(*operands: torch.Tensor) -> torch.Tensor:
        scores, x, up, down, bias = operands
        weights, chosen = scores.topk(K)
        ids, order = torch.where(chosen != 0, 1, 0).reshape(-1).sort()
        ends = torch.histc(ids.float(), 1, 0, 0).cumsum(0, dtype=torch.int32)
        rows = torch._grouped_mm(x[order // K], up[:1].mT, offs=ends)
        products = torch._grouped_mm(rows, down[:1].mT, offs=ends) + bias[:1][ids.clamp(max=0)]
        scaled = products.masked_fill((ids >= 1).unsqueeze(-1), 0.0) * weights.reshape(-1)[order].unsqueeze(-1)
        return all_reduce(side_by_side(scaled, order).sum(1).bfloat16())

    assert plain.made(fused(one)) == 0


@pytest.mark.parametrize("name", ["all experts", "experts of a rank", "next experts", "experts in order of tokens"])
def test_sums_of_one_rank_take_any_biases(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call gets the ids of the graph, which may be any."""
    form = REFUSED[name] if name in REFUSED else FIRES[name][0]
    assert isinstance(form, Form)
    monkeypatch.setattr(sums, "LEAST_SCATTERED", 0)

    def layer(up: torch.Tensor, x: torch.Tensor, scores: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        # A reduction that is fused, without which nothing is.
        x = all_reduce(x @ up[0].mT @ up[0])
        _, products, weights, order = form.products(scores, x, up, *others)
        index = (order // K).reshape(-1, 1).expand(-1, D)
        return torch.zeros_like(x).scatter_add(0, index, (products * weights).bfloat16())

    # A compiled graph takes them in the order in which they are used.
    given = (*OPERANDS[2:0:-1], OPERANDS[0], *OPERANDS[3:])
    (after,) = compiled_graphs(layer, *given)
    before = twin(after)
    assert pipeline.run(after.graph, Options())["combine_experts"] == 1
    (task,) = [task for _, task in local_calls(after.graph) if isinstance(task, CombineExperts)]
    assert task.has_bias
    after.graph.lint()
    after.recompile()
    plain.assert_same(after, before, given, 2e-2)


def test_ranges() -> None:
    def numbers(scores: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        chosen = scores.topk(K)[1]
        return (
            chosen,
            torch.where(chosen > 2, HERE, chosen % 2),
            chosen.clamp(1, 3).view(-1).sort()[0],
            ids.clamp(min=2),
            ids % -3,
            ids,
            chosen + 1,
        )

    (returned,) = traced(numbers, torch.empty(T, E), torch.empty(4, dtype=torch.int64)).graph.find_nodes(op="output")
    found = [range_of(node) for node in returned.args[0]]
    infinite = expert_rows.ANY
    expected = [Range(0, E - 1), Range(0, HERE), Range(1, 3), Range(2, infinite.most), infinite, infinite, infinite]
    assert found == expected
