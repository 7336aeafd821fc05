"""What a report says of routed experts whose sum no node takes: in front of a reduction alone, and of one with its norm."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ditron_inductor import pipeline
from ditron_inductor.errors import DitronNotFused
from ditron_inductor.options import Options
from ditron_inductor.task.site_records import SiteRecord, collect_sites
from tests.passes.graphs import all_gather, all_reduce, compiled_graphs, reduce_scatter

pytestmark = pytest.mark.usefixtures("group")
D, E, K = 16, 4, 2
MANY, SOME, FEW = 512, 256, 8
UP, DOWN = torch.empty(E, 8, D).bfloat16(), torch.empty(E, D, 8).bfloat16()
NORM = torch.ones(D).bfloat16()
Sum = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def given(tokens: int) -> tuple[torch.Tensor, ...]:
    return torch.empty(tokens, E), torch.empty(tokens, D).bfloat16(), UP, DOWN


def grouped(scores: torch.Tensor, x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, *, total: Sum) -> Any:
    """total: a function of the products of sorted slots, the weights of the tokens, and the slot at each place."""
    weights, chosen = scores.topk(K)
    ids, order = chosen.reshape(-1).sort()
    ends = torch.histc(ids.float(), E, 0, E - 1).cumsum(0, dtype=torch.int32)
    rows = torch._grouped_mm(x[order // K], up.mT, offs=ends).sin()
    return total(torch._grouped_mm(rows, down.mT, offs=ends), weights, order)


def copied(scores: torch.Tensor, x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, *, total: Sum) -> Any:
    """As `batched_mm` of `transformers` writes it: the weights are copied for each slot."""
    weights, chosen = scores.topk(K)
    # Two choices of a token may be one expert, so nothing becomes a call.
    ids = chosen.reshape(-1) // 2
    rows = torch.bmm(up[ids], x.repeat_interleave(K, 0).unsqueeze(-1)).sin()
    return total(torch.bmm(down[ids], rows).squeeze(-1), weights, ids)


def buffered(scores: torch.Tensor, x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> Any:
    """Slots lie in a buffer for each expert, from which they are picked again."""
    weights, chosen = scores.topk(K)
    ids = chosen.reshape(-1)
    rows = torch.zeros(E * len(x), D, dtype=x.dtype).index_put((ids,), x.repeat_interleave(K, 0))
    products = torch.bmm(torch.bmm(rows.view(E, -1, D), up.mT).sin(), down.mT).view(-1, D)
    return (products[ids] * weights.reshape(-1, 1).bfloat16()).view(-1, K, D).sum(1)


def dropping(scores: torch.Tensor, x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> Any:
    """The same, with a row of zeros behind the buffer, which slots beyond the capacity of an expert read."""
    weights, chosen = scores.topk(K)
    ids = chosen.reshape(-1)
    rows = torch.bmm(x.repeat(E, 1).view(E, -1, D), up.mT).sin()
    products = F.pad(torch.bmm(rows, down.mT).view(-1, D), (0, 0, 0, 1))
    return (products[ids] * weights.reshape(-1, 1).bfloat16()).view(-1, K, D).sum(1)


def all_experts(scores: torch.Tensor, x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> Any:
    """Every expert computes every token."""
    rows = x.repeat(E, 1).view(E, -1, D) * scores.t().unsqueeze(-1).bfloat16()
    return torch.bmm(torch.bmm(rows, up.mT).sin(), down.mT).sum(0)


def by_token(rows: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order))
    return rows[places].view(-1, K, D)


def scaled(rows: torch.Tensor, weights: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    return rows * weights.reshape(-1)[order].unsqueeze(-1)


def known(rows: torch.Tensor, weights: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    return by_token(scaled(rows, weights, order), order).sum(1).bfloat16()


def scaled_behind(rows: torch.Tensor, weights: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """By a number that is a tensor."""
    return (by_token(scaled(rows, weights, order), order).sum(1) * weights.amax()).bfloat16()


def one_by_one(rows: torch.Tensor, weights: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """One slot is left out."""
    slots = by_token(scaled(rows, weights, order), order)
    return (slots[:, 0] + slots[:, 0]).bfloat16()


def each_slot_once(rows: torch.Tensor, weights: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    slots = by_token(rows, order)
    return (slots[:, 0] * weights[:, :1] + slots[:, 1] * weights[:, 1:]).bfloat16()


def by_einsum_of_slots(rows: torch.Tensor, weights: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    return torch.einsum("tkd,tk->td", by_token(rows, order), weights.bfloat16())


def sent_in_fp32(rows: torch.Tensor, weights: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    return known(rows, weights, order).float()


def not_rounded(rows: torch.Tensor, weights: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    return by_token(scaled(rows, weights, order), order).sum(1)


def by_einsum(rows: torch.Tensor, weights: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """The slots have weights before, too."""
    return torch.einsum("tkd,tk->td", by_token(scaled(rows, weights, order), order).bfloat16(), weights.bfloat16())


def all_but_sent_in_fp32(rows: torch.Tensor, weights: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    slots = by_token(scaled(rows, weights, order), order)
    return slots[:, 0] + slots[:, 1]


def einsum_in_fp32(rows: torch.Tensor, weights: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    return torch.einsum("tk,tkd->td", weights, by_token(rows, order).float())


def slots_alone(rows: torch.Tensor, weights: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    return by_token(rows, order)


def not_placed(rows: torch.Tensor, weights: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    return rows.view(-1, K, D).sum(1)


def of_copies(rows: torch.Tensor, weights: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return (rows * weights.reshape(-1, 1)).view(-1, K, D).sum(1).bfloat16()


def copies_by_einsum(rows: torch.Tensor, weights: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return torch.einsum("tkd,tk->td", rows.view(-1, K, D), weights.bfloat16())


def copies_scaled_behind(rows: torch.Tensor, weights: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    return of_copies(rows, weights, order) * weights.amax().bfloat16()


def copies_scaled_twice(rows: torch.Tensor, weights: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    return copies_by_einsum(rows * weights.reshape(-1, 1).bfloat16(), weights, order)


def copies_by_einsum_in_fp32(rows: torch.Tensor, weights: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return torch.einsum("tkd,tk->td", rows.view(-1, K, D).float(), weights)


def products_alone(rows: torch.Tensor, weights: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return rows


def only_site(graph: torch.fx.GraphModule, options: Options | None = None) -> SiteRecord:
    """What the pipeline says of the one collective of a graph."""
    with collect_sites() as sink:
        pipeline.DitronPipeline(options or Options())(graph.graph)
    (record,) = sink.graphs[0].sites
    return record


def site(
    layer: Callable[..., Any], tokens: int, *, normed: bool, options: Options, dynamic: bool = False
) -> SiteRecord:
    def reduced(*operands: torch.Tensor) -> Any:
        total = all_reduce(layer(*operands))
        return F.rms_norm(total, (D,), NORM.to(total.dtype), eps=1e-5) if normed else total

    (graph,) = compiled_graphs(reduced, *given(tokens), dynamic=dynamic)
    return only_site(graph, options)


def alone(layer: Callable[..., Any], tokens: int, *, dynamic: bool = False) -> tuple[str | None, str]:
    """Why the reduction of what `layer` returns is left alone, and the op that stopped it."""
    record = site(layer, tokens, normed=False, options=Options(), dynamic=dynamic)
    return record.reason_code, "" if record.culprit is None else record.culprit.op.split(".")[1]


def notes(
    layer: Callable[..., Any], tokens: int, *, dynamic: bool = False, options: Options | None = None
) -> list[tuple[str, str, str]]:
    """What stayed outside of the node of the reduction with its norm."""
    record = site(layer, tokens, normed=True, options=options or Options(), dynamic=dynamic)
    assert record.kind == "all_reduce_rms_norm" and all(one.text for one in record.outside)
    return [(one.what, one.code, one.node.op.split(".")[1]) for one in record.outside]


OTHERS: dict[Sum, str] = {
    scaled_behind: "mul",
    one_by_one: "select",
}
"""Other forms of the sum, and the op that is none of the form that is taken."""
ALONE: dict[Sum, str] = {
    sent_in_fp32: "convert_element_type",
    not_rounded: "sum",
    by_einsum: "bmm",
    all_but_sent_in_fp32: "add",
    einsum_in_fp32: "bmm",
}
"""Those that a reduction with a norm does not show in the same way."""


@pytest.mark.parametrize(("total", "op"), (OTHERS | ALONE).items())
def test_the_op_that_is_none_of_the_form_is_named(total: Sum, op: str) -> None:
    layer = functools.partial(grouped, total=total)
    assert alone(layer, MANY) == ("experts_sum", op)
    # No form of few tokens is taken, so another one would change nothing.
    assert alone(layer, SOME)[0] == "few_tokens"


@pytest.mark.parametrize(("total", "op"), OTHERS.items())
def test_a_reduction_with_its_norm_says_so_too(total: Sum, op: str) -> None:
    layer = functools.partial(grouped, total=total)
    assert notes(layer, MANY) == [("experts in front", "experts_sum", op)]
    assert [code for _, code, _ in notes(layer, SOME)] == ["few_tokens"]
    without = Options(fusions=("all_reduce_rms_norm",))
    assert notes(layer, MANY, options=without) == [], "nobody wants it"


def test_what_the_matcher_says_stands_beside_the_norm() -> None:
    layer = functools.partial(grouped, total=known)
    assert [code for _, code, _ in notes(layer, SOME)] == ["few_tokens"]
    assert [code for _, code, _ in notes(layer, 600, dynamic=True)] == ["dynamic_tokens"]


def test_a_dynamic_number_of_tokens_is_the_reason_in_any_form() -> None:
    assert alone(functools.partial(grouped, total=scaled_behind), 600, dynamic=True)[0] == "dynamic_tokens"


def test_products_of_which_nothing_is_known() -> None:
    """Rows in the order of the experts may be those of any tokens."""
    assert alone(functools.partial(grouped, total=not_placed), MANY) == ("grouped_matmul", "_grouped_mm")
    # Nothing has to be known of rows in the order of the tokens: each may be a token with one slot.
    record = site(functools.partial(grouped, total=slots_alone), MANY, normed=False, options=Options())
    assert (record.matched, record.kind) == (True, "grouped_matmul_all_reduce")


def test_experts_whose_weights_are_copied() -> None:
    assert alone(functools.partial(copied, total=of_copies), MANY) == ("experts_sum", "bmm")
    assert alone(functools.partial(copied, total=of_copies), FEW)[0] == "few_tokens"
    assert alone(functools.partial(copied, total=copies_by_einsum), FEW) == ("few_tokens", "bmm")
    assert alone(functools.partial(copied, total=products_alone), FEW) == ("few_tokens", "bmm")


def test_a_norm_that_does_not_take_the_sum_of_a_few_tokens() -> None:
    def last(total: Sum) -> tuple[str, str, str]:
        *_, note = notes(functools.partial(copied, total=total), FEW)
        return note

    assert last(copies_by_einsum_in_fp32) == ("experts in front", "experts_sum", "bmm")
    assert last(copies_scaled_behind) == ("experts in front", "experts_sum", "mul")
    # These are in the node.
    assert last(copies_by_einsum) == ("experts in front", "experts_form", "bmm")
    assert last(copies_scaled_twice) == ("experts in front", "experts_form", "bmm")
    assert last(of_copies) == ("experts in front", "experts_form", "bmm")


def test_rows_that_are_picked_from_batches() -> None:
    assert alone(buffered, MANY) == ("experts_sum", "bmm")
    assert alone(buffered, FEW)[0] == "few_tokens"
    assert notes(buffered, MANY)[0] == ("experts in front", "experts_sum", "bmm")
    assert alone(dropping, MANY) == ("experts_sum", "bmm")


@pytest.mark.parametrize("layer", [buffered, dropping])
def test_gradients_of_tokens_that_lie_in_batches(layer: Callable[..., Any]) -> None:
    """The form of a backward is not the user's: that the matmul is a batched one is all that is said of it."""
    (graph,) = compiled_graphs(lambda *operands: all_reduce(layer(*operands)), *given(MANY))
    next(iter(graph.graph.find_nodes(op="placeholder"))).name = "tangents_1"
    record = only_site(graph)
    assert record.reason_code == "batched_matmul"
    assert record.culprit is not None and record.culprit.op == "aten.bmm.default"


