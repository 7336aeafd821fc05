"""choose_experts: which routers become one call, into which graph, and what keeps them as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch
from torch import fx
from torch.nn.functional import linear

from ditron_inductor.options import Options
from ditron_inductor.passes.fuse.choose_experts import (
    MOST_CHOSEN,
    MOST_EXPERTS,
    MOST_TOKENS,
    ChoiceBounds,
    choose_experts,
    choose_within,
)
from ditron_inductor.task.nodes import ChooseExperts
from tests.passes.graphs import WORLD_SIZE, all_reduce, compiled_graphs, fuse, local_nodes, run_ranks, text, twin

pytestmark = pytest.mark.usefixtures("group")

T, K, E = 3, 32, 16
ANYWHERE = ChoiceBounds(("cpu", "cuda"))
Router = Callable[..., Any]


def softmax(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, k: int = 4) -> Any:
    """As Qwen3 and Mixtral route."""
    logits = linear(x, w)
    values, experts = torch.topk(torch.softmax(logits, -1, dtype=torch.float), k)
    return (values / values.sum(-1, keepdim=True)).to(logits.dtype), experts


def logits(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Any:
    """As GPT-OSS routes."""
    values, experts = torch.topk(linear(x, w, b), 4)
    return torch.softmax(values, -1), experts


def plain(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Any:
    """The largest values of the softmax as they are."""
    return torch.topk(linear(x, w, b).float().softmax(-1), 3, sorted=False)


def by_hand(
    z: torch.Tensor, *, alpha: float = 1.0, keepdim: bool = True, returned: bool = False, turned: bool = False
) -> Any:
    """The largest values of a softmax that is written out."""
    wide = z.float()
    largest = wide.amax(-1, True)
    terms = (wide - largest if alpha == 1.0 else torch.sub(wide, largest, alpha=alpha)).exp()
    total = terms.sum(-1, keepdim=keepdim)
    choice = torch.topk(total / terms if turned else terms / total, 4)
    return (choice, total) if returned else choice


def graph_of(
    route: Router, tokens: int = T, experts: int = E, dtype: torch.dtype = torch.bfloat16, dynamic: bool = False
) -> fx.GraphModule:
    """The router of what a fused reduction returns, as Inductor has it."""

    def layer(x: torch.Tensor, v: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Any:
        return route(all_reduce(x @ v), w, b)

    shapes = (tokens, K), (K, K), (experts, K), (experts,)
    with torch.no_grad():
        (module,) = compiled_graphs(layer, *(torch.randn(shape, dtype=dtype) for shape in shapes), dynamic=dynamic)
    return module


def routed(
    module: fx.GraphModule, options: Options | None = None, bounds: ChoiceBounds = ANYWHERE
) -> list[ChooseExperts]:
    """The calls that the pass makes."""
    return local_nodes(module, ChooseExperts.kind, lambda *given: choose_within(*given, bounds), options)


def test_golden() -> None:
    module = graph_of(softmax)
    assert routed(module) == [ChooseExperts(4, "softmax", True)]
    expecttest.assert_expected_inline(
        text(module.graph),
        """\
