"""vllm_collectives: ops with the schemas of vLLM's become functional collectives, where that is proved to be the same."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import expecttest
import pytest
import torch
import torch.distributed as dist
from torch import fx

from ditron_inductor.options import Options
from ditron_inductor.passes.finish.order_collectives import order_collectives
from ditron_inductor.passes.normalize.normalize_collectives import normalize_collectives
from ditron_inductor.pipeline import DitronPipeline
from tests.passes.graphs import WORLD_SIZE, all_reduce, assert_no_new_guards, fuse, reasons, run_ranks, text, traced

pytestmark = pytest.mark.usefixtures("group", "vllm")

X = torch.empty(8, 16)
W = torch.empty(16, 24)
TP = "tp:0"
ops: Any = torch.ops.vllm


def all_reduce_of_vllm(tensor: torch.Tensor, group_name: str) -> torch.Tensor:
    return torch.empty_like(tensor)


def all_gather_of_vllm(tensor: torch.Tensor, dim: int, world_size: int, group_name: str) -> torch.Tensor:
    sizes = list(tensor.shape)
    sizes[dim] *= world_size
    return tensor.new_empty(sizes)


def reduce_scatter_of_vllm(tensor: torch.Tensor, dim: int, world_size: int, group_name: str) -> torch.Tensor:
    sizes = list(tensor.shape)
    sizes[dim] //= world_size
    return tensor.new_empty(sizes)


@pytest.fixture(scope="module")
def registered() -> Iterator[None]:
    """The three ops with vLLM's names and schemas, as long as the module's tests run."""
    library = torch.library.Library("vllm", "FRAGMENT")
    for name, function in (
        ("all_reduce", all_reduce_of_vllm),
        ("all_gather", all_gather_of_vllm),
        ("reduce_scatter", reduce_scatter_of_vllm),
    ):
        library.define(name + torch.library.infer_schema(function, mutates_args=[]))
        library.impl(name, function, "CPU")
        library._register_fake(name, function)
    yield
    library._destroy()


@pytest.fixture
def vllm(group: None, registered: None, monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[[], Any]]:
    """vLLM's table of groups, in which `tp:0` is the world; a coordinator that is gone; one of an unknown group."""
    world = SimpleNamespace(device_group=dist.group.WORLD)
    foreign = SimpleNamespace(device_group=object())
    table: dict[str, Callable[[], Any]] = {TP: lambda: world, "pp:0": lambda: None, "ep:0": lambda: foreign}
    module = ModuleType("vllm.distributed.parallel_state")
    module.__dict__["_groups"] = table
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return table


def normalized(fn: Callable[..., Any], *args: torch.Tensor) -> fx.GraphModule:
    module = traced(fn, *args)
    normalize_collectives(module.graph, options=Options())
    module.graph.lint()
    module.recompile()
    return module


def test_golden_first_dimension() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        gathered = ops.all_gather(x, 0, WORLD_SIZE, TP)
        scattered = ops.reduce_scatter(gathered @ w, dim=-2, world_size=WORLD_SIZE, group_name=TP)
        return ops.all_reduce(scattered, group_name=TP)

    expecttest.assert_expected_inline(
        text(normalized(fn, X, W).graph),
        """\
x_1 [8, 16]
w_1 [16, 24]
all_gather_into_tensor_default [32, 16] = _c10d_functional.all_gather_into_tensor(x_1, 4, '0')
wait_tensor_default [32, 16] = _c10d_functional.wait_tensor(all_gather_into_tensor_default)
mm [32, 24] = aten.mm(wait_tensor_default, w_1)
reduce_scatter_tensor_default [8, 24] = _c10d_functional.reduce_scatter_tensor(mm, 'sum', 4, '0')
wait_tensor_default_1 [8, 24] = _c10d_functional.wait_tensor(reduce_scatter_tensor_default)
all_reduce_default [8, 24] = _c10d_functional.all_reduce(wait_tensor_default_1, 'sum', '0')
wait_tensor_default_2 [8, 24] = _c10d_functional.wait_tensor(all_reduce_default)
return wait_tensor_default_2
""",
    )


def test_golden_last_dimension() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return ops.reduce_scatter(ops.all_gather(x, -1, WORLD_SIZE, TP), 1, WORLD_SIZE, TP)

    expecttest.assert_expected_inline(
        text(normalized(fn, X).graph),
        """\
x_1 [8, 16]
all_gather_into_tensor_default [32, 16] = _c10d_functional.all_gather_into_tensor(x_1, 4, '0')
wait_tensor_default [32, 16] = _c10d_functional.wait_tensor(all_gather_into_tensor_default)
split_tensor = aten.split.Tensor(wait_tensor_default, 8, 0)
getitem [8, 16] = split_tensor[0]
getitem_1 [8, 16] = split_tensor[1]
getitem_2 [8, 16] = split_tensor[2]
getitem_3 [8, 16] = split_tensor[3]
cat_default [8, 64] = aten.cat([getitem, getitem_1, getitem_2, getitem_3], 1)
split_tensor_1 = aten.split.Tensor(cat_default, 16, 1)
getitem_4 [8, 16] = split_tensor_1[0]
getitem_5 [8, 16] = split_tensor_1[1]
getitem_6 [8, 16] = split_tensor_1[2]
getitem_7 [8, 16] = split_tensor_1[3]
cat_default_1 [32, 16] = aten.cat([getitem_4, getitem_5, getitem_6, getitem_7], 0)
reduce_scatter_tensor_default [8, 16] = _c10d_functional.reduce_scatter_tensor(cat_default_1, 'sum', 4, '0')
wait_tensor_default_1 [8, 16] = _c10d_functional.wait_tensor(reduce_scatter_tensor_default)
return wait_tensor_default_1
""",
    )


