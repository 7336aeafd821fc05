"""A Llama in all-reduce form that the compiler makes sequence parallel: as in eager mode, with all sites fused."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.distributed._functional_collectives import all_reduce

from ditron_inductor.errors import DitronNotReplicated
from ditron_inductor.report.explain import without_caches
from ditron_inductor.task.site_records import collect_sites
from ditron_inductor.tools.demo_model import LlamaConfig
from tests.models.interpreted import interpreted, without_generated_code
from tests.models.llama import Setup, assert_matches, build, compiled, inputs, step
from tests.ranks import RankContext, RankPools

CONFIG = LlamaConfig(dim=16, num_layers=2, num_heads=4, num_kv_heads=2, hidden_dim=32, max_seq_len=16)
ON = {"ditron.strategy": "tile", "ditron.sequence_parallel": "on"}


def setup(batch: int, seq_len: int, num_layers: int = 2) -> Setup:
    config = replace(CONFIG, num_layers=num_layers)
    return Setup(config, sequence_parallel=False, batch=batch, seq_len=seq_len, dtype=torch.float32, options=ON)


def check_inference(ctx: RankContext, batch: int, seq_len: int) -> None:
    torch._dynamo.reset()
    given = setup(batch, seq_len)
    model = build(ctx, given)
    with torch.no_grad(), collect_sites() as sink, without_caches(), without_generated_code():
        call = compiled(given, model)
        for seed in (2, 3):
            x = inputs(ctx, given, seed=seed)
            wanted, got = model(x, seq_len), call(x, seq_len)
            assert_matches({"output": got}, {"output": wanted}, given.dtype)
            # Replicated: the same bits everywhere.
            others = [torch.empty_like(got) for _ in range(ctx.world_size)]
            torch.distributed.all_gather(others, got.contiguous())
            assert all(torch.equal(got, other) for other in others)
    (graph,) = sink.graphs
    fused = Counter(site.kind for site in graph.sites if site.matched)
    assert fused == Counter(matmul_reduce_scatter=4, all_gather_matmul=3)
    # What the graph returns is gathered, with no matmul behind it.
    assert [site.kind for site in graph.sites if not site.matched] == ["all_gather_into_tensor"]


def check_training(ctx: RankContext) -> None:
    """Forward in parts, backward as it was: the same gradients."""
    torch._dynamo.reset()
    given = setup(1, 6, num_layers=1)
    model = build(ctx, given)
    x = inputs(ctx, given)
    with without_caches(), without_generated_code():
        assert_matches(step(given, model, compiled(given, model), x), step(given, model, model, x), given.dtype)


def check_what_differs(ctx: RankContext) -> list[str]:
    """The errors of programs in which something behind the reduction differs between ranks. Nothing does in the first
    one, and the second one is of the same structure.
    """

    def added(a: torch.Tensor, v: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return all_reduce(a @ v, "sum", ctx.group_name) + x

    def scaled(a: torch.Tensor, v: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return all_reduce(a @ v, "sum", ctx.group_name) * (ctx.rank + 2)

    def cut(a: torch.Tensor, v: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return all_reduce(a @ v, "sum", ctx.group_name) + torch.cat([x, x + 1])[ctx.rank : ctx.rank + 4]

    torch.manual_seed(ctx.rank)
    a, v, same, other = torch.randn(4, 6), torch.randn(6, 8), torch.ones(4, 8), torch.full((4, 8), ctx.rank + 2.0)
    found = []
    for fn, x in ((added, same), (added, other), (scaled, same), (cut, same)):
        torch._dynamo.reset()
        with without_caches():
            try:
                out = torch.compile(fn, backend=interpreted(ON))(a, v, x)
            except DitronNotReplicated as error:
                found.append(str(error))
            else:
                torch.testing.assert_close(out, fn(a, v, x))
                found.append("")
    return found


@pytest.mark.timeout(200)
def test_inference(rank_pools: RankPools) -> None:
    rank_pools.get("cpu", 2).run(check_inference, 3, 4, timeout=180)


@pytest.mark.timeout(200)
def test_training(rank_pools: RankPools) -> None:
    rank_pools.get("cpu", 2).run(check_training, timeout=180)


@pytest.mark.timeout(200)
def test_what_differs_between_ranks_is_an_error(rank_pools: RankPools) -> None:
    for nothing, added, scaled, cut in rank_pools.get("cpu", 2).run(check_what_differs, timeout=180):
        assert nothing == ""
        assert "rank 1" in added and "another float32[4, 8], read at test_sequence_parallel.py:" in added
        assert "another constant, mul.Tensor(_, 3) and not mul.Tensor(_, 2), than rank 0" in scaled
        assert "another constant, slice.Tensor(_, 0, 1, 5) and not slice.Tensor(_, 0, 0, 4), than rank 0" in cut
