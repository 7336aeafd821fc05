"""name_sites: names that are equal on all ranks, stable, and unique within a graph."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx

from ditron_inductor.device.facts import CUDAGRAPHS, GraphFacts
from ditron_inductor.ops import flash_decode
from ditron_inductor.options import Options
from ditron_inductor.passes.finish.name_sites import add_key, find_sites, name_sites
from ditron_inductor.passes.finish.order_collectives import order_collectives
from ditron_inductor.passes.finish.verify_tasks import verify_tasks
from ditron_inductor.task.schema import node_from_call
from tests.passes import graphs

pytestmark = pytest.mark.usefixtures("group")
SITE = re.compile(r"[0-9a-f]{8}/(\d+):(\w+)")


def named(fn: Callable[..., Any], *args: torch.Tensor, dynamic: bool = False) -> fx.GraphModule:
    module = graphs.traced(fn, *args, dynamic=dynamic)
    graphs.fuse(module)
    order_collectives(module.graph, options=Options())
    name_sites(module.graph, options=Options())
    assert verify_tasks(module.graph, options=Options()) == 0
    return module


def sites(module: fx.GraphModule) -> list[str]:
    _, nodes = find_sites(module.graph)
    return [node_from_call(node.target, node.args).site for node in nodes]


def layer(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    hidden = torch.relu(graphs.all_gather(x) @ w)
    return graphs.reduce_scatter(hidden @ v), graphs.all_reduce(x @ w)


def tensors(rows: int = 8, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(shape, dtype=dtype) for shape in ((rows, 16), (16, 32), (32, 16)))


@pytest.mark.parametrize("replayed", [False, True])
def test_all_sites_know_whether_torch_captures_them(replayed: bool) -> None:
    """Calls of the user's program too, whatever options they were made with."""

    def with_a_call(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor) -> Any:
        q, cache = x.view(8, 1, 16), w.view(8, 4, 1, 16)
        return *layer(x, w, v), flash_decode(q, cache, cache, lengths, options=Options(trials=True))

    module = named(with_a_call, *tensors(), torch.ones(8, dtype=torch.int32))
    facts = GraphFacts((), {CUDAGRAPHS: repr(replayed)})
    add_key(module.graph, facts)
    _, nodes = find_sites(module.graph)
    tasks = [node_from_call(node.target, node.args) for node in nodes]
    assert {task.kind for task in tasks} >= {"flash_decode", "matmul_all_reduce"}
    for task in tasks:
        assert (task.policy.replayed, task.policy.trials) == (replayed, not replayed) and task.site.endswith(f"@{facts.key}")


def test_form() -> None:
    names = sites(named(layer, *tensors()))
    kinds = [match.groups() for match in map(SITE.fullmatch, names) if match]
    assert kinds == [("0", "all_gather_matmul"), ("1", "matmul_reduce_scatter"), ("2", "matmul_all_reduce")]
    assert len({name.split("/")[0] for name in names}) == 1


def test_again_changes_nothing() -> None:
    module = named(layer, *tensors())
    before = str(module.graph)
    assert name_sites(module.graph, options=Options()) == 0
    assert str(module.graph) == before


def test_graph_without_sites() -> None:
    module = graphs.traced(lambda x: graphs.all_reduce(x * 2), torch.randn(8, 16))
    assert name_sites(module.graph, options=Options()) == 0


def test_what_may_differ_between_ranks_is_not_in_the_name() -> None:
    """Local shapes, symbols instead of numbers, constants, names of nodes, the name of the group."""
    expected = sites(named(layer, *tensors()))
    assert sites(named(layer, *tensors(rows=12))) == expected
    assert sites(named(layer, *tensors(), dynamic=True)) == expected

    def renamed(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = torch.relu(graphs.all_gather(x * 3.25 + 1) @ w).exp()
        return graphs.reduce_scatter(hidden @ v), graphs.all_reduce(x @ w) - 7

    assert sites(named(renamed, *tensors())) == expected


def test_group_names_are_not_in_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = sites(named(layer, *tensors()))
    other = dist.new_group(list(range(graphs.WORLD_SIZE)))
    monkeypatch.setattr(graphs, "group_name", lambda: other.group_name)
    assert sites(named(layer, *tensors())) == expected


def _avg(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    hidden = torch.relu(graphs.all_gather(x) @ w)
    return graphs.reduce_scatter(hidden @ v, "avg"), graphs.all_reduce(x @ w)


def _one_more(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return *layer(x, w, v), graphs.all_reduce(x.relu())


def _other_order(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    reduced = graphs.all_reduce(x @ w)
    return graphs.reduce_scatter(torch.relu(graphs.all_gather(x) @ w) @ v), reduced


def _gathered_used(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    gathered = graphs.all_gather(x)
    return graphs.reduce_scatter(torch.relu(gathered @ w) @ v), graphs.all_reduce(x @ w), gathered.relu()


def _with_more(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A bias, another weight, an epilogue, a statistic of what is reduced."""
    gathered = graphs.all_gather(x)
    hidden, product = torch.nn.functional.silu(gathered @ w) * (gathered @ (w * 2)), x @ w
    return graphs.reduce_scatter(hidden @ v + v[0]), graphs.all_reduce(product), product.amax()


@pytest.mark.parametrize("other", [_gathered_used, _with_more])
def test_what_one_rank_alone_may_have_is_not_in_the_name(other: Callable[..., Any]) -> None:
    ours, theirs = named(layer, *tensors()), named(other, *tensors())
    assert find_sites(ours.graph)[0] == find_sites(theirs.graph)[0]
    assert {*sites(theirs)} <= {*sites(ours)}


@pytest.mark.parametrize("other", [_avg, _one_more, _other_order])
def test_another_program_has_another_region(other: Callable[..., Any]) -> None:
    ours, theirs = named(layer, *tensors()), named(other, *tensors())
    assert find_sites(ours.graph)[0] != find_sites(theirs.graph)[0]


def test_another_dtype_has_another_region() -> None:
    ours, theirs = named(layer, *tensors()), named(layer, *tensors(dtype=torch.bfloat16))
    assert find_sites(ours.graph)[0] != find_sites(theirs.graph)[0]
