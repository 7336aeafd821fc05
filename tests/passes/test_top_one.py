"""What experts return where each token takes one of them: nothing is added up, in front of a reduction."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ditron_inductor.passes.graph.slot_readings import readings
from tests.passes import test_absorb_sums as few
from tests.passes.graphs import all_reduce, compiled_graphs, fuse, only_task, text, traced
from tests.passes.test_combine_experts import calls
from tests.passes.test_grouped_matmul_all_reduce import OPERANDS, D, E, few_tokens, fused

__all__ = ["few_tokens"]
pytestmark = pytest.mark.usefixtures("group", "few_tokens")
KIND = "grouped_matmul_all_reduce"
Operands = tuple[torch.Tensor, ...]
Layer = Callable[..., torch.Tensor]


def products_of(
    scores: torch.Tensor, x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, *, before: bool = False
) -> Operands:
    """(The products of the sorted tokens, their weights [T, 1], the token at each place). before: rows are scaled before
    they are multiplied.
    """
    weights, chosen = scores.topk(1)
    weights = weights.sigmoid()
    ids, order = chosen.reshape(-1).sort()
    ends = torch.histc(ids.float(), E, 0, E - 1).cumsum(0, dtype=torch.int32)
    rows = x[order]
    rows = (rows * weights[order]).bfloat16() if before else rows
    return torch._grouped_mm(torch._grouped_mm(rows, up.mT, offs=ends), down.mT, offs=ends), weights, order


def places_of(order: torch.Tensor) -> torch.Tensor:
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    return places


def written(*operands: torch.Tensor) -> torch.Tensor:
    products, weights, order = products_of(*operands)
    terms = (products * weights[order]).bfloat16()
    return torch.empty_like(terms).index_put((order,), terms)


def written_and_scaled(*operands: torch.Tensor) -> torch.Tensor:
    products, weights, order = products_of(*operands)
    return torch.empty_like(products).index_put((order,), products) * weights.bfloat16() + operands[1].sin()


def indexed(*operands: torch.Tensor) -> torch.Tensor:
    products, weights, order = products_of(*operands)
    return (products * weights[order])[places_of(order)].bfloat16()


def indexed_and_scaled(*operands: torch.Tensor) -> torch.Tensor:
    products, weights, order = products_of(*operands)
    return (products[places_of(order)] * weights).bfloat16().view(2, -1, D)


def gathered(*operands: torch.Tensor) -> torch.Tensor:
    products, weights, order = products_of(*operands)
    return products.gather(0, places_of(order).unsqueeze(-1).expand(-1, D)) * weights.bfloat16() * 2.5


def added_to_another(*operands: torch.Tensor) -> torch.Tensor:
    """As TorchTitan computes Llama 4: the rows are scaled before, and added to those of a shared expert."""
    products, _, order = products_of(*operands, before=True)
    return operands[1].sin().scatter_add(0, order.unsqueeze(-1).expand(-1, D), products)


def by_einsum(*operands: torch.Tensor) -> torch.Tensor:
    products, weights, order = products_of(*operands)
    return torch.einsum("tk,tkd->td", weights.bfloat16(), products[places_of(order)].view(-1, 1, D))


def by_sum(*operands: torch.Tensor) -> torch.Tensor:
    products, weights, order = products_of(*operands)
    return (products[places_of(order)].view(-1, 1, D) * weights.unsqueeze(-1)).sum(1).bfloat16()


FORMS = [
    written, written_and_scaled, indexed, indexed_and_scaled, gathered, added_to_another, by_einsum, by_sum,
]  # fmt: skip


def reduced(fn: Layer) -> Layer:
    return lambda *operands: all_reduce(fn(*operands))


@pytest.mark.parametrize("fn", FORMS)
def test_it_becomes_one_node(fn: Layer) -> None:
    task, _ = only_task(fused(reduced(fn)), KIND)
    assert task.top_k == 1


@pytest.mark.parametrize("fn", [written_and_scaled, indexed_and_scaled])
def test_nothing_is_a_call_of_its_own(fn: Layer) -> None:
    """Inductor makes one kernel of what stands behind the products."""

    def layer(*operands: torch.Tensor) -> torch.Tensor:
        scores, x, up, down = operands
        return fn(scores, all_reduce(x @ up[0].mT @ up[0]), up, down)

    (module,) = compiled_graphs(layer, *OPERANDS)
    assert calls(module) == 0


def scaled_by_columns(*operands: torch.Tensor) -> torch.Tensor:
    products, _, order = products_of(*operands)
    return products[places_of(order)] * operands[1]


def scaled_at_other_places(*operands: torch.Tensor) -> torch.Tensor:
    """One token may have the products of another, and its own weight."""
    products, weights, _ = products_of(*operands)
    return products[operands[0].argmax(1)] * weights.bfloat16()


def written_to_some(*operands: torch.Tensor) -> torch.Tensor:
    products, _, order = products_of(*operands)
    return torch.ones_like(products).index_put((order // 2 * 2,), products)


@pytest.mark.parametrize("fn", [scaled_by_columns, scaled_at_other_places, written_to_some])
def test_it_must_not_fire(fn: Layer) -> None:
    (graph,) = compiled_graphs(reduced(fn), *OPERANDS)
    fuse(graph)
    assert KIND not in text(graph.graph)


def decoded(scores: torch.Tensor, x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    weights, chosen = scores.topk(1)
    ids, rows = chosen.view(-1), x.unsqueeze(-1)
    rows = torch.bmm(up[ids], rows).squeeze(-1)[:, : few.F]
    return torch.bmm(down[ids], rows.unsqueeze(-1)).squeeze(-1) * weights.sigmoid().to(few.BF16)


def test_a_decode_step_scales_in_its_reduction() -> None:
    task, operands = only_task(few.compiled(few.layer(decoded)), few.KIND)
    assert task.top_k == 1
    assert "factors" in operands


def test_a_scaled_matmul_is_no_expert() -> None:
    """What a gate scales, as that of a shared expert, is left to other passes, and to Inductor."""

    def fn(scores: torch.Tensor, x: torch.Tensor, up: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, ...]:
        product = (x * scores[:, :1].sin().to(few.BF16)) @ up[0]
        return product * scores[:, :1].sigmoid().to(few.BF16), product

    assert not few.made(few.compiled(few.layer(fn)))


def test_a_number_of_tokens_is_no_weight() -> None:
    """A symbol is a node of the graph as well, but no tensor."""
    module = traced(lambda x: x * x.shape[0], torch.ones(6, 5), dynamic=True)
    (product,) = module.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)
    assert product.args[1].meta["val"].node.is_symbolic()
    assert not list(readings(product))