@pytest.mark.parametrize("tokens", [FEW, MANY])
def test_the_sum_of_all_batches_is_one_matmul(tokens: int) -> None:
    assert alone(all_experts, tokens) == ("sum_of_matmuls", "bmm")
    assert notes(all_experts, tokens) == [("matmuls in front", "sum_of_matmuls", "bmm")]


def test_strict_asks_for_another_form() -> None:
    layer = functools.partial(grouped, total=scaled_behind)
    with pytest.raises(DitronNotFused, match=r"experts_sum: mul.*\n.*torch\._grouped_mm"):
        site(layer, MANY, normed=False, options=Options(strict=True))
    # As with a dynamic number of tokens, the norm is enough.
    assert site(layer, MANY, normed=True, options=Options(strict=True)).matched
    others = tuple(kind for kind in Options().fusions if kind != "grouped_matmul_all_reduce")
    assert not site(layer, MANY, normed=False, options=Options(strict=True, fusions=others)).matched


def reason_of(
    layer: Callable[..., Any], *more: torch.Tensor, tokens: int, trained: bool = False
) -> tuple[str | None, str]:
    """Why the collective of a layer that has it inside is left alone, and the op that stopped it. trained: its weights
    are.
    """
    graph, *_ = compiled_graphs(layer, *(one.detach().requires_grad_(trained) for one in (*given(tokens), *more)))
    record = only_site(graph)
    assert record.culprit is not None
    return record.reason_code, record.culprit.op.split(".")[1]


