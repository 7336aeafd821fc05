"""Attention as Hugging Face's Gemma 2 writes it out, with context parallelism: on two ranks, and the function with a
soft cap, against the whole sequence on one.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from benchmarks.tolerances import MODEL_TOLERANCES, relative_error
from ditron_inductor.ops import all_gather_attention
from ditron_inductor.report.explain import without_caches
from ditron_inductor.task.site_records import collect_sites
from tests.models.interpreted import interpreted
from tests.rank_process import RankContext
from tests.ranks import RankPools

B, LENGTH, HEADS, KEY_HEADS, D = 2, 24, 4, 2, 16
SCALE, SOFTCAP, WINDOW = 0.25, 0.8, 15


def repeated(x: torch.Tensor, times: int) -> torch.Tensor:
    """Its `repeat_kv`."""
    batch, heads, length, width = x.shape
    return x[:, :, None, :, :].expand(batch, heads, times, length, width).reshape(batch, heads * times, length, width)


def eager_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: int, window: int) -> torch.Tensor:
    """Its `eager_attention_forward`, of queries that stand from `first` on. q [B, H, S, D]; returns [B, S, H, D]."""
    keys, values = (repeated(one, q.shape[1] // one.shape[1]) for one in (k, v))
    weights = torch.matmul(q, keys.transpose(2, 3)) * SCALE
    weights = weights / SOFTCAP
    weights = torch.tanh(weights)
    weights = weights * SOFTCAP
    ahead = torch.arange(q.shape[2])[:, None] + first - torch.arange(k.shape[2])
    hidden = (ahead < 0) | (ahead >= window)
    mask = torch.zeros(hidden.shape, dtype=q.dtype).masked_fill(hidden, torch.finfo(q.dtype).min)
    weights = weights + mask[None, None]
    weights = torch.nn.functional.softmax(weights, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(weights, values).transpose(1, 2).contiguous()


def layers(x: torch.Tensor, first: int, windows: tuple[int, ...], sharded: bool) -> torch.Tensor:
    """Of x [B, S, (H + 2 Hkv) * D]."""
    for window in windows:
        q, k, v = (
            one.unflatten(2, (-1, D)).transpose(1, 2) for one in x.split([HEADS * D, KEY_HEADS * D, KEY_HEADS * D], 2)
        )
        if sharded:
            k, v = (functional.all_gather_tensor(one.contiguous(), 2, dist.group.WORLD) for one in (k, v))
        out = eager_attention(q, k, v, first, window).flatten(2)
        x = torch.cat((out, x[:, :, HEADS * D :]), 2)
    return x


def _check_compiled(ctx: RankContext, strategy: str, dtype: torch.dtype) -> None:
    """Local attention, then global."""
    windows = WINDOW, LENGTH
    torch._dynamo.reset()
    torch.manual_seed(3)
    whole = torch.randn(B, LENGTH, (HEADS + 2 * KEY_HEADS) * D)
    wanted = layers(whole, 0, windows, sharded=False).chunk(ctx.world_size, 1)[ctx.rank]
    mine, first = whole.chunk(ctx.world_size, 1)[ctx.rank].to(dtype), ctx.rank * LENGTH // ctx.world_size
    backend: Any = interpreted({"ditron.strategy": strategy})
    with torch.no_grad(), collect_sites() as sink, without_caches():
        call: Any = torch.compile(layers, backend=backend, fullgraph=True)
        found = call(mine, first, windows, sharded=True)
    assert relative_error(found.float(), wanted) <= MODEL_TOLERANCES[dtype]
    sites = [(site.kind, site.pattern) for graph in sink.graphs for site in graph.sites]
    assert len(sites) == len(windows) and all(site[0] == "all_gather_attention" for site in sites), sites
    assert all("softcap=0.8" in pattern for _, pattern in sites)


@pytest.mark.skipif(
    torch.__version__ < (2, 13),
    reason="Dynamo of torch before 2.13 does not trace a gather along this dimension, with any backend",
)
@pytest.mark.timeout(100)
@pytest.mark.parametrize(
    ("strategy", "dtype"), [("tile", torch.float32), ("chunked", torch.float32), ("library", torch.bfloat16)], ids=str
)
def test_what_gemma_writes_is_fused_and_right(rank_pools: RankPools, strategy: str, dtype: torch.dtype) -> None:
    rank_pools.get("cpu", 2).run(_check_compiled, strategy, dtype, timeout=90)


def _check_function(ctx: RankContext, strategy: str) -> None:
    """With gradients, in eager mode."""
    torch.manual_seed(4)
    shapes = (HEADS, KEY_HEADS, KEY_HEADS, HEADS)
    q, k, v, gradient = (torch.randn(B, heads, LENGTH, D) for heads in shapes)
    whole = [one.clone().requires_grad_() for one in (q, k, v)]
    wanted = eager_attention(*whole, first=0, window=WINDOW).transpose(1, 2)
    wanted.backward(gradient)
    mine = [one.chunk(ctx.world_size, 2)[ctx.rank].clone().requires_grad_() for one in (q, k, v)]
    out = all_gather_attention(*mine, window=WINDOW, scale=SCALE, softcap=SOFTCAP, strategy=strategy)
    out.backward(gradient.chunk(ctx.world_size, 2)[ctx.rank])
    pairs = [(out, wanted), *((one.grad, other.grad) for one, other in zip(mine, whole, strict=True))]
    for found, every in pairs:
        assert found is not None and every is not None
        assert relative_error(found, every.chunk(ctx.world_size, 2)[ctx.rank]) <= MODEL_TOLERANCES[torch.float32]


@pytest.mark.parametrize("strategy", ["tile", "chunked"])
def test_the_function_has_a_cap_and_its_gradient(rank_pools: RankPools, strategy: str) -> None:
    rank_pools.get("cpu", 2).run(_check_function, strategy, timeout=90)
