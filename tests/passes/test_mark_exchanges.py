"""mark_exchanges: the gradient of an exchange of tokens is known as one, in whatever graph it is."""

from __future__ import annotations

from collections.abc import Callable
from operator import getitem
from typing import Any

import pytest
import torch
from torch import fx
from torch.distributed._functional_collectives import all_to_all_single_autograd

from ditron_inductor.options import Options
from ditron_inductor.passes.graph.token_exchanges import TOKENS, may_be_gradient
from ditron_inductor.passes.normalize.mark_exchanges import mark_exchanges
from ditron_inductor.report.explain import without_caches
from ditron_inductor.task.site_records import collect_sites
from tests.models.interpreted import interpreted
from tests.passes.graphs import WORLD_SIZE, c10d, group_name

pytestmark = pytest.mark.usefixtures("group")

X, IDS = (8, 16), 16
SENT, CAME = [5, 3, 8, 0], [2, 2, 6, 2]
"""How many rows go to each rank, and come from it."""
EQUAL = [IDS // WORLD_SIZE] * WORLD_SIZE


def exchange(x: torch.Tensor, sent: list[int] = SENT, came: list[int] = CAME) -> torch.Tensor:
    return c10d.wait_tensor(c10d.all_to_all_single(x.contiguous(), came, sent, group_name()))


class Exchange(torch.autograd.Function):
    """As programs write it themselves. The compiler does not tag its backward as one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return exchange(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return exchange(grads[0], CAME, SENT)


class Both(torch.autograd.Function):
    """Two exchanges under one number."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return exchange(x), exchange(y)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return exchange(grads[0], CAME, SENT), exchange(grads[1], CAME, SENT)


def by_autograd(x: torch.Tensor, sent: list[int] = SENT, came: list[int] = CAME) -> torch.Tensor:
    return all_to_all_single_autograd(x, came, sent, torch.distributed.group.WORLD)


def slots(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The rows of two slots for each token, by their experts."""
    return x[ids.sort()[1] // 2]


def codes(fn: Callable[..., Any]) -> tuple[list[str], list[str]]:
    """(The reasons of the collectives of a forward, of its backward)."""
    x, ids = torch.randn(X, requires_grad=True), torch.randint(4, (IDS,))
    torch._dynamo.reset()
    with collect_sites() as sink, without_caches():
        out = torch.compile(fn, backend=interpreted({}, run_fused=False), fullgraph=True)(x, ids)
        torch.autograd.backward(out, [torch.ones_like(one) for one in out] if isinstance(out, tuple) else out)
    forward, backward = sink.graphs
    assert not forward.is_backward and backward.is_backward
    return [site.reason_code for site in forward.sites], [site.reason_code for site in backward.sites]


TOKENS_ONLY = ["tokens_exchanged"]


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, ids: by_autograd(slots(x, ids)),
        lambda x, ids: by_autograd(slots(x, ids), EQUAL, EQUAL),
        lambda x, ids: Exchange.apply(slots(x, ids)),
    ],
    ids=["autograd", "equal", "function"],
)
def test_a_gradient_that_is_alone_in_its_graph(fn: Callable[..., Any]) -> None:
    assert codes(fn) == (TOKENS_ONLY, TOKENS_ONLY)


def test_two_exchanges_under_one_number() -> None:
    assert codes(lambda x, ids: Both.apply(slots(x, ids), 2 * x[ids.sort()[1] // 2])) == (
        ["tokens_exchanged", "no_matmul"],
        ["no_matmul", "no_matmul"],
    )


def test_the_gradient_of_another_exchange_is_not_marked() -> None:
    assert codes(lambda x, ids: by_autograd(x[ids])) == (["no_matmul"], ["no_matmul"])


def joint(group: str = "", number: int | None = 7, sent: list[int] = CAME) -> tuple[fx.Graph, fx.Node, fx.Node]:
    """A joint graph of an exchange of sorted rows, and one of the backward that may be its gradient."""
    graph = fx.Graph()
    x, ids, tangents = (graph.placeholder(name) for name in ("primals_1", "primals_2", "tangents_1"))
    order = graph.call_function(torch.ops.aten.sort.default, (ids,))
    picked = graph.call_function(getitem, (order, 1))
    rows = graph.call_function(torch.ops.aten.index.Tensor, (x, [picked]))
    there = graph.call_function(c10d.all_to_all_single.default, (rows, CAME, SENT, group_name()))
    back = graph.call_function(c10d.all_to_all_single.default, (tangents, SENT, sent, group or group_name()))
    graph.output((there, back))
    ids.meta["val"] = picked.meta["val"] = torch.zeros(IDS, dtype=torch.int64)
    x.meta["val"], rows.meta["val"] = torch.empty(X), torch.empty(IDS, X[1])
    tangents.meta["val"], there.meta["val"] = torch.empty(sum(CAME), X[1]), torch.empty(sum(CAME), X[1])
    back.meta["val"] = torch.empty(IDS, X[1])
    there.meta["seq_nr"] = 7
    if number is not None:
        back.meta["seq_nr"] = number
    return graph, there, back


def test_the_mark_is_the_name() -> None:
    graph, there, back = joint()
    name = back.name
    assert mark_exchanges(graph, options=Options()) == 1
    assert back.name == f"{TOKENS}_{name}" == back.meta[TOKENS] and TOKENS not in there.meta


@pytest.mark.parametrize("other", [{"group": "other"}, {"number": 8}, {"number": None}, {"sent": SENT}])
def test_it_must_not_fire(other: dict[str, Any]) -> None:
    graph, there, back = joint(**other)
    assert not may_be_gradient(back, there)
    assert mark_exchanges(graph, options=Options()) == 0 and TOKENS not in back.meta
