"""expert_projections: which matmuls of slots become a call, into which graph, and what keeps them as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch
from torch import fx
from torch.nn.functional import silu
from torch.utils._pytree import tree_leaves

from ditron_inductor import pipeline
from ditron_inductor.options import Options
from ditron_inductor.passes.fuse.expert_projections import expert_projections
from ditron_inductor.task.nodes import MOST_ORDERED_TOKENS
from tests.passes.graphs import all_reduce, compiled_graphs, run_ranks, text, traced, twin

pytestmark = pytest.mark.usefixtures("group")

T, D, F, E, K = 3, 16, 8, 6, 2
X = torch.empty(T, D)
SCORES = torch.empty(T, E)
GATE_UP = torch.empty(E, 2 * F, D)
DOWN = torch.empty(E, D, F)
NORM = torch.empty(D, D)


def experts(x: torch.Tensor, scores: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """The experts of a decode step, with the weights of each slot copied."""
    weights, chosen = scores.topk(K)
    ids = chosen.reshape(-1)
    rows = x.repeat_interleave(K, 0)
    gate, up = torch.bmm(gate_up[ids], rows.unsqueeze(-1)).squeeze(-1).chunk(2, -1)
    out = torch.bmm(down[ids], (silu(gate) * up).unsqueeze(-1)).squeeze(-1)
    return all_reduce((out * weights.reshape(-1, 1)).view(-1, K, x.shape[1]).sum(1))


def layer(
    x: torch.Tensor, scores: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, norm: torch.Tensor
) -> torch.Tensor:
    """Behind a reduction that is fused, without which nothing is."""
    return experts(all_reduce(x @ norm), scores, gate_up, down)


def calls(module: fx.GraphModule, options: Options | None = None) -> int:
    """Runs all passes; how many calls were made."""
    made = pipeline.run(module.graph, options or Options())["expert_projections"]
    module.graph.lint()
    module.recompile()
    return made


OPERANDS = (X, SCORES, GATE_UP, DOWN, NORM)


def test_golden_experts_of_a_decode_step() -> None:
    (module,) = compiled_graphs(layer, *(one.bfloat16() for one in OPERANDS))
    assert calls(module) == 2
    lines = text(module.graph).splitlines()
    begin = next(index for index, line in enumerate(lines) if "topk" in line)
    end = next(index for index, line in enumerate(lines) if "aten.sum" in line)
    expecttest.assert_expected_inline(
        "\n".join(lines[begin:end]),
        """\
