"""A second process finds the compiled graphs in Inductor's cache, runs no pass, and computes the same."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from benchmarks.tolerances import assert_near
from ditron_inductor import backend, config, graph_meeting
from ditron_inductor.lowering.host.site_call import SiteCall
from ditron_inductor.summary import Summary
from tests.ranks import RankContext, RankPool

SHAPES = (8, 16), (16, 32), (32, 16)


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
    eager = [torch.randn(shape).requires_grad_() for shape in SHAPES]
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


def run_layers(
    ctx: RankContext, several: list[dict[str, Any]], configured: dict[str, Any] | None = None
) -> list[dict[str, int]]:
    """`run_layer` with one set of options after the other, in one process; then with those of `configured` in config
    instead.
    """
    counted = [run_layer(ctx, {"ditron.strategy": "library", **options}) for options in several]
    if configured is not None:
        with config.patch(configured, strategy="library"):
            counted.append(run_layer(ctx, {}))
    return counted


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of ranks that keep compiled graphs in a folder. What the compiler can do for this machine's vectors is not tried
    out again for that folder.
    """
    on = {"TORCHINDUCTOR_FX_GRAPH_CACHE": "1", "TORCHINDUCTOR_AUTOGRAD_CACHE": "1", "TORCHINDUCTOR_VEC_ISA_OK": "0"}
    return {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path_factory.mktemp("cache")), **on}


@pytest.fixture(scope="module")
def pools(env: dict[str, str]) -> Iterator[tuple[RankPool, RankPool]]:
    """Ranks that keep compiled graphs in a folder, and ranks that look for them there."""
    first, second = RankPool(2, env=env), RankPool(2, env=env)
    yield first, second
    first.close()
    second.close()


@pytest.mark.timeout(300)
def test_second_process_hits_until_an_option_changes(pools: tuple[RankPool, RankPool]) -> None:
    one, other = pools
    first = one.run(run_layers, [{}], timeout=200.0)
    for (counted,) in first:
        assert counted["hit"] + counted["miss"] == 2 and counted["bypass"] == 0
    # One rank may find what the other has just compiled, but one of them has to compile.
    assert any(counted["rewritten"] > 0 for (counted,) in first)
    changed = {"ditron.workspace_limit": 12345}
    hits = {"hit": 2, "miss": 0, "bypass": 0, "rewritten": 0}
    second = other.run(run_layers, [{}, changed], changed, timeout=200.0)
    for counted, _, configured in second:
        assert counted == hits and configured == hits, "an option counts wherever it was set"
    assert any(compiled["rewritten"] > 0 for _, compiled, _ in second)


def before_an_edit(x: torch.Tensor, w: torch.Tensor, odd: bool) -> Any:
    out = functional.all_reduce(x @ w, "sum", dist.group.WORLD)
    return (out, x @ x.t()) if odd else out


def after_an_edit(x: torch.Tensor, w: torch.Tensor, odd: bool) -> Any:
    out = functional.all_reduce(x @ w, "sum", dist.group.WORLD)
    return (out, x @ x.t()) if odd else out


