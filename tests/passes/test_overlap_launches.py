"""overlap_launches: which calls of a decode step may begin early, and what keeps others from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch._inductor import config as inductor_config

from ditron_inductor.options import Options
from ditron_inductor.passes.finish import overlap_launches as module_of_the_pass
from ditron_inductor.passes.finish.name_sites import name_sites
from ditron_inductor.passes.finish.order_collectives import order_collectives
from ditron_inductor.passes.finish.overlap_launches import overlap_launches
from ditron_inductor.passes.finish.verify_tasks import verify_tasks
from ditron_inductor.passes.fuse.all_reduce_rms_norm import all_reduce_rms_norm
from ditron_inductor.passes.fuse.projections import projections
from ditron_inductor.task import schema
from ditron_inductor.task.node import TaskNode
from tests.passes.graphs import all_reduce, compiled_graphs, fuse

pytestmark = pytest.mark.usefixtures("group")

N = 32
X, WEIGHT = torch.randn(1, N), torch.randn(N, N)
NORM, PRODUCTS = "matmul_all_reduce_rms_norm", "projections"
FIRST, FOLLOWING = [(NORM, "leads")], [(PRODUCTS, "follows"), (NORM, "follows")]


@pytest.fixture(autouse=True)
def _as_on_a_gpu() -> Iterator[None]:
    with mock.patch.object(module_of_the_pass, "DEVICES", ("cpu",)):
        yield


def norm(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def half(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The end of one half of a layer: (what the next half reads, the sum)."""
    total = all_reduce(x @ weight.t()) + residual
    return norm(total), total


def both(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ first.t()) + x @ second.t()


def step(x: torch.Tensor, residual: torch.Tensor, wo: torch.Tensor, wg: torch.Tensor, wu: torch.Tensor, wd: Any) -> Any:
    normed, total = half(x, residual, wo)
    return half(both(normed, wg, wu), total, wd)


def found(fn: Callable[..., Any], *given: torch.Tensor) -> tuple[list[tuple[str, str]], int]:
    """Returns (of each call, in order, its kind and how it overlaps; how many the pass says follow)."""
    with torch.no_grad():
        (module,) = compiled_graphs(fn, *given)
    options = Options()
    fuse(module, options)
    all_reduce_rms_norm(module.graph, options=options)
    projections(module.graph, options=options)
    order_collectives(module.graph, options=options)
    count = overlap_launches(module.graph, options=options)
    name_sites(module.graph, options=options)
    verify_tasks(module.graph, options=options)
    module.graph.lint()
    tasks = [task for node in module.graph.nodes if (task := schema.node_of(node)) is not None]
    return [(one.kind, (one.policy if isinstance(one, TaskNode) else one).overlap) for one in tasks], count


def test_what_is_behind_a_norm_follows() -> None:
    assert found(step, X, X, *(WEIGHT,) * 4) == (FIRST + FOLLOWING, 2)


def test_nothing_follows_elsewhere_than_on_a_gpu() -> None:
    with mock.patch.object(module_of_the_pass, "DEVICES", ("cuda",)):
        calls, count = found(step, X, X, *(WEIGHT,) * 4)
    assert count == 0 and not any(overlap for _, overlap in calls)


def test_nothing_follows_where_inductor_s_kernels_may_begin_early() -> None:
    with inductor_config.patch({"triton.enable_pdl": True}):
        calls, count = found(step, X, X, *(WEIGHT,) * 4)
    assert count == 0 and not any(overlap for _, overlap in calls)


def test_nothing_follows_without_a_norm_in_front() -> None:
    def fn(x: torch.Tensor, residual: torch.Tensor, wg: torch.Tensor, wu: torch.Tensor, wd: torch.Tensor) -> Any:
        return half(both(x, wg, wu), residual, wd)

    assert found(fn, X, X, *(WEIGHT,) * 3) == ([(PRODUCTS, ""), (NORM, "leads")], 0)


def test_weights_that_the_graph_computes_are_not_read_early() -> None:
    def fn(x: torch.Tensor, residual: torch.Tensor, wo: torch.Tensor, wg: torch.Tensor, wu: torch.Tensor, wd: Any) -> Any:
        normed, total = half(x, residual, wo)
        return half(both(normed, wg, wu * 2.0), total, wd.exp())

    assert found(fn, X, X, *(WEIGHT,) * 4) == (FIRST + [(PRODUCTS, "leads"), (NORM, "leads")], 0)


def test_weights_that_are_written_are_not_read_early() -> None:
    def fn(x: torch.Tensor, residual: torch.Tensor, wo: torch.Tensor, wg: torch.Tensor, wu: torch.Tensor, wd: Any) -> Any:
        out = step(x, residual, wo, wg, wu, wd)
        wu.copy_(wg)
        return out

    calls, count = found(fn, X, X, *(WEIGHT.clone() for _ in range(4)))
    assert (calls, count) == (FIRST + [(PRODUCTS, "leads"), (NORM, "follows")], 1)


def test_a_part_of_a_wider_weight_is_an_input_too() -> None:
    def fn(x: torch.Tensor, residual: torch.Tensor, wo: torch.Tensor, wide: torch.Tensor, wd: torch.Tensor) -> Any:
        return step(x, residual, wo, wide[:N], wide[N:], wd)

    def split(x: torch.Tensor, residual: torch.Tensor, wo: torch.Tensor, wide: torch.Tensor, wd: torch.Tensor) -> Any:
        return step(x, residual, wo, *wide.split(N), wd)

    for one in (fn, split):
        assert found(one, X, X, WEIGHT, torch.randn(2 * N, N), WEIGHT)[0] == FIRST + FOLLOWING


def test_what_is_written_as_a_part_of_something_else_is_not_read_early() -> None:
    def fn(x: torch.Tensor, residual: torch.Tensor, wo: torch.Tensor, stack: torch.Tensor, wd: torch.Tensor) -> Any:
        out = step(x, residual, wo, stack[0], stack[1], wd)
        stack.mul_(2.0)
        return out

    calls, count = found(fn, X, X, WEIGHT, torch.randn(2, N, N), WEIGHT)
    assert (calls, count) == (FIRST + [(PRODUCTS, "leads"), (NORM, "follows")], 1)


def test_a_reduction_without_a_product_follows() -> None:
    def fn(x: torch.Tensor, residual: torch.Tensor, wo: torch.Tensor, wg: torch.Tensor, wu: torch.Tensor) -> Any:
        normed, total = half(x, residual, wo)
        return norm(all_reduce(both(normed, wg, wu).cumsum(-1)) + total) @ wo

    assert found(fn, X, X, *(WEIGHT,) * 3)[0][:3] == [*FIRST, FOLLOWING[0], ("all_reduce_rms_norm", "follows")]
