"""Expert parallelism in operations of static shapes: values and gradients of two ranks, in one graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ditron_inductor import ops
from ditron_inductor.backend import ditron
from ditron_inductor.errors import InvalidOperands
from ditron_inductor.expert_parallel import register_with_transformers
from ditron_inductor.task.site_records import collect_sites
from tests.models.interpreted import interpreted
from tests.rank_process import RankContext
from tests.ranks import RankPools

T, D, K, LOCAL = 6, 16, 2, 3


def one_by_one(weight: torch.Tensor) -> Callable[..., torch.Tensor]:
    """Every expert for all rows, as a mask chooses."""

    def compute(rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        assert torch.compiler.is_compiling() or type(rows) is torch.Tensor, "a kernel could not read its memory"
        found = torch.zeros_like(rows)
        for expert in range(weight.shape[0]):
            factor = (weights * (ids == expert)).sum(-1, keepdim=True)
            found = found + torch.tanh(rows @ weight[expert]) * factor
        return found

    return compute


def operands(rank: int, world_size: int, routing: str = "") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The tokens of a rank, the experts that they take, and weights. routing: `first` where all ranks' tokens take
    experts of rank 0, `equal` where all scores are equal.
    """
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(T, D, generator=generator, dtype=torch.float64)
    scores = torch.rand(T, LOCAL * world_size, generator=generator, dtype=torch.float64)
    if routing == "first":
        scores[:, :LOCAL] += 1
    if routing == "equal":
        scores = torch.ones_like(scores)
    weights, ids = scores.topk(K)
    return x, ids, weights


def gradients(call: Callable[..., torch.Tensor], *given: torch.Tensor) -> list[torch.Tensor]:
    """The result, and the gradients of a sum of its squares, of operands that have any."""
    leaves = [one.detach().requires_grad_(one.is_floating_point()) for one in given]
    out = call(*leaves)
    out.square().sum().backward()
    return [out.detach(), *(one.grad for one in leaves if one.grad is not None)]


def divided(ctx: RankContext, routing: str = "") -> int:
    """Eager and compiled, against all experts here. Returns the graphs that were compiled."""
    given = operands(ctx.rank, ctx.world_size, routing)
    weight = torch.randn(LOCAL * ctx.world_size, D, D, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    mine = weight.chunk(ctx.world_size)[ctx.rank]

    def layer(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return ops.experts(one_by_one(weight), x, ids, weights, num_local=LOCAL)

    wanted = gradients(lambda x, ids, weights, weight: one_by_one(weight)(x, ids, weights), *given, weight)
    # The gradients of an expert come from the tokens of all ranks.
    dist.all_reduce(wanted[-1])
    wanted[-1] = wanted[-1].chunk(ctx.world_size)[ctx.rank]
    with collect_sites() as sink:
        compiled = torch.compile(layer, backend=interpreted({}), fullgraph=True)
        for call in (layer, compiled):
            got = gradients(call, *given, mine)
            torch.testing.assert_close(got, wanted)
    return len(sink.graphs)


def test_values_and_gradients(rank_pools: RankPools) -> None:
    assert rank_pools.get("cpu", 2).run(divided) == [2, 2], "forward and backward"


@pytest.mark.parametrize("routing", ["first", "equal"])
def test_ranks_whose_experts_nobody_takes_and_scores_that_are_equal(rank_pools: RankPools, routing: str) -> None:
    assert rank_pools.get("cpu", 4).run(divided, routing) == [2] * 4


def without_tokens(ctx: RankContext) -> list[tuple[int, ...]]:
    """The shapes of what no tokens return, and of their gradients."""
    x, ids, weights = (one[:0] for one in operands(ctx.rank, ctx.world_size))
    weight = torch.zeros(LOCAL, D, D, dtype=torch.float64)

    def layer(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return ops.experts(one_by_one(weight), x, ids, weights, num_local=LOCAL)

    return [tuple(one.shape) for one in gradients(layer, x, ids, weights)]


def test_no_tokens(rank_pools: RankPools) -> None:
    assert rank_pools.get("cpu", 2).run(without_tokens) == [[(0, D), (0, D), (0, K)]] * 2


def nobodys(ctx: RankContext) -> None:
    """Numbers that are no expert's add nothing, as if their weights were 0."""
    x, ids, weights = operands(ctx.rank, ctx.world_size)
    weight = torch.randn(LOCAL, D, D, generator=torch.Generator().manual_seed(ctx.rank), dtype=torch.float64)

    def layer(ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return ops.experts(one_by_one(weight), x, ids, weights, num_local=LOCAL)

    wanted = layer(ids, weights.index_fill(1, torch.tensor([1]), 0.0))
    assert wanted.norm() > 0
    for number in (-1, -LOCAL, LOCAL * ctx.world_size, LOCAL * ctx.world_size + 1):
        torch.testing.assert_close(layer(ids.index_fill(1, torch.tensor([1]), number), weights), wanted)


def test_numbers_that_are_no_experts(rank_pools: RankPools) -> None:
    assert rank_pools.get("cpu", 2).run(nobodys) == [None] * 2


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"x": torch.zeros(2, T, D)}, "x"),
        ({"ids": torch.zeros(T, K, dtype=torch.int32)}, "ids"),
        ({"ids": torch.zeros(T + 1, K, dtype=torch.int64)}, "ids"),
        ({"weights": torch.zeros(T, K + 1)}, "weights"),
    ],
)
def test_operands_that_do_not_fit_are_named(change: dict[str, torch.Tensor], name: str) -> None:
    x, ids, weights = operands(0, 1)
    given: dict[str, Any] = {"x": x, "ids": ids, "weights": weights} | change
    with pytest.raises(InvalidOperands, match=f"experts: {name} "):
        ops.experts(one_by_one(x), num_local=LOCAL, **given)


