"""A rank whose memory changes captures its CUDA graph again, or compiles it again, while the others replay theirs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from torch._dynamo.utils import counters

from benchmarks.tolerances import MODEL_TOLERANCES, relative_error
from ditron_inductor.backend import ditron
from tests.rank_process import RankContext
from tests.ranks import RankPool

SITES = 3
"""An odd number: if the host of each rank counted its captured calls, ranks would use different slots afterwards."""
ROWS, LARGER, COLUMNS = 8, 512, 256
RENEWED: dict[int, tuple[int, ...]] = {2: (1,), 3: (0,), 5: (1,), 6: (0, 1), 8: (1,), 9: (0,)}
"""Which ranks have a cache with another address from a turn on."""
GROWN, RECOMPILED, TURNS = 4, 7, 11


def _step(cache: torch.Tensor, x: torch.Tensor, weights: list[torch.Tensor], group: Any) -> torch.Tensor:
    for weight in weights:
        x = torch.tanh(fc.all_reduce(x @ weight, "sum", group)) + cache
    return x


def _cache(ctx: RankContext) -> torch.Tensor:
    cache = torch.full((COLUMNS,), 0.25, device=ctx.device, dtype=torch.bfloat16)
    # Its address is a part of the captured graph.
    torch._dynamo.mark_static_address(cache, guard=False)
    return cache


def _turns(ctx: RankContext) -> int:
    """Every step is right, and fused, whatever each rank captures. Returns how often this rank has captured."""
    torch._dynamo.reset()
    generator = torch.Generator(ctx.device).manual_seed(3)

    def random(rows: int) -> torch.Tensor:
        return torch.randn(rows, COLUMNS, generator=generator, device=ctx.device).to(torch.bfloat16) / 8

    weights = [random(COLUMNS) for _ in range(SITES)]
    options = {"triton.cudagraphs": True, "ditron.strategy": "tile", "ditron.timeout_s": 20.0}
    call = torch.compile(_step, backend=ditron, options=options, dynamic=False)
    # Caches that are not used any more keep their addresses.
    caches = [_cache(ctx)]
    captures = torch.cuda.CUDAGraph.capture_begin
    captured = 0

    def count(*args: Any, **kwargs: Any) -> None:
        nonlocal captured
        captured += 1
        captures(*args, **kwargs)

    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda.CUDAGraph, "capture_begin", count)
        counters.clear()
        for turn in range(TURNS):
            if ctx.rank in RENEWED.get(turn, ()):
                caches.append(_cache(ctx))
            if turn == RECOMPILED and ctx.rank == 0:
                # It warms up and captures alone, and finds what was agreed.
                torch._dynamo.reset()
            for rows in (ROWS, LARGER) if turn == GROWN else (ROWS,) * 3:
                x = random(rows)
                torch.compiler.cudagraph_mark_step_begin()
                got = call(caches[-1], x, weights, dist.group.WORLD)
                wanted = _step(caches[-1].float(), x.float(), [weight.float() for weight in weights], dist.group.WORLD)
                error = relative_error(got, wanted)
                assert error < MODEL_TOLERANCES[torch.bfloat16], f"turn {turn}, {rows} rows: {error:.1e}"
    assert counters["ditron"]["matmul_all_reduce"] % SITES == 0 and counters["ditron"]["matmul_all_reduce"] > 0
    return captured


@pytest.mark.timeout(150)
def test_ranks_that_capture_alone(gpu_pool: RankPool) -> None:
    captured = gpu_pool.run(_turns, timeout=140)
    # Otherwise nobody was alone.
    assert min(captured) >= 4
