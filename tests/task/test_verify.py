"""verify_graph: a legal graph passes, and every broken rule is an error that names the call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from ditron_inductor.errors import GraphVerificationError, InvalidTaskNode
from ditron_inductor.task import ops
from ditron_inductor.task.verify import task_calls, verify_graph
from tests.passes.graphs import traced

X = torch.empty(8, 16)
W = torch.empty(16, 24)
V = torch.empty(24, 16)


def site(name: str, world_size: int = 4) -> tuple[Any, ...]:
    return (world_size, "0", name, "auto", 1 << 30, 0.0)


def chain(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Two sites and a collective that is not fused, in one chain."""
    hidden, token = torch.ops.ditron.all_gather_matmul(x, [w], None, 0, False, *site("r/0"))
    other = torch.ops.ditron.token_of(torch.ops.ditron.after(x, token).sin())
    bias = v.sum(0)
    out, _ = torch.ops.ditron.matmul_reduce_scatter([hidden, hidden], [v, v], bias, other, 0, "sum", *site("r/1"))
    return out


@pytest.fixture
def module() -> fx.GraphModule:
    ops.define()
    return traced(chain, X, W, V)


def test_a_legal_graph(module: fx.GraphModule) -> None:
    verify_graph(module.graph)
    assert [task.kind for _, task in task_calls(module.graph)] == ["all_gather_matmul", "matmul_reduce_scatter"]


def set_argument(index: int, value: Any, call: int = 0) -> Callable[[fx.Graph], None]:
    def change(graph: fx.Graph) -> None:
        task_calls(graph)[call][0].update_arg(index, value)

    return change


def wrong_weight(graph: fx.Graph) -> None:
    call = task_calls(graph)[0][0]
    call.update_arg(1, [call.args[0]])


def narrow_product(graph: fx.Graph) -> None:
    call = task_calls(graph)[1][0]
    call.update_arg(1, [call.args[1][0], task_calls(graph)[0][0].args[1][0]])


def short_rows(graph: fx.Graph) -> None:
    call = task_calls(graph)[1][0]
    call.update_arg(0, [call.args[0][0], task_calls(graph)[0][0].args[0]])


def bias_that_is_no_row(graph: fx.Graph) -> None:
    call = task_calls(graph)[1][0]
    call.update_arg(2, call.args[1][0])


def lost_token(graph: fx.Graph) -> None:
    task_calls(graph)[1][0].update_arg(3, None)


def shared_token(graph: fx.Graph) -> None:
    token = task_calls(graph)[1][0].args[3]
    (output,) = graph.find_nodes(op="output")
    output.args = ((output.args[0], token),)


def token_that_is_none(graph: fx.Graph) -> None:
    task_calls(graph)[1][0].update_arg(3, next(iter(graph.nodes)))


def whole_list_used(graph: fx.Graph) -> None:
    (output,) = graph.find_nodes(op="output")
    output.args = ((output.args[0], task_calls(graph)[0][0]),)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (wrong_weight, "do not fit"),
        (narrow_product, "products of different shapes"),
        (short_rows, "products of different shapes"),
        (bias_that_is_no_row, "no row"),
        (lost_token, "no token"),
        (shared_token, "shares its token"),
        (token_that_is_none, "token that is none"),
        (whole_list_used, "is used by"),
        (set_argument(7, ""), "no site name"),
        (set_argument(7, "r/1"), "shares its site name"),
        (set_argument(3, 1), "gathers dimension 1 of 2"),
        (set_argument(4, 1, call=1), "scatters dimension 1 of 2"),
        (set_argument(6, 3, call=1), "does not divide"),
    ],
)
def test_a_broken_rule_is_named(module: fx.GraphModule, change: Callable[[fx.Graph], None], words: str) -> None:
    change(module.graph)
    with pytest.raises(GraphVerificationError, match=words):
        verify_graph(module.graph)


@pytest.mark.parametrize(("epilogue", "legal"), [("mm0 + row(x0)", True), ("mm0 + full(x0)", False)])
def test_extra_tensors_of_a_reduction_fit_its_output(epilogue: str, legal: bool) -> None:
    def fn(x: torch.Tensor, w: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        out, _ = torch.ops.ditron.matmul_reduce_scatter([x], [w], None, None, 0, "sum", *site("r/0"), [row], epilogue)
        return out

    ops.define()
    module = traced(fn, X, W, torch.empty(24))
    with contextlib.nullcontext() if legal else pytest.raises(GraphVerificationError, match="no full: x0"):
        verify_graph(module.graph)


def test_an_illegal_field_is_named(module: fx.GraphModule) -> None:
    set_argument(5, 1)(module.graph)
    with pytest.raises(InvalidTaskNode, match="world_size"):
        verify_graph(module.graph)


def test_mixed_dtypes(module: fx.GraphModule) -> None:
    call = task_calls(module.graph)[0][0]
    weight = call.args[1][0]  # type: ignore[index]
    weight.meta["val"] = weight.meta["val"].to(torch.bfloat16)
    with pytest.raises(GraphVerificationError, match="mixes"):
        verify_graph(module.graph)
