"""Grouped matmuls of a few tokens' experts become expert_projections, and nothing is sorted, unless the order matters."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx
from torch.nn.functional import silu

from benchmarks.tolerances import relative_error
from ditron_inductor import pipeline
from ditron_inductor.options import Options
from ditron_inductor.passes.fuse import sorted_experts
from ditron_inductor.passes.graph import place_order
from ditron_inductor.passes.graph.place_order import Kind
from ditron_inductor.task.nodes import MOST_EXPERT_TOKENS, MOST_ORDERED_TOKENS
from ditron_inductor.task.verify import local_calls
from tests.passes.graphs import WORLD_SIZE, all_reduce, compiled_graphs, run_ranks, text, twin

pytestmark = pytest.mark.usefixtures("group")
KIND = "expert_projections"
BF16 = torch.bfloat16
T, D, F, E, K = 5, 16, 8, 6, 2
X, SCORES, NORM = torch.empty(T, D).to(BF16), torch.empty(T, E), torch.empty(D, D).to(BF16)
GATE_UP, DOWN = torch.empty(E, 2 * F, D).to(BF16), torch.empty(E, D, F).to(BF16)
BIAS, OUTER = torch.empty(E, 2 * F).to(BF16), torch.empty(E, D).to(BF16)
OPERANDS = (X, SCORES, GATE_UP, DOWN)
Experts = Callable[..., Any]
TILE = Options(strategy="tile")


def ends_of(ids: torch.Tensor, bins: int = E) -> torch.Tensor:
    return torch.histc(ids.float(), bins=bins, min=0, max=bins - 1).cumsum(0, dtype=torch.int32)


def places_of(order: torch.Tensor) -> torch.Tensor:
    places = torch.empty_like(order)
    places[order] = torch.arange(order.shape[0])
    return places


def experts(
    x: torch.Tensor,
    scores: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    between: Callable[..., torch.Tensor] = lambda rows, **known: rows,
    choose: Callable[[torch.Tensor], torch.Tensor] = lambda scores: scores.topk(K)[1],
    count: Callable[[torch.Tensor], torch.Tensor] = ends_of,
    finish: Callable[..., torch.Tensor] = lambda out, order, x: out[places_of(order)].view(-1, K, D).sum(1),
    descending: bool = False,
) -> torch.Tensor:
    """The experts of a prompt, as `transformers` writes them. between: what is done to gate and up, by place."""
    chosen = choose(scores)
    weights = scores.gather(1, chosen).flatten()
    ids, order = chosen.flatten().sort(descending=descending)
    ends = count(ids)
    both = torch._grouped_mm(x[order // K], gate_up.mT, offs=ends)
    gate, up = between(both, ids=ids, order=order, x=x).chunk(2, -1)
    out = torch._grouped_mm(silu(gate) * up, down.mT, offs=ends) * weights[order].unsqueeze(-1)
    return finish(out, order, x).to(x.dtype)


def layer(fn: Experts) -> Experts:
    """Behind a reduction that is fused, without which nothing is."""

    def call(x: torch.Tensor, norm: torch.Tensor, *rest: torch.Tensor) -> Any:
        return all_reduce(fn(all_reduce(x @ norm), *rest))

    return call


def graph_of(fn: Experts, operands: tuple[torch.Tensor, ...] = OPERANDS, **options: Any) -> fx.GraphModule:
    x, *rest = operands
    (module,) = compiled_graphs(layer(fn), x, NORM, *rest, **options)
    return module


def made(module: fx.GraphModule, options: Options | None = None) -> int:
    """Runs all passes; how many calls were made."""
    count = pipeline.run(module.graph, options or TILE)[KIND]
    module.graph.lint()
    module.recompile()
    return count


def same_results(fn: Experts, operands: tuple[torch.Tensor, ...] = OPERANDS) -> fx.GraphModule:
    """Two calls are made, and the graph computes on all ranks what it computed before, in whatever order it has ties."""
    after = graph_of(fn, operands)
    before = twin(after)
    assert made(after) == 2
    given = [operands[0], NORM, *operands[1:]]
    for seed in range(3):
        drawn = torch.Generator().manual_seed(seed)
        inputs = [[torch.randn(one.shape, generator=drawn).to(one.dtype) for one in given] for _ in range(WORLD_SIZE)]
        copies = [[one.clone() for one in each] for each in inputs]
        for got, wanted in zip(run_ranks(after, inputs), run_ranks(before, copies), strict=True):
            assert all(relative_error(one, other) < 2e-2 for one, other in zip(got, wanted, strict=True))
    return after


def test_nothing_is_sorted_any_more() -> None:
    module = same_results(experts)
    gone = text(module.graph)
    for op in ("sort", "histc", "cumsum", "_grouped_mm", "index", "iota", "empty"):
        assert f"aten.{op}" not in gone and f"prims.{op}" not in gone, op
    gate_up, down = (task for _, task in local_calls(module.graph) if task.kind == KIND)
    assert (gate_up.by_token, gate_up.num_weights, bool(gate_up.epilogue)) == (True, 2, True)
    assert (down.by_token, down.top_k, down.has_absent) == (False, K, False)


def added(order: torch.Tensor, out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(x, dtype=out.dtype).index_add(0, order // K, out)


def scattered(order: torch.Tensor, out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    index = (order // K).unsqueeze(-1).expand(-1, D)
    return torch.zeros_like(x, dtype=out.dtype).scatter_add(0, index, out)


def put(order: torch.Tensor, out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(out).index_put((order,), out).view(-1, K, D).sum(1)


SAME: dict[str, dict[str, Any]] = {
    "added by index_add": {"finish": lambda out, order, x: added(order, out, x)},
    "added by scatter_add": {"finish": lambda out, order, x: scattered(order, out, x)},
    "put back": {"finish": lambda out, order, x: put(order, out, x)},
    "a row of x for each place": {"between": lambda rows, order, x, **_: rows * x[order // K]},
    "a function of the ids": {"between": lambda rows, ids, **_: rows * (ids + 1).unsqueeze(-1).to(BF16)},
    "masked by the ids": {"between": lambda rows, ids, **_: rows.masked_fill((ids >= 4).unsqueeze(-1), 0.0)},
    "clamped": {"between": lambda rows, **_: rows.clamp(-1, 1)},
    "a bias for all": {"between": lambda rows, x, **_: rows + x[:1]},
}


@pytest.mark.parametrize("name", SAME, ids=lambda name: name.replace(" ", "_"))
def test_what_is_read_row_by_row_may_have_any_order(name: str) -> None:
    same_results(lambda *operands: experts(*operands, **SAME[name]))


def with_biases(x: torch.Tensor, scores: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
    """As GPT-OSS has them. The weights and biases come in the order in which the graph reads them."""
    gate_up, inner, down, outer = rest
    weights = gate_up, down
    chosen = scores.topk(K)[1].flatten()
    ids, order = chosen.sort()
    ends, w = ends_of(ids), scores.gather(1, scores.topk(K)[1]).flatten()
    gate, up = (torch._grouped_mm(x[order // K], weights[0].mT, offs=ends) + inner[ids]).chunk(2, -1)
    out = torch._grouped_mm(silu(gate) * up, weights[1].mT, offs=ends) + outer[ids]
    return (out * w[order].unsqueeze(-1))[places_of(order)].view(-1, K, D).sum(1).to(x.dtype)


def test_biases_of_experts() -> None:
    same_results(with_biases, (X, SCORES, GATE_UP, BIAS, DOWN, OUTER))


RANK, OWN = 1, 3


def marked_by_experts(chosen: torch.Tensor) -> torch.Tensor:
    return torch.where((chosen // OWN) != RANK, OWN, chosen % OWN)


def marked_by_the_router(chosen: torch.Tensor) -> torch.Tensor:
    """As the releases 5.16 to 5.22 of `transformers` mark them."""
    own = torch.fmod(chosen.masked_fill((chosen // OWN) != RANK, -1), OWN)
    return own.masked_fill(own == -1, OWN)


def of_ranks(
    x: torch.Tensor,
    scores: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    marked: Callable[[torch.Tensor], torch.Tensor] = marked_by_experts,
) -> torch.Tensor:
    """With expert parallelism: of the experts a rank has three, and E marks a slot of another one."""
    weights, chosen = scores.topk(K)
    ids, order = marked(chosen).flatten().sort()
    away = (ids >= OWN).unsqueeze(-1)
    ends = ends_of(ids, OWN)
    rows = x[order // K].masked_fill(away, 0.0)
    gate, up = torch._grouped_mm(rows, gate_up.mT, offs=ends).masked_fill(away, 0.0).chunk(2, -1)
    out = torch._grouped_mm(silu(gate) * up, down.mT, offs=ends).masked_fill(away, 0.0)
    return (out * weights.flatten()[order].unsqueeze(-1))[places_of(order)].view(-1, K, D).sum(1).to(x.dtype)


@pytest.mark.parametrize("marked", [marked_by_experts, marked_by_the_router])
def test_experts_of_other_ranks(marked: Callable[[torch.Tensor], torch.Tensor]) -> None:
    module = same_results(functools.partial(of_ranks, marked=marked), (X, SCORES, GATE_UP[:OWN], DOWN[:OWN]))
    tasks = [task for _, task in local_calls(module.graph) if task.kind == KIND]
    assert [(task.has_absent, task.by_token) for task in tasks] == [(True, True), (True, False)]
    assert "aten.sort" not in text(module.graph)


def biased_of_ranks(
    x: torch.Tensor,
    scores: torch.Tensor,
    *rest: torch.Tensor,
    most: int = OWN,
    named: Callable[[torch.Tensor], torch.Tensor] = lambda ids: ids,
    masked: Callable[..., torch.Tensor] = lambda out, bias, away: (out + bias).masked_fill(away, 0.0),
) -> torch.Tensor:
    """Does `of_ranks` with biases, as GPT-OSS has them. A matmul reads what is masked where what is `named` by the ids
    is `most` and more. The products are no larger than the biases.
    """
    gate_up, inner, down, outer, norm = rest
    weights = gate_up, down
    _, chosen = scores.topk(K)
    ids, order = marked_by_experts(chosen).flatten().sort()
    ends, known = ends_of(ids, OWN), ids.clamp(max=OWN - 1)
    gate, up = (torch._grouped_mm(x[order // K], weights[0].mT, offs=ends) + inner[known]).chunk(2, -1)
    out = torch._grouped_mm(silu(gate) * up * 0.05, weights[1].mT, offs=ends)
    rows = masked(out, outer[known], (named(ids) >= most).unsqueeze(-1))
    return rows[places_of(order)] @ norm.to(rows.dtype)


OF_RANKS = (X, SCORES, GATE_UP[:OWN], BIAS[:OWN], DOWN[:OWN], OUTER[:OWN], NORM)


PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "with the biases in front of it": ("mm0 + expert(x0)", {}),
    "alone": ("mm0", {"masked": lambda out, bias, away: out.masked_fill(away, 0.0)}),
}


@pytest.mark.parametrize(("epilogue", "changes"), PARTS.values(), ids=[name.replace(" ", "_") for name in PARTS])
def test_a_mask_of_slots_elsewhere_is_a_part_of_the_call(epilogue: str, changes: dict[str, Any]) -> None:
    module = same_results(lambda *operands: biased_of_ranks(*operands, **changes), OF_RANKS)
    _, down = (task for _, task in local_calls(module.graph) if task.kind == KIND)
    assert down.epilogue == epilogue and text(module.graph).count("aten.where") == 1


def zeros_of(away: torch.Tensor) -> torch.Tensor:
    return torch.zeros(1, 1, device=away.device)


OTHERWISE: dict[str, dict[str, Any]] = {
    "more rows": {"most": OWN - 1},
    "rows of other ids": {"named": lambda ids: ids * 2},
    "in front of something that makes no zeros": {
        "masked": lambda out, bias, away: torch.sigmoid((out + bias).masked_fill(away, 0.0))
    },
    "alone in front of that": {"masked": lambda out, bias, away: torch.sigmoid(out.masked_fill(away, 0.0))},
    "in front of the biases": {"masked": lambda out, bias, away: out.masked_fill(away, 0.0) + bias},
    "in another dtype": {"masked": lambda out, bias, away: torch.where(away, zeros_of(away), out)},
}


@pytest.mark.parametrize("changes", OTHERWISE.values(), ids=[name.replace(" ", "_") for name in OTHERWISE])
def test_a_mask_that_the_call_does_not_have_stays(changes: dict[str, Any]) -> None:
    module = same_results(lambda *operands: biased_of_ranks(*operands, **changes), OF_RANKS)
    assert text(module.graph).count("aten.where") == 2


@pytest.mark.parametrize("tokens", [1, MOST_EXPERT_TOKENS, MOST_EXPERT_TOKENS + 1])
def test_so_many_tokens(tokens: int) -> None:
    same_results(experts, (torch.empty(tokens, D).to(BF16), torch.empty(tokens, E), GATE_UP, DOWN))


def returned_by_place(out: torch.Tensor, order: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return out


def along_columns(out: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Row s of a square table has the slots at all places, so column p has the one at place p."""
    table = torch.zeros(T * K, T * K).index_put((order,), order * 1.5, accumulate=True)
    return (out[places_of(order)] + table[:, :1]).view(-1, K, D).sum(1)


