"""Generation with a sharded KV cache: compiled from plain torch, and by ops.flash_decode, as without sharding."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from benchmarks.tolerances import relative_error
from ditron_inductor import ops
from ditron_inductor.backend import ditron
from ditron_inductor.options import Options
from ditron_inductor.task import flash_decode as task
from tests.models.decode_loop import Attend, Layer, generate, plain_attention, torch_attention
from tests.rank_process import RankContext
from tests.ranks import RankPool, RankPools

BATCH, STEPS = 2, 5
HEAD_DIM = {"cpu": 16, "cuda": 64}


def _generate(ctx: RankContext, way: str) -> int:
    """Tokens of one way are those of one rank with the whole cache; how many sites were fused."""
    torch._dynamo.reset()
    counters.clear()
    head_dim = HEAD_DIM[ctx.device.type]
    layer = Layer.random(50, 32, 4, 2, head_dim, ctx.device)
    first = torch.arange(BATCH, device=ctx.device)

    def whole(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return task.local_attention(q, k, v, lengths, scale=head_dim**-0.5)[0]

    function = functools.partial(ops.flash_decode, options=Options(strategy="tile"))
    attend: Attend = {
        "compiled": torch.compile(plain_attention, backend=ditron, fullgraph=True, options={"ditron.strategy": "tile"}),
        "function": function,
        "inside": torch.compile(function, backend=ditron, fullgraph=True),
    }[way]
    seen: list[torch.Tensor] = []

    def watched(*operands: torch.Tensor) -> torch.Tensor:
        seen.append(attend(*operands))
        return seen[-1]

    with torch.no_grad():
        wanted = generate(layer, first, STEPS, 0, 1, whole)
        # From the first step on, where all ranks but one have no token yet.
        found = generate(layer, first, STEPS, ctx.rank, ctx.world_size, watched)
    dist.barrier()
    fused = counters["ditron"]["flash_decode"]
    # Before the tokens: argmax hides what NaN and zeros show.
    assert all(one.isfinite().all() and one.any() for one in seen), (way, fused, seen)
    assert torch.equal(found, wanted), (way, fused, found, wanted)
    return fused


def _attend(ctx: RankContext) -> int:
    """Full caches, heads that share keys, torch's own op: compiled as eager; how many sites were fused."""
    torch._dynamo.reset()
    counters.clear()
    head_dim, dtype = HEAD_DIM[ctx.device.type], torch.bfloat16 if ctx.device.type == "cuda" else torch.float32
    same, own = (torch.Generator(ctx.device).manual_seed(seed) for seed in (0, 1 + ctx.rank))
    q = torch.randn(BATCH, 6, head_dim, device=ctx.device, generator=same).to(dtype)
    k, v = (torch.randn(BATCH, 2, 40, head_dim, device=ctx.device, generator=own).to(dtype) for _ in range(2))
    compiled = torch.compile(torch_attention, backend=ditron, fullgraph=True, options={"ditron.strategy": "tile"})
    with torch.no_grad():
        wanted, found = torch_attention(q, k, v), compiled(q, k, v)
    assert found.dtype == wanted.dtype and found.stride() == wanted.stride()
    assert relative_error(found, wanted) <= (1e-2 if dtype == torch.bfloat16 else 1e-5)
    return counters["ditron"]["flash_decode"]


def _of_places(ctx: RankContext) -> int:
    """Lengths of the whole cache, which each rank compares with its own tokens' places, as with its own lengths."""
    torch._dynamo.reset()
    counters.clear()
    head_dim, S = HEAD_DIM[ctx.device.type], 24
    same, own = (torch.Generator(ctx.device).manual_seed(seed) for seed in (0, 1 + ctx.rank))
    q = torch.randn(BATCH, 6, head_dim, device=ctx.device, generator=same)
    k, v = (torch.randn(BATCH, S, 2, head_dim, device=ctx.device, generator=own) for _ in range(2))
    # Every rank has a token of each sequence.
    first, last = ctx.rank * S, S * ctx.world_size
    lengths = torch.tensor([last - S // 2, last], device=ctx.device)
    attend = functools.partial(plain_attention, first=first)
    compiled = torch.compile(attend, backend=ditron, fullgraph=True, options={"ditron.strategy": "tile"})
    with torch.no_grad():
        found, wanted = compiled(q, k, v, lengths), plain_attention(q, k, v, lengths - first)
    assert relative_error(found, wanted) <= 1e-5
    return counters["ditron"]["flash_decode"]


def test_lengths_of_the_whole_cache(rank_pools: RankPools) -> None:
    assert set(rank_pools.get("cpu", 2).run(_of_places, timeout=200)) == {1}


def test_lengths_of_the_whole_cache_on_gpus(gpu_pool: RankPool) -> None:
    assert set(gpu_pool.run(_of_places, timeout=200)) == {1}


def test_attention_of_torch(rank_pools: RankPools) -> None:
    assert set(rank_pools.get("cpu", 2).run(_attend, timeout=200)) == {1}


def test_attention_of_torch_on_gpus(gpu_pool: RankPool) -> None:
    assert set(gpu_pool.run(_attend, timeout=200)) == {1}


@pytest.mark.parametrize("way", ["compiled", "function", "inside"])
def test_a_decode_loop(rank_pools: RankPools, way: str) -> None:
    assert set(rank_pools.get("cpu", 2).run(_generate, way, timeout=200)) == {int(way == "compiled")}


@pytest.mark.parametrize("way", ["compiled", "function", "inside"])
def test_a_decode_loop_on_gpus(gpu_pool: RankPool, way: str) -> None:
    assert set(gpu_pool.run(_generate, way, timeout=200)) == {int(way == "compiled")}
