"""Generation with a static cache: compiled steps compute, and leave behind in the caches, what eager ones do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
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
from tests.rank_process import RankContext
from tests.ranks import RankPools

BATCH, LENGTH, LAYERS, VOCABULARY = 2, 24, 1, 96


def steps(step: Any, model: Model, device: torch.device, count: int, given: list[torch.Tensor]) -> list[torch.Tensor]:
    """The logits of steps whose tokens are `given`, or chosen by the logits before, which are then added to it."""
    position, found = torch.zeros(1, dtype=torch.long, device=device), []
    for layer in model.decoder.layers:
        layer.self_attn.core.keys.zero_()
        layer.self_attn.core.values.zero_()
    chosen = torch.arange(1, BATCH + 1, device=device).view(BATCH, 1)
    for at in range(count):
        torch.compiler.cudagraph_mark_step_begin()
        if at == len(given):
            given.append(chosen)
        tokens, logits = step(given[at], position)
        chosen = tokens.clone()
        found.append(logits.clone())
        position += 1
    return found


def caches(model: Model) -> list[torch.Tensor]:
    cores = [layer.self_attn.core for layer in model.decoder.layers]
    return [cache.clone() for core in cores for cache in (core.keys, core.values)]


def _generate(ctx: RankContext, strategy: str, count: int) -> int:
    """Returns how many attentions were found."""
    torch._dynamo.reset()
    counters.clear()
    device, torch_mesh = ctx.device, init_device_mesh(ctx.device.type, (ctx.world_size,))
    # On GPUs torch's attention of float32 is no op that could be recognised.
    cuda = device.type == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    arch = replace(MODELS["llama3-8b"].like(TINY), head_dim=64 if cuda else 16)
    torch.manual_seed(1)
    with device:
        model = Model(arch, LAYERS, BATCH, LENGTH, VOCABULARY, ctx.world_size).to(dtype).requires_grad_(False)
    cut(model.decoder, "ar", torch_mesh)
    given: list[torch.Tensor] = []
    with torch.no_grad(), mock.patch.object(cached_attention, "GPUS", ("cpu", "cuda")):
        wanted = steps(model, model, device, count, given)
        left = caches(model)
        options = {**serving.options(cudagraphs=cuda), "ditron.strategy": strategy}
        compiled = torch.compile(serving.local_parameters(model), backend="ditron", options=options)
        found = steps(compiled, model, device, count, given)
        for one, other in zip((*found, *caches(model)), (*wanted, *left), strict=True):
            assert relative_error(one, other) < (MODEL_TOLERANCES[dtype] if cuda else 1e-4)
    dist.barrier()
    return counters["ditron"]["cached_attention"]


@pytest.mark.parametrize("strategy", ["tile", "auto"])
def test_steps_are_those_of_eager_mode(rank_pools: RankPools, strategy: str) -> None:
    found = rank_pools.get("cpu", 2).run(_generate, strategy, 3, timeout=200.0)
    assert found == [LAYERS, LAYERS]


@pytest.mark.gpu
def test_steps_are_those_of_eager_mode_on_gpus(rank_pools: RankPools) -> None:
    assert rank_pools.get("cuda", 2).run(_generate, "auto", LENGTH, timeout=100) == [LAYERS, LAYERS]
