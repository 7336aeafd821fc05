"""ditron.strict from outside: the error reaches the user of torch.compile on every rank, cached graphs or not."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed import _functional_collectives as funcol

import ditron_inductor
import ditron_inductor.backend  # the name, where the package is not installed
from ditron_inductor.device import groups
from ditron_inductor.device.meetings import meetings
from tests.ranks import RankContext, RankPools

# The first compilation on a fresh machine precompiles Inductor's C++ headers, once for all tests.
pytestmark = pytest.mark.timeout(300)
STRICT = {"ditron.strict": True}


def _message(run: Callable[[], Any]) -> str:
    """What a run raises, empty where it does not."""
    try:
        run()
    except Exception as error:
        return str(error)
    return ""


def _forward(ctx: RankContext) -> list[str]:
    def product_used(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        product = x @ w
        return funcol.all_reduce(product, "sum", ctx.group_name), product

    def fused(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return funcol.all_reduce(x @ w, "sum", ctx.group_name)

    def compiled(fn: Callable[..., Any], options: dict[str, Any] | None = None) -> str:
        # The graph is compiled anew, and may come from Inductor's cache.
        torch._dynamo.reset()
        return _message(lambda: torch.compile(fn, backend="ditron", options=options)(x, w))

    x, w = torch.ones(4, 8), torch.ones(8, 6)
    runs = [compiled(product_used), compiled(product_used, STRICT), compiled(product_used, STRICT)]
    runs += [compiled(fused, STRICT), compiled(fused, STRICT), compiled(product_used)]
    return [*runs, _message(lambda: ditron_inductor.explain(product_used, options=STRICT)(x, w))]


def _without_gpus(ctx: RankContext) -> list[str]:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return funcol.all_reduce(x @ w, "sum", ctx.group_name)

    def run(**options: Any) -> str:
        torch._dynamo.reset()
        given = {f"ditron.{name}": value for name, value in options.items()}
        compiled = torch.compile(fn, backend="ditron", options=given)
        # A call that raised raises again.
        assert _message(lambda: compiled(x, w)) == (message := _message(lambda: compiled(x, w)))
        return message

    x, w = torch.ones(4, 8), torch.ones(8, 6)
    return [run(strict=True), run(strict="run"), run(strict="run", strategy="library"), run(strict="run")]


def test_an_obstacle_of_the_run_raises_where_that_is_asked_for(rank_pools: RankPools) -> None:
    first, second = rank_pools.get("cpu", 2).run(_without_gpus, timeout=250.0)
    assert first == second
    assert [bool(message) for message in first] == [False, True, False, True]
    assert "/0:matmul_all_reduce can run only by the library" in first[1] and "no GPU: on the CPU" in first[1]


def _broken_on_one_rank(ctx: RankContext) -> str:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = funcol.all_reduce(x @ w, "sum", ctx.group_name)
        if ctx.rank == 0:
            torch._dynamo.graph_break()
        return funcol.all_reduce(y.sin() @ w.t(), "sum", ctx.group_name)

    torch._dynamo.reset()
    x, w = torch.ones(4, 8), torch.ones(8, 6)
    options = {"ditron.strict": "run", "ditron.strategy": "tile"}
    return _message(lambda: torch.compile(fn, backend="ditron", options=options)(x, w))


def test_graphs_of_ranks_that_differ_are_such_an_obstacle(rank_pools: RankPools) -> None:
    for message in rank_pools.get("cpu", 2).run(_broken_on_one_rank, timeout=250.0):
        assert "/0:matmul_all_reduce" in message and "can run only by the library" in message
        assert "the graphs of the ranks have" in message


def _fused_after_it(ctx: RankContext) -> tuple[str, str]:
    def fused(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return funcol.all_reduce(x.cos() @ w, "sum", ctx.group_name)

    refused = _broken_on_one_rank(ctx)
    if ctx.rank == 1:
        # Rank 0 looks for its peer's entry before that is there.
        time.sleep(1.0)
    x, w = torch.ones(4, 8), torch.ones(8, 6)
    options = {"ditron.strict": "run", "ditron.strategy": "tile"}
    return refused, _message(lambda: torch.compile(fused, backend="ditron", options=options)(x, w))


def test_a_graph_that_raised_is_left_behind_by_all_ranks(rank_pools: RankPools) -> None:
    for refused, after in rank_pools.get("cpu", 2).run(_fused_after_it, timeout=250.0):
        assert "can run only by the library" in refused and after == ""


def _gives_up_for_good(ctx: RankContext) -> list[int]:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return funcol.all_reduce(x.tanh() @ w, "sum", ctx.group_name)

    x, w = torch.ones(4, 8), torch.ones(8, 6)
    log = meetings._log(ctx.group_name)
    if ctx.rank == 0:
        # As after an exception in the middle of a graph: the peer is not there any more.
        log.runs_plain(1, 1 << 20)
    else:
        time.sleep(1.0)
    found = []
    for _ in range(2):
        torch._dynamo.reset()
        compiled = torch.compile(fn, backend="ditron", options={"ditron.strategy": "tile"})
        assert torch.equal(compiled(x, w), fn(x, w))
        found.append(log._written)
    log.stopped(0)
    meetings.forget(groups.find(ctx.group_name), f"{ctx.seed}")
    return found


def test_a_rank_that_gives_up_for_good_tells_its_peers(rank_pools: RankPools) -> None:
    for first, second in rank_pools.get("cpu", 2).run(_gives_up_for_good, timeout=250.0):
        # What is compiled again meets nobody again.
        assert first == second


def test_each_compilation_raises_and_no_other(rank_pools: RankPools) -> None:
    first, second = rank_pools.get("cpu", 2).run(_forward, timeout=250.0)
    assert first == second
    assert [bool(message) for message in first] == [False, True, True, False, False, False, False]
    for part in ("DitronNotFused", "'ditron.strict'", "all_reduce, ", "test_strict.py:", "intermediate_used"):
        assert part in first[1]


def _backward(ctx: RankContext) -> tuple[str, str]:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (funcol.all_gather_tensor_autograd(x.sin(), 0, ctx.group_name) @ w).sin()

    class OfSines(torch.autograd.Function):
        """Its gradient stands between the matmul of the backward and its reduction."""

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad.sin()

    def squared(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (OfSines.apply(funcol.all_gather_tensor_autograd(x, 0, ctx.group_name)) @ w).square()

    def both(fn: Callable[..., Any]) -> str:
        x, w = torch.ones(4, 8, requires_grad=True), torch.ones(8, 6, requires_grad=True)
        return _message(lambda: torch.compile(fn, backend="ditron", options=STRICT)(x, w).sum().backward())

    return both(fn), both(squared)


def test_the_backward_graph_counts_too(rank_pools: RankPools) -> None:
    for clean, found in rank_pools.get("cpu", 2).run(_backward, timeout=250.0):
        assert clean == ""
        assert "pointwise_between" in found and "reduce_scatter_tensor" in found
