"""grouped_projections: which grouped matmuls take their rows where they lie, and what keeps them as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import expecttest
import pytest
import torch
from torch import fx
from torch.nn.functional import silu

from benchmarks.tolerances import relative_error
from ditron_inductor import pipeline
from ditron_inductor.options import Options
from ditron_inductor.passes.fuse.grouped_projections import grouped_projections
from ditron_inductor.task import grouped_cost
from ditron_inductor.task.nodes import MOST_ORDERED_TOKENS, GroupedProjections
from ditron_inductor.task.verify import local_calls
from tests.passes.graphs import WORLD_SIZE, all_reduce, assert_no_new_guards, compiled_graphs, run_ranks, text, twin

pytestmark = pytest.mark.usefixtures("group")
KIND = "grouped_projections"
DEFAULT = Options()
BF16 = torch.bfloat16
T, D, F, E, K = 80, 16, 8, 4, 2
X, SCORES = torch.empty(T, D).to(BF16), torch.empty(T, E)
GATE_UP, DOWN, NORM = (torch.empty(*shape).to(BF16) for shape in ((E, 2 * F, D), (E, D, F), (D, D)))
OPERANDS = (X, SCORES, GATE_UP, DOWN, NORM)


def sorted_slots(scores: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(The slots in the order of their experts, the ends of the experts, the weights of the slots)."""
    weights, chosen = scores.topk(K)
    ids, order = chosen.reshape(-1).sort()
    ends = torch.histc(ids.float(), bins=E, min=0, max=E - 1).cumsum(0, dtype=torch.int32)
    return order, ends, weights


