"""grouped_matmul_all_reduce: which reductions of experts become a node, and what keeps them as they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import expecttest
import pytest
import torch

from benchmarks.tolerances import relative_error
from ditron_inductor.options import Options
from ditron_inductor.task.nodes import MOST_EXPERT_TOKENS
from tests.passes.graphs import WORLD_SIZE, all_reduce, compiled_graphs, fuse, only_task, reasons, run_ranks, text

pytestmark = pytest.mark.usefixtures("group")
KIND = "grouped_matmul_all_reduce"
NAMED = replace(Options(), fusions=(*Options().fusions, KIND))
T, D, F, E, K = MOST_EXPERT_TOKENS + 6, 16, 8, 6, 2
X = torch.empty(T, D).bfloat16()
SCORES = torch.empty(T, E)
UP = torch.empty(E, F, D).bfloat16()
DOWN = torch.empty(E, D, F).bfloat16()


def routed(scores: torch.Tensor, x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """The products of all slots, scaled, with the places of the slots of each token: as `transformers` writes it."""
    weights, chosen = scores.topk(K)
    ids, order = chosen.reshape(-1).sort()
    ends = torch.histc(ids.float(), E, 0, E - 1).cumsum(0, dtype=torch.int32)
    rows = torch._grouped_mm(x[order // K], up.mT, offs=ends)
    products = torch._grouped_mm(rows, down.mT, offs=ends) * weights.reshape(-1)[order].unsqueeze(-1)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    return products[places]


def experts(*operands: torch.Tensor) -> torch.Tensor:
    return all_reduce(routed(*operands).view(T, K, D).sum(1).bfloat16())


def with_another(*operands: torch.Tensor) -> torch.Tensor:
    """With what another expert returns, which all tokens use, in another shape."""
    total = routed(*operands).view(T, K, D).sum(1).bfloat16().view(2, T // 2, D)
    return all_reduce(total + operands[1].sin().view(2, T // 2, D))


def fused(fn: Callable[..., Any], *operands: torch.Tensor, options: Options = NAMED) -> Any:
    """The graph after the fusions, which computes on all ranks what it computed before."""
    given = operands or (SCORES, X, UP, DOWN)
    (before,), (after,) = compiled_graphs(fn, *given), compiled_graphs(fn, *given)
    fuse(after, options)
    generator = torch.Generator().manual_seed(0)
    inputs = [[torch.randn(one.shape, generator=generator).to(one.dtype) for one in given] for _ in range(WORLD_SIZE)]
    # The node rounds once, and the graph several times.
    for got, wanted in zip(run_ranks(after, inputs), run_ranks(before, inputs), strict=True):
        assert all(relative_error(one, other) < 1e-2 for one, other in zip(got, wanted, strict=True))
    return after


def kinds(module: Any) -> list[str]:
    return [node.name for node in module.graph.nodes if node.name.startswith(KIND)]


def test_golden_experts_of_a_prompt() -> None:
    after = fused(experts)
    task, _ = only_task(after, KIND)
    assert (task.top_k, task.has_added, task.reduce_op) == (K, False, "sum")
    lines = text(after.graph).splitlines()
    begin = next(index for index, line in enumerate(lines) if "_grouped_mm" in line)
    expecttest.assert_expected_inline("\n".join(lines[begin:]), """\
_grouped_mm [140, 8] = aten._grouped_mm(index, permute, cumsum)
permute_1 [6, 8, 16] = aten.permute(arg3_1, [0, 2, 1])
view_1 [140] = aten.reshape(getitem, [-1])
index_1 [140] = aten.index.Tensor(view_1, [getitem_3])
unsqueeze [140, 1] = aten.unsqueeze(index_1, -1)
empty [140] = aten.empty.memory_format([140], dtype=torch.int64, layout=torch.strided, device=device(type='cpu'), pin_memory=False)
iota [140] = prims.iota(140, start=0, step=1, dtype=torch.int64, device=device(type='cpu'), requires_grad=False)
index_put [140] = aten.index_put(empty, [getitem_3], iota)
reshape_default [140] = aten.reshape(unsqueeze, [140])
grouped_matmul_all_reduce = ditron.grouped_matmul_all_reduce([_grouped_mm, permute_1, cumsum, index_put, reshape_default], "reduce_op=sum top_k=2 world_size=4 group_name=0 site='' trials", None)
getitem_4 [70, 16] = grouped_matmul_all_reduce[0]
return (getitem_4,)""")


def test_what_is_added_goes_into_the_node() -> None:
    after = fused(with_another)
    task, operands = only_task(after, KIND)
    assert task.has_added and operands["added"] == "reshape_default_1"


def test_it_has_to_be_named() -> None:
    after = fused(experts, options=Options())
    assert kinds(after) == [] and reasons(after) == ["disabled"]


def few(scores: torch.Tensor, x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    rows = MOST_EXPERT_TOKENS
    return all_reduce(routed(scores[:rows], x[:rows], up, down).view(rows, K, D).sum(1).bfloat16())


def used_elsewhere(*operands: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    total = routed(*operands).view(T, K, D).sum(1).bfloat16()
    return all_reduce(total), total.amax()


def slots_of_others(*operands: torch.Tensor) -> torch.Tensor:
    """The slots of a token are not side by side."""
    return all_reduce(routed(*operands).view(K, T, D).sum(0).bfloat16())


def sums_over_tokens(*operands: torch.Tensor) -> torch.Tensor:
    return all_reduce(routed(*operands).view(T, K, D).sum(0).bfloat16())


def fewer_places(*operands: torch.Tensor) -> torch.Tensor:
    return all_reduce(routed(*operands)[: (T - 1) * K].view(T - 1, K, D).sum(1).bfloat16())


def scaled_columns(scores: torch.Tensor, x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """The factors are not of slots."""
    places, scale = torch.cat([scores[:, 0].argsort()] * K), scores[:1].repeat(1, D // 2)[:, :D]
    ends = (torch.arange(E, device=x.device, dtype=torch.int32) + 1) * (T * K // E)
    products = torch._grouped_mm(torch.cat([x @ up[0].mT] * K), down.mT, offs=ends) * scale
    return all_reduce(products[places].view(T, K, D).sum(1).bfloat16())


def summed_in_fp32(*operands: torch.Tensor) -> torch.Tensor:
    return all_reduce(routed(*operands).view(T, K, D).sum(1))


REFUSED = (few, used_elsewhere, slots_of_others, sums_over_tokens, fewer_places, scaled_columns, summed_in_fp32)


@pytest.mark.parametrize("fn", REFUSED)
def test_it_must_not_fire(fn: Callable[..., Any]) -> None:
    assert kinds(fused(fn)) == []


def test_a_dynamic_number_of_tokens_is_left_alone() -> None:
    def of_any(scores: torch.Tensor, x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        return all_reduce(routed(scores, x, up, down).view(x.shape[0], K, D).sum(1).bfloat16())

    (module,) = compiled_graphs(of_any, SCORES, X, UP, DOWN, dynamic=True)
    fuse(module, NAMED)
    assert kinds(module) == []
