"""Coalesced collectives: which members become single ones, and what stays together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import fx

from ditron_inductor.options import Options
from ditron_inductor.passes.normalize.normalize_collectives import normalize_collectives
from tests.passes.graphs import (
    all_gather,
    assert_no_new_guards,
    assert_same_on_all_ranks,
    c10d,
    compiled_graphs,
    fuse,
    group_name,
    reasons,
    text,
    traced,
)

pytestmark = pytest.mark.usefixtures("group")

X = torch.empty(8, 16)
Y = torch.empty(12, 5)
W = torch.empty(16, 24)


def waited(outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    return [c10d.wait_tensor(one) for one in outputs]


def reduced(*xs: torch.Tensor, op: str = "sum") -> list[torch.Tensor]:
    return waited(c10d.all_reduce_coalesced(list(xs), op, group_name()))


def gathered(*xs: torch.Tensor) -> list[torch.Tensor]:
    return waited(c10d.all_gather_into_tensor_coalesced(list(xs), 4, group_name()))


def scattered(*xs: torch.Tensor) -> list[torch.Tensor]:
    return waited(c10d.reduce_scatter_tensor_coalesced(list(xs), "sum", 4, group_name()))


def test_golden_before_and_after() -> None:
    module = traced(lambda x, w, y: reduced(y + 1, x @ w, y), X, W, Y)
    expecttest.assert_expected_inline(
        text(module.graph),
        """\
x_1 [8, 16]
w_1 [16, 24]
y_1 [12, 5]
add [12, 5] = aten.add.Tensor(y_1, 1)
mm [8, 24] = aten.mm(x_1, w_1)
all_reduce_coalesced = _c10d_functional.all_reduce_coalesced([add, mm, y_1], 'sum', '0')
getitem [12, 5] = all_reduce_coalesced[0]
getitem_1 [8, 24] = all_reduce_coalesced[1]
getitem_2 [12, 5] = all_reduce_coalesced[2]
wait_tensor [12, 5] = _c10d_functional.wait_tensor(getitem)
wait_tensor_1 [8, 24] = _c10d_functional.wait_tensor(getitem_1)
wait_tensor_2 [12, 5] = _c10d_functional.wait_tensor(getitem_2)
return [wait_tensor, wait_tensor_1, wait_tensor_2]
""",
    )
    fuse(module)
    expecttest.assert_expected_inline(
        text(module.graph),
        """\
x_1 [8, 16]
w_1 [16, 24]
y_1 [12, 5]
add [12, 5] = aten.add.Tensor(y_1, 1)
matmul_all_reduce = ditron.matmul_all_reduce([x_1, w_1], "reduce_op=sum world_size=4 group_name=0 site='' trials", None)
getitem_3 [8, 24] = matmul_all_reduce[0]
all_reduce_coalesced = _c10d_functional.all_reduce_coalesced([add, y_1], 'sum', '0')
getitem [12, 5] = all_reduce_coalesced[0]
getitem_2 [12, 5] = all_reduce_coalesced[1]
wait_tensor [12, 5] = _c10d_functional.wait_tensor(getitem)
wait_tensor_2 [12, 5] = _c10d_functional.wait_tensor(getitem_2)
return [wait_tensor, getitem_3, wait_tensor_2]
""",
    )


def test_golden_nothing_is_left() -> None:
    module = traced(lambda x, w, y: (g := gathered(x, y))[0] @ w + g[1].sum(), X, W, Y)
    fuse(module)
    expecttest.assert_expected_inline(
        text(module.graph),
        """\
