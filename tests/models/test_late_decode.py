"""A decode step that is captured once and replayed many times, by ranks that come late now and then."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist

from ditron_inductor.report.timing import captured
from ditron_inductor.task import trial
from ditron_inductor.tools.demo_model import LlamaConfig
from tests.lowering.stress import Mismatches, delay
from tests.models.interpreted import code_generated
from tests.models.llama import Setup, assert_matches, build, compiled, inputs
from tests.rank_process import RankContext
from tests.ranks import RankPool, RankPools

SMALL = LlamaConfig(dim=32, num_layers=2, num_heads=4, num_kv_heads=2, hidden_dim=64, max_seq_len=64)
LAYERS = LlamaConfig.llama_8b(num_layers=2)
STEPS = {"cpu": 8, "cuda": 10_000}
DRAWN = 8
LATE, MOST_LATE_MS = 0.02, 2.0
AHEAD = 500
"""After so many steps the host waits for the GPU."""


def _replayed(ctx: RankContext, setup: Setup) -> None:
    """Every step has the bits of the first one with the same input, which is right and the same on all ranks."""
    on_gpu = ctx.device.type == "cuda"
    torch._dynamo.reset()
    model = build(ctx, setup)
    given = [inputs(ctx, setup, seed=2 + index) for index in range(DRAWN)]
    x = given[0].clone()
    chance = random.Random(ctx.rank)
    with torch.no_grad(), code_generated(on_gpu):
        call = compiled(setup, model)
        for _ in range(trial.ALL_CALLS if on_gpu else 1):
            call(x, setup.seq_len)
        step = captured(lambda _: call(x, setup.seq_len), calls=1) if on_gpu else lambda _: call(x, setup.seq_len)
        first = []
        for one in given:
            x.copy_(one)
            first.append(step(0).clone())
            assert_matches({"output": first[-1]}, {"output": model(one, setup.seq_len)}, setup.dtype)
        everyone = [torch.empty_like(first[0]) for _ in range(ctx.world_size)]
        for one in first:
            dist.all_gather(everyone, one)
            assert all(torch.equal(one, other) for other in everyone), "ranks have different bits"
        mismatches = Mismatches(ctx)
        for index in range(STEPS[ctx.device.type]):
            if chance.random() < LATE:
                delay(ctx, chance.random() * MOST_LATE_MS)
            x.copy_(given[index % DRAWN])
            mismatches.add([step(0)], [first[index % DRAWN]])
            if on_gpu and index % AHEAD == AHEAD - 1:
                torch.cuda.synchronize()
        mismatches.assert_none(STEPS[ctx.device.type])


def test_a_decode_step(rank_pools: RankPools) -> None:
    setup = Setup(SMALL, sequence_parallel=False, batch=3, seq_len=1, dtype=torch.float32)
    rank_pools.get("cpu", 2).run(_replayed, setup, timeout=200)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("batch", [1, 32, 128])
def test_ten_thousand_replays(gpu_pool: RankPool, batch: int) -> None:
    setup = Setup(LAYERS, sequence_parallel=False, batch=batch, seq_len=1, dtype=torch.bfloat16, options={})
    gpu_pool.run(_replayed, setup, timeout=280)