def test_a_reduce_scatter_of_the_columns() -> None:
    def scattered(*operands: torch.Tensor, total: Sum) -> torch.Tensor:
        return reduce_scatter(torch.cat(grouped(*operands, total=total).chunk(4, 1)))

    assert reason_of(functools.partial(scattered, total=known), tokens=MANY) == ("experts_sum", "cat")


def test_a_sum_by_slots_of_which_the_columns_are_scattered() -> None:
    """The sum is a batched matmul, which says nothing of the columns."""

    def scattered(*operands: torch.Tensor) -> torch.Tensor:
        return reduce_scatter(torch.cat(grouped(*operands, total=by_einsum_of_slots).chunk(4, 1)))

    assert reason_of(scattered, tokens=MANY) == ("experts_sum", "split")


def test_the_largest_of_what_ranks_sum_up() -> None:
    def largest(*operands: torch.Tensor) -> torch.Tensor:
        return reduce_scatter(torch.cat(grouped(*operands, total=each_slot_once).chunk(4, 1)), "max")

    assert reason_of(largest, tokens=MANY) == ("reduce_op", "reduce_scatter_tensor")


def test_slots_that_a_backward_reads_too() -> None:
    layer = functools.partial(grouped, total=by_einsum_of_slots)
    assert reason_of(lambda *operands: all_reduce(layer(*operands)), tokens=MANY, trained=True) == (
        "intermediate_used",
        "permute",
    )
    assert site(layer, MANY, normed=False, options=Options()).matched, "nobody else reads them"


