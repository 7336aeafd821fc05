"""The node that stopped a fusion, by reason, and the line of the user's program that it comes from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ditron_inductor.options import Options
from ditron_inductor.passes.finish.record_sites import record_graph
from ditron_inductor.passes.fuse.all_gather_matmul import all_gather_matmul
from ditron_inductor.passes.graph.culprits import user_line
from ditron_inductor.passes.graph.reasons import LEFT_ALONE, Reason, ReasonCode, Refusal, refused
from tests.passes.graphs import WORLD_SIZE, all_gather, all_reduce, compiled_graphs, fuse, reduce_scatter, traced

pytestmark = pytest.mark.usefixtures("group")

X = torch.empty(8, 16)
A = torch.empty(32, 16)
W = torch.empty(16, 24)


def left_alone(fn: Callable[..., Any], *args: torch.Tensor) -> Reason:
    """Why the only collective of `fn` is left alone."""
    module = traced(fn, *args)
    assert fuse(module) == 0
    (reason,) = [node.meta[LEFT_ALONE] for node in module.graph.nodes if LEFT_ALONE in node.meta]
    assert isinstance(reason, Reason)
    return reason


def used_twice(a: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    product = a @ w
    return [all_reduce(product), product.exp()]


def random_weight(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    gathered = all_gather(x)
    first = gathered.sum()
    return [gathered @ (w + torch.rand_like(w)), first]


def gathered_twice(x: torch.Tensor) -> torch.Tensor:
    gathered = all_gather(x)
    return gathered @ gathered.exp().t()


CASES: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...], ReasonCode, str]] = {
    "cast in front": (lambda a, w: all_reduce((a @ w).half()), (A, W), ReasonCode.CAST_BETWEEN, "_to_copy"),
    "op in front": (lambda a, w: all_reduce((a @ w).sin()), (A, W), ReasonCode.POINTWISE_BETWEEN, "sin"),
    "op in a sum": (lambda a, w: all_reduce((a @ w).sin() + a @ w), (A, W), ReasonCode.POINTWISE_BETWEEN, "sin"),
    "transpose in front": (lambda a, w: reduce_scatter((a @ w).t().reshape(-1)), (A, W), ReasonCode.LAYOUT, "t"),
    "used elsewhere": (used_twice, (A, W), ReasonCode.INTERMEDIATE_USED, "exp"),
    "cast behind": (lambda x, w: all_gather(x).double() @ w.double(), (X, W), ReasonCode.CAST_BETWEEN, "_to_copy"),
    "not a float": (lambda x, w: all_gather(x.int()) @ w.int(), (X, W), ReasonCode.DTYPE, "mm"),
    "late operand": (random_weight, (X, W), ReasonCode.OPERAND_LATE, "rand_like"),
    "dependent operand": (gathered_twice, (X,), ReasonCode.OPERAND_DEPENDS, "t"),
    "other chunks": (
        lambda x, w: torch.cat(all_gather(x).chunk(WORLD_SIZE)[::-1], 1) @ torch.cat([w] * WORLD_SIZE),
        (X, W),
        ReasonCode.CHUNKS_PERMUTED,
        "cat",
    ),
    "of the collective": (lambda a, w: all_reduce(a @ w, "max"), (A, W), ReasonCode.REDUCE_OP, "all_reduce"),
}


@pytest.mark.parametrize(("fn", "args", "code", "op"), CASES.values(), ids=CASES)
def test_the_node_that_stopped_it(
    fn: Callable[..., Any], args: tuple[torch.Tensor, ...], code: ReasonCode, op: str
) -> None:
    reason = left_alone(fn, *args)
    assert reason.code == code.value
    assert reason.culprit.op.split(".")[1] == op, reason.culprit


def test_a_result_that_is_returned_too() -> None:
    def fn(a: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        product = a @ w
        return [all_reduce(product), product]

    assert left_alone(fn, A, W).culprit.op == "the graph's output"


def test_the_node_is_described_as_it_was_found() -> None:
    culprit = left_alone(lambda a, w: all_reduce((a @ w).sin()), A, W).culprit
    assert (culprit.name, culprit.value) == ("sin", "[32, 24] float32")
    assert culprit.text() == "sin (aten.sin.default, [32, 24] float32)"


def test_a_node_of_a_form_that_was_only_tried_is_not_named() -> None:
    weight = torch.empty(16, 24, dtype=torch.int32)
    reason = left_alone(lambda a, w: all_reduce(torch.bmm(a[None], w[None])), A.int(), weight)
    assert (reason.code, reason.culprit.op) == ("dtype", "aten.bmm.default")


def test_refusals_keep_the_first_node() -> None:
    first, second = list(traced(torch.sin, X).graph.nodes)[:2]
    refusal = ReasonCode.BIAS.at(first)
    assert refusal.at(second) is refusal and refusal == Refusal(ReasonCode.BIAS, first)
    assert refused(refusal) and refused(ReasonCode.BIAS) and not refused(None)


class Model(nn.Module):
    """One line for each of its matmuls."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        product = self.down(hidden)
        return all_reduce(product.sin())


def test_lines_are_those_of_the_user() -> None:
    forward, backward = compiled_graphs(Model(), torch.randn(8, 16, requires_grad=True))
    assert fuse(forward) == 0
    (site,) = record_graph(forward.graph, Options(), graph_before="", graph_after="").sites
    assert site.culprit is not None
    assert site.culprit.line.startswith(f"{__file__}:") and site.culprit.line.endswith("(product.sin())")
    assert " in all_reduce: " in site.line
    products = [node for node in backward.graph.nodes if node.target is torch.ops.aten.mm.default]
    assert any("self.down(hidden)" in user_line(node.meta["stack_trace"]) for node in products)


def test_traces() -> None:
    theirs = f'  File "{torch.__file__}", line 3, in linear\n    return mm(x)\n'
    ours = '  File "/home/me/model.py", line 12, in forward\n    return self.down(x)\n           ^^^^^^^^^\n\n'
    assert user_line(ours + theirs) == "/home/me/model.py:12 in forward: return self.down(x)"
    assert user_line('  File "/a b/m.py", line 1, in f\n') == "/a b/m.py:1 in f"
    assert user_line(theirs).endswith("in linear: return mm(x)")
    assert user_line("") == ""


def test_a_switched_off_fusion_speaks_of_the_collective() -> None:
    module = traced(lambda x, w: all_gather(x) @ w, X, W)
    all_gather_matmul(module.graph, options=Options(fusions=()))
    (reason,) = [node.meta[LEFT_ALONE] for node in module.graph.nodes if LEFT_ALONE in node.meta]
    assert reason.culprit.name.startswith("all_gather_into_tensor")
