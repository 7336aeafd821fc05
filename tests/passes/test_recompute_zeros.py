"""recompute_zeros: a backward that adds rows to zeros makes them, and keeps none of the forward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx
from torch._inductor import config
from torch.utils.checkpoint import CheckpointPolicy

from ditron_inductor.options import Options
from ditron_inductor.passes.graph import proofs
from ditron_inductor.passes.graph.rewriting import RECOMPUTE
from ditron_inductor.passes.normalize.recompute_zeros import recompute_zeros
from ditron_inductor.pipeline import JointPipeline
from tests.passes.graphs import all_reduce, compiled_graphs

aten = torch.ops.aten
pytestmark = pytest.mark.usefixtures("group")
T, N = 6, 8


def added(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The forward adds rows to zeros, and the backward adds their gradients to zeros of the same shape."""
    terms = torch.sin(x[rows])
    return torch.zeros_like(x).scatter_add(0, rows.unsqueeze(-1).expand(-1, N), terms)


def reduced(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return all_reduce(added(x, rows))


def graphs_of(fn: Callable[..., torch.Tensor]) -> list[fx.GraphModule]:
    x, rows = torch.randn(T, N, requires_grad=True), torch.randint(0, T, (2 * T,))
    with config.patch(joint_custom_post_pass=JointPipeline(Options())):
        return compiled_graphs(fn, x, rows)


def saves_zeros(backward: fx.GraphModule) -> bool:
    """Whether the backward adds rows to an input."""
    (put,) = backward.graph.find_nodes(op="call_function", target=aten.index_put.default)
    return not proofs.is_full(put.args[0], 0)


def test_the_backward_makes_its_zeros() -> None:
    forward, backward = graphs_of(reduced)
    assert not saves_zeros(backward)
    assert forward.graph.find_nodes(op="call_function", target=aten.scatter_add.default)


def test_without_a_collective_nothing_changes() -> None:
    _, backward = graphs_of(added)
    assert saves_zeros(backward), "the partitioner makes them by itself: the pass is not needed any more"


def test_marks_of_the_user_stay() -> None:
    graph = fx.Graph()
    x, rows = graph.placeholder("x"), graph.placeholder("rows")
    zeros, ones, kept = (graph.call_function(aten.full.default, ([T, N], number)) for number in (0, 1, 0))
    kept.meta[RECOMPUTE] = CheckpointPolicy.MUST_SAVE
    sums = [graph.call_function(aten.index_put.default, (base, [rows], x, True)) for base in (zeros, ones, kept)]
    graph.call_function(torch.ops._c10d_functional.all_reduce.default, (sums[0], "sum", "0"))
    assert recompute_zeros(graph, options=Options()) == 2
    marks = [node.meta.get(RECOMPUTE) for node in (zeros, ones, kept)]
    assert marks == [CheckpointPolicy.MUST_RECOMPUTE, None, CheckpointPolicy.MUST_SAVE]
