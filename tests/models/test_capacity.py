"""A mixture whose experts have a capacity, which is fused where slots beyond it have the weight 0 and lie among the
others, and is left alone where they go to a row of a buffer. It is equal to eager in both directions.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch.distributed import _functional_collectives as funcol
from torch.nn.functional import one_hot, rms_norm, silu

from benchmarks.tolerances import MODEL_TOLERANCES, assert_near, relative_error
from ditron_inductor.report.explain import without_caches
from ditron_inductor.task.site_records import collect_sites
from tests.cases import rare
from tests.fuzz.words import Copied, Reduced
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
    return (out * limited(ids, weights).unsqueeze(-1)).view(-1, K, D).sum(1).to(x.dtype)


def grouped(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """By grouped matmuls of the slots, sorted by expert."""
    weights = limited(ids, weights)
    ids, order = ids.sort()
    ends = torch.histc(ids.float(), E, 0, E - 1).cumsum(0, dtype=torch.int32)
    gate, value = torch._grouped_mm(x[order // K], up.mT, offs=ends).chunk(2, -1)
    products = torch._grouped_mm(silu(gate) * value, down.mT, offs=ends)
    terms = products * weights[order].unsqueeze(-1)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    return terms[places].view(-1, K, D).sum(1).to(x.dtype)


def dropped(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """By grouped matmuls, with the slots beyond the capacity sorted behind those of all experts, where nothing is
    multiplied, as `transformers` has slots of other ranks.
    """
    ids, order = torch.where(place_of(ids) < CAPACITY, ids, E).sort()
    ends = torch.histc(ids.float(), E, 0, E - 1).cumsum(0, dtype=torch.int32)
    absent = (ids >= E).unsqueeze(-1)
    rows = x[order // K].masked_fill(absent, 0.0)
    gate, value = torch._grouped_mm(rows, up.mT, offs=ends).masked_fill(absent, 0.0).chunk(2, -1)
    products = torch._grouped_mm(silu(gate) * value, down.mT, offs=ends).masked_fill(absent, 0.0)
    terms = products * weights[order].unsqueeze(-1)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    return terms[places].view(-1, K, D).sum(1).to(x.dtype)


def buffered(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """With a buffer of as many rows for each expert as it takes, and one behind them for all slots beyond that."""
    place = place_of(ids)
    place = torch.where(place < CAPACITY, ids * CAPACITY + place, E * CAPACITY)
    buffer = x.new_zeros(E * CAPACITY + 1, D).index_copy(0, place, x.repeat_interleave(K, 0))
    gate, value = torch.bmm(buffer[:-1].view(E, CAPACITY, D), up.mT).chunk(2, -1)
    out = torch.bmm(silu(gate) * value, down.mT).view(-1, D)
    terms = torch.cat([out, out.new_zeros(1, D)])[place] * weights.unsqueeze(-1)
    return terms.view(-1, K, D).sum(1).to(x.dtype)


def place_of(ids: torch.Tensor) -> torch.Tensor:
    """How many slots in front of each have the same expert."""
    taken = one_hot(ids, E)
    return (taken.cumsum(0) * taken).sum(-1) - 1


def limited(ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The weights, 0 for the slots that come when their expert has as many as it takes."""
    return torch.where(place_of(ids) < CAPACITY, weights, 0.0)


