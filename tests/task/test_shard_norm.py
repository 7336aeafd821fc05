"""The norm in front of a gather: its text and rules, the op's fake outputs, what a graph with one must keep to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx

from ditron_inductor.errors import GraphVerificationError, InvalidTaskNode
from ditron_inductor.task import schema
from ditron_inductor.task.nodes import AllGatherMatmul, Norm, Policy, ShardNorm
from ditron_inductor.task.verify import task_calls, verify_graph
from tests.passes.graphs import traced

PROLOGUE = ShardNorm(Norm("layer", 1e-5), ("residual", "weight"), ("rstd",))
NODE = AllGatherMatmul(1, 4, "0", True, "r/0", Policy(), 1, prologue=PROLOGUE)
X, W, G = torch.empty(2, 8, 16), torch.empty(16, 24), torch.empty(16)


def block(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, w: torch.Tensor) -> Any:
    return schema.call(NODE, shard=x, weights=[w], residual=residual, weight=weight)[:-1]


@pytest.fixture
def module() -> fx.GraphModule:
    schema.define()
    return traced(block, X, X, G, W)


def test_text() -> None:
    assert NODE.text() == (
        "gather_dim=1 world_size=4 group_name=0 return_gathered site=r/0 num_weights=1 "
        "prologue=(norm=(form=layer eps=1e-05) extras=residual+weight saved=rstd)"
    )
    assert "norm" not in replace(NODE, prologue=None).text()


def test_a_call_stands_for_its_node(module: fx.GraphModule) -> None:
    verify_graph(module.graph)
    ((call, node),) = task_calls(module.graph)
    assert node == NODE
    shapes = [(tuple(one.shape), one.dtype) for one in call.meta["val"][:-1]]
    fp32 = torch.float32
    assert shapes == [((64, 24), fp32), ((2, 32, 16), fp32), ((2, 8, 16), fp32), ((2, 8, 1), fp32)]


@pytest.mark.parametrize("round_first", [False, True])
def test_fields_at_their_defaults_are_in_no_text(round_first: bool) -> None:
    """What is left out is read back as it was."""
    schema.define()
    prologue = ShardNorm(Norm("rms", 1e-5, round_first=round_first), ("weight",))
    node = replace(NODE, return_gathered=False, prologue=prologue)

    def call(x: torch.Tensor, weight: torch.Tensor, w: torch.Tensor) -> Any:
        return schema.call(node, shard=x, weights=[w], weight=weight)[:-1]

    ((call_of_it, found),) = task_calls(traced(call, X, G, W).graph)
    assert found == node
    text = call_of_it.args[schema.NODE]
    assert "plus_one" not in text and "saved" not in text and ("round_first" in text) is round_first


@pytest.mark.parametrize(
    "field, value",
    [("extras", ("weight", "residual")), ("extras", ("bias",)), ("saved", ("reduced",)), ("norm", Norm("batch"))],
)
def test_rules(field: str, value: Any) -> None:
    with pytest.raises(InvalidTaskNode, match=field):
        replace(NODE, prologue=replace(PROLOGUE, **{field: value})).verify()


SHARD, WEIGHTS, RESIDUAL, WEIGHT = range(4)
"""The places of the operands."""


@pytest.mark.parametrize(
    "place, other, problem",
    [
        (WEIGHT, WEIGHTS, "has a weight that does not fit"),
        (RESIDUAL, WEIGHT, "adds a residual of another size"),
    ],
)
def test_a_wrong_operand(module: fx.GraphModule, place: int, other: int, problem: str) -> None:
    ((call, node),) = task_calls(module.graph)
    assert [name for name, _ in node.slots()] == ["shard", "weights", "residual", "weight"]
    operands = list(schema.operands_of(call))
    operands[place] = operands[other]
    call.update_arg(schema.OPERANDS, operands)
    with pytest.raises(GraphVerificationError, match=problem):
        verify_graph(module.graph)


def test_tensors_of_a_norm_and_no_norm(module: fx.GraphModule) -> None:
    ((call, node),) = task_calls(module.graph)
    call.update_arg(schema.NODE, replace(node, prologue=None).text())
    call.meta["val"] = [*call.meta["val"][:2], call.meta["val"][-1]]
    with pytest.raises(GraphVerificationError, match="has 4 operands, and its node has 2"):
        verify_graph(module.graph)


def test_a_norm_and_not_all_of_its_tensors(module: fx.GraphModule) -> None:
    ((call, _),) = task_calls(module.graph)
    call.update_arg(schema.OPERANDS, schema.operands_of(call)[:-1])
    with pytest.raises(GraphVerificationError, match="has 3 operands, and its node has 4"):
        verify_graph(module.graph)
