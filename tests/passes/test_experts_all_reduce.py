"""experts_all_reduce: which reductions of a decode step's experts become a node, and what keeps them as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch
from torch import fx
from torch.nn.functional import silu

from benchmarks.tolerances import relative_error
from ditron_inductor import pipeline
from ditron_inductor.options import Options
from ditron_inductor.passes.fuse.experts_all_reduce import experts_all_reduce
from ditron_inductor.task.nodes import FUSIONS, MOST_EXPERT_COLUMNS, MOST_EXPERT_TOKENS
from tests.passes.graphs import (
    WORLD_SIZE,
    all_reduce,
    assert_no_new_guards,
    compiled_graphs,
    fuse,
    only_task,
    reasons,
    run_ranks,
    text,
)

pytestmark = pytest.mark.usefixtures("group")
KIND = "experts_all_reduce"
ALL = Options(fusions=FUSIONS)
BF16 = torch.bfloat16
T, D, F, E, K = 3, 16, 8, 6, 2
SCORES, X = torch.empty(T, E), torch.empty(T, D).to(BF16)
UP, DOWN = torch.empty(E, 2 * F, D).to(BF16), torch.empty(E, D, F).to(BF16)
OPERANDS = (SCORES, X, UP, DOWN)


def hidden(scores: torch.Tensor, x: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(What the second matmul of the experts multiplies, their weights and numbers)."""
    weights, chosen = scores.topk(K)
    ids = chosen.reshape(-1)
    rows = x.repeat_interleave(K, 0)
    gate, value = torch.bmm(up[ids], rows.unsqueeze(-1)).squeeze(-1).chunk(2, -1)
    return silu(gate) * value, weights, ids


