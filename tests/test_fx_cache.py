"""A second process finds the compiled graphs in Inductor's cache, runs no pass, and computes the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from tests.ranks import RankContext, run_ranks
from tests.tolerances import assert_near


def layer(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Matmuls and collectives only: an empty cache folder would cost a C++ compilation for anything pointwise."""
    group = dist.group.WORLD
    hidden = functional.all_gather_tensor_autograd(x, 0, group) @ w
    return functional.reduce_scatter_tensor_autograd(hidden @ v, "sum", 0, group)


def run_layer(ctx: RankContext, options: dict[str, Any]) -> dict[str, int]:
    """Compiles, compares with eager, forward and backward; returns what the caches and the passes counted."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    eager = [torch.randn(shape).requires_grad_() for shape in ((8, 16), (16, 32), (32, 16))]
    ours = [value.detach().clone().requires_grad_() for value in eager]
    wanted, got = layer(*eager), torch.compile(layer, backend="ditron", options=options)(*ours)
    assert_near(got.detach(), wanted.detach(), num_partials=ctx.world_size)
    # Torch 2.11 wants contiguous gradients in front of an eager all-gather: those of a sum would be expanded.
    wanted.square().sum().backward()
    got.square().sum().backward()
    for one, other in zip(ours, eager, strict=True):
        assert one.grad is not None and other.grad is not None
        assert_near(one.grad, other.grad, num_partials=32)
    found = {name: counters["inductor"][f"fxgraph_cache_{name}"] for name in ("hit", "miss", "bypass")}
    return found | {"rewritten": sum(counters["ditron"].values())}


def run_layers(ctx: RankContext, several: list[dict[str, Any]]) -> list[dict[str, int]]:
    """`run_layer` with one set of options after the other, in one process."""
    return [run_layer(ctx, {"ditron.strategy": "library", **options}) for options in several]


@pytest.mark.timeout(300)
def test_second_process_hits_until_an_option_changes(tmp_path: Path) -> None:
    on = {"TORCHINDUCTOR_FX_GRAPH_CACHE": "1", "TORCHINDUCTOR_AUTOGRAD_CACHE": "1"}
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), **on}
    first = run_ranks(run_layers, 2, [{}], env=env, timeout=200.0)
    for (counted,) in first:
        assert counted["hit"] + counted["miss"] == 2 and counted["bypass"] == 0
    # One rank may find what the other has just compiled, but one of them has to compile.
    assert any(counted["rewritten"] > 0 for (counted,) in first)
    second = run_ranks(run_layers, 2, [{}, {"ditron.workspace_limit": 12345}], env=env, timeout=200.0)
    for counted, _ in second:
        assert counted == {"hit": 2, "miss": 0, "bypass": 0, "rewritten": 0}
    assert any(changed["rewritten"] > 0 for _, changed in second)
