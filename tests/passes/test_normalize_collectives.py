"""normalize_collectives: one form of every collective and of what stands around it, and nothing else touched."""

from __future__ import annotations

from typing import Any

import expecttest
import pytest
import torch
from torch import fx

from ditron_inductor.options import Options
from ditron_inductor.passes.normalize.normalize_collectives import normalize_collectives
from tests.passes.graphs import (
    WORLD_SIZE,
    all_gather,
    all_reduce,
    assert_no_new_guards,
    c10d,
    fuse,
    gather_dim,
    group_name,
    reasons,
    text,
    traced,
)

pytestmark = pytest.mark.usefixtures("group")

aten = torch.ops.aten
X = torch.empty(8, 16)
X3 = torch.empty(2, 8, 16)
W = torch.empty(16, 24)


def normalized(fn: Any, *args: torch.Tensor, dynamic: bool = False) -> tuple[fx.Graph, int]:
    module = traced(fn, *args, dynamic=dynamic)
    count = normalize_collectives(module.graph, options=Options())
    module.graph.lint()
    return module.graph, count


def test_golden_views_and_equal_views() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gathered = gather_dim(x, 1)
        return gathered.view(64, 16) @ w, gathered.view(64, 16).sin(), x.view(16, 16)

    graph, _ = normalized(fn, X3, W)
    expecttest.assert_expected_inline(
        text(graph),
        """\
x_1 [2, 8, 16]
w_1 [16, 24]
all_gather_into_tensor [8, 8, 16] = _c10d_functional.all_gather_into_tensor(x_1, 4, '0')
wait_tensor [8, 8, 16] = _c10d_functional.wait_tensor(all_gather_into_tensor)
split = aten.split.Tensor(wait_tensor, 2)
getitem [2, 8, 16] = split[0]
getitem_1 [2, 8, 16] = split[1]
getitem_2 [2, 8, 16] = split[2]
getitem_3 [2, 8, 16] = split[3]
cat [2, 32, 16] = aten.cat([getitem, getitem_1, getitem_2, getitem_3], 1)
view [64, 16] = aten.reshape(cat, [64, 16])
mm [64, 24] = aten.mm(view, w_1)
sin [64, 16] = aten.sin(view)
view_2 [16, 16] = aten.view(x_1, [16, 16])
return (mm, sin, view_2)
""",
    )


def test_a_graph_in_this_form_is_not_touched() -> None:
    module = traced(lambda x, w: all_reduce(all_gather(x) @ w), X, W)
    before = text(module.graph)
    assert normalize_collectives(module.graph, options=Options()) == 0
    assert text(module.graph) == before


def test_a_graph_without_collectives_is_not_touched() -> None:
    module = traced(lambda x, w: ((x @ w).view(-1), (x @ w).view(-1)), X, W)
    before = text(module.graph)
    assert normalize_collectives(module.graph, options=Options()) == 0
    assert text(module.graph) == before


def test_keyword_arguments_become_positional() -> None:
    module = traced(lambda x: all_reduce(x), X)
    (node,) = module.graph.find_nodes(op="call_function", target=c10d.all_reduce.default)
    node.kwargs = {"reduce_op": node.args[1], "group_name": node.args[2]}
    node.args = node.args[:1]
    assert normalize_collectives(module.graph, options=Options()) == 1
    (node,) = module.graph.find_nodes(op="call_function", target=c10d.all_reduce.default)
    assert (node.args[1:], node.kwargs) == (("sum", group_name()), {})


def out_form(buffer_used: bool) -> fx.GraphModule:
    """`all_gather_into_tensor_out` with a buffer made in the graph: from front ends other than Dynamo."""
    module = traced(lambda x, w: all_gather(x) @ w, X, W)
    graph = module.graph
    (gather,) = graph.find_nodes(op="call_function", target=c10d.all_gather_into_tensor.default)
    with graph.inserting_before(gather):
        buffer = graph.call_function(aten.empty.memory_format, ([32, 16],))
        buffer.meta["val"] = gather.meta["val"]
        out = graph.call_function(c10d.all_gather_into_tensor_out.default, gather.args, {"out": buffer})
        out.meta["val"] = gather.meta["val"]
    gather.replace_all_uses_with(out)
    graph.erase_node(gather)
    if buffer_used:
        (output,) = graph.find_nodes(op="output")
        output.args = ((output.args[0], buffer),)
    return module


def test_an_out_form_with_a_buffer_of_its_own_is_fused() -> None:
    module = out_form(False)
    assert fuse(module) == 1
    assert "empty" not in text(module.graph)


def test_an_out_form_whose_buffer_is_used_is_left_alone() -> None:
    module = out_form(True)
    assert fuse(module) == 0
    assert reasons(module) == ["unsupported_collective"]


def test_the_autograd_namespace_is_the_plain_one() -> None:
    module = traced(lambda x, w: all_gather(x) @ w, X, W)
    (gather,) = module.graph.find_nodes(op="call_function", target=c10d.all_gather_into_tensor.default)
    gather.target = torch.ops._c10d_functional_autograd.all_gather_into_tensor.default
    assert fuse(module) == 1


def test_collectives_that_no_fusion_covers_get_a_reason() -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        sizes = [2] * WORLD_SIZE
        exchanged = c10d.wait_tensor(c10d.all_to_all_single(x, sizes, sizes, group_name()))
        (one,) = c10d.all_reduce_coalesced([x], "sum", group_name())
        return exchanged, c10d.wait_tensor(one), c10d.wait_tensor(c10d.broadcast(x, 0, group_name()))

    module = traced(fn, X)
    assert fuse(module) == 0
    assert reasons(module) == ["no_matmul", "no_matmul", "unsupported_collective"]


def test_clones_are_not_merged() -> None:
    graph, _ = normalized(lambda x: ((g := all_gather(x)).clone(), g.clone()), X)
    assert text(graph).count("aten.clone(") == 2


def test_sizes_are_read_elsewhere_without_a_guard() -> None:
    module = traced(lambda x, w: gather_dim(x, 1) @ w, X3, W, dynamic=True)
    with assert_no_new_guards(module):
        normalize_collectives(module.graph, options=Options())
    asked = [node.args[0].op for node in module.graph.find_nodes(op="call_function", target=aten.sym_size.int)]
    assert set(asked) == {"placeholder"}


def test_placeholders_without_tensors_are_no_obstacle() -> None:
    """Device meshes are lifted into the graph as objects."""
    module = traced(lambda x, w: all_gather(x) @ w, X, W)
    first = next(iter(module.graph.nodes))
    with module.graph.inserting_before(first):
        module.graph.placeholder("mesh")
    assert fuse(module) == 1


def test_equal_tensors_that_are_both_returned_stay_two() -> None:
    def twice(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        whole = all_gather(x)
        return torch.cat(whole.chunk(4), 1), torch.cat(whole.chunk(4), 1)

    graph, _ = normalized(twice, torch.empty(2, 8))
    first, second = next(iter(graph.find_nodes(op="output"))).args[0]
    assert first is not second
