"""Gate and up in alternate columns of one weight, with biases of the experts: one call, if the proofs hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import expecttest
import pytest
import torch
from torch import fx

from ditron_inductor import pipeline
from ditron_inductor.options import Options
from ditron_inductor.task.nodes import ExpertProjections
from ditron_inductor.task.verify import local_calls
from tests.passes.graphs import all_reduce, compiled_graphs, text, twin
from tests.passes.test_grouped_matmul_all_reduce import assert_same

pytestmark = pytest.mark.usefixtures("group")

T, D, F, E, K = 3, 16, 8, 6, 2
OPERANDS = (
    torch.empty(T, D), torch.empty(D, D), torch.empty(T, E), torch.empty(E, D, 2 * F), torch.empty(E, 2 * F),
    torch.empty(E, F, D),
)  # fmt: skip
"""In the order in which they are used."""


@dataclass(frozen=True)
class Layer:
    """The experts of a decode step as GPT-OSS writes them. named: the experts whose biases are added. table: of them.
    gate, up: of the first product. more: what else is made of that, or of its sum with the biases.
    """

    named: Callable[[torch.Tensor], torch.Tensor] = lambda ids: ids
    table: Callable[[torch.Tensor], torch.Tensor] = lambda bias: bias
    gate: Callable[[torch.Tensor], torch.Tensor] = lambda rows: rows[:, ::2]
    up: Callable[[torch.Tensor], torch.Tensor] = lambda rows: rows[:, 1::2]
    more: Callable[[torch.Tensor, torch.Tensor], Any] = lambda product, total: None
    biased: bool = True

    def __call__(
        self,
        x: torch.Tensor,
        norm: torch.Tensor,
        scores: torch.Tensor,
        gate_up: torch.Tensor,
        bias: torch.Tensor,
        down: torch.Tensor,
    ) -> Any:
        x = all_reduce(x @ norm)
        weights, chosen = scores.topk(K)
        ids = chosen.reshape(-1)
        product = torch.bmm(x.repeat_interleave(K, 0).unsqueeze(1), gate_up[ids]).squeeze(1)
        total = product + self.table(bias)[self.named(ids)] if self.biased else product + 0.5
        gate, up = self.gate(total).clamp(max=0.7), self.up(total).clamp(-0.7, 0.7)
        hidden = (up + 1) * (gate * torch.sigmoid(gate * 1.702))
        out = torch.bmm(hidden.unsqueeze(1), down[ids]).squeeze(1) * weights.reshape(-1, 1)
        reduced, others = all_reduce(out.view(-1, K, D).sum(1)), self.more(product, total)
        return reduced if others is None else (reduced, others)


def calls(module: fx.GraphModule) -> list[ExpertProjections]:
    """Runs all passes; the calls of experts."""
    pipeline.run(module.graph, Options())
    module.graph.lint()
    module.recompile()
    return [task for _, task in local_calls(module.graph) if isinstance(task, ExpertProjections)]


def same_results(
    fn: Callable[..., Any], given: tuple[torch.Tensor, ...] = OPERANDS
) -> tuple[list[ExpertProjections], fx.GraphModule]:
    """The calls of the graph, which computes what it computed before, and the graph."""
    (after,) = compiled_graphs(fn, *given)
    before = twin(after)
    found = calls(after)
    assert_same(after, before, given, 1e-4)
    return found, after


def test_golden_experts_of_gpt_oss() -> None:
    (module,) = compiled_graphs(Layer(), *(one.bfloat16() for one in OPERANDS))
    first, second = calls(module)
    assert first.interleaved and not second.interleaved
    lines = [line for line in text(module.graph).splitlines() if "expert_projections" in line]
    expecttest.assert_expected_inline("\n".join(lines), """\
expert_projections_3 = ditron.expert_projections([getitem_2, view, arg3_1, arg4_1, arg4_1], "top_k=2 by_token num_weights=2 num_extras=2 epilogue='cast(cast(minimum(maximum(cast(mm1 + odd(x0), bf16), -0.7), 0.7), bf16) + 1.0, bf16) * cast(cast(minimum(cast(mm0 + even(x1), bf16), 0.7), bf16) * cast(sigmoid(cast(cast(minimum(cast(mm0 + even(x1), bf16), 0.7), bf16) * 1.702, bf16)), bf16), bf16)' interleaved", None)
getitem_7 [6, 8] = expert_projections_3[0]
expert_projections_1 = ditron.expert_projections([getitem_7, view, arg5_1], 'top_k=2 num_weights=1', None)
getitem_4 [6, 16] = expert_projections_1[0]""")


def with_total(product: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    return total


FIRES = {
    "biases": Layer(),
    "clamped ids": Layer(named=lambda ids: ids.clamp(0, E - 1)),
    "views between": Layer(
        gate=lambda rows: rows.unsqueeze(1)[..., ::2].squeeze(1),
        up=lambda rows: rows.view(T, K, -1)[..., 1::2].view(-1, F),
    ),
}


@pytest.mark.parametrize("name", FIRES)
def test_gate_and_up_are_one_call(name: str) -> None:
    (first, second), after = same_results(FIRES[name])
    assert first.interleaved and first.num_extras == 2 and "even(x" in first.epilogue and "odd(x" in first.epilogue
    assert not second.epilogue and not after.graph.find_nodes(op="call_function", target=torch.ops.aten.index.Tensor)


REFUSED = {
    # Whose biases they are.
    "biases of other experts": Layer(named=lambda ids: (ids + 1) % E),
    "experts from the end": Layer(named=lambda ids: ids - E),
    "biases of all slots in another order": Layer(named=lambda ids: ids.flip(0)),
    "clamped to fewer": Layer(named=lambda ids: ids.clamp(0, E - 2)),
    "more biases than experts": Layer(table=lambda bias: torch.cat([bias, bias])),
    # Which columns they are.
    "gate twice": Layer(up=lambda rows: rows[:, ::2]),
    "every third column": Layer(gate=lambda rows: rows[:, : F // 2 * 3 : 3].repeat(1, 2)),
    "an op before the columns are parted": Layer(biased=False),
    # What else reads the product.
    "the sum is returned": Layer(more=with_total),
    "the product is returned": Layer(more=lambda product, total: product),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_must_not_fire(name: str) -> None:
    (module,) = compiled_graphs(REFUSED[name], *OPERANDS)
    assert [task.interleaved for task in calls(module)] == [False, False]


def test_rows_of_a_table_behind_one_product() -> None:
    """A bias that ends a chain is in the epilogue of its matmul."""

    def fn(
        x: torch.Tensor, norm: torch.Tensor, scores: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
    ) -> torch.Tensor:
        rows = all_reduce(x @ norm).repeat_interleave(K, 0).unsqueeze(1)
        ids = scores.topk(K)[1].reshape(-1)
        return all_reduce(torch.bmm(rows, weight[ids]).squeeze(1) + bias[ids])

    (task,), _ = same_results(fn, OPERANDS[:-1])
    assert task.epilogue == "mm0 + expert(x0)"
