"""A forced strategy that a kind lacks: the nearest one runs, with the right result, and the choice says why."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from benchmarks.tolerances import assert_near
from ditron_inductor.lowering.register import register
from ditron_inductor.ops import all_gather_attention
from ditron_inductor.task import reference, schema
from ditron_inductor.task.nodes import AllReduceRmsNorm, MatmulAllGather, Norm, Policy
from ditron_inductor.task.plan import Choice, decisions
from tests.rank_process import RankContext
from tests.ranks import RankPools

POLICY = Policy("chunked", 1 << 29, 30.0)


def chosen(ctx: RankContext, site: str) -> Choice:
    last = decisions.last(ctx.group_name, site)
    assert last is not None
    return last[1]


def _products_and_norms(ctx: RankContext) -> list[Choice]:
    register()
    world, group = ctx.world_size, ctx.group_name
    a, b = torch.randn(6, 16), torch.randn(16, 8) / 4
    node = MatmulAllGather(1, world, group, "missing/0:matmul_all_gather", POLICY)
    out, _ = schema.call(node, a=[a], b=[b])
    wanted = reference.matmul_all_gather([a], [b], gather_dim=1, world_size=world, group_name=group)
    assert_near(out, wanted.double())
    norm = AllReduceRmsNorm("sum", Norm(), ("weight",), world, group, "missing/1:all_reduce_rms_norm", POLICY)
    normed, total, _ = schema.call(norm, x=a, weight=torch.full([16], 0.5))
    dist.all_reduce(a)
    assert_near(total, a.double(), num_partials=world)
    assert normed.shape == total.shape
    return [chosen(ctx, one.site) for one in (node, norm)]


def _gradients(ctx: RankContext, strategy: str) -> Choice:
    torch.manual_seed(ctx.rank)
    given = [torch.randn(1, 2, 12, 16) for _ in range(3)]
    found = {}
    for name in ("library", strategy):
        operands = [one.clone().requires_grad_() for one in given]
        all_gather_attention(*operands, strategy=name).sin().sum().backward()
        found[name] = [one.grad for one in operands]
        dist.barrier()
    for got, wanted in zip(found[strategy], found["library"], strict=True):
        assert got is not None and wanted is not None
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    return chosen(ctx, "")


def test_tile_runs_where_there_is_nothing_to_be_cut(rank_pools: RankPools) -> None:
    for choices in rank_pools.get("cpu", 2).run(_products_and_norms):
        assert [choice.strategy for choice in choices] == ["tile", "tile"]
        for choice, kind in zip(choices, ("matmul_all_gather", "all_reduce_rms_norm"), strict=True):
            assert choice.reason == f"{kind} has no strategy chunked: where that is forced tile runs"


@pytest.mark.parametrize("strategy", ["tile", "chunked"])
def test_the_backward_of_attention_has_the_library_alone(rank_pools: RankPools, strategy: str) -> None:
    for choice in rank_pools.get("cpu", 2).run(_gradients, strategy):
        assert choice.strategy == "library"
        assert choice.reason.startswith(f"attention_reduce_scatter has no strategy {strategy}: ")
