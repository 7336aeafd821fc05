"""verify_graph: a legal graph passes, and every broken rule is an error that names the call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx

from ditron_inductor.errors import GraphVerificationError, InvalidTaskNode
from ditron_inductor.task import schema
from ditron_inductor.task.nodes import AllGatherMatmul, AllReduceRmsNorm, MatmulReduceScatter, Norm, Policy
from ditron_inductor.task.verify import task_calls, verify_graph
from tests.passes.graphs import traced

X = torch.empty(8, 16)
W = torch.empty(16, 24)
V = torch.empty(24, 16)
GATHER = AllGatherMatmul(0, 4, "0", False, "r/0", Policy(), 1)
SCATTER = MatmulReduceScatter(0, "sum", 4, "0", "r/1", Policy(), num_products=2, has_bias=True)


def chain(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Two sites and a collective that is not fused, in one chain."""
    hidden, token = schema.call(GATHER, shard=x, weights=[w])
    other = torch.ops.ditron.token_of(torch.ops.ditron.after(x, token).sin())
    bias = v.sum(0)
    out, _ = schema.call(SCATTER, other, a=[hidden, hidden], b=[v, v], bias=bias)
    return out


@pytest.fixture
def module() -> fx.GraphModule:
    schema.define()
    return traced(chain, X, W, V)


def test_a_legal_graph(module: fx.GraphModule) -> None:
    verify_graph(module.graph)
    assert [task.kind for _, task in task_calls(module.graph)] == ["all_gather_matmul", "matmul_reduce_scatter"]


def set_field(index: int = 0, **fields: Any) -> Callable[[fx.Graph], None]:
    """Changes fields of the node of a call."""

    def change(graph: fx.Graph) -> None:
        call, task = task_calls(graph)[index]
        call.update_arg(schema.NODE, replace(task, **fields).text())

    return change


def set_operand(index: int, name: str, value: Callable[[fx.Graph], Any]) -> Callable[[fx.Graph], None]:
    """Changes an operand of a call."""

    def change(graph: fx.Graph) -> None:
        call, task = task_calls(graph)[index]
        call.update_arg(schema.OPERANDS, task.flat({**schema.operands_from_call(call), name: value(graph)}))

    return change


def operand(graph: fx.Graph, index: int, name: str) -> Any:
    return schema.operand(task_calls(graph)[index][0], name)


wrong_weight = set_operand(0, "weights", lambda graph: [operand(graph, 0, "shard")])
narrow_product = set_operand(1, "b", lambda graph: [operand(graph, 1, "b")[0], operand(graph, 0, "weights")[0]])
short_rows = set_operand(1, "a", lambda graph: [operand(graph, 1, "a")[0], operand(graph, 0, "shard")])
bias_that_is_no_row = set_operand(1, "bias", lambda graph: operand(graph, 1, "b")[0])


def operand_that_is_no_node(graph: fx.Graph) -> None:
    call = task_calls(graph)[0][0]
    call.update_arg(schema.OPERANDS, [schema.operands_of(call)[0], None])


def lost_operand(graph: fx.Graph) -> None:
    call = task_calls(graph)[1][0]
    call.update_arg(schema.OPERANDS, schema.operands_of(call)[:-1])


def lost_token(graph: fx.Graph) -> None:
    task_calls(graph)[1][0].update_arg(schema.TOKEN, None)


def shared_token(graph: fx.Graph) -> None:
    token = task_calls(graph)[1][0].args[schema.TOKEN]
    (output,) = graph.find_nodes(op="output")
    output.args = ((output.args[0], token),)


def token_that_is_none(graph: fx.Graph) -> None:
    task_calls(graph)[1][0].update_arg(schema.TOKEN, next(iter(graph.nodes)))


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
        (operand_that_is_no_node, "has an operand that is no tensor: None"),
        (lost_operand, "has 4 operands, and its node has 5"),
        (set_field(num_weights=2), "has 2 operands, and its node has 3"),
        (lost_token, "no token"),
        (shared_token, "shares its token"),
        (token_that_is_none, "token that is none"),
        (whole_list_used, "is used by"),
        (set_field(site=""), "no site name"),
        (set_field(site="r/1"), "shares its site name"),
        (set_field(gather_dim=1), "gathers dimension 1 of 2"),
        (set_field(1, scatter_dim=1), "scatters dimension 1 of 2"),
        (set_field(1, world_size=3), "does not divide"),
    ],
)
def test_a_broken_rule_is_named(module: fx.GraphModule, change: Callable[[fx.Graph], None], words: str) -> None:
    change(module.graph)
    with pytest.raises(GraphVerificationError, match=words):
        verify_graph(module.graph)


@pytest.mark.parametrize(("epilogue", "legal"), [("mm0 + row(x0)", True), ("mm0 + full(x0)", False)])
def test_extra_tensors_of_a_reduction_fit_its_output(epilogue: str, legal: bool) -> None:
    node = MatmulReduceScatter(0, "sum", 4, "0", "r/0", Policy(), num_extras=1, epilogue=epilogue)

    def fn(x: torch.Tensor, w: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        out, _ = schema.call(node, a=[x], b=[w], extras=[row])
        return out

    schema.define()
    module = traced(fn, X, W, torch.empty(24))
    with contextlib.nullcontext() if legal else pytest.raises(GraphVerificationError, match="no full: x0"):
        verify_graph(module.graph)


@pytest.mark.parametrize(
    ("factors", "added", "words"),
    [
        ((8,), (4, 16), ""),
        ((4, 2), (4, 16), "has a scale that is no vector"),
        ((4,), (4, 16), "has a scale that does not fit the slots"),
        ((8,), (64,), "adds what does not fit"),
        ((8,), (8, 8), "adds what does not fit"),
    ],
)
def test_operands_of_a_sum_of_slots_fit(factors: tuple[int, ...], added: tuple[int, ...], words: str) -> None:
    node = AllReduceRmsNorm("sum", Norm(), (), 4, "0", "r/0", Policy(), top_k=2, has_added=True)

    def fn(x: torch.Tensor, factors: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        out, *_ = schema.call(node, x=x, factors=factors, added=added)
        return out

    schema.define()
    module = traced(fn, X, torch.empty(factors), torch.empty(added))
    with pytest.raises(GraphVerificationError, match=words) if words else contextlib.nullcontext():
        verify_graph(module.graph)


def test_an_illegal_field_is_named(module: fx.GraphModule) -> None:
    set_field(world_size=1)(module.graph)
    with pytest.raises(InvalidTaskNode, match="world_size"):
        verify_graph(module.graph)


def test_mixed_dtypes(module: fx.GraphModule) -> None:
    (weight,) = operand(module.graph, 0, "weights")
    weight.meta["val"] = weight.meta["val"].to(torch.bfloat16)
    with pytest.raises(GraphVerificationError, match="mixes"):
        verify_graph(module.graph)