def test_a_shared_expert_beside_few_tokens() -> None:
    """Its matmul is no reason to add what the experts return behind the collective."""

    def shared(*operands: torch.Tensor) -> torch.Tensor:
        *routed, weight = operands
        return all_reduce(grouped(*routed, total=known) + torch.einsum("...k,kn->...n", routed[1], weight))

    assert reason_of(shared, torch.empty(D, D).bfloat16(), tokens=FEW)[0] == "few_tokens"


def test_a_gather_in_front_of_copied_weights() -> None:
    """Neither is nothing beside it, nor is it attention, for all its exponentials."""

    def gathered(*operands: torch.Tensor, activation: Callable[..., torch.Tensor]) -> torch.Tensor:
        _, x, up, down = operands
        ids = torch.arange(K * 4 * FEW) % E
        rows = torch.bmm(all_gather(x).repeat_interleave(K, 0).unsqueeze(1), up.mT[ids])
        return torch.bmm(activation(rows), down.mT[ids])

    for activation in (torch.sin, F.silu):
        found = reason_of(functools.partial(gathered, activation=activation), tokens=FEW)
        assert found == ("grouped_matmul", "bmm")


def test_a_reduce_scatter_of_an_inner_dimension() -> None:
    def scattered(*operands: torch.Tensor) -> torch.Tensor:
        total = grouped(*operands, total=scaled_behind).view(2, -1, D)
        return reduce_scatter(torch.cat(total.chunk(4, 1)))

    (graph,) = compiled_graphs(scattered, *given(MANY))
    record = only_site(graph)
    assert (record.reason_code, record.pattern) == ("experts_sum", "grouped_matmul_reduce_scatter")
    assert record.culprit is not None and record.culprit.op == "aten.mul.Tensor"
