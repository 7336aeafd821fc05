"""A sequence-parallel Llama whose gathers make their shards themselves: as in eager mode, forward and backward."""

from __future__ import annotations

import pytest
import torch

from ditron_inductor.report.explain import without_caches
from ditron_inductor.task.site_records import collect_sites
from ditron_inductor.tools.demo_model import LlamaConfig
from tests.models.interpreted import without_generated_code
from tests.models.llama import Setup, assert_matches, build, compiled, inputs, step
from tests.ranks import RankContext, RankPools

CONFIG = LlamaConfig(dim=16, num_layers=1, num_heads=4, num_kv_heads=2, hidden_dim=32, max_seq_len=16)
SETUP = Setup(
    CONFIG, sequence_parallel=True, batch=2, seq_len=8, dtype=torch.float32, options={"ditron.strategy": "chunked"}
)


def check(ctx: RankContext) -> list[str]:
    """The patterns of the forward graph's gathers."""
    torch._dynamo.reset()
    model = build(ctx, SETUP)
    with collect_sites() as sink, without_caches(), without_generated_code():
        call = compiled(SETUP, model)
        x = inputs(ctx, SETUP)
        assert_matches(step(SETUP, model, call, x), step(SETUP, model, model, x), SETUP.dtype)
    forward = next(graph for graph in sink.graphs if not graph.is_backward)
    return [site.pattern for site in forward.sites if site.kind == "all_gather_matmul"]


@pytest.mark.timeout(300)
def test_training(rank_pools: RankPools) -> None:
    for patterns in rank_pools.get("cpu", 2).run(check, timeout=280):
        # The first norm is of the input, which nothing has been added to.
        made = [pattern.split("all_gather")[0] for pattern in patterns]
        assert made == ["rms norm -> ", "x + residual -> rms norm -> "]
