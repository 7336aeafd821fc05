"""A mixture whose experts have a capacity: slots beyond it have the weight 0. It is fused, and equal to eager."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch.distributed import _functional_collectives as funcol
from torch.nn.functional import one_hot, rms_norm, silu

from benchmarks.tolerances import assert_near
from ditron_inductor.report.explain import without_caches
from tests.models.interpreted import interpreted
from tests.rank_process import RankContext
from tests.ranks import RankPools

fuse = importlib.import_module("ditron_inductor.passes.fuse.grouped_matmul_all_reduce")
D, F, E, K, CAPACITY = 32, 16, 4, 2, 3
Experts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def copied(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """With the weights of each slot copied, as for a few tokens."""
    rows = x.repeat_interleave(K, 0)
    gate, value = torch.bmm(up[ids], rows.unsqueeze(-1)).squeeze(-1).chunk(2, -1)
    out = torch.bmm(down[ids], (silu(gate) * value).unsqueeze(-1)).squeeze(-1)
    return (out * weights.unsqueeze(-1)).view(-1, K, D).sum(1).to(x.dtype)


def grouped(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """By grouped matmuls of the slots, sorted by expert."""
    ids, order = ids.sort()
    ends = torch.histc(ids.float(), E, 0, E - 1).cumsum(0, dtype=torch.int32)
    gate, value = torch._grouped_mm(x[order // K], up.mT, offs=ends).chunk(2, -1)
    products = torch._grouped_mm(silu(gate) * value, down.mT, offs=ends)
    terms = products * weights[order].unsqueeze(-1)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    return terms[places].view(-1, K, D).sum(1).to(x.dtype)


def limited(ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The weights, 0 for the slots that come when their expert has as many as it takes."""
    taken = one_hot(ids, E)
    position = (taken.cumsum(0) * taken).sum(-1) - 1
    return torch.where(position < CAPACITY, weights, 0.0)


def compared(ctx: RankContext, experts: Experts, tokens: int) -> dict[str, int]:
    """What was fused of a layer, compiled and compared with eager."""

    def layer(x: torch.Tensor, w: torch.Tensor, router: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        x = rms_norm(funcol.all_reduce(x @ w, "sum", dist.group.WORLD), (D,))
        factors, chosen = (x @ router).float().softmax(-1).topk(K)
        ids = chosen.reshape(-1)
        out = funcol.all_reduce(experts(x, ids, limited(ids, factors.reshape(-1)), *weights), "sum", dist.group.WORLD)
        return rms_norm(out + x, (D,))

    generator = torch.Generator().manual_seed(ctx.rank)
    shapes = (tokens, 8), (8, D), (D, E), (E, 2 * F, D), (E, D, F)
    given = [torch.randn(shape, generator=generator).bfloat16() / shape[-1] ** 0.5 for shape in shapes]
    # All ranks choose alike.
    given[2] = torch.randn(D, E, generator=torch.Generator().manual_seed(9)).bfloat16()
    torch._dynamo.reset()
    counters.clear()
    quick = mock.patch.object(fuse, "LEAST_TOKENS", 64)
    with quick, without_caches(), torch.no_grad(), inductor_config.patch(unroll_reductions_threshold=2):
        wanted = layer(*given)
        assert_near(torch.compile(layer, backend=interpreted({}), fullgraph=True)(*given), wanted.double())
        # The capacity is what the test is about: without it the result is another one.
        with mock.patch(f"{__name__}.CAPACITY", tokens * K):
            assert not torch.allclose(layer(*given), wanted, atol=0.1)
    return dict(counters["ditron"])


@pytest.mark.parametrize(
    ("experts", "tokens", "kinds"),
    [
        (copied, 10, {"expert_projections": 2, "absorb_sums": 1}),
        (grouped, 72, {"grouped_matmul_all_reduce": 1}),
    ],
)
def test_slots_beyond_a_capacity(rank_pools: RankPools, experts: Experts, tokens: int, kinds: dict[str, int]) -> None:
    for fused in rank_pools.get("cpu", 2).run(compared, experts, tokens):
        assert {kind: fused[kind] for kind in kinds} == kinds