def compared(ctx: RankContext, experts: Experts, tokens: int, train: bool) -> tuple[dict[str, int], list[Counter[str]]]:
    """(What was fused of a layer, what became of the collectives of each of its graphs), after a comparison with eager
    of the result, and in training of all gradients.
    """
    group = dist.group.WORLD

    def layer(x: torch.Tensor, w: torch.Tensor, router: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        x = rms_norm(Reduced.apply(x @ w, group, "sum") if train else funcol.all_reduce(x @ w, "sum", group), (D,))
        factors, chosen = (x @ router).float().softmax(-1).topk(K)
        rows = Copied.apply(x, group) if train else x
        out = experts(rows, chosen.reshape(-1), factors.reshape(-1), *weights)
        return rms_norm((Reduced.apply(out, group, "sum") if train else funcol.all_reduce(out, "sum", group)) + x, (D,))

    def step(call: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        leaves = [one.clone().requires_grad_(train) for one in given]
        out = call(*leaves)
        if train:
            (out.float() * torch.linspace(-1, 1, D)).sum().backward()
        return [out.detach(), *(one.grad for one in leaves if one.grad is not None)]

    generator = torch.Generator().manual_seed(ctx.rank)
    shapes = (tokens, 8), (8, D), (D, E), (E, 2 * F, D), (E, D, F)
    given = [torch.randn(shape, generator=generator).bfloat16() / shape[-1] ** 0.5 for shape in shapes]
    # All ranks choose alike.
    given[2] = torch.randn(D, E, generator=torch.Generator().manual_seed(9)).bfloat16()
    torch._dynamo.reset()
    counters.clear()
    quick = mock.patch.object(fuse, "LEAST_TOKENS", 64)
    unrolled = inductor_config.patch(unroll_reductions_threshold=2)
    with quick, without_caches(), torch.set_grad_enabled(train), unrolled, collect_sites() as sink:
        wanted = step(layer)
        found = step(torch.compile(layer, backend=interpreted({}), fullgraph=True))
        assert len(found) == len(wanted) == (1 + len(given) if train else 1)
        assert_near(found[0], wanted[0].double())
        errors = [relative_error(mine, other) for mine, other in zip(found, wanted, strict=True)]
        assert max(errors) <= MODEL_TOLERANCES[torch.bfloat16], errors
        # The capacity is what the test is about: without it the result is another one.
        with mock.patch(f"{__name__}.CAPACITY", tokens * K):
            assert not torch.allclose(step(layer)[0], wanted[0], atol=0.1)
    became = [
        Counter(one.kind if one.matched else f"{one.kind}: {one.reason_code}" for one in graph.sites)
        for graph in sink.graphs
    ]
    return dict(counters["ditron"]), became


FEW, MANY, REDUCED = 10, 72, "grouped_matmul_all_reduce"


@pytest.mark.parametrize(
    ("experts", "tokens", "kinds", "world_size"),
    [
        (copied, FEW, {"expert_projections": 2, "absorb_sums": 1}, 2),
        (grouped, MANY, {REDUCED: 1, "grouped_projections": 1}, 2),
        (dropped, MANY, {REDUCED: 1, "grouped_projections": 1}, 2),
        # The reduction is one with its norm, and nothing of the experts is fused.
        (buffered, MANY, {"all_reduce_rms_norm": 1, REDUCED: 0, "grouped_projections": 0, "combine_experts": 0}, 2),
        *rare(
            (buffered, FEW, {"all_reduce_rms_norm": 1, "expert_projections": 0, "absorb_sums": 0}, 2),
            (copied, FEW, {"expert_projections": 2, "absorb_sums": 1}, 4),
            (grouped, MANY, {REDUCED: 1, "grouped_projections": 1}, 4),
            (dropped, MANY, {REDUCED: 1, "grouped_projections": 1}, 4),
        ),
    ],
)
def test_slots_beyond_a_capacity(
    rank_pools: RankPools, experts: Experts, tokens: int, kinds: dict[str, int], world_size: int
) -> None:
    for fused, _ in rank_pools.get("cpu", world_size).run(compared, experts, tokens, False):
        assert {kind: fused[kind] for kind in kinds} == kinds


@pytest.mark.parametrize(
    ("experts", "fused", "world_size"),
    [
        (grouped, True, 2),
        *rare((dropped, True, 2), (buffered, False, 2), (grouped, True, 4), (dropped, True, 4), (buffered, False, 4)),
    ],
)
def test_training_with_a_capacity(rank_pools: RankPools, experts: Experts, fused: bool, world_size: int) -> None:
    behind = {REDUCED: 1} if fused else {"all_reduce_rms_norm": 1}
    wanted = [{"matmul_all_reduce": 1} | behind, {REDUCED: 1} if fused else {"all_reduce: batched_matmul": 1}]
    for _, became in rank_pools.get("cpu", world_size).run(compared, experts, MANY, True):
        assert became == wanted
