"""A second process finds the compiled graphs in Inductor's cache, runs no pass, and computes the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from tests.ranks import RankContext, run_ranks
from tests.tolerances import assert_near


def layer(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    group = dist.group.WORLD
    hidden = torch.relu(functional.all_gather_tensor_autograd(x, 0, group) @ w)
    return functional.reduce_scatter_tensor_autograd(hidden @ v, "sum", 0, group)


def run_layer(ctx: RankContext, options: dict[str, Any]) -> dict[str, int]:
    """Compiles, compares with eager, forward and backward; returns what the caches and the passes counted."""
    from torch._dynamo.utils import counters

    eager = [torch.randn(shape).requires_grad_() for shape in ((8, 16), (16, 32), (32, 16))]
    ours = [value.detach().clone().requires_grad_() for value in eager]
    wanted, got = layer(*eager), torch.compile(layer, backend="ditron", options=options)(*ours)
    assert_near(got.detach(), wanted.detach(), num_partials=ctx.world_size)
    wanted.sum().backward()
    got.sum().backward()
    for one, other in zip(ours, eager, strict=True):
        assert one.grad is not None and other.grad is not None
        assert_near(one.grad, other.grad, num_partials=32)
    # A graph found by AOTAutograd's cache counts as one of Inductor's too in some versions only: take either.
    names = ("fxgraph_cache_hit", "fxgraph_cache_miss", "fxgraph_cache_bypass")
    found = {name: counters["inductor"][name] for name in names}
    autograd = counters["aot_autograd"]
    found |= {name: autograd[name] for name in ("autograd_cache_hit", "autograd_cache_miss", "autograd_cache_bypass")}
    return found | {"rewritten": sum(counters["ditron"].values())}


Run = Callable[..., list[dict[str, int]]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """`run_layer` in two fresh rank processes that share one cache folder with earlier calls."""
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_FX_GRAPH_CACHE": "1"}

    def call(**options: Any) -> list[dict[str, int]]:
        given = {"ditron.strategy": "library", **options}
        return run_ranks(run_layer, 2, given, env=env, timeout=100.0)

    return call


def test_second_process_hits(run: Run) -> None:
    first, second = run(), run()
    for counted in first:
        assert counted["fxgraph_cache_bypass"] == counted["autograd_cache_bypass"] == 0
    assert any(counted["rewritten"] >= 3 for counted in first)
    for counted in second:
        assert counted["fxgraph_cache_miss"] == counted["fxgraph_cache_bypass"] == 0
        assert counted["fxgraph_cache_hit"] + counted["autograd_cache_hit"] >= 1
        assert counted["rewritten"] == 0


def test_another_option_misses(run: Run) -> None:
    run()
    for counted in run(**{"ditron.workspace_limit": 12345}):
        assert counted["rewritten"] >= 3 or counted["fxgraph_cache_hit"] >= 1
    # One rank may find what the other has just compiled; one of them has to compile.
    assert any(counted["rewritten"] >= 3 for counted in run(**{"ditron.workspace_limit": 54321}))
