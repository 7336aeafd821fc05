"""A decode step that is captured once and replayed many times, by ranks that come late now and then."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.generation import Model
from benchmarks.models.forms import cut
from benchmarks.models.zoo import MODELS, TINY
from benchmarks.tolerances import MODEL_TOLERANCES, relative_error
from ditron_inductor import serving
from ditron_inductor.passes.attention import cached_attention
from ditron_inductor.report.timing import captured
from ditron_inductor.task import trial
from ditron_inductor.tools.demo_model import LlamaConfig
from tests.cases import rare
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


def _again(ctx: RankContext, made: Callable[[int], torch.Tensor], first: list[torch.Tensor]) -> None:
    """Makes the steps that returned `first`, one for each index, many times by ranks that come late now and then. They
    have the same bits on all ranks, each time.
    """
    everyone = [torch.empty_like(first[0]) for _ in range(ctx.world_size)]
    for one in first:
        dist.all_gather(everyone, one)
        assert all(torch.equal(one, other) for other in everyone), "ranks have different bits"
    chance, mismatches, steps = random.Random(ctx.rank), Mismatches(ctx), STEPS[ctx.device.type]
    for index in range(steps):
        if chance.random() < LATE:
            delay(ctx, chance.random() * MOST_LATE_MS)
        mismatches.add([made(index % len(first))], [first[index % len(first)]])
        if ctx.device.type == "cuda" and index % AHEAD == AHEAD - 1:
            torch.cuda.synchronize()
    mismatches.assert_none(steps)


def _replayed(ctx: RankContext, setup: Setup) -> None:
    """Every step has the bits of the first one with the same input, which is right and the same on all ranks."""
    on_gpu = ctx.device.type == "cuda"
    torch._dynamo.reset()
    model = build(ctx, setup)
    given = [inputs(ctx, setup, seed=2 + index) for index in range(DRAWN)]
    x = given[0].clone()
    with torch.no_grad(), code_generated(on_gpu):
        call = compiled(setup, model)
        for _ in range(trial.FIRST_CALLS if on_gpu else 1):
            call(x, setup.seq_len)
        step = captured(lambda _: call(x, setup.seq_len), calls=1) if on_gpu else lambda _: call(x, setup.seq_len)

        def made(index: int) -> torch.Tensor:
            x.copy_(given[index])
            return step(0)

        first = [made(index).clone() for index in range(DRAWN)]
        for found, one in zip(first, given, strict=True):
            assert_matches({"output": found}, {"output": model(one, setup.seq_len)}, setup.dtype)
        _again(ctx, made, first)


def test_a_decode_step(rank_pools: RankPools) -> None:
    setup = Setup(SMALL, sequence_parallel=False, batch=3, seq_len=1, dtype=torch.float32)
    rank_pools.get("cpu", 2).run(_replayed, setup, timeout=200)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("batch", [1, 32, 128])
def test_ten_thousand_replays(gpu_pool: RankPool, batch: int) -> None:
    setup = Setup(LAYERS, sequence_parallel=False, batch=batch, seq_len=1, dtype=torch.bfloat16, options={})
    gpu_pool.run(_replayed, setup, timeout=280)


@dataclass(frozen=True)
class Cached:
    """A whole model with a cache for as many tokens as it makes. page: the tokens of a block, 0 for static caches."""

    name: str
    batch: int
    page: int = 0

    def __str__(self) -> str:
        return f"{self.name}-{self.batch}" + f"-page{self.page}" * (self.page > 0)


ROUNDS = 2


def _generated(ctx: RankContext, one: Cached) -> None:
    """Steps go through the positions of the caches again and again. In each of ROUNDS rounds other tokens stand there,
    so what a step has not stored, or not yet, is seen by the next ones. What a step returns has the bits of the first
    time, which is right and the same on all ranks.
    """
    on_gpu = ctx.device.type == "cuda"
    torch._dynamo.reset()
    dtype = torch.bfloat16 if on_gpu else torch.float32
    arch = MODELS[one.name] if on_gpu else replace(MODELS[one.name].like(TINY), head_dim=16)
    vocabulary, length = (2048, 48) if on_gpu else (96, 3)
    torch.manual_seed(1)
    with ctx.device:
        model = Model(arch, 1, one.batch, length, vocabulary, ctx.world_size, one.page).to(dtype).requires_grad_(False)
    cut(model.decoder, "ar", init_device_mesh(ctx.device.type, (ctx.world_size,)))
    places = [(part, at) for part in range(ROUNDS) for at in range(length)]
    given = torch.randint(0, vocabulary, (ROUNDS, length, one.batch, 1), generator=torch.Generator().manual_seed(2))
    given = given.to(ctx.device)
    tokens, position = given[0, 0].clone(), torch.zeros(1, dtype=torch.long, device=ctx.device)
    with torch.no_grad(), mock.patch.object(cached_attention, "GPUS", ("cpu", "cuda")):
        wanted = [model(given[place], position + place[1])[1].clone() for place in places]
        counters.clear()
        call = torch.compile(
            serving.local_parameters(model), backend="ditron", options=serving.options(cudagraphs=False)
        )
        for _ in range(trial.FIRST_CALLS if on_gpu else 1):
            call(tokens, position)
        assert counters["ditron"]["cached_attention"] == 1
        step = captured(lambda _: call(tokens, position)[1], calls=1) if on_gpu else lambda _: call(tokens, position)[1]
        core = model.decoder.layers[0].self_attn.core
        for cache in (core.keys, core.values):
            cache.zero_()

        def made(index: int) -> torch.Tensor:
            tokens.copy_(given[places[index]])
            position.fill_(places[index][1])
            return step(0)

        first = [made(index).clone() for index in range(len(places))]
        for found, right in zip(first, wanted, strict=True):
            assert relative_error(found, right) < MODEL_TOLERANCES[dtype]
        _again(ctx, made, first)


@pytest.mark.parametrize("one", [Cached("llama3-8b", 2), *rare(Cached("qwen3-30b-a3b", 2, page=2))], ids=str)
def test_steps_with_a_cache(rank_pools: RankPools, one: Cached) -> None:
    rank_pools.get("cpu", 2).run(_generated, one, timeout=200)


CACHED = (Cached("llama3-8b", 1), Cached("llama3-8b", 32, page=16), Cached("qwen3-30b-a3b", 8))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("one", CACHED, ids=str)
def test_ten_thousand_replays_with_a_cache(gpu_pool: RankPool, one: Cached) -> None:
    gpu_pool.run(_generated, one, timeout=280)
