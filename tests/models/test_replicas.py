"""Replicas of a tensor-parallel group that change their tokens, together and apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed import distributed_c10d

from ditron_inductor.task.plan import decisions
from tests.cases import rare
from tests.ranks import RankContext, RankPools

TOKENS = {
    "one replica changes": [(8, 8), (12, 8), (12, 8)],
    "both change at once": [(8, 8), (12, 12), (8, 8)],
    "both change apart": [(8, 8), (12, 8), (12, 20), (8, 20), (20, 12)],
    "they differ from the first": [(8, 12), (12, 8), (8, 12)],
}
"""The tokens of both replicas in each call."""
MEETING_S = 5.0
"""Far more than ranks that share a core take from the end of a compilation to their meeting."""


@dataclass(frozen=True)
class Step:
    """One step of training, of a layer that is divided among a replica, whose gradient the replicas add up."""

    replica: str
    """The group of the ranks of this replica."""
    across: str
    """The group of the ranks that have the same part of the weights, one of each replica."""
    logs_from: int | None = None
    """The call from which this rank computes a statistic of a product too."""
    has_mean: bool = False
    """Whether a gradient is that of the mean over tokens: a factor that is moved across its reduction."""
    breaks_at: int = -1
    """The call in which this rank's graph breaks."""

    def __call__(self, x: torch.Tensor, w: torch.Tensor, call: int) -> Any:
        total = funcol.wait_tensor(funcol.all_reduce(x @ w, "sum", self.replica))
        if call == self.breaks_at:
            torch._dynamo.graph_break()
        product = x.t() @ total.cos()
        if self.has_mean:
            product = product / x.shape[0]
        gradient = funcol.wait_tensor(funcol.all_reduce(product, "sum", self.across))
        if self.logs_from is not None and call >= self.logs_from:
            return total.sin(), gradient, product.abs().max()
        return total.sin(), gradient


def groups_of(rank: int) -> tuple[int, str, str]:
    """The number of a rank's replica, and the names of new groups: of this replica, and across replicas."""
    # The last one's name has one more digit, so that ranks would sort the names of their two groups differently.
    distributed_c10d._world.group_count = 10 ** len(str(distributed_c10d._world.group_count)) - 3
    replicas = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    replica, part = divmod(rank, 2)
    return replica, replicas[replica].group_name, across[part].group_name


def changing(
    ctx: RankContext, calls: Sequence[tuple[int, int]], dynamic: bool | None, of_all: Any = (), of_one: Any = ()
) -> set[str]:
    """The strategies that run sites, where all results were right. of_all, of_one: what the Steps of all ranks
    and that of rank 0 are made with.
    """
    torch._dynamo.reset()
    decisions._last.clear()
    replica, *names = groups_of(ctx.rank)
    program = Step(*names, **dict([*of_all, *(of_one if ctx.rank == 0 else ())]))
    options = {"ditron.strategy": "tile", "ditron.meeting_s": MEETING_S, "ditron.timeout_s": 60.0}
    compiled = torch.compile(program.__call__, backend="ditron", dynamic=dynamic, options=options)
    generator = torch.Generator().manual_seed(ctx.rank)
    for call, tokens in enumerate(calls):
        x, w = (torch.randn(*shape, generator=generator) for shape in ((tokens[replica], 16), (16, 24)))
        torch.testing.assert_close(compiled(x, w, call), program(x, w, call), atol=1e-4, rtol=1e-4)
    return {choice.strategy for _, choice in decisions._last.values()}


@pytest.mark.parametrize(
    ("name", "dynamic"),
    [
        ("one replica changes", False),
        ("both change at once", False),
        *rare(("both change apart", False), ("they differ from the first", False)),
        *rare(*((name, dynamic) for name in TOKENS for dynamic in (None, True))),
    ],
)
def test_replicas_have_tokens_of_their_own(rank_pools: RankPools, name: str, dynamic: bool | None) -> None:
    for strategies in rank_pools.get("cpu", 4).run(changing, TOKENS[name], dynamic, timeout=150.0):
        assert strategies == {"tile"}, "no site was given up"


@pytest.mark.parametrize(
    ("name", "logs_from"),
    [
        ("one replica changes", 1),
        *rare(("one replica changes", 2), *((f"both change {how}", 1) for how in ("at once", "apart"))),
        *rare(("both change at once", 2)),
    ],
)
def test_one_rank_logs_a_product_from_a_call_on(rank_pools: RankPools, name: str, logs_from: int) -> None:
    """It changes its form in the call in which its replica changes its tokens, or in a later one."""
    logs = [("logs_from", logs_from)]
    rank_pools.get("cpu", 4).run(changing, TOKENS[name], False, (), logs, timeout=150.0)


def test_a_factor_of_the_tokens_is_moved_across(rank_pools: RankPools) -> None:
    """All ranks have a new graph, and of it what is moved across a reduction is new as well."""
    calls, mean = TOKENS["both change at once"], [("has_mean", True)]
    rank_pools.get("cpu", 4).run(changing, calls, False, mean, timeout=150.0)


def test_a_rank_breaks_its_graph_when_all_change(rank_pools: RankPools) -> None:
    """Of the others one misses it in one group, and the rest in none: they run as Inductor alone would run them."""
    calls, breaks = TOKENS["both change at once"], [("breaks_at", 1)]
    rank_pools.get("cpu", 4).run(changing, calls, False, (), breaks, timeout=150.0)
