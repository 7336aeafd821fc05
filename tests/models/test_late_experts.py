"""A rank whose graph differs in a later call, after the ranks have agreed on the reductions of experts, takes part."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.distributed import _functional_collectives as funcol

from benchmarks.tolerances import relative_error
from ditron_inductor.task.nodes import FUSIONS
from tests.cases import rare
from tests.rank_process import RankContext
from tests.ranks import RankPools

T, D, F, E, K = 48, 16, 8, 6, 2
Reduce = Callable[[torch.Tensor], torch.Tensor]


def experts(scores: torch.Tensor, x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """What the experts return for each token, as `transformers` writes it."""
    weights, chosen = scores.topk(K)
    ids, order = chosen.reshape(-1).sort()
    ends = torch.histc(ids.float(), E, 0, E - 1).cumsum(0, dtype=torch.int32)
    products = torch._grouped_mm(torch._grouped_mm(x[order // K], up.mT, offs=ends), down.mT, offs=ends)
    terms = products * weights.reshape(-1)[order].unsqueeze(-1)
    return terms[order.argsort()].view(-1, K, D).sum(1).bfloat16()


def whole(total: torch.Tensor) -> torch.Tensor:
    return funcol.all_reduce(total, "sum", dist.group.WORLD)


def sequences(total: torch.Tensor) -> torch.Tensor:
    return funcol.reduce_scatter_tensor(total.view(3, -1, D), "sum", 1, dist.group.WORLD)


REDUCTIONS: dict[str, Reduce] = {"grouped_matmul_all_reduce": whole, "grouped_matmul_reduce_scatter": sequences}


def differs_later(ctx: RankContext, kind: str, statistic: bool) -> int:
    """Compares four calls with eager, in one of which a rank reads the sum too, or has no tokens; how many nodes."""
    reduce = REDUCTIONS[kind]

    def step(call: int, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        odd = ctx.rank == 1 and call == 2
        total = torch.zeros_like(operands[1]) if odd and not statistic else experts(*operands)
        reduced = reduce(total)
        return (reduced, total.abs().max()) if odd and statistic else (reduced,)

    torch._dynamo.reset()
    counters.clear()
    drawn = torch.Generator().manual_seed(ctx.rank)
    fuse = importlib.import_module("ditron_inductor.passes.fuse.grouped_matmul_all_reduce")
    options = {"ditron.fusions": FUSIONS, "ditron.strategy": "tile", "ditron.meeting_s": 2.0}
    with mock.patch.object(fuse, "LEAST_TOKENS", T), torch.no_grad():
        compiled = torch.compile(step, backend="ditron", options=options)
        for call in range(4):
            shapes = (T, E), (T, D), (E, F, D), (E, D, F)
            scores, *others = (torch.randn(shape, generator=drawn) for shape in shapes)
            operands = scores, *(one.bfloat16() for one in others)
            for got, wanted in zip(compiled(call, *operands), step(call, *operands), strict=True):
                assert relative_error(got, wanted) < 2e-2, call
    return counters["ditron"][kind]


@pytest.mark.timeout(220)
@pytest.mark.parametrize(
    ("kind", "statistic"),
    [
        ("grouped_matmul_all_reduce", False),
        *rare(
            ("grouped_matmul_reduce_scatter", False),
            ("grouped_matmul_all_reduce", True),
            ("grouped_matmul_reduce_scatter", True),
        ),
    ],
)
def test_a_rank_that_differs_later_takes_part(rank_pools: RankPools, kind: str, statistic: bool) -> None:
    made = rank_pools.get("cpu", 2).run(differs_later, kind, statistic, timeout=200)
    assert all(count >= 1 for count in made)
