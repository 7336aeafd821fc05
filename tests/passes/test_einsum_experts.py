"""expert_projections of programs that index weights by experts [T, k] and multiply by einsums, or copies in any order."""

from __future__ import annotations

from collections.abc import Callable

import expecttest
import pytest
import torch
from torch import fx
from torch.nn.functional import silu

from benchmarks.tolerances import relative_error
from ditron_inductor import pipeline
from ditron_inductor.options import Options
from ditron_inductor.task import schema
from ditron_inductor.task.nodes import ExpertProjections
from ditron_inductor.task.site_records import collect_sites
from tests.passes.graphs import WORLD_SIZE, all_reduce, compiled_graphs, only_task, run_ranks, text, twin

pytestmark = pytest.mark.usefixtures("group")
BF16 = torch.bfloat16
T, D, F, E, K = 3, 16, 8, 6, 2
SCORES, X, NORM = torch.empty(T, E), torch.empty(T, D).to(BF16), torch.empty(D, D).to(BF16)
GATE, UP, DOWN = (torch.empty(shape).to(BF16) for shape in ((E, F, D), (E, F, D), (E, D, F)))
OPERANDS = (SCORES, X, GATE, UP, DOWN, NORM)
Layer = Callable[..., torch.Tensor]


def chosen(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(The weights [T, K] in bf16, the experts [T, K])."""
    weights, ids = scores.softmax(-1).topk(K)
    return (weights / weights.sum(-1, keepdim=True)).to(BF16), ids


def by_einsum(
    scores: torch.Tensor, x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """As gpt-fast decodes."""
    weights, ids = chosen(scores)
    hidden = silu(torch.einsum("ti,taoi->tao", x, gate[ids])) * torch.einsum("ti,taoi->tao", x, up[ids])
    return torch.einsum("tai,ta->ti", torch.einsum("tao,taio->tai", hidden, down[ids]), weights)


def by_einsum_of_other_layouts(
    scores: torch.Tensor, x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Weights that lie the other way round, [E, K, N]."""
    weights, ids = chosen(scores)
    gate, up, down = (one.mT.contiguous() for one in (gate, up, down))
    hidden = silu(torch.einsum("ti,taio->tao", x, gate[ids])) * torch.einsum("ti,taio->tao", x, up[ids])
    return torch.einsum("tai,ta->ti", torch.einsum("tao,taoi->tai", hidden, down[ids]), weights)


def by_matmul(
    scores: torch.Tensor, x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Copies of the weights are transposed."""
    weights, ids = chosen(scores)
    rows, flat = x.repeat_interleave(K, 0).unsqueeze(1), ids.view(-1)
    hidden = silu(rows @ gate[flat].mT) * (rows @ up[flat].mT)
    products = (hidden @ down[flat].mT).view(-1, K, D)
    return (products * weights.unsqueeze(-1)).sum(1)


def one_by_one(
    scores: torch.Tensor, x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    weights, ids = chosen(scores)
    hidden = silu(torch.einsum("ti,taoi->tao", x, gate[ids])) * torch.einsum("ti,taoi->tao", x, up[ids])
    products = torch.einsum("tao,taio->tai", hidden, down[ids])
    total = torch.zeros_like(x)
    for slot in range(K):
        total = total + products[:, slot] * weights[:, slot : slot + 1]
    return total * 2.5


def layer(fn: Layer) -> Layer:
    """`fn`, an all-reduce of what it returns, and a norm of that with the residual."""

    def whole(*operands: torch.Tensor) -> torch.Tensor:
        *given, norm = operands
        total = all_reduce(fn(*given)) + operands[1]
        wide = total.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(BF16) @ norm

    return whole


def compiled(fn: Layer, given: tuple[torch.Tensor, ...] = OPERANDS) -> fx.GraphModule:
    """The graph after all passes, which computes on all ranks what it computed before."""
    (after,) = compiled_graphs(layer(fn), *given)
    before = twin(after)
    values = [node.meta["val"] for node in after.graph.find_nodes(op="placeholder")]
    pipeline.run(after.graph, Options())
    after.graph.lint()
    after.recompile()

    def inputs() -> list[list[torch.Tensor]]:
        drawn = torch.Generator().manual_seed(0)
        return [[torch.randn(one.shape, generator=drawn).to(one.dtype) for one in values] for _ in range(WORLD_SIZE)]

    for (got,), (wanted,) in zip(run_ranks(after, inputs()), run_ranks(before, inputs()), strict=True):
        assert relative_error(got, wanted) < 1e-2
    return after


def weights_of_calls(module: fx.GraphModule) -> list[int]:
    """How many weights each call of experts has."""
    tasks = map(schema.node_of, module.graph.nodes)
    return [task.num_weights for task in tasks if isinstance(task, ExpertProjections)]


@pytest.mark.parametrize("fn", [by_einsum, by_einsum_of_other_layouts, by_matmul, one_by_one])
@pytest.mark.parametrize("tokens", [T, 1])
def test_nothing_is_copied(fn: Layer, tokens: int) -> None:
    after = compiled(fn, (SCORES[:tokens], X[:tokens], *OPERANDS[2:]))
    assert weights_of_calls(after) == [2, 1]
    assert not list(after.graph.find_nodes(op="call_function", target=torch.ops.aten.bmm.default))
    task, _ = only_task(after, "all_reduce_rms_norm")
    assert task.top_k == K


def test_golden_experts_by_einsum() -> None:
    lines = text(compiled(by_einsum).graph).splitlines()
    expecttest.assert_expected_inline(
        "\n".join(one for one in lines if "ditron.expert" in one),
        """\
expert_projections_2 = ditron.expert_projections([arg2_1, reshape_default, permute_default, permute_default_1], "top_k=2 by_token num_weights=2 epilogue='cast(silu(mm0), bf16) * mm1'", None)
expert_projections_1 = ditron.expert_projections([reshape_default_3, reshape_default_4, permute_default_2], 'top_k=2 num_weights=1', None)""",
    )


def other_experts(
    scores: torch.Tensor, x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Two choices of a token may be one expert."""
    weights, ids = chosen(scores)
    ids = ids // 2
    hidden = silu(torch.einsum("ti,taoi->tao", x, gate[ids])) * torch.einsum("ti,taoi->tao", x, up[ids])
    return torch.einsum("tai,ta->ti", torch.einsum("tao,taio->tai", hidden, down[ids]), weights)


def of_pairs_of_tokens(
    scores: torch.Tensor, x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Rows are multiplied by the matrices of other tokens' experts."""
    weights, ids = chosen(scores)
    across = ids.reshape(K, -1).t()
    hidden = silu(torch.einsum("ti,taoi->tao", x, gate[across])) * torch.einsum("ti,taoi->tao", x, up[across])
    return torch.einsum("tai,ta->ti", torch.einsum("tao,taio->tai", hidden, down[across]), weights)


def columns_of_all_experts(
    scores: torch.Tensor, x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """The columns of a token's experts are in alternate order."""
    weights, ids = chosen(scores)
    rows = x.unsqueeze(1) @ gate[ids].permute(0, 3, 2, 1).reshape(-1, D, F * K)
    return (rows.view(-1, F, K) * weights.unsqueeze(1)).sum(2).repeat(1, 2)


def two_rows_of_a_slot(
    scores: torch.Tensor, x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    weights, ids = chosen(scores)
    rows = torch.stack((x, x.sin()), 1).repeat_interleave(K, 0)
    return (torch.bmm(rows, gate[ids.view(-1)].mT).view(-1, 2 * K * F) * weights[:, :1])[:, :D]


def two_rows_of_a_token(
    scores: torch.Tensor, x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    weights, ids = chosen(scores)
    rows = torch.stack((x, x.sin()), 1)
    both = torch.bmm(rows, gate[ids].permute(0, 3, 1, 2).reshape(-1, D, K * F))
    return (both.view(-1, 2 * K * F) * weights[:, :1])[:, :D]


@pytest.mark.parametrize(
    "fn", [other_experts, of_pairs_of_tokens, columns_of_all_experts, two_rows_of_a_slot, two_rows_of_a_token]
)
def test_it_must_not_fire(fn: Layer) -> None:
    assert not weights_of_calls(compiled(fn))


@pytest.mark.parametrize("fn", [other_experts, of_pairs_of_tokens])
def test_a_report_says_that_the_weights_are_copied(fn: Layer) -> None:
    (graph,) = compiled_graphs(layer(fn), *OPERANDS)
    with collect_sites() as sink:
        pipeline.DitronPipeline(Options())(graph.graph)
    (site,) = sink.graphs[0].sites
    assert [(note.what, note.code) for note in site.outside] == [("experts in front", "experts_form")] * 3


def test_copies_with_another_reader_stay() -> None:
    def fn(*operands: torch.Tensor) -> torch.Tensor:
        scores, x, gate, *_ = operands
        _, ids = chosen(scores)
        copied = gate[ids]
        return torch.einsum("ti,taoi->tao", x, copied).view(-1, D) + copied.amax()

    assert not weights_of_calls(compiled(fn))


def test_the_weights_of_other_rows_are_another_call() -> None:
    def fn(*operands: torch.Tensor) -> torch.Tensor:
        scores, x, gate, up, _ = operands
        _, ids = chosen(scores)
        first = torch.einsum("ti,taoi->tao", x, gate[ids])
        return (first + torch.einsum("ti,taoi->tao", x.sin(), up[ids])).view(-1, D)

    assert weights_of_calls(compiled(fn)) == [1, 1]