x_1 [8, 16]
w_1 [16, 24]
y_1 [12, 5]
all_gather_into_tensor_default_1 [48, 5] = _c10d_functional.all_gather_into_tensor(y_1, 4, '0')
wait_tensor_1 [48, 5] = _c10d_functional.wait_tensor(all_gather_into_tensor_default_1)
all_gather_matmul = ditron.all_gather_matmul([x_1, w_1], "gather_dim=0 world_size=4 group_name=0 site='' trials num_weights=1", None)
getitem_2 [32, 24] = all_gather_matmul[0]
sum_1 [] = aten.sum(wait_tensor_1)
add [32, 24] = aten.add.Tensor(getitem_2, sum_1)
return add
""",
    )


FUSED: dict[str, tuple[Callable[..., Any], int]] = {
    "all_reduce": (lambda x, w, y: reduced(x @ w, y), 1),
    "all_reduce_twice": (lambda x, w, y: reduced(x @ w, y, (x * 2) @ w, op="avg"), 2),
    "all_gather": (lambda x, w, y: ((g := gathered(y, x))[1] @ w, g[0]), 1),
    "all_gather_same_tensor": (lambda x, w, y: ((g := gathered(x, x, y))[0] @ w, g[1] @ w, g[2]), 1),
    "reduce_scatter": (lambda x, w, y: scattered(x @ w, y), 1),
    "reduce_scatter_inner_dim": (
        lambda x, w, y: scattered(torch.cat(torch.chunk((x @ w).view(2, 4, 24), 4, 1)), y),
        1,
    ),
    "every_member": (lambda x, w, y: scattered(x @ w, (x * 2) @ w), 2),
    "one_member": (lambda x, w, y: reduced(x @ w), 1),
    "gather_then_reduce": (lambda x, w, y: reduced(gathered(x, y)[0].relu() @ w, y), 1),
}


@pytest.mark.parametrize(("fn", "fused"), FUSED.values(), ids=FUSED)
def test_fused(fn: Callable[..., Any], fused: int) -> None:
    assert_same_on_all_ranks(fn, X, W, Y, fused=fused)


def test_members_that_are_not_fused_stay_in_one_launch() -> None:
    module = traced(lambda x, w, y: reduced(y, x @ w, y * 2, x), X, W, Y)
    assert fuse(module) == 1
    (left,) = module.graph.find_nodes(op="call_function", target=c10d.all_reduce_coalesced.default)
    assert len(left.args[0]) == 3
    assert reasons(module) == ["no_matmul"]


def test_in_place_form() -> None:
    module = traced(lambda x, w, y: reduced(x @ w, y + 1), X, W, Y)
    (node,) = module.graph.find_nodes(op="call_function", target=c10d.all_reduce_coalesced.default)
    node.target = c10d.all_reduce_coalesced_.default
    assert fuse(module) == 1
    (left,) = module.graph.find_nodes(op="call_function", target=c10d.all_reduce_coalesced_.default)
    assert len(left.args[0]) == 1


LEFT_ALONE: dict[str, tuple[str, Callable[..., Any]]] = {
    "bias": ("bias", lambda x, w, y: reduced(y, x @ w + x[:, :1])),
    "pointwise": ("pointwise_between", lambda x, w, y: reduced((x @ w).relu(), y)),
    "no_matmul": ("no_matmul", lambda x, w, y: gathered(x, y)),
    "used": ("intermediate_used", lambda x, w, y: [*reduced(p := x @ w, y), p]),
    "twice": ("intermediate_used", lambda x, w, y: reduced(p := x @ w, p)),
    "reduce_op": ("reduce_op", lambda x, w, y: reduced(x @ w, y, op="max")),
}


@pytest.mark.parametrize(("code", "fn"), LEFT_ALONE.values(), ids=LEFT_ALONE)
def test_left_alone(code: str, fn: Callable[..., Any]) -> None:
    module = traced(fn, X, W, Y)
    normalize_collectives(module.graph, options=Options())
    before = text(module.graph)
    assert fuse(module) == 0
    assert text(module.graph) == before
    assert reasons(module) == [code]


def test_a_fusion_that_is_off_splits_nothing() -> None:
    module = traced(lambda x, w, y: reduced(x @ w, y), X, W, Y)
    assert fuse(module, Options(fusions=("all_gather_matmul",))) == 0
    assert reasons(module) == ["disabled"]


def unreadable(form: str) -> fx.GraphModule:
    module = traced(lambda x, w, y: reduced(x @ w, y), X, W, Y)
    graph = module.graph
    (node,) = graph.find_nodes(op="call_function", target=c10d.all_reduce_coalesced.default)
    (output,) = graph.find_nodes(op="output")
    if form == "result_list_used":
        output.args = ((*output.args[0], node),)
    else:
        with graph.inserting_before(node):
            listed = graph.call_function(torch.ops.aten._foreach_div.Scalar, (node.args[0], 4))
        listed.meta["val"] = [operand.meta["val"] for operand in node.args[0]]
        node.update_arg(0, listed)
    return module


@pytest.mark.parametrize("form", ["result_list_used", "operand_list_computed"])
def test_lists_that_cannot_be_read_are_left_alone(form: str) -> None:
    module = unreadable(form)
    assert fuse(module) == 0
    assert reasons(module) == ["unsupported_collective"]


def test_idempotent() -> None:
    module = traced(lambda x, w, y: (reduced(x @ w, y, y * 2), gathered(x, y), all_gather(x) @ w), X, W, Y)
    fuse(module)
    before = text(module.graph)
    assert fuse(module) == 0
    assert text(module.graph) == before


def test_dynamic_shapes() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        first, second = gathered(x, y)
        hidden = torch.cat(torch.chunk(first, 4), 1) @ w
        return scattered(torch.cat(torch.chunk(hidden @ w.t(), 4, 1)), second)

    module = traced(fn, torch.empty(2, 8, 16), W, Y, dynamic=True)
    with assert_no_new_guards(module):
        assert fuse(module) == 2


def test_training() -> None:
    """The gradient of a coalesced gather is a coalesced reduce-scatter."""

    def fn(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        first, second = gathered(x, y)
        return (first @ w).sum() + second.sum()

    forward, backward = compiled_graphs(fn, *(one.clone().requires_grad_() for one in (X, Y, W)))
    assert (fuse(forward), fuse(backward)) == (1, 1)
    assert (reasons(forward), reasons(backward)) == (["no_matmul"], ["no_matmul"])


def test_a_member_that_is_narrowed_behind_the_gather() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first, second = gathered(x, y)
        return first.bfloat16() @ w, second.bfloat16()

    after = assert_same_on_all_ranks(fn, X, Y, W.bfloat16(), fused=1)
    assert "_to_copy(x_1" in text(after.graph)  # and the other one is gathered as it was
    assert "all_gather_into_tensor(y_1, 4" in text(after.graph)


def test_functional_collectives() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        group = dist.group.WORLD
        assert group is not None
        first, second = funcol.all_gather_into_tensor_coalesced([x, y], group)
        third, fourth = funcol.reduce_scatter_tensor_coalesced([first @ w, second], "sum", [0, 1], group)
        return tuple(funcol.all_reduce_coalesced([third @ w.t(), fourth], "avg", group))

    (graph,) = compiled_graphs(fn, torch.randn(8, 16), torch.randn(16, 24), torch.randn(12, 8))
    assert fuse(graph) == 2