def of_transformers(ctx: RankContext, backend: Callable[..., Any] | None = None) -> list[int]:
    """A layer of Mixtral's experts with a batch of its own on each rank, through the registry of `transformers`, in
    training, against the whole layer.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import MixtralConfig
    from transformers.distributed.expert_parallel import apply_expert_parallelism
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    config = MixtralConfig(
        hidden_size=D, intermediate_size=32, num_local_experts=LOCAL * ctx.world_size, num_experts_per_tok=K
    )
    config._experts_implementation = "grouped_mm"
    whole, part = (MixtralExperts(config).to(ctx.device) for _ in range(2))
    for one in (whole, part):
        torch.manual_seed(0)
        for parameter in one.parameters():
            torch.nn.init.normal_(parameter, std=D**-0.5)
    register_with_transformers()
    mesh = init_device_mesh(ctx.device.type, (ctx.world_size, 1), mesh_dim_names=("ep", "tp"))
    plan = {"gate_up_proj": "grouped_gemm", "down_proj": "grouped_gemm", "": "ep_dispatch_experts"}
    apply_expert_parallelism(part, mesh["ep"], mesh["tp"], plan, "ditron")
    given = (one.to(ctx.device) for one in operands(ctx.rank, ctx.world_size))
    x, ids, weights = (one.float() if one.is_floating_point() else one for one in given)

    def wanted_of(module: Any, call: Any) -> list[torch.Tensor]:
        found = gradients(call, x, ids, weights)
        for parameter in module.parameters():
            grad = parameter.grad
            found.append(grad.to_local() if hasattr(grad, "to_local") else grad)
            parameter.grad = None
        return found

    wanted = wanted_of(whole, whole)
    for index in (-1, -2):
        dist.all_reduce(wanted[index])
        wanted[index] = wanted[index].chunk(ctx.world_size)[ctx.rank]
    with collect_sites() as sink:
        compiled = torch.compile(part, backend=backend or interpreted({}), fullgraph=True)
        for call in (part, compiled):
            torch.testing.assert_close(wanted_of(part, call), wanted, rtol=1e-4, atol=1e-5)
    return [len(graph.sites) for graph in sink.graphs]


def needs_registry() -> None:
    pytest.importorskip("transformers.distributed.expert_parallel", reason="pip install 'ditron-inductor[models]'")


def test_transformers_trains_in_one_graph(rank_pools: RankPools) -> None:
    needs_registry()
    one, other = rank_pools.get("cpu", 2).run(of_transformers)
    assert one == other and len(one) == 2 and all(one), "collectives in the forward and in the backward"


@pytest.mark.gpu
def test_transformers_trains_on_gpus(rank_pools: RankPools) -> None:
    needs_registry()
    one, other = rank_pools.get("cuda", 2).run(of_transformers, ditron)
    assert one == other and len(one) == 2 and all(one), "collectives in the forward and in the backward"
