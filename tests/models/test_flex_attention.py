"""FlexAttention next to gathers on GPUs, whose templates and backward the CPU has not: forward and training, fused."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.nn.attention import flex_attention as flex

from benchmarks.tolerances import relative_error
from ditron_inductor.backend import ditron
from ditron_inductor.report.explain import without_caches
from ditron_inductor.task import reference, reference_attention
from ditron_inductor.task.nodes import ATTENTION_KINDS
from ditron_inductor.task.site_records import collect_sites
from tests.rank_process import RankContext
from tests.ranks import RankPool

FORWARD, BACKWARD = ATTENTION_KINDS
HEADS, KEY_HEADS, D, ROWS, BLOCK, CAP = 8, 2, 64, 256, 128, 2.0
MOST_ERROR = 2e-2
"""In norm: roundings to bfloat16, one of them of the probabilities."""


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, form: str, window: int) -> torch.Tensor:
    """Causal in a sequence that is sharded in rank order, with a window unless it is 0; as a program writes it."""
    assert dist.group.WORLD is not None
    first = dist.get_rank() * ROWS
    keys, values = (all_gather_tensor_autograd(one, 2, dist.group.WORLD) for one in (k, v))

    def seen(b: Any, h: Any, i: Any, j: Any) -> Any:
        causal = i + first >= j
        return causal & (i + first - j < window) if window else causal

    def capped(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return CAP * torch.tanh(score / CAP)

    def hidden(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return torch.where(seen(b, h, i, j), score, -float("inf"))

    if form == "scores":
        out = flex.flex_attention(q, keys, values, score_mod=hidden, enable_gqa=True)
    else:
        blocks = flex.create_block_mask(seen, None, None, ROWS, keys.shape[2], device=q.device.type, BLOCK_SIZE=BLOCK)
        score_mod = capped if form == "capped" else None
        out = flex.flex_attention(q, keys, values, score_mod=score_mod, block_mask=blocks, enable_gqa=True)
    assert isinstance(out, torch.Tensor)
    return out


def whole(x: torch.Tensor) -> torch.Tensor:
    """What all ranks have of x [1, H, ROWS, D], in fp64."""
    assert dist.group.WORLD is not None
    group = {"world_size": dist.get_world_size(), "group_name": dist.group.WORLD.group_name}
    return reference.all_gather(x.detach().contiguous(), gather_dim=2, **group).double()


def _check(ctx: RankContext, form: str, window: int, strategy: str, trained: bool) -> Counter[str]:
    torch._dynamo.reset()
    generator = torch.Generator(ctx.device).manual_seed(1 + ctx.rank)
    q, k, v, grad = (
        torch.randn(1, heads, ROWS, D, generator=generator, device=ctx.device).bfloat16()
        for heads in (HEADS, KEY_HEADS, KEY_HEADS, HEADS)
    )
    given = [one.requires_grad_(trained) for one in (q, k, v)]
    exact = [whole(one).requires_grad_(trained) for one in given]
    ahead = torch.arange(exact[0].shape[2], device=ctx.device)
    ahead = ahead[:, None] - ahead
    seen = (ahead >= 0) & (ahead < (window or len(ahead)))
    softcap = CAP if form == "capped" else 0.0
    wanted, _ = reference_attention.attend(*exact, seen=seen, scale=D**-0.5, softcap=softcap)
    compiled = torch.compile(attend, backend=ditron, fullgraph=True, options={"ditron.strategy": strategy})
    with collect_sites() as sink, without_caches():
        out = compiled(*given, form, window)
        if trained:
            out.backward(grad)
    mine = slice(ctx.rank * ROWS, (ctx.rank + 1) * ROWS)
    assert relative_error(out.detach(), wanted.detach()[:, :, mine]) <= MOST_ERROR
    if trained:
        wanted.backward(whole(grad))
        for name, one, each in zip("qkv", given, exact, strict=True):
            assert one.grad is not None and each.grad is not None
            assert relative_error(one.grad, each.grad[:, :, mine]) <= MOST_ERROR, name
    sites = [site for graph in sink.graphs for site in graph.sites]
    assert all(site.matched for site in sites), [site.reason for site in sites]
    return Counter(site.kind for site in sites)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("strategy", ["auto", "chunked"])
@pytest.mark.parametrize(("form", "window"), [("blocks", 0), ("blocks", 300), ("scores", 0)])
def test_both_directions(gpu_pool: RankPool, form: str, window: int, strategy: str) -> None:
    for fused in gpu_pool.run(_check, form, window, strategy, True, timeout=180):
        assert fused == Counter({FORWARD: 1, BACKWARD: 1})


@pytest.mark.timeout(200)
@pytest.mark.parametrize(("form", "window"), [("blocks", 0), ("capped", 300)])
def test_without_gradients(gpu_pool: RankPool, form: str, window: int) -> None:
    for fused in gpu_pool.run(_check, form, window, "tile", False, timeout=180):
        assert fused == Counter({FORWARD: 1})