arg0_1 [3, 32]
arg1_1 [32, 32]
arg2_1 [16, 32]
matmul_all_reduce = ditron.matmul_all_reduce([arg0_1, arg1_1], "reduce_op=sum world_size=4 group_name=0 site='' trials", None)
getitem_2 [3, 32] = matmul_all_reduce[0]
permute [32, 16] = aten.permute(arg2_1, [1, 0])
choose_experts = ditron.choose_experts([getitem_2, permute], 'top_k=4 scores=softmax normalised', None)
getitem_3 [3, 4] = choose_experts[0]
getitem_4 [3, 4] = choose_experts[1]
convert_element_type_5 [3, 4] = prims.convert_element_type(getitem_3, torch.bfloat16)
return (convert_element_type_5, getitem_4)
""",
    )


@pytest.mark.parametrize(
    ("route", "task"),
    [
        (softmax, ChooseExperts(4, "softmax", True)),
        (logits, ChooseExperts(4, "logits", has_bias=True)),
        (plain, ChooseExperts(3, "softmax", has_bias=True)),
        (lambda x, w, b: by_hand(linear(x, w)), ChooseExperts(4, "softmax")),
        (
            lambda x, w, b: torch.topk(torch.addmm(b.view(1, -1), x, w.t()), 4),
            ChooseExperts(4, "logits", has_bias=True),
        ),
        (lambda x, w, b: softmax(x, w, b)[1], ChooseExperts(4, "softmax")),
        (lambda x, w, b: softmax(x, w, b)[0], ChooseExperts(4, "softmax", True)),
    ],
    ids=["softmax", "logits", "plain", "by hand", "a bias with two dimensions", "experts alone", "values alone"],
)
def test_every_form_of_a_router(route: Router, task: ChooseExperts) -> None:
    """It fires, and what comes of it is what the graph computes."""
    before = graph_of(route)
    after = twin(before)
    assert routed(after) == [task]
    torch.manual_seed(1)
    shapes = [tuple(node.meta["val"].shape) for node in before.graph.find_nodes(op="placeholder")]
    # No two logits of a token are equal.
    by_rank = [[(torch.randn(shape) / 8).bfloat16() for shape in shapes] for _ in range(WORLD_SIZE)]
    # Without `sorted` topk may return its choice in any order.
    found, wanted = (
        [[one.sort(-1)[0] for one in of_rank] for of_rank in run_ranks(module, by_rank)] for module in (after, before)
    )
    torch.testing.assert_close(found, wanted)


def test_values_that_are_used_elsewhere_are_not_divided_inside() -> None:
    def route(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Any:
        values, experts = torch.topk(torch.softmax(linear(x, w), -1, dtype=torch.float), 4)
        return values / values.sum(-1, keepdim=True), values, experts

    assert routed(graph_of(route)) == [ChooseExperts(4, "softmax")]


def test_a_sum_that_is_divided_by_values_is_computed_outside() -> None:
    def route(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Any:
        values, experts = torch.topk(torch.softmax(linear(x, w), -1, dtype=torch.float), 4)
        return values.sum(-1, keepdim=True) / values, experts

    assert routed(graph_of(route)) == [ChooseExperts(4, "softmax")]


def _of_logits(change: Callable[[torch.Tensor], Any]) -> Router:
    return lambda x, w, b: change(linear(x, w))


NEVER: dict[str, tuple[Router, dict[str, Any]]] = {
    "many tokens": (softmax, {"tokens": MOST_TOKENS + 1}),
    "a dynamic number of tokens": (softmax, {"dynamic": True}),
    "many experts": (softmax, {"experts": MOST_EXPERTS + 1}),
    "many chosen": (lambda x, w, b: softmax(x, w, b, MOST_CHOSEN + 1), {"experts": 32}),
    "fp32": (softmax, {"dtype": torch.float32}),
    "logits are returned": (_of_logits(lambda z: (z, torch.topk(z, 4))), {}),
    "scores are returned": (_of_logits(lambda z: (s := z.float().softmax(-1), torch.topk(s, 4))), {}),
    "the sum is returned": (_of_logits(lambda z: by_hand(z, returned=True)), {}),
    "half of the largest logit": (_of_logits(lambda z: by_hand(z, alpha=0.5)), {}),
    "divided by the terms": (_of_logits(lambda z: by_hand(z, turned=True)), {}),
    "divided by a number": (
        _of_logits(lambda z: torch.topk((z.float() - z.float().amax(-1, True)).exp() / 2.0, 4)),
        {},
    ),
    "divided by the sums of other tokens": (_of_logits(lambda z: by_hand(z, keepdim=False)), {"tokens": E}),
    "tokens with gaps": (lambda x, w, b: torch.topk(torch.cat([x, x + 1], -1)[:, :K] @ w.t(), 4), {}),
    "the smallest": (_of_logits(lambda z: torch.topk(z, 4, largest=False)), {}),
    "of each expert": (_of_logits(lambda z: torch.topk(z, 2, dim=0)), {}),
    "a sigmoid": (_of_logits(lambda z: torch.topk(z.float().sigmoid(), 4)), {}),
    "a softmax over tokens": (_of_logits(lambda z: torch.topk(z.float().softmax(0), 4)), {}),
    "a softmax that is rounded": (_of_logits(lambda z: torch.topk(z.softmax(-1), 4)), {}),
    "by rows of the router": (lambda x, w, b: torch.topk(x @ w.mT.contiguous(), 4), {}),
}


@pytest.mark.parametrize("name", NEVER, ids=lambda name: name.replace(" ", "_"))
def test_it_must_not_fire(name: str) -> None:
    route, sizes = NEVER[name]
    assert routed(graph_of(route, **sizes)) == []


def test_without_a_site_it_is_left_to_inductor() -> None:
    (module,) = compiled_graphs(softmax, *(torch.randn(shape).bfloat16() for shape in ((T, K), (E, K), (E,))))
    assert routed(module) == []


@pytest.mark.parametrize(
    "options", [Options(strategy="library"), Options(fusions=("matmul_all_reduce", "projections"))], ids=str
)
def test_it_can_be_left_out(options: Options) -> None:
    assert routed(graph_of(softmax), options) == []


def test_the_cpu_device_is_left_to_inductor() -> None:
    module = graph_of(softmax)
    fuse(module, Options())
    assert choose_experts(module.graph, options=Options()) == 0