def test_values() -> None:
    """On numbers: gathers along each dimension, and scatters along the two that vLLM scatters along."""

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gathers = (ops.all_gather(x, dim, WORLD_SIZE, TP) for dim in (0, 1, -1))
        scatters = (ops.reduce_scatter(x, dim, WORLD_SIZE, TP) for dim in (0, -2))
        return *gathers, *scatters, ops.all_reduce(x, TP)

    inputs = [torch.randn(4, 8, 2) for _ in range(WORLD_SIZE)]
    total = torch.stack(inputs).sum(0)
    results = run_ranks(normalized(fn, inputs[0]), [[one] for one in inputs])
    for rank, got in enumerate(results):
        gathered = [torch.cat(inputs, dim) for dim in (0, 1, -1)]
        scattered = [total.chunk(WORLD_SIZE, dim)[rank] for dim in (0, -2)]
        for one, wanted in zip(got, (*gathered, *scattered, total), strict=True):
            torch.testing.assert_close(one, wanted)


def test_they_are_fused() -> None:
    module = traced(lambda x, w: ops.all_reduce(ops.all_gather(x, 0, WORLD_SIZE, TP) @ w, TP), X, W)
    assert fuse(module) == 1
    module = traced(lambda x, w: ops.reduce_scatter(x @ w, 0, WORLD_SIZE, TP), X, W)
    assert fuse(module) == 1


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (lambda x: ops.all_reduce(x, "tp:1"), "group_unknown"),
        (lambda x: ops.all_reduce(x, "0"), "group_unknown"),
        (lambda x: ops.all_reduce(x, "pp:0"), "group_unknown"),
        (lambda x: ops.all_reduce(x, "ep:0"), "group_unknown"),
        (lambda x: ops.all_gather(x, 0, 2, TP), "world_size"),
        (lambda x: ops.all_reduce(x.t(), TP), "unsupported_collective"),
        (lambda x: ops.all_gather(x.t(), 0, WORLD_SIZE, TP), "unsupported_collective"),
        (lambda x: ops.reduce_scatter(x.view(2, 4, 16), 2, WORLD_SIZE, TP), "unsupported_collective"),
        (lambda x: ops.reduce_scatter(x[:6], 0, WORLD_SIZE, TP), "uneven_shards"),
    ],
)
def test_what_is_not_proved_is_left_alone(fn: Callable[..., Any], reason: str) -> None:
    module = traced(fn, X)
    before = text(module.graph)
    normalize_collectives(module.graph, options=Options())
    assert text(module.graph) == before and reasons(module) == [reason]


def test_without_vllms_table_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "vllm.distributed.parallel_state")
    module = normalized(lambda x: ops.all_reduce(x, TP), X)
    assert reasons(module) == ["group_unknown"]


def test_dynamic_sizes() -> None:
    """A dynamic number of rows is fine along the first dimension, and adds no guard; along another it is left alone."""
    module = traced(lambda x, w: ops.all_reduce(ops.all_gather(x, 0, WORLD_SIZE, TP) @ w, TP), X, W, dynamic=True)
    with assert_no_new_guards(module):
        normalize_collectives(module.graph, options=Options())
    assert reasons(module) == []
    module = traced(lambda x: ops.all_gather(x, 1, WORLD_SIZE, TP), X, dynamic=True)
    normalize_collectives(module.graph, options=Options())
    assert reasons(module) == ["shape_unproven"]


def test_one_that_is_left_alone_keeps_its_place() -> None:
    """Nobody knows whether its group is that of a Task node: it is chained with it."""

    def fn(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return all_reduce(x @ w), ops.all_reduce(x, "tp:1")

    module = traced(fn, X, W)
    assert fuse(module) == 1
    assert order_collectives(module.graph, options=Options()) == 1


def test_the_groups_are_in_the_uuid(vllm: dict[str, Callable[[], Any]]) -> None:
    """A graph from a cache names the group that stood behind `tp:0` when it was made."""
    with_groups = DitronPipeline(Options()).uuid()
    assert with_groups == DitronPipeline(Options()).uuid()
    del vllm[TP]
    assert DitronPipeline(Options()).uuid() != with_groups