topk = aten.topk(arg2_1, 2)
getitem [3, 2] = topk[0]
getitem_1 [3, 2] = topk[1]
view [6] = aten.reshape(getitem_1, [-1])
permute_default [6, 16, 16] = aten.permute(arg3_1, [0, 2, 1])
columns [6, 16, 8] = aten.slice.Tensor(permute_default, 2, 0, 8)
columns_1 [6, 16, 8] = aten.slice.Tensor(permute_default, 2, 8, 16)
expert_projections_3 = ditron.expert_projections([getitem_4, view, columns, columns_1], "top_k=2 by_token num_weights=2 epilogue='cast(silu(mm0), bf16) * mm1'", None)
getitem_9 [6, 8] = expert_projections_3[0]
permute_default_1 [6, 8, 16] = aten.permute(arg4_1, [0, 2, 1])
expert_projections_1 = ditron.expert_projections([getitem_9, view, permute_default_1], 'top_k=2 num_weights=1', None)
getitem_6 [6, 16] = expert_projections_1[0]
view_2 [6, 1] = aten.reshape(getitem, [-1, 1])
mul_1 [6, 16] = aten.mul.Tensor(getitem_6, view_2)
view_3 [3, 2, 16] = aten.reshape(mul_1, [-1, 2, 16])""",
    )


def same_results(fn: Callable[..., Any], *args: torch.Tensor, made: int, options: Options | None = None) -> None:
    after = traced(fn, *args)
    before = twin(after)
    # By the passes of matmuls and experts alone: what follows changes no value.
    assert calls(after, options) == made
    generator = torch.Generator().manual_seed(0)
    inputs = [[torch.randn(arg.shape, generator=generator) for arg in args] for _ in range(4)]
    torch.testing.assert_close(run_ranks(after, inputs), run_ranks(before, inputs))


def test_computes_the_same() -> None:
    same_results(layer, *OPERANDS, made=2)


def other_way_round(
    x: torch.Tensor, scores: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, norm: torch.Tensor
) -> torch.Tensor:
    """bmm(rows, weights), with a bias of each expert behind it, and no gate."""
    ids = scores.topk(K)[1].reshape(-1)
    rows = all_reduce(x @ norm).repeat_interleave(K, 0)
    out = torch.bmm(rows.unsqueeze(1), weight.mT[ids]).squeeze(1) + bias[ids]
    return all_reduce(out.view(-1, K, out.shape[1]).sum(1))


def test_the_factors_may_stand_the_other_way_round() -> None:
    same_results(other_way_round, X, SCORES, GATE_UP, torch.empty(E, 2 * F), NORM, made=1)


def one_token(x: torch.Tensor, scores: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, norm: torch.Tensor):  # type: ignore[no-untyped-def]
    return layer(x[:1], scores[:1], gate_up, down, norm)


def test_one_token() -> None:
    same_results(one_token, *OPERANDS, made=2)


def chosen_by(choose: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The first matmul, with experts that are chosen in another way."""

    def fn(x: torch.Tensor, scores: torch.Tensor, weight: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        ids = choose(scores)
        rows = all_reduce(x @ norm).repeat_interleave(K, 0)
        return all_reduce(torch.bmm(weight[ids], rows.unsqueeze(-1)).squeeze(-1))

    return fn


def by_topk(scores: torch.Tensor) -> torch.Tensor:
    return scores.topk(K)[1].reshape(-1)


def test_experts_must_be_those_of_a_topk() -> None:
    given = (X, SCORES, GATE_UP, NORM)
    same_results(chosen_by(by_topk), *given, made=1)
    # Two slots of a token may have one expert.
    same_results(chosen_by(lambda scores: scores.topk(K)[1].reshape(-1) // 2), *given, made=0)
    same_results(chosen_by(lambda scores: scores.argsort(-1)[:, :K].reshape(-1)), *given, made=0)
    # Slots do not stand token by token.
    same_results(chosen_by(lambda scores: scores.topk(K)[1].t().reshape(-1)), *given, made=0)
    # A slot of each row of the scores' transpose, whose rows are so many tokens with one expert.
    same_results(chosen_by(lambda scores: scores.t().topk(1)[1].reshape(-1)), *given, made=1)


def test_more_scores_than_experts_prove_nothing() -> None:
    module = traced(chosen_by(by_topk), X, torch.empty(T, E + 1), GATE_UP, NORM)
    assert calls(module) == 0


def test_choices_may_be_clamped_to_all_experts() -> None:
    """As `transformers` before 5.23 clamps them, on one rank too. The call reads what is not clamped."""

    def clamped(least: int, most: int) -> Callable[..., torch.Tensor]:
        return chosen_by(lambda scores: by_topk(scores).clamp(least, most))

    given = (X, SCORES, GATE_UP, NORM)
    module = traced(clamped(0, E - 1), *given)
    assert calls(module) == 1 and "clamp" not in text(module.graph)
    same_results(clamped(0, E - 1), *given, made=1)
    same_results(clamped(-1, E + 3), *given, made=1)
    same_results(clamped(0, E - 2), *given, made=0)
    same_results(clamped(1, E - 1), *given, made=0)
    assert calls(traced(clamped(0, E - 1), X, torch.empty(T, E + 1), GATE_UP, NORM)) == 0


def test_weights_without_contiguous_rows_or_columns_stay() -> None:
    across = GATE_UP.mT.contiguous().mT
    assert across.stride(2) != 1
    assert calls(traced(chosen_by(by_topk), X, SCORES, across, NORM)) == 1
    apart = torch.empty(E, 2 * F, 2 * D)[:, :, ::2]
    assert calls(traced(chosen_by(by_topk), X, SCORES, apart, NORM)) == 0


def test_copies_with_another_reader_stay() -> None:
    def fn(x: torch.Tensor, scores: torch.Tensor, weight: torch.Tensor, norm: torch.Tensor) -> Any:
        copied = weight[scores.topk(K)[1].reshape(-1)]
        rows = all_reduce(x @ norm).repeat_interleave(K, 0)
        return all_reduce(torch.bmm(copied, rows.unsqueeze(-1)).squeeze(-1)), copied

    assert calls(traced(fn, X, SCORES, GATE_UP, NORM)) == 0


def test_weights_that_are_written_to_stay() -> None:
    module = traced(chosen_by(by_topk), X, SCORES, GATE_UP, NORM)
    (weight,) = [node for node in module.graph.nodes if node.op == "placeholder" and "weight" in node.name]
    (bmm,) = module.graph.find_nodes(op="call_function", target=torch.ops.aten.bmm.default)
    with module.graph.inserting_before(bmm):
        zero = module.graph.call_function(torch.ops.aten.zero_.default, (weight,))
    zero.meta["val"] = weight.meta["val"]
    assert calls(module) == 0


def test_weights_that_are_a_view_of_what_is_written_to_stay() -> None:
    def fn(x: torch.Tensor, scores: torch.Tensor, weights: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        return chosen_by(by_topk)(x, scores, weights[:E], norm)

    module = traced(fn, X, SCORES, torch.cat([GATE_UP, GATE_UP]), NORM)
    (whole,) = [node for node in module.graph.nodes if node.op == "placeholder" and "weight" in node.name]
    (bmm,) = module.graph.find_nodes(op="call_function", target=torch.ops.aten.bmm.default)
    assert calls(traced(fn, X, SCORES, torch.cat([GATE_UP, GATE_UP]), NORM)) == 1
    with module.graph.inserting_before(bmm):
        zero = module.graph.call_function(torch.ops.aten.zero_.default, (whole,))
    zero.meta["val"] = whole.meta["val"]
    assert calls(module) == 0


def test_few_tokens_only() -> None:
    for tokens, made in ((MOST_ORDERED_TOKENS, 1), (MOST_ORDERED_TOKENS + 1, 0)):
        assert calls(traced(chosen_by(by_topk), torch.empty(tokens, D), torch.empty(tokens, E), GATE_UP, NORM)) == made


def test_a_dynamic_depth_is_no_argument_of_a_node() -> None:
    """Rows of the slots that are no matrix yet, as a matmul returns them."""

    def fn(x: torch.Tensor, scores: torch.Tensor, up: torch.Tensor, down: torch.Tensor, norm: torch.Tensor) -> Any:
        ids = by_topk(scores)
        rows = torch.bmm(up[ids], x.repeat_interleave(K, 0).unsqueeze(-1))
        return all_reduce(x @ norm), torch.bmm(down[ids], rows).squeeze(-1)

    up, down = torch.empty(E, F, D), torch.empty(E, D, F)
    torch._dynamo.mark_dynamic(up, 1)
    torch._dynamo.mark_dynamic(down, 2)
    (module,) = compiled_graphs(fn, X, SCORES, up, down, NORM)
    assert calls(module) == 1
    values = [one for node in module.graph.nodes for one in tree_leaves((node.args, node.kwargs))]
    assert not any(isinstance(one, torch.SymInt) for one in values)


def test_a_graph_without_a_fused_collective_stays() -> None:
    def fn(x: torch.Tensor, scores: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rows = x.repeat_interleave(K, 0)
        return torch.bmm(weight[by_topk(scores)], rows.unsqueeze(-1)).squeeze(-1)

    assert calls(traced(fn, X, SCORES, GATE_UP)) == 0


@pytest.mark.parametrize("options", [Options(strategy="library"), Options(fusions=("matmul_all_reduce",))], ids=str)
def test_options(options: Options) -> None:
    assert calls(traced(layer, *OPERANDS), options) == 0


def test_idempotent() -> None:
    module = traced(layer, *OPERANDS)
    assert calls(module) == 2
    assert expert_projections(module.graph, options=Options()) == 0
