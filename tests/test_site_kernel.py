"""What Inductor writes for our ops: sites are called past the dispatcher, from code that stands for itself."""

from __future__ import annotations

import re
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._inductor import scheduler
from torch._inductor.utils import run_and_get_code
from torch.distributed import _functional_collectives as functional

from benchmarks.tolerances import assert_near
from ditron_inductor import backend
from ditron_inductor.report.explain import without_caches
from ditron_inductor.task.nodes import MatmulAllReduce, Policy
from tests.ranks import RankContext, RankPools

BOUND = re.compile(r"^(call_\w+) = site_call\('(\w+)', (True|False), (.*)\)$", re.MULTILINE)
OP = re.compile(r"torch\.ops\.ditron\.(\w+)\.default\(")
SHAPES = (8, 16), (16, 32), (32, 16)


def layer(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    group = dist.group.WORLD
    hidden = functional.all_gather_tensor_autograd(x, 0, group) @ w
    return functional.reduce_scatter_tensor_autograd(hidden @ v, "sum", 0, group)


def compiled_layer(ctx: RankContext, settings: dict[str, Any], backward: bool, rows: tuple[int, ...]) -> list[str]:
    """The code of its graphs; compares with eager."""
    torch._dynamo.reset()
    compiled = torch.compile(layer, **settings)
    codes: list[str] = []
    for count in rows:
        eager = [torch.randn(shape).requires_grad_(backward) for shape in ((count, 16), *SHAPES[1:])]
        ours = [value.detach().clone().requires_grad_(backward) for value in eager]

        def step() -> torch.Tensor:
            got = compiled(*ours)  # noqa: B023
            if backward:
                got.square().sum().backward()
            return got.detach()  # type: ignore[no-any-return]

        with without_caches():
            got, new = run_and_get_code(step)
        codes += new
        wanted = layer(*eager)
        assert_near(got, wanted.detach(), num_partials=ctx.world_size)
        if backward:
            wanted.square().sum().backward()
            for one, other in zip(ours, eager, strict=True):
                assert one.grad is not None and other.grad is not None
                # Sums of squares: larger by one more product than what is compared above.
                assert_near(one.grad, other.grad, num_partials=128)
    return codes


def settings(dynamic: bool = False, strategy: str = "library", **options: Any) -> dict[str, Any]:
    return {"backend": backend.ditron, "dynamic": dynamic, "options": {"ditron.strategy": strategy, **options}}


def sites_of(code: str) -> list[tuple[str, bool]]:
    """(kind, whether static) of the sites that are called past the dispatcher; each is bound and called once."""
    found = []
    for name, kind, static, _ in BOUND.findall(code):
        assert len(re.findall(rf"= {name}\(", code)) == 1
        found.append((kind, static == "True"))
    return found


@pytest.mark.parametrize("strategy", ["library", "tile"])
def test_a_static_graph_binds_all_but_the_tensors(rank_pools: RankPools, strategy: str) -> None:
    pool = rank_pools.get("cpu", 2)
    for codes in pool.run(compiled_layer, settings(strategy=strategy), True, (8,), timeout=200.0):
        expected = [("all_gather_matmul", True), ("matmul_reduce_scatter", True)]
        assert [sites_of(code) for code in codes] == [expected, expected]
        assert not any(OP.search(code) for code in codes)
        (gather, _), (scatter, _) = ((found[0], found[3]) for found in BOUND.findall(codes[0]))
        assert re.search(rf"= {gather}\(\w+, \w+\)", codes[0]), "the shard and the weight, nothing else"
        # The first in the order of its group has no token, and the second none either: the graph has its order.
        assert re.search(rf"= {scatter}\(\w+, \w+\)", codes[0])


def test_symbolic_sizes_are_no_static_form(rank_pools: RankPools) -> None:
    pool = rank_pools.get("cpu", 2)
    expected = [("all_gather_matmul", False), ("matmul_reduce_scatter", False)]
    for codes in pool.run(compiled_layer, settings(dynamic=True), False, (8, 6, 10), timeout=200.0):
        assert codes and all(sites_of(code) == expected for code in codes)


def test_a_wrapper_in_cpp_calls_the_ops(rank_pools: RankPools) -> None:
    for codes in rank_pools.get("cpu", 2).run(compiled_layer, settings(cpp_wrapper=True), False, (8,), timeout=200.0):
        assert codes and not any("site_call" in code for code in codes)
        assert all("ditron::all_gather_matmul" in code or "ditron.all_gather_matmul" in code for code in codes)


def layer_in_partitions(ctx: RankContext) -> list[str]:
    """The code of a graph that is cut at its reduce-scatter, as graphs are cut at what CUDA graphs cannot hold."""

    def should_partition(self: Any, node: Any, *_: Any, **__: Any) -> str | None:
        op = getattr(node.node, "op_overload", None)
        return "cut here" if op is torch.ops.ditron.matmul_reduce_scatter.default else None

    with mock.patch.object(scheduler.Scheduler, "should_partition", should_partition):
        return compiled_layer(ctx, settings(graph_partition=True), False, (8,))


def test_a_partition_binds_its_own_sites(rank_pools: RankPools) -> None:
    for (code,) in rank_pools.get("cpu", 2).run(layer_in_partitions, timeout=200.0):
        assert sorted(sites_of(code)) == [("all_gather_matmul", True), ("matmul_reduce_scatter", True)]
        partition = code[code.index("def partition_0(") : code.index("class Runner")]
        called = re.findall(r"= (call_\w+)\(", partition)
        assert len(called) == 1 and f"{called[0]} = site_call('all_gather_matmul'" in code


def graph_without_our_passes(ctx: RankContext) -> list[str]:
    """The code of a graph with an op of ours that Inductor compiles by itself, after one that we compiled."""
    compiled_layer(ctx, settings(), False, (8,))
    torch._dynamo.reset()

    node = MatmulAllReduce("sum", ctx.world_size, ctx.group_name, "plain/0", Policy("library")).text()

    def reduced(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.ops.ditron.matmul_all_reduce([a, b], node, None)[0]

    with without_caches():
        _, codes = run_and_get_code(torch.compile(reduced, backend="inductor"), torch.ones(4, 4), torch.ones(4, 4))
    return codes


def test_graphs_without_our_passes_have_ops(rank_pools: RankPools) -> None:
    for (code,) in rank_pools.get("cpu", 2).run(graph_without_our_passes, timeout=200.0):
        assert sites_of(code) == [] and OP.findall(code) == ["matmul_all_reduce"]


def events_of_ops(ctx: RankContext) -> list[str]:
    """What a profiler sees of a compiled graph's second step."""
    torch._dynamo.reset()
    compiled = torch.compile(layer, **settings())
    inputs = [torch.randn(shape) for shape in SHAPES]
    with torch.no_grad(), without_caches():
        compiled(*inputs)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            compiled(*inputs)
    return [event.name for event in profile.events() if event.name.startswith("ditron::")]


def test_a_profiler_sees_the_ops_of_a_graph(rank_pools: RankPools) -> None:
    for names in rank_pools.get("cpu", 2).run(events_of_ops, timeout=200.0):
        assert names == ["ditron::all_gather_matmul", "ditron::matmul_reduce_scatter"]
