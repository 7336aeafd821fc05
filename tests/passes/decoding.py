"""Decode attention over sharded caches, as programs write its parts and their merging, and how its graphs are tested."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch.distributed import _functional_collectives as functional

from ditron_inductor.options import Options
from ditron_inductor.passes.attention.flash_decode import flash_decode
from tests.passes.graphs import WORLD_SIZE, compiled_graphs, run_ranks

B, HQ, HKV, S, D = 2, 6, 2, 40, 16
Tensor = torch.Tensor


def gathered(x: Tensor) -> Tensor:
    """[W, ..]."""
    return functional.all_gather_tensor(x.contiguous(), 0, dist.group.WORLD).view(WORLD_SIZE, *x.shape)


def below(lengths: Tensor) -> Tensor:
    """Which tokens are kept [B, S]."""
    return torch.arange(S) < lengths[:, None]


def scores_of(q: Tensor, k: Tensor, kept: Tensor | None) -> Tensor:
    """q [B, Hq, D], k [B, S, Hkv, D]; [B, Hkv, G, S] in fp32."""
    grouped = q.view(B, HKV, HQ // HKV, D)
    scores = torch.einsum("bhgd,bshd->bhgs", grouped, k).float() * D**-0.5
    return scores if kept is None else scores.masked_fill(~kept[:, None, None, :], -math.inf)


def parts(q: Tensor, k: Tensor, v: Tensor, kept: Tensor | None) -> tuple[Tensor, Tensor]:
    """(o, lse)."""
    scores = scores_of(q, k, kept)
    weights = torch.softmax(scores, -1).to(v.dtype)
    return torch.einsum("bhgs,bshd->bhgd", weights, v), torch.logsumexp(scores, -1)


def by_softmax(os: Tensor, lses: Tensor) -> Tensor:
    return (torch.softmax(lses, 0)[..., None] * os).sum(0)


def by_maximum(os: Tensor, lses: Tensor) -> Tensor:
    weights = torch.exp(lses - lses.max(0).values)
    return (weights[..., None] * os).sum(0) / weights.sum(0)[..., None]


def by_logarithm(os: Tensor, lses: Tensor) -> Tensor:
    return (torch.exp(lses - torch.logsumexp(lses, 0, keepdim=True)).unsqueeze(-1) * os).sum(0)


def operands(dtype: torch.dtype = torch.float16) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(B, HQ, D).to(dtype), torch.randn(B, S, HKV, D).to(dtype), torch.randn(B, S, HKV, D).to(dtype)


def graph_of(fn: Callable[..., Any], args: tuple[Tensor, ...], dynamic: bool | None = None) -> fx.GraphModule:
    with torch.no_grad():
        (module,) = compiled_graphs(fn, *args, dynamic=dynamic)
    return module


def fused(module: fx.GraphModule, options: Options | None = None) -> int:
    count = flash_decode(module.graph, options=options or Options())
    module.graph.lint()
    module.recompile()
    return count


def assert_same(before: fx.GraphModule, after: fx.GraphModule, inputs: list[list[Tensor]], tolerance: float) -> None:
    """All ranks compute the same by both graphs, of the inputs of a program; a graph has them in the order of their
    use. Keys and values have one shape: both graphs get the keys for both.
    """
    shapes = [node.meta["val"].shape for node in before.graph.nodes if node.op == "placeholder"]
    assert len(shapes) == len(inputs[0])
    ordered = [[next(one for one in given if one.shape == shape) for shape in shapes] for given in inputs]
    torch.testing.assert_close(run_ranks(after, ordered), run_ranks(before, ordered), rtol=tolerance, atol=tolerance)