def run_program(ctx: RankContext, name: str, odd_call: int) -> int:
    """Three calls, in one of which rank 1 compiles another graph than rank 0; how many graphs came from the cache."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    program = {"before": before_an_edit, "after": after_an_edit}[name]
    compiled = torch.compile(program, backend="ditron", options={"ditron.strategy": "tile", "ditron.meeting_s": 5.0})
    x, w = torch.randn(8, 16), torch.randn(16, 8)
    for call in range(3):
        odd = ctx.rank == 1 and call == odd_call
        torch.testing.assert_close(compiled(x, w, odd), program(x, w, odd), atol=1e-4, rtol=1e-4)
    return counters["inductor"]["fxgraph_cache_hit"]


@pytest.mark.timeout(300)
def test_a_graph_of_other_lines_is_not_taken_from_the_cache(pools: tuple[RankPool, RankPool]) -> None:
    """A rank that later compiles another graph is found by the lines of the program, which are in the code."""
    first, second = pools
    first.run(run_program, "before", 3, timeout=100.0)
    assert second.run(run_program, "before", 3, timeout=100.0) == [1, 1]
    second.run(run_program, "after", 1, timeout=60.0)


def sites() -> list[SiteCall]:
    """All that there are in this process."""
    return [one for one in gc.get_objects() if type(one) is SiteCall]


def calls_in_a_graph(ctx: RankContext) -> dict[str, int]:
    """How many sites a graph brings into this process, and whether a pass has run."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    before = sites()
    compiled = torch.compile(layer, backend=backend.ditron, dynamic=False, options={"ditron.strategy": "library"})
    inputs = [torch.randn(shape) for shape in SHAPES]
    with torch.no_grad():
        for _ in range(3):
            assert_near(compiled(*inputs), layer(*inputs), num_partials=ctx.world_size)
    found = [one for one in sites() if not any(one is known for known in before)]
    assert all(one.static and one._prepared is not None for one in found), "called, and without autograd"
    return {"sites": len(found), "rewritten": sum(counters["ditron"].values())}


@pytest.mark.timeout(200)
def test_code_from_the_cache_binds_its_sites_in_another_process(pools: tuple[RankPool, RankPool]) -> None:
    first, second = pools
    first.run(calls_in_a_graph, timeout=150.0)
    for counted in second.run(calls_in_a_graph, timeout=150.0):
        assert counted == {"sites": 2, "rewritten": 0}


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def said_of_graphs(ctx: RankContext) -> tuple[list[str], dict[str, int]]:
    """What the summary logs when graphs run for the first time in a process, and what caches and passes counted."""
    lines = _Lines()
    logger = logging.getLogger("ditron_inductor.summary")
    logger.addHandler(lines)
    try:
        with mock.patch.object(graph_meeting, "summary", Summary()):
            return lines.texts, run_layer(ctx, {"ditron.strategy": "library"})
    finally:
        logger.removeHandler(lines)


@pytest.mark.timeout(300)
def test_the_summary_is_logged_for_graphs_from_the_cache(pools: tuple[RankPool, RankPool]) -> None:
    first, second = pools
    cold = first.run(said_of_graphs, timeout=200.0)
    warm = second.run(said_of_graphs, timeout=200.0)
    assert all(counted["rewritten"] == 0 and counted["hit"] == 2 for _, counted in warm)
    assert [texts for texts, _ in warm] == [texts for texts, _ in cold] == [
        [
            "ditron: 2 of 2 collectives of the first graph matched (1 all_gather_matmul, 1 matmul_reduce_scatter); "
            "0 ran fused, 2 by library (forced by the option ditron.strategy); "
            "ditron_inductor.explain(model)(*inputs) says where and why"
        ],
        [],
    ]


def reduced(ctx: RankContext, *cases: tuple[str, str]) -> list[float]:
    """By each (strategy, op), what becomes of ones on all ranks, through a product."""
    torch._dynamo.reset()
    ones = torch.ones(4, 4)
    found = []
    for strategy, reduce_op in cases:

        def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return functional.all_reduce(x @ w, reduce_op, dist.group.WORLD)  # noqa: B023

        compiled = torch.compile(program, backend="ditron", options={"ditron.strategy": strategy})
        found.append(float(compiled(ones, ones / 4)[0, 0]))
    return found


@pytest.mark.all_cases
@pytest.mark.timeout(300)
def test_a_cached_graph_is_not_run_by_another_number_of_ranks(
    pools: tuple[RankPool, RankPool], env: dict[str, str]
) -> None:
    three = RankPool(3, env=env)
    try:
        for world_size, pool in ((2, pools[0]), (3, three)):
            for found in pool.run(reduced, ("auto", "avg"), ("tile", "sum")):
                assert found == [1.0, float(world_size)]
    finally:
        three.close()
