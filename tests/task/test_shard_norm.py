"""The norm in front of a gather: its text and rules, the op's fake outputs, what a graph with one must keep to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx

from ditron_inductor.errors import GraphVerificationError, InvalidTaskNode
from ditron_inductor.task import ops
from ditron_inductor.task.nodes import AllGatherMatmul, Norm, Policy, ShardNorm
from ditron_inductor.task.verify import task_calls, verify_graph
from tests.passes.graphs import traced

PROLOGUE = ShardNorm(Norm("layer", 1e-5), ("residual", "weight"), ("rstd",))
NODE = AllGatherMatmul(1, 4, "0", True, "r/0", Policy(), 1, prologue=PROLOGUE)
X, W, G = torch.empty(2, 8, 16), torch.empty(16, 24), torch.empty(16)


def block(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, w: torch.Tensor) -> Any:
    extras = residual, weight, None
    site = ops.site_args(NODE)
    arguments = x, [w], None, 1, True, *site, [], "", *extras, *ops.shard_norm_args(PROLOGUE)
    return torch.ops.ditron.all_gather_matmul(*arguments)[:-1]


@pytest.fixture
def module() -> fx.GraphModule:
    ops.define()
    return traced(block, X, X, G, W)


def test_text() -> None:
    assert NODE.text() == (
        "all_gather_matmul(gather_dim=1, num_weights=1, return_gathered=True, norm=layer(eps=1e-05), "
        "norm_extras=residual+weight, saved=rstd, world_size=4, group_name='0', site='r/0', strategy=auto, "
        "workspace_limit=1073741824, timeout_s=0)"
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
def test_arguments_at_their_defaults_do_not_come(round_first: bool) -> None:
    """The dispatcher leaves them out of what it hands to the op, from the last one on."""
    ops.define()
    prologue = ShardNorm(Norm("rms", 1e-5, round_first=round_first), ("weight",))
    node = replace(NODE, return_gathered=False, prologue=prologue)

    def call(x: torch.Tensor, weight: torch.Tensor, w: torch.Tensor) -> Any:
        arguments = x, [w], None, 1, False, *ops.site_args(node), [], "", None, weight, None
        return torch.ops.ditron.all_gather_matmul(*arguments, *ops.shard_norm_args(prologue))[:-1]

    ((_, found),) = task_calls(traced(call, X, G, W).graph)
    assert found == node


@pytest.mark.parametrize(
    "field, value",
    [("extras", ("weight", "residual")), ("extras", ("bias",)), ("saved", ("reduced",)), ("norm", Norm("batch"))],
)
def test_rules(field: str, value: Any) -> None:
    with pytest.raises(InvalidTaskNode, match=field):
        replace(NODE, prologue=replace(PROLOGUE, **{field: value})).verify()


RESIDUAL, WEIGHT, NORM = 13, 14, 16


@pytest.mark.parametrize(
    "place, value, problem",
    [
        (WEIGHT, "w", "has a weight that does not fit"),
        (RESIDUAL, "weight", "adds a residual of another size"),
        (NORM, "", "has tensors of a norm, and no norm"),
    ],
)
def test_a_wrong_call(module: fx.GraphModule, place: int, value: str, problem: str) -> None:
    ((call, _),) = task_calls(module.graph)
    by_name = {"w": call.args[1][0], "weight": call.args[WEIGHT]}  # type: ignore[index]
    call.update_arg(place, by_name.get(value, value))
    if not value:
        call.meta["val"] = [*call.meta["val"][:2], call.meta["val"][-1]]
    with pytest.raises(GraphVerificationError, match=problem):
        verify_graph(module.graph)
