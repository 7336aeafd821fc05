"""Sums over the experts of each token: the slots of an expert may lie in any order, not only in a stable sort's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from benchmarks.tolerances import assert_near
from ditron_inductor.lowering.expert_sums import combine_kernel
from ditron_inductor.task.nodes import GroupedMatmulAllReduce, GroupedMatmulReduceScatter
from tests.cases import rare
from tests.lowering import test_combine_experts as sums
from tests.lowering.calls import assert_replicated
from tests.lowering.test_reduced_experts import CASES, Kind, call, given_to, reduced
from tests.rank_process import RankContext
from tests.ranks import RankPool, RankPools

BY_PLACE = ("x", "scale", "absent")
"""The operands that have a row or a number for each place."""


def other_orders(experts: torch.Tensor, seed: int) -> Iterator[torch.Tensor]:
    """The slots of each expert in reverse, and drawn: which place's slot lies at each place. experts: by place."""
    drawn = torch.randperm(len(experts), generator=torch.Generator().manual_seed(seed)).to(experts.device)
    for before in (torch.arange(len(experts), device=experts.device).flip(0), drawn):
        yield before[experts[before].sort(stable=True).indices]


def moved(given: dict[str, torch.Tensor], order: torch.Tensor) -> dict[str, torch.Tensor]:
    """The operands with their slots in this order."""
    rows = {name: given[name][order] for name in BY_PLACE if name in given}
    return given | rows | {"places": order.argsort()[given["places"]]}


def in_any_order(ctx: RankContext, kind: Kind, which: int) -> None:
    """The result does not change with the order of the slots of each expert: each rank has one of its own, and then all
    ranks but one.
    """
    case = CASES[kind][ctx.device.type][which]
    given = given_to(ctx, case)
    experts = torch.searchsorted(given["ends"], torch.arange(len(given["x"]), device=ctx.device), right=True)
    right = reduced(ctx, kind, case, given)
    reverse, drawn = (moved(given, order) for order in other_orders(experts, ctx.rank))
    for number, one in enumerate((reverse, drawn if ctx.rank else given)):
        assert one is given or not torch.equal(one["places"], given["places"])
        for strategy in ("tile", "library"):
            out = call(ctx, kind, case, strategy, one, name=f" in order {number}")
            assert_near(out, right, num_partials=ctx.world_size, what=f"{case} {strategy} {number}")
            if kind is GroupedMatmulAllReduce:
                assert_replicated(ctx, out)


@pytest.mark.parametrize("which", [7, *rare(2)])
@pytest.mark.parametrize("kind", [GroupedMatmulAllReduce, GroupedMatmulReduceScatter], ids=lambda kind: kind.kind)
def test_reductions(pool: RankPool, kind: Kind, which: int) -> None:
    pool.run(in_any_order, kind, which)


def combined_in_any_order(ctx: RankContext, which: int) -> None:
    case = sums.CASES[which]
    products, places, scale, absent, added, bias, experts = sums.operands(case, ctx.device)
    assert places is not None and experts is not None
    right = sums.wanted(case, products, places, scale, absent, added, bias, experts)
    for order in other_orders(experts, ctx.rank):
        rows = (one if one is None else one[order] for one in (products, scale, absent, experts))
        there, factors, marks, of_rows = rows
        given = there, order.argsort()[places], factors, marks, added, bias, of_rows
        for run in (
            combine_kernel.prepare(sums.node_of(case), *given, "tile"),
            combine_kernel.by_library(sums.node_of(case)),
        ):
            assert_near(run(*given)[0], right, what=str(case))


@pytest.mark.parametrize("which", [7])
def test_sums(rank_pools: RankPools, which: int) -> None:
    rank_pools.get("cpu", 2).run(combined_in_any_order, which)