def products(scores: torch.Tensor, x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(The products of all slots, the weights of the experts)."""
    rows, weights, ids = hidden(scores, x, up)
    return torch.bmm(down[ids], rows.unsqueeze(-1)).squeeze(-1), weights


def summed(*operands: torch.Tensor) -> torch.Tensor:
    """The sums of a rank, as `transformers` writes them: in fp32, by weights in fp32."""
    out, weights = products(*operands)
    return (out * weights.reshape(-1).unsqueeze(-1)).view(-1, K, D).sum(1).to(BF16)


def experts(*operands: torch.Tensor) -> torch.Tensor:
    return all_reduce(summed(*operands))


def narrow(*operands: torch.Tensor) -> torch.Tensor:
    """With weights in bf16, and the terms in three dimensions."""
    out, weights = products(*operands)
    return all_reduce((out.view(-1, K, D) * weights.to(BF16).unsqueeze(-1)).sum(1))


def with_another(*operands: torch.Tensor) -> torch.Tensor:
    """With what another expert returns, which all tokens use, in another shape."""
    total = summed(*operands)
    return all_reduce(operands[1].sin().view(1, -1, D) + total.view(1, -1, D))


def the_other_way_round(scores: torch.Tensor, x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """bmm(rows, weights)."""
    rows, weights, ids = hidden(scores, x, up)
    out = torch.bmm(rows.unsqueeze(1), down.mT[ids]).squeeze(1)
    return all_reduce((weights.reshape(-1, 1) * out).view(-1, K, D).sum(1).to(BF16))


def one_token(*operands: torch.Tensor) -> torch.Tensor:
    return experts(operands[0][:1], operands[1][:1], *operands[2:])


def normed(*operands: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """With the residual and the norm of the next layer behind it."""
    total = operands[1] + experts(*operands)
    wide = total.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return scaled.to(BF16) @ operands[2][0].mT, total


def fused(
    fn: Callable[..., Any], given: tuple[torch.Tensor, ...] = OPERANDS, options: Options = ALL
) -> fx.GraphModule:
    """The graph after the fusions, which computes on all ranks what it computed before."""
    (before,), (after,) = compiled_graphs(fn, *given), compiled_graphs(fn, *given)
    fuse(after, options)

    def inputs() -> list[list[torch.Tensor]]:
        drawn = torch.Generator().manual_seed(0)
        return [[torch.randn(one.shape, generator=drawn).to(one.dtype) for one in given] for _ in range(WORLD_SIZE)]

    # The node rounds once, and the graph several times.
    for got, wanted in zip(run_ranks(after, inputs()), run_ranks(before, inputs()), strict=True):
        assert all(relative_error(one, other) < 1e-2 for one, other in zip(got, wanted, strict=True))
    return after


def made(module: fx.GraphModule) -> int:
    return sum(node.name.startswith(KIND) for node in module.graph.nodes)


def test_golden_experts_of_a_decode_step() -> None:
    _, begin, rest = text(fused(experts).graph).partition("permute")
    expecttest.assert_expected_inline(begin + rest, """\
permute_default [6, 8, 16] = aten.permute(arg3_1, [0, 2, 1])
reshape_default [6] = aten.reshape(unsqueeze_3, [6])
experts_all_reduce = ditron.experts_all_reduce([mul, permute_default, view, reshape_default], "reduce_op=sum top_k=2 world_size=4 group_name=0 site='' trials", None)
getitem_4 [3, 16] = experts_all_reduce[0]
return (getitem_4,)
""")


FORMS = (experts, narrow, with_another, the_other_way_round, one_token)


@pytest.mark.parametrize("fn", FORMS)
def test_sums_in_any_form_are_reduced_by_one_node(fn: Callable[..., Any]) -> None:
    after = fused(fn)
    task, operands = only_task(after, KIND)
    assert (task.top_k, task.has_added, task.reduce_op) == (K, fn is with_another, "sum")
    assert not list(after.graph.find_nodes(op="call_function", target=torch.ops.aten.sum.dim_IntList))
    assert set(operands) == {"x", "matrices", "experts", "factors"} | ({"added"} if task.has_added else set())


def test_a_norm_behind_it_is_a_part_of_it() -> None:
    (module,) = compiled_graphs(normed, *OPERANDS)
    pipeline.run(module.graph, ALL)
    task, operands = only_task(module, "experts_all_reduce_rms_norm")
    assert task.extras == ("residual",) and task.top_k == K and task.norm.form == "rms"
    assert operands["residual"].startswith("arg")


def test_the_first_matmul_is_a_call_of_its_own() -> None:
    (module,) = compiled_graphs(experts, *OPERANDS)
    assert pipeline.run(module.graph, ALL)["expert_projections"] == 1
    assert not list(module.graph.find_nodes(op="call_function", target=torch.ops.aten.bmm.default))


def terms_used(*operands: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out, weights = products(*operands)
    return all_reduce((out * weights.reshape(-1).unsqueeze(-1)).view(-1, K, D).sum(1).to(BF16)), out.sin()


def sum_used(*operands: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    total = summed(*operands)
    return all_reduce(total), total


def with_bias(*operands: torch.Tensor) -> torch.Tensor:
    """GPT-OSS: a bias of each expert behind the product."""
    out, weights = products(*operands)
    return all_reduce(((out + operands[1][:1]) * weights.reshape(-1, 1)).view(-1, K, D).sum(1).to(BF16))


def of_tokens(scores: torch.Tensor, x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Experts of one matmul, whose slots share the row of their token."""
    weights, chosen = scores.topk(K)
    rows = x.repeat_interleave(K, 0)
    out = torch.bmm(up[chosen.reshape(-1)], rows.unsqueeze(-1)).squeeze(-1)
    return all_reduce((out * weights.reshape(-1, 1)).view(-1, K, D).sum(1).to(BF16)) * down[0, :, 0]


def elsewhere(scores: torch.Tensor, x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Under expert parallelism: slots of other ranks' experts have one here, with the weight 0."""
    here = E // 2
    weights, chosen = scores.topk(K)
    ids = chosen.reshape(-1)
    rows = x.repeat_interleave(K, 0)[:, :F] * up[0, 0, :F]
    out = torch.bmm(down[:here][ids.clamp_max(here - 1)], rows.unsqueeze(-1)).squeeze(-1)
    factors = torch.where(ids >= here, 0.0, weights.reshape(-1))
    return all_reduce((out * factors.unsqueeze(-1)).view(-1, K, D).sum(1).to(BF16))


def of_other_slots(*operands: torch.Tensor) -> torch.Tensor:
    """Sums of slots of different tokens."""
    out, weights = products(*operands)
    return all_reduce((out * weights.reshape(-1, 1)).view(K, -1, D).sum(0).to(BF16))


def by_column(*operands: torch.Tensor) -> torch.Tensor:
    """Factors of columns, and not of slots."""
    out, _ = products(*operands)
    return all_reduce((out * operands[1][:1]).view(-1, K, D).sum(1))


def in_fp32(*operands: torch.Tensor) -> torch.Tensor:
    out, weights = products(*operands)
    return all_reduce((out * weights.reshape(-1, 1)).view(-1, K, D).sum(1))


def in_rows_of_another_length(*operands: torch.Tensor) -> torch.Tensor:
    return all_reduce(summed(*operands).view(-1, D // 2))


def of_halves(*operands: torch.Tensor) -> torch.Tensor:
    """Sums of the two halves of each product, in rows that are long enough again behind them."""
    out, weights = products(*operands)
    halves = (out * weights.reshape(-1, 1)).view(-1, 2, D // 2)
    return all_reduce(halves.sum(1).to(BF16).view(-1, D))


def factors_of_halves(*operands: torch.Tensor) -> torch.Tensor:
    """Two factors for each slot."""
    out, weights = products(*operands)
    scale = torch.stack((weights.reshape(-1), weights.reshape(-1).sin()), 1).unsqueeze(-1)
    return all_reduce((out.view(-1, 2, D // 2) * scale).view(-1, K, D).sum(1).to(BF16))


def of_integers(*operands: torch.Tensor) -> torch.Tensor:
    out, weights = products(*operands)
    terms = (out * weights.reshape(-1, 1)).view(-1, K, D)
    return all_reduce(terms.sum(1, dtype=torch.int32).to(BF16))


def of_maximum(*operands: torch.Tensor) -> torch.Tensor:
    return all_reduce(summed(*operands), "max")


LEFT = {
    terms_used: "intermediate_used",
    sum_used: "intermediate_used",
    of_tokens: "experts_form",
    elsewhere: "experts_form",
    in_rows_of_another_length: "experts_form",
    of_halves: "experts_form",
    factors_of_halves: "experts_form",
    in_fp32: "cast_between",
}


@pytest.mark.parametrize(("fn", "code"), LEFT.items())
def test_reasons(fn: Callable[..., Any], code: str) -> None:
    after = fused(fn)
    assert made(after) == 0 and reasons(after) == [code]


@pytest.mark.parametrize("fn", [with_bias, of_other_slots, by_column, of_integers, of_maximum])
def test_it_must_not_fire(fn: Callable[..., Any]) -> None:
    assert made(fused(fn)) == 0


@pytest.mark.parametrize("tokens", [MOST_EXPERT_TOKENS, MOST_EXPERT_TOKENS + 1])
def test_few_tokens_only(tokens: int) -> None:
    given = torch.empty(tokens, E), torch.empty(tokens, D).to(BF16), UP, DOWN
    assert made(fused(experts, given)) == (1 if tokens == MOST_EXPERT_TOKENS else 0)


@pytest.mark.parametrize("columns", [MOST_EXPERT_COLUMNS, MOST_EXPERT_COLUMNS + 1])
def test_columns_have_flags(columns: int) -> None:
    def fn(scores: torch.Tensor, x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        out, weights = products(scores, x, up, down)
        return all_reduce((out * weights.reshape(-1, 1)).view(-1, K, columns).sum(1).to(BF16))

    (module,) = compiled_graphs(fn, SCORES, X, UP, torch.empty(E, columns, F).to(BF16))
    fuse(module, ALL)
    assert made(module) == (1 if columns == MOST_EXPERT_COLUMNS else 0)


@pytest.mark.parametrize("most", [None, 64])
def test_a_dynamic_number_of_columns_stays(most: int | None) -> None:
    def fn(scores: torch.Tensor, x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        out, weights = products(scores, x, up, down)
        total = (out * weights.reshape(-1, 1)).view(T, K, down.shape[1]).sum(1).to(BF16)
        return all_reduce(total.view(1, T, -1))

    down = torch.empty(E, 40, F).to(BF16)
    torch._dynamo.mark_dynamic(down, 1, min=2 if most else None, max=most)
    (module,) = compiled_graphs(fn, SCORES, X, UP, down)
    with assert_no_new_guards(module):
        fuse(module, ALL)
    assert made(module) == 0 and reasons(module) == ["experts_form"]


def test_operands_that_are_written_to_stay() -> None:
    (module,) = compiled_graphs(experts, *OPERANDS)
    (down,) = [node for node in module.graph.nodes if node.op == "placeholder" and node.meta["val"].shape == DOWN.shape]
    (wait,) = [node for node in module.graph.nodes if "wait_tensor" in node.name]
    with module.graph.inserting_before(wait):
        zero = module.graph.call_function(torch.ops.aten.zero_.default, (down,))
    zero.meta["val"] = down.meta["val"]
    fuse(module, ALL)
    assert made(module) == 0


@pytest.mark.parametrize("options", [Options(), Options(fusions=("matmul_all_reduce",))])
def test_it_is_made_only_if_it_is_asked_for(options: Options) -> None:
    assert made(fused(experts, options=options)) == 0


def test_idempotent() -> None:
    after = fused(experts)
    assert experts_all_reduce(after.graph, options=ALL) == 0