NEVER: dict[str, dict[str, Any]] = {
    "the result lies by place": {"finish": returned_by_place},
    "it is summed along the places": {"between": lambda rows, **_: rows.cumsum(0)},
    "a reduction over the places": {"between": lambda rows, **_: rows - rows.amax(0, keepdim=True)},
    "a number for each place": {"between": lambda rows, **_: rows * torch.arange(T * K).unsqueeze(-1).to(BF16)},
    "the places themselves": {"between": lambda rows, order, **_: rows * places_of(order).unsqueeze(-1).to(BF16)},
    "turned around": {"between": lambda rows, **_: rows.flip(0)},
    "transposed": {"between": lambda rows, **_: rows.t().contiguous().view(T * K, 2 * F) * 2},
    "half of the places": {"finish": lambda out, order, x: out[: T * K // 2].view(-1, 1, D).sum(1)},
    "the ids are not of a topk": {"choose": lambda scores: scores.argsort(-1)[:, :K]},
    "ends of other ids": {"count": lambda ids: ends_of(ids // 2)},
    "ends of other experts": {"count": lambda ids: ends_of(ids + 1)},
    "the order descends": {"descending": True},
    "a sum of other rows": {"finish": lambda out, order, x: added(order.flip(0), out, x)},
    "put without its slot": {"finish": lambda out, order, x: put(order // K, out, x)},
    "put by a mask": {
        "finish": lambda out, order, x: torch.zeros_like(out).index_put((order >= 0,), out, accumulate=True)
    },
    "numbers put along columns": {"finish": lambda out, order, x: along_columns(out, order)},
    "back by the slots": {"finish": lambda out, order, x: out[order].view(-1, K, D).sum(1)},
}


@pytest.mark.parametrize("name", NEVER, ids=lambda name: name.replace(" ", "_"))
def test_where_the_order_matters_it_stays(name: str) -> None:
    module = graph_of(lambda *operands: experts(*operands, **NEVER[name]))
    assert made(module) == 0 and "aten.sort" in text(module.graph)


def test_more_tokens_are_sorted() -> None:
    tokens = MOST_ORDERED_TOKENS + 1
    assert made(graph_of(experts, (torch.empty(tokens, D).to(BF16), torch.empty(tokens, E), GATE_UP, DOWN))) == 0
    for number, found in ((MOST_ORDERED_TOKENS, True), (tokens, False)):
        module = graph_of(experts, (torch.empty(number, D).to(BF16), torch.empty(number, E), GATE_UP, DOWN))
        (sort,) = module.graph.find_nodes(op="call_function", target=torch.ops.aten.sort.default)
        assert (sorted_experts.find_sorted_experts(sort, "tile") is not None) is found


@pytest.mark.parametrize(("tokens", "count"), [(96, 2), (97, 0)])
def test_with_many_slots_of_an_expert_torch_is_faster(tokens: int, count: int) -> None:
    """E = 6 and K = 2, so 96 tokens have 32 slots of an expert."""
    module = graph_of(experts, (torch.empty(tokens, D).to(BF16), torch.empty(tokens, E), GATE_UP, DOWN))
    with mock.patch.object(sorted_experts, "GPUS", ("cpu",)):
        assert made(module, Options()) == count


def test_a_number_of_tokens_that_is_not_known() -> None:
    assert made(graph_of(experts, dynamic=True)) == 0


def test_more_choices_than_experts() -> None:
    assert made(graph_of(experts, (X, torch.empty(T, E + 1), GATE_UP, DOWN))) == 0


LEFT_OUT = (Options(strategy="library"), Options(strategy="tile", fusions=("matmul_all_reduce",)), Options())


@pytest.mark.parametrize("options", LEFT_OUT, ids=("library", "not_a_fusion", "on_the_CPU_device"))
def test_it_can_be_left_out(options: Options) -> None:
    assert made(graph_of(experts), options) == 0


def test_a_token_whose_row_has_gaps_is_copied() -> None:
    def gaps(x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return experts(torch.cat([x, x + 1], -1)[:, :D], *rest)

    module = same_results(gaps)
    assert [task.by_token for _, task in local_calls(module.graph) if task.kind == KIND] == [False, False]


def test_more_rows_than_tokens_that_take_experts() -> None:
    module = same_results(experts, (torch.empty(T + 3, D).to(BF16), *OPERANDS[1:]))
    assert [task.by_token for _, task in local_calls(module.graph) if task.kind == KIND] == [False, False]


def test_an_input_that_is_not_read_any_more_remains_an_input() -> None:
    def with_room(x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        def finish(out: torch.Tensor, order: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            places = rest[-1].long().index_put((order,), torch.arange(T * K))
            return out[places].view(-1, K, D).sum(1)

        return experts(x, *rest[:-1], finish=finish)

    room = torch.empty(T * K, dtype=torch.int64)
    module = graph_of(with_room, (*OPERANDS, room))
    inputs = [node.name for node in module.graph.nodes if node.op == "placeholder"]
    assert made(module) == 2 and inputs == [node.name for node in module.graph.nodes if node.op == "placeholder"]


RETURNED: dict[str, Callable[..., tuple[torch.Tensor, ...]]] = {
    "an input": lambda out, order, places, scale: (scale[order][places],),
    "a column of an input": lambda out, order, places, scale: (scale[order][places].select(1, 0),),
    "a result twice": lambda out, order, places, scale: (out[places], out[places].view(-1, K, D)),
}


@pytest.mark.parametrize("name", RETURNED, ids=lambda name: name.replace(" ", "_"))
def test_what_is_returned_shares_no_memory(name: str) -> None:
    def call(x: torch.Tensor, norm: torch.Tensor, *rest: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found: list[torch.Tensor] = []

        def finish(out: torch.Tensor, order: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            places = places_of(order)
            found.extend(RETURNED[name](out, order, places, rest[-1]))
            return out[places].view(-1, K, D).sum(1)

        return (experts(all_reduce(x @ norm), *rest[:-1], finish=finish), *found)

    (module,) = compiled_graphs(call, X, NORM, *OPERANDS[1:], torch.empty(T * K, 3))
    assert made(module) == 2
    shapes = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
    inputs = [[torch.randn(one.shape).to(one.dtype) for one in shapes] for _ in range(WORLD_SIZE)]
    for given, got in zip(inputs, run_ranks(module, inputs), strict=True):
        memory = [one.untyped_storage().data_ptr() for one in (*given, *got)]
        assert len(set(memory)) == len(memory)


def test_slots_that_are_read_by_two_nodes() -> None:
    module = graph_of(experts)
    before = twin(module)
    (sort,) = module.graph.find_nodes(op="call_function", target=torch.ops.aten.sort.default)
    slots = next(user for user in sort.users if user.args[1] == 1)
    with module.graph.inserting_after(sort):
        again = module.graph.node_copy(slots)
    reader = next(user for user in slots.users if user.target is torch.ops.aten.index.Tensor)
    reader.replace_input_with(slots, again)
    assert made(module) == 2 and "aten.sort" not in text(module.graph)
    inputs = [[torch.randn(one.shape).to(one.dtype) for one in (X, NORM, *OPERANDS[1:])] for _ in range(WORLD_SIZE)]
    for (got,), (wanted,) in zip(run_ranks(module, inputs), run_ranks(before, inputs), strict=True):
        assert relative_error(got, wanted) < 2e-2


def test_weights_that_are_written_meanwhile() -> None:
    def writes(x: torch.Tensor, scores: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        weights = torch.ones(T * K)
        chosen = scores.topk(K)[1]
        ids, order = chosen.flatten().sort()
        ends = ends_of(ids)
        gate, up = torch._grouped_mm(x[order // K], gate_up.mT, offs=ends).chunk(2, -1)
        out = torch._grouped_mm(silu(gate) * up, down.mT, offs=ends) * scores.flatten()[order].unsqueeze(-1)
        scores.zero_()
        return out[places_of(order)].view(-1, K, D).sum(1).to(x.dtype) + weights[0].to(x.dtype)

    assert made(graph_of(writes, (X, torch.empty(T, E), GATE_UP, DOWN))) == 0


def test_kinds() -> None:
    graph = graph_of(experts).graph
    (sort,) = graph.find_nodes(op="call_function", target=torch.ops.aten.sort.default)
    kinds = place_order.kinds_of(sort)
    assert kinds is not None
    found = list(kinds.values())
    assert [found.count(kind) for kind in (Kind.SORT, Kind.SLOTS, Kind.PLACES)] == [1, 1, 1]