def experts(x: torch.Tensor, scores: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """The experts of a prompt, as `transformers` writes them."""
    order, ends, weights = sorted_slots(scores)
    gate, up = torch._grouped_mm(x[order // K], gate_up.mT, offs=ends).chunk(2, -1)
    out = torch._grouped_mm(silu(gate) * up, down.mT, offs=ends)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order))
    return (out * weights.flatten()[order].unsqueeze(-1))[places].view(-1, K, x.shape[1]).sum(1).to(x.dtype)


def behind_a_reduction(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Without a reduction that is fused nothing is."""

    def layer(x: torch.Tensor, scores: torch.Tensor, *more: torch.Tensor) -> Any:
        *weights, norm = more
        found = fn(all_reduce(x @ norm), scores, *weights)
        first, *others = found if isinstance(found, tuple) else (found,)
        return all_reduce(first), *others

    return layer


def made(module: fx.GraphModule, options: Options = DEFAULT) -> int:
    """Runs all passes; how many calls were made."""
    count = pipeline.run(module.graph, options)[KIND]
    module.graph.lint()
    module.recompile()
    return count


def test_golden_experts_of_a_prompt() -> None:
    (module,) = compiled_graphs(behind_a_reduction(experts), *OPERANDS)
    assert made(module) == 1
    lines = [line for line in text(module.graph).splitlines() if "matrices" not in line]
    begin = next(index for index, line in enumerate(lines) if "floor_divide" in line or "div" in line)
    end = next(index for index, line in enumerate(lines) if KIND in line) + 2
    expecttest.assert_expected_inline(
        "\n".join(lines[begin:end]),
        """\
div [160] = aten.div.Tensor_mode(getitem_3, 2, rounding_mode='floor')
permute [4, 16, 16] = aten.permute(arg3_1, [0, 2, 1])
convert_element_type_2 [160] = prims.convert_element_type(getitem_2, torch.float32)
histc [4] = aten.histc(convert_element_type_2, 4, 0, 3)
cumsum [4] = aten.cumsum(histc, 0, dtype=torch.int32)
columns [4, 16, 8] = aten.slice.Tensor(permute, 2, 0, 8)
columns_1 [4, 16, 8] = aten.slice.Tensor(permute, 2, 8, 16)
grouped_projections_2 = ditron.grouped_projections([getitem_6, div, cumsum, columns, columns_1], "num_weights=2 epilogue='cast(silu(mm0), bf16) * mm1'", None)
getitem_10 [160, 8] = grouped_projections_2[0]""",
    )


def same_results(fn: Callable[..., Any], given: tuple[torch.Tensor, ...] = OPERANDS) -> int:
    """How many calls were made; the graph computes on all ranks what it computed before."""
    (after,) = compiled_graphs(fn, *given)
    before = twin(after)
    count = made(after)

    # The graph has its operands in the order in which they are used.
    used = [given[0], given[-1], *given[1:-1]]

    def inputs() -> list[list[torch.Tensor]]:
        drawn = torch.Generator().manual_seed(0)
        return [[torch.randn(one.shape, generator=drawn).to(one.dtype) for one in used] for _ in range(WORLD_SIZE)]

    for got, wanted in zip(run_ranks(after, inputs()), run_ranks(before, inputs()), strict=True):
        assert all(relative_error(one, other) < 2e-2 for one, other in zip(got, wanted, strict=True))
    return count


def apart(x: torch.Tensor, scores: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Gate and up in two weights, whose rows are copied once."""
    order, ends, _ = sorted_slots(scores)
    rows = x[order // K]
    gate = torch._grouped_mm(rows, gate_up[:, :F].mT, offs=ends)
    up = torch._grouped_mm(rows, gate_up[:, F:].mT, offs=ends)
    return torch._grouped_mm(silu(gate) * up, down.mT, offs=ends)


def across(x: torch.Tensor, scores: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Weights with contiguous columns, and rows by `index_select`."""
    order, ends, _ = sorted_slots(scores)
    return torch._grouped_mm(x.index_select(0, order // K), down.mT @ gate_up.mT.mT.mT, offs=ends)


def in_turns(x: torch.Tensor, scores: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """GPT-OSS: gate and up in alternate columns, and biases of the experts."""
    weights, chosen = scores.topk(K)
    ids, order = chosen.reshape(-1).sort()
    ends = torch.histc(ids.float(), bins=E, min=0, max=E - 1).cumsum(0, dtype=torch.int32)
    both = torch._grouped_mm(x[order // K], gate_up.mT, offs=ends) + gate_up.amax(-1)[ids]
    gate, up = both[:, ::2].clamp(max=0.7), both[:, 1::2].clamp(-0.7, 0.7)
    hidden = (up + 1) * (gate * torch.sigmoid(gate * 1.702))
    out = torch._grouped_mm(hidden, down.mT, offs=ends) * weights.flatten()[order].unsqueeze(-1)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order))
    return out[places].view(-1, K, x.shape[1]).sum(1).to(x.dtype)


def test_gate_and_up_in_turns_are_one_call_with_their_biases() -> None:
    assert same_results(behind_a_reduction(in_turns)) == 1
    (module,) = compiled_graphs(behind_a_reduction(in_turns), *OPERANDS)
    made(module)
    (task,) = [task for _, task in local_calls(module.graph) if isinstance(task, GroupedProjections)]
    assert task.interleaved and task.num_extras == 2 and "even(x" in task.epilogue and "odd(x" in task.epilogue


def elsewhere(
    x: torch.Tensor,
    scores: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    most: int = E - 1,
    of: int = E - 1,
    marked: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = lambda chosen, away: torch.where(
        away, E - 1, chosen.remainder(E - 1)
    ),
) -> torch.Tensor:
    """Expert parallelism: a rank has the first experts, and slots of other ones are masked. most: the number that masked
    ids have at least. of: the experts of the rank. marked: the ids of choices, some of which are elsewhere.
    """
    weights, chosen = scores.topk(K)
    ids, order = marked(chosen, chosen >= E - 1).reshape(-1).sort()
    ends = torch.histc(ids.float(), bins=of, min=0, max=of - 1).cumsum(0, dtype=torch.int32)
    mask = (ids >= most).unsqueeze(-1)
    zero = torch.zeros((), dtype=BF16)
    rows = torch.where(mask, zero, x[order // K])
    both = torch.where(mask, zero, torch._grouped_mm(rows, gate_up[:of].mT, offs=ends))
    gate, up = both.chunk(2, -1)
    out = torch.where(mask, zero, torch._grouped_mm(silu(gate) * up, down[:of].mT, offs=ends))
    out = out * weights.flatten()[order].unsqueeze(-1)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order))
    return out[places].view(-1, K, x.shape[1]).sum(1).to(x.dtype)


def marked_by_the_router(*operands: torch.Tensor, nowhere: int = -1) -> torch.Tensor:
    """As the releases 5.16 to 5.22 of `transformers` mark them."""

    def marked(chosen: torch.Tensor, away: torch.Tensor) -> torch.Tensor:
        own = torch.fmod(chosen.masked_fill(away, nowhere), E - 1)
        return own.masked_fill(own == -1, E - 1)

    return elsewhere(*operands, marked=marked)


def marked_below(*operands: torch.Tensor) -> torch.Tensor:
    """Ids that may be less than 0, whose rows are counted nowhere and stand in front of all others."""
    return marked_by_the_router(*operands, nowhere=-2)


def rows_of_others(*operands: torch.Tensor) -> torch.Tensor:
    """The mask covers an expert of the rank, too."""
    return elsewhere(*operands, most=E - 2)


def masked_and_returned(x: torch.Tensor, scores: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> Any:
    """Something else reads the masked rows."""
    _, chosen = scores.topk(K)
    ids, order = torch.where(chosen >= E - 1, E - 1, chosen.remainder(E - 1)).reshape(-1).sort()
    ends = torch.histc(ids.float(), bins=E - 1, min=0, max=E - 2).cumsum(0, dtype=torch.int32)
    mask, zero = (ids >= E - 1).unsqueeze(-1), torch.zeros((), dtype=BF16)
    rows = torch.where(mask, zero, x[order // K])
    product = torch._grouped_mm(rows, gate_up[: E - 1].mT, offs=ends)
    return torch.where(mask, zero, product), rows


def test_masks_of_slots_elsewhere_go_with_the_copy() -> None:
    assert same_results(behind_a_reduction(elsewhere)) == 1
    (module,) = compiled_graphs(behind_a_reduction(elsewhere), *OPERANDS)
    before = len(module.graph.find_nodes(op="call_function", target=torch.ops.aten.where.self))
    made(module)
    (task,) = [task for _, task in local_calls(module.graph) if isinstance(task, GroupedProjections)]
    assert task.epilogue == "cast(silu(mm0), bf16) * mm1"
    left = module.graph.find_nodes(op="call_function", target=torch.ops.aten.where.self)
    # That of the rows, and that of the first product; the second product is summed up by others.
    assert len(left) == before - 2


def test_slots_that_the_router_marks_are_elsewhere_too() -> None:
    assert same_results(behind_a_reduction(marked_by_the_router)) == 1
    # Of such rows the graph itself makes numbers of what no matmul has written.
    assert made(compiled_graphs(behind_a_reduction(marked_below), *OPERANDS)[0]) == 0


@pytest.mark.parametrize("fn", [rows_of_others, masked_and_returned])
def test_masks_of_rows_that_are_read_stay(fn: Callable[..., Any]) -> None:
    assert same_results(behind_a_reduction(fn)) == 0


@pytest.mark.parametrize(("least", "left"), [(E, 0), (E - 1, 2)])
def test_masks_of_no_rows_go_whoever_reads_them(least: int, left: int) -> None:
    def fn(x: torch.Tensor, scores: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> Any:
        ids, order = scores.topk(K)[1].reshape(-1).sort()
        ends = torch.histc(ids.float(), bins=E, min=0, max=E - 1).cumsum(0, dtype=torch.int32)
        mask = (ids >= least).unsqueeze(-1)
        rows = x[order // K].masked_fill(mask, 0.0)
        return torch._grouped_mm(rows, gate_up.mT, offs=ends).masked_fill(mask, 0.0), rows

    assert same_results(behind_a_reduction(fn)) == 0
    (module,) = compiled_graphs(behind_a_reduction(fn), *OPERANDS)
    made(module)
    assert len(module.graph.find_nodes(op="call_function", target=torch.ops.aten.where.self)) == left


def test_biases_of_other_experts_stay() -> None:
    def fn(x: torch.Tensor, scores: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        ids, order = scores.topk(K)[1].reshape(-1).sort()
        ends = torch.histc(ids.float(), bins=E, min=0, max=E - 1).cumsum(0, dtype=torch.int32)
        both = torch._grouped_mm(x[order // K], gate_up.mT, offs=ends) + gate_up.amax(-1)[ids.flip(0)]
        return torch._grouped_mm(both[:, ::2] * both[:, 1::2], down.mT, offs=ends)

    assert same_results(behind_a_reduction(fn)) == 1
    (module,) = compiled_graphs(behind_a_reduction(fn), *OPERANDS)
    made(module)
    (task,) = [task for _, task in local_calls(module.graph) if isinstance(task, GroupedProjections)]
    assert not task.interleaved and not task.epilogue


@pytest.mark.parametrize(("fn", "count"), [(experts, 1), (apart, 2)])
def test_computes_the_same(fn: Callable[..., Any], count: int) -> None:
    assert same_results(behind_a_reduction(fn)) == count


def rows_kept(x: torch.Tensor, scores: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> Any:
    """As a backward keeps them."""
    order, ends, _ = sorted_slots(scores)
    rows = x[order // K]
    return torch._grouped_mm(rows, gate_up.mT, offs=ends), rows


def rows_scaled(x: torch.Tensor, scores: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    order, ends, weights = sorted_slots(scores)
    rows = x[order // K] * weights.flatten()[order].unsqueeze(-1).to(BF16)
    return torch._grouped_mm(rows, gate_up.mT, offs=ends)


def columns_of_x(x: torch.Tensor, scores: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    order, ends, _ = sorted_slots(scores)
    return torch._grouped_mm(x.mT.contiguous().mT[order // K], gate_up.mT, offs=ends)


def rows_as_matrices(x: torch.Tensor, scores: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> Any:
    """As in a backward, where the gradient of a weight is a product with the rows that the forward multiplies."""
    order, ends, _ = sorted_slots(scores)
    rows = x[order // K]
    out = torch._grouped_mm(rows, gate_up.mT, offs=ends)
    return out, torch._grouped_mm(out.mT, rows, offs=ends)


def one_stays(x: torch.Tensor, scores: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> Any:
    """The rows are copied anyway for the second matmul, which names the dtype of its result."""
    order, ends, _ = sorted_slots(scores)
    rows = x[order // K]
    gate = torch._grouped_mm(rows, gate_up[:, :F].mT, offs=ends)
    return gate, torch._grouped_mm(rows, gate_up[:, F:].mT, offs=ends, out_dtype=torch.bfloat16)


@pytest.mark.parametrize("fn", [rows_kept, rows_scaled, columns_of_x, rows_as_matrices, one_stays])
def test_it_must_not_fire(fn: Callable[..., Any]) -> None:
    (module,) = compiled_graphs(behind_a_reduction(fn), *OPERANDS)
    assert made(module) == 0


def test_rows_that_are_written_to_stay() -> None:
    (module,) = compiled_graphs(behind_a_reduction(experts), *OPERANDS)
    (ends,) = [node for node in module.graph.nodes if "cumsum" in node.name]
    (last,) = [node for node in module.graph.nodes if node.op == "output"]
    with module.graph.inserting_before(last):
        zero = module.graph.call_function(torch.ops.aten.zero_.default, (ends,))
    zero.meta["val"] = ends.meta["val"]
    assert made(module) == 0


def test_rows_that_are_a_view_of_what_is_written_to_stay() -> None:
    def fn(x: torch.Tensor, scores: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, norm: torch.Tensor) -> Any:
        reduced = all_reduce((x @ norm).view(2, -1, D))
        return all_reduce(experts(reduced.view(-1, D), scores, gate_up, down))

    (module,) = compiled_graphs(fn, *OPERANDS)
    (first, *_) = module.graph.find_nodes(op="call_function", target=torch.ops.aten._grouped_mm.default)
    (viewed,) = [user for user in first.args[0].args[0].all_input_nodes if len(user.meta["val"].shape) == 3]
    with module.graph.inserting_before(first):
        zero = module.graph.call_function(torch.ops.aten.zero_.default, (viewed,))
    zero.meta["val"] = viewed.meta["val"]
    assert made(module) == 0


def test_it_is_not_made_where_the_option_leaves_it_out() -> None:
    (module,) = compiled_graphs(behind_a_reduction(experts), *OPERANDS)
    assert made(module, Options(fusions=("matmul_all_reduce",))) == 0


@pytest.mark.parametrize(("strategy", "count"), [("auto", 0), ("tile", 1)])
def test_what_the_library_does_faster_stays_unless_the_kernel_is_forced(strategy: str, count: int) -> None:
    # With fewer tokens the kernel that is forced is that of expert_projections.
    tokens = MOST_ORDERED_TOKENS + 1
    sizes = {"S": tokens * K, "E": E, "K": D, "N": 2 * F}
    with mock.patch.object(grouped_cost, "library_wins", lambda **given: given == sizes):
        operands = torch.empty(tokens, D).to(BF16), torch.empty(tokens, E), *OPERANDS[2:]
        (module,) = compiled_graphs(behind_a_reduction(experts), *operands)
        assert made(module, Options(strategy=strategy)) == count


def test_matmuls_of_the_same_rows_are_judged_together() -> None:
    """The library copies the rows once for both."""
    asked: list[dict[str, int]] = []
    with mock.patch.object(grouped_cost, "library_wins", lambda **sizes: asked.append(sizes)):
        (module,) = compiled_graphs(behind_a_reduction(apart), *OPERANDS)
        assert made(module) == 2
    assert asked == [{"S": T * K, "E": E, "K": D, "N": 2 * F}]


def test_a_dynamic_number_of_tokens() -> None:
    x, scores = torch.empty(T, D).to(BF16), torch.empty(T, E)
    for one in (x, scores):
        torch._dynamo.mark_dynamic(one, 0, min=66, max=4096)
    (module,) = compiled_graphs(behind_a_reduction(apart), x, scores, *OPERANDS[2:])
    with assert_no_new_guards(module):
        assert made(module) == 2


def test_with_a_dynamic_number_of_tokens_the_library_is_at_its_best() -> None:
    x, scores = torch.empty(T, D).to(BF16), torch.empty(T, E)
    for one in (x, scores):
        torch._dynamo.mark_dynamic(one, 0, min=66, max=4096)
    (module,) = compiled_graphs(behind_a_reduction(experts), x, scores, *OPERANDS[2:])
    with (
        mock.patch.object(grouped_cost, "library_wins", lambda **sizes: sizes["S"] > 4096 * K),
        assert_no_new_guards(module),
    ):
        assert made(module) == 0


def test_idempotent() -> None:
    (module,) = compiled_graphs(behind_a_reduction(experts), *OPERANDS)
    assert made(module) == 1
    assert grouped_projections(module.graph, options=DEFAULT) == 0
