"""absorb_sums: which sums of what a decode step's experts return go into the reduction with a norm behind them."""

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
from ditron_inductor.passes.absorb import absorb_epilogues
from ditron_inductor.passes.absorb.absorb_sums import absorb_sums
from ditron_inductor.task.nodes import MOST_EXPERT_TOKENS
from tests.passes.graphs import (
    WORLD_SIZE,
    all_reduce,
    assert_no_new_guards,
    compiled_graphs,
    only_task,
    run_ranks,
    text,
)

pytestmark = pytest.mark.usefixtures("group")
KIND = "all_reduce_rms_norm"
BF16 = torch.bfloat16
T, D, F, E, K = 3, 16, 8, 6, 2
SCORES, X = torch.empty(T, E), torch.empty(T, D).to(BF16)
UP, DOWN = torch.empty(E, 2 * F, D).to(BF16), torch.empty(E, D, F).to(BF16)
OPERANDS = (SCORES, X, UP, DOWN)


def normed(reduced: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What the next layer begins with: the residual, and the norm in front of a matmul."""
    total = x.view(reduced.shape).to(reduced.dtype) + reduced
    wide = total.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return scaled.to(reduced.dtype).view(-1, D) @ weight.mT.to(reduced.dtype), total


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
    return summed(*operands)


def narrow(*operands: torch.Tensor) -> torch.Tensor:
    """With weights in bf16, and the terms in three dimensions."""
    out, weights = products(*operands)
    return (out.view(-1, K, D) * weights.to(BF16).unsqueeze(-1)).sum(1)


def with_another(*operands: torch.Tensor) -> torch.Tensor:
    """With what another expert returns, which all tokens use, in another shape."""
    total = summed(*operands)
    return operands[1].sin().view(1, -1, D) + total.view(1, -1, D)


def the_other_way_round(scores: torch.Tensor, x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """bmm(rows, weights)."""
    rows, weights, ids = hidden(scores, x, up)
    out = torch.bmm(rows.unsqueeze(1), down.mT[ids]).squeeze(1)
    return (weights.reshape(-1, 1) * out).view(-1, K, D).sum(1).to(BF16)


def one_token(*operands: torch.Tensor) -> torch.Tensor:
    return experts(operands[0][:1], operands[1][:1], *operands[2:])


def of_other_ranks(scores: torch.Tensor, x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Under expert parallelism: slots of other ranks' experts have one here, with the weight 0."""
    here = E // 2
    weights, chosen = scores.topk(K)
    ids = chosen.reshape(-1)
    rows = x.repeat_interleave(K, 0)[:, :F] * up[0, 0, :F]
    out = torch.bmm(down[:here][ids.clamp_max(here - 1)], rows.unsqueeze(-1)).squeeze(-1)
    factors = torch.where(ids >= here, 0.0, weights.reshape(-1))
    return (out * factors.unsqueeze(-1)).view(-1, K, D).sum(1).to(BF16)


def biased(scores: torch.Tensor, x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """GPT-OSS: a bias of each expert behind the product, which becomes the epilogue of that."""
    rows, weights, ids = hidden(scores, x, up)
    out = torch.bmm(down[ids], rows.unsqueeze(-1)).squeeze(-1) + down.amax(-1)[ids]
    return (out * weights.reshape(-1, 1)).view(-1, K, D).sum(1).to(BF16)


def with_bias_of_columns(scores: torch.Tensor, x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Biases that do not lie row after row, so that no epilogue takes them."""
    rows, weights, ids = hidden(scores, x, up)
    out = torch.bmm(down[ids], rows.unsqueeze(-1)).squeeze(-1) + up[:, 0, :D][ids]
    return (out * weights.reshape(-1, 1)).view(-1, K, D).sum(1).to(BF16)


def product_used(
    scores: torch.Tensor, x: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What is behind the matmul has another reader, which the compiler computes with it."""
    rows, weights, ids = hidden(scores, x, up)
    out = torch.bmm(down[ids], rows.unsqueeze(-1)).squeeze(-1)
    total = out + down.amax(-1)[ids]
    return (total * weights.reshape(-1, 1)).view(-1, K, D).sum(1).to(BF16), out.sin()


FORMS = (experts, narrow, with_another, the_other_way_round, one_token, of_other_ranks, biased)


def layer(fn: Callable[..., Any], op: str = "sum") -> Callable[..., Any]:
    """`fn`, an all-reduce of what it returns first, and a norm of that."""

    def whole(*operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = fn(*operands)
        reduced, *more = found if isinstance(found, tuple) else (found,)
        x = operands[1][: reduced.numel() // D]
        return (*normed(all_reduce(reduced, op), x, operands[2][0]), *more)

    return whole


def compiled(fn: Callable[..., Any], given: tuple[torch.Tensor, ...] = OPERANDS) -> fx.GraphModule:
    """The graph after all passes, which computes on all ranks what it computed before."""
    (before,), (after,) = compiled_graphs(fn, *given), compiled_graphs(fn, *given)
    pipeline.run(after.graph, Options())
    after.recompile()

    def inputs() -> list[list[torch.Tensor]]:
        drawn = torch.Generator().manual_seed(0)
        return [[torch.randn(one.shape, generator=drawn).to(one.dtype) for one in given] for _ in range(WORLD_SIZE)]

    # The node rounds once, and the graph several times.
    for got, wanted in zip(run_ranks(after, inputs()), run_ranks(before, inputs()), strict=True):
        assert all(relative_error(one, other) < 1e-2 for one, other in zip(got, wanted, strict=True))
    return after


def terms_used(*operands: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out, weights = products(*operands)
    terms = out * weights.reshape(-1).unsqueeze(-1)
    return terms.view(-1, K, D).sum(1).to(BF16), terms.sin()


def sum_used(*operands: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    total = summed(*operands)
    return total, total


def of_other_slots(*operands: torch.Tensor) -> torch.Tensor:
    """Sums of slots of different tokens."""
    out, weights = products(*operands)
    return (out * weights.reshape(-1, 1)).view(K, -1, D).sum(0).to(BF16)


def by_column(*operands: torch.Tensor) -> torch.Tensor:
    """Factors of columns, and not of slots."""
    out, _ = products(*operands)
    return (out * operands[1][:1]).view(-1, K, D).sum(1)


def in_fp32(*operands: torch.Tensor) -> torch.Tensor:
    out, weights = products(*operands)
    return (out * weights.reshape(-1, 1)).view(-1, K, D).sum(1)


def of_halves(*operands: torch.Tensor) -> torch.Tensor:
    """Sums of the two halves of each product, in rows that are long enough again behind them."""
    out, weights = products(*operands)
    halves = (out * weights.reshape(-1, 1)).view(-1, 2, D // 2)
    return halves.sum(1).to(BF16).view(-1, D)


def factors_of_halves(*operands: torch.Tensor) -> torch.Tensor:
    """Two factors for each slot."""
    out, weights = products(*operands)
    scale = torch.stack((weights.reshape(-1), weights.reshape(-1).sin()), 1).unsqueeze(-1)
    return (out.view(-1, 2, D // 2) * scale).view(-1, K, D).sum(1).to(BF16)


def of_integers(*operands: torch.Tensor) -> torch.Tensor:
    out, weights = products(*operands)
    terms = (out * weights.reshape(-1, 1)).view(-1, K, D)
    return terms.sum(1, dtype=torch.int32).to(BF16)


def in_fp64(*operands: torch.Tensor) -> torch.Tensor:
    """Of products in fp32, whose sum in fp64 has digits that one in fp32 has not."""
    rows, weights, _ = hidden(*operands[:3])
    out = rows.float() @ operands[3][0].mT.float()
    return (out * weights.reshape(-1, 1)).view(-1, K, D).sum(1, dtype=torch.float64).float()


def twice_as_wide(*operands: torch.Tensor) -> torch.Tensor:
    """A product of which each half has the columns of a slot."""
    rows, _, _ = hidden(*operands[:3])
    return rows @ torch.cat((operands[3][0], operands[3][1])).mT


def of_columns(*operands: torch.Tensor) -> torch.Tensor:
    """Of products that do not lie row after row."""
    _, weights = products(*operands)
    return (twice_as_wide(*operands)[:, D:] * weights.reshape(-1, 1)).reshape(-1, K, D).sum(1).to(BF16)


def with_columns(*operands: torch.Tensor) -> torch.Tensor:
    """With something that does not lie row after row."""
    return summed(*operands) + twice_as_wide(*operands)[: len(operands[0]), D:]


LEFT = (
    terms_used, sum_used, with_bias_of_columns, product_used, of_other_slots, by_column, in_fp32, of_halves, factors_of_halves, of_integers,
    in_fp64, of_columns, with_columns,
)  # fmt: skip


def made(module: fx.GraphModule) -> bool:
    """Whether the only reduction with a norm adds up slots."""
    task, _ = only_task(module, KIND)
    return task.top_k > 0


def test_golden_experts_of_a_decode_step() -> None:
    _, begin, rest = text(compiled(layer(experts)).graph).partition("expert_projections_1")
    expecttest.assert_expected_inline(
        begin + rest,
        """\
expert_projections_1 = ditron.expert_projections([getitem_12, view, permute_default_1], 'top_k=2 num_weights=1', None)
getitem_7 [6, 16] = expert_projections_1[0]
view_2 [6] = aten.reshape(getitem, [-1])
unsqueeze_3 [6, 1] = aten.unsqueeze(view_2, -1)
reshape_default [6] = aten.reshape(unsqueeze_3, [6])
all_reduce_rms_norm_1 = ditron.all_reduce_rms_norm([getitem_7, arg1_1, reshape_default], 'reduce_op=sum norm=() extras=residual world_size=4 group_name=0 site=4095cb6f/0:all_reduce_rms_norm trials top_k=2', None)
getitem_8 [3, 16] = all_reduce_rms_norm_1[0]
getitem_9 [3, 16] = all_reduce_rms_norm_1[1]
select [16, 16] = aten.select.int(arg2_1, 0, 0)
permute [16, 16] = aten.permute(select, [1, 0])
mm [3, 16] = aten.mm(getitem_8, permute)
return (mm, getitem_9)
""",
    )


@pytest.mark.parametrize("fn", FORMS)
def test_sums_in_any_form_are_a_part_of_the_reduction(fn: Callable[..., Any]) -> None:
    after = compiled(layer(fn))
    task, operands = only_task(after, KIND)
    assert (task.top_k, task.has_added, task.reduce_op) == (K, fn is with_another, "sum")
    assert not list(after.graph.find_nodes(op="call_function", target=torch.ops.aten.sum.dim_IntList))
    assert set(operands) == {"x", "residual", "factors"} | ({"added"} if task.has_added else set())


@pytest.mark.parametrize("fn", LEFT)
def test_it_must_not_fire(fn: Callable[..., Any]) -> None:
    assert not made(compiled(layer(fn)))


def test_rows_of_another_length_stay() -> None:
    def fn(*operands: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        reduced = all_reduce(summed(*operands).view(-1, D // 2))
        wide = reduced.float()
        scaled = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(BF16)
        return scaled @ operands[2][0, : D // 2, : D // 2], reduced

    assert not made(compiled(fn))


def test_products_that_are_no_tensor_in_memory_stay() -> None:
    def fn(*operands: torch.Tensor) -> torch.Tensor:
        scores, x, *_ = operands
        weights, _ = scores.topk(K)
        return (x.repeat_interleave(K, 0).sin() * weights.reshape(-1, 1)).view(-1, K, D).sum(1).to(BF16)

    assert not made(compiled(layer(fn)))


def test_a_matmul_of_another_form_has_products_in_memory() -> None:
    def fn(*operands: torch.Tensor) -> torch.Tensor:
        scores, x, up, _ = operands
        weights, _ = scores.topk(K)
        return ((x.repeat_interleave(K, 0) @ up[0]) * weights.reshape(-1, 1)).view(-1, K, D).sum(1).to(BF16)

    assert made(compiled(layer(fn)))


@pytest.mark.parametrize("tokens", [MOST_EXPERT_TOKENS, MOST_EXPERT_TOKENS + 1])
def test_few_tokens_only(tokens: int) -> None:
    given = torch.empty(tokens, E), torch.empty(tokens, D).to(BF16), UP, DOWN
    assert made(compiled(layer(experts), given)) == (tokens == MOST_EXPERT_TOKENS)


def test_a_dynamic_number_of_tokens_stays() -> None:
    scores, x = torch.empty(5, E), torch.empty(5, D).to(BF16)
    torch._dynamo.mark_dynamic(scores, 0, min=2, max=60)
    torch._dynamo.mark_dynamic(x, 0, min=2, max=60)
    (module,) = compiled_graphs(layer(experts), scores, x, UP, DOWN)
    with assert_no_new_guards(module):
        pipeline.run(module.graph, Options())
    assert not made(module)


def test_operands_that_are_written_to_stay() -> None:
    (module,) = compiled_graphs(layer(with_another), *OPERANDS)
    (added,) = [node for node in module.graph.nodes if "sin" in node.name]
    (wait,) = [node for node in module.graph.nodes if "wait_tensor" in node.name]
    with module.graph.inserting_before(wait):
        zero = module.graph.call_function(torch.ops.aten.zero_.default, (added,))
    zero.meta["val"] = added.meta["val"]
    pipeline.run(module.graph, Options())
    assert not made(module)


def test_a_sum_that_the_call_has_as_its_residual_too_stays() -> None:
    def fn(*operands: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = summed(*operands)
        return normed(all_reduce(total), total, operands[2][0])

    assert not made(compiled(fn))


def test_products_whose_whole_is_written_to_stay() -> None:
    def fn(*operands: torch.Tensor) -> torch.Tensor:
        rows, weights, _ = hidden(*operands[:3])
        out = (torch.cat((rows, rows)) @ operands[3][0].mT)[1 : 1 + len(rows)]
        return (out * weights.reshape(-1, 1)).view(-1, K, D).sum(1).to(BF16)

    assert made(compiled(layer(fn)))
    (module,) = compiled_graphs(layer(fn), *OPERANDS)
    (whole, _) = module.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    (wait,) = [node for node in module.graph.nodes if "wait_tensor" in node.name]
    with module.graph.inserting_before(wait):
        zero = module.graph.call_function(torch.ops.aten.zero_.default, (whole,))
    zero.meta["val"] = whole.meta["val"]
    pipeline.run(module.graph, Options())
    assert not made(module)


def test_each_sum_reads_one_call_of_experts() -> None:
    """In a model with many layers, a sum that read the calls of all layers would take most of the time of all passes."""

    def fn(scores: torch.Tensor, x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            scaled, _ = normed(all_reduce(biased(scores + x[:, :E], x, up, down)), x, up[0])
            x = scaled
        return x

    (module,) = compiled_graphs(fn, *OPERANDS)
    with mock.patch.object(absorb_epilogues, "_read_chain", wraps=absorb_epilogues._read_chain) as read:
        absorbed: list[int] = []
        real = pipeline.PASSES

        def counted(graph: fx.Graph, *, options: Options) -> int:
            read.reset_mock()
            made = absorb_sums(graph, options=options)
            absorbed.append(read.call_count)
            return made

        passes = [counted if one is absorb_sums else one for one in real]
        pipeline.run(module.graph, Options(), passes)
    assert absorbed == [3]


def test_idempotent() -> None:
    assert absorb_sums(compiled(layer(experts)).graph, options=Options()) == 0
