"""Replicas of a tensor-parallel group that change their tokens apart: each group of a graph keeps what it agreed on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch._dynamo.utils import counters

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


@dataclass(frozen=True)
class Step:
    """One step of training, of a layer that is divided among a replica, whose gradient the replicas add up."""

    replica: str
    """The group of the ranks of this replica."""
    across: str
    """The group of the ranks that have the same part of the weights, one of each replica."""
    logged: str = ""
    """The product of which this rank computes a statistic too."""
    logs_from: int = 0
    """The call from which it does."""

    def __call__(self, x: torch.Tensor, w: torch.Tensor, call: int) -> Any:
        part = x @ w
        total = funcol.wait_tensor(funcol.all_reduce(part, "sum", self.replica))
        product = x.t() @ total.cos()
        gradient = funcol.wait_tensor(funcol.all_reduce(product, "sum", self.across))
        if self.logged and call >= self.logs_from:
            return total.sin(), gradient, (part if self.logged == "part" else product).abs().max()
        return total.sin(), gradient


def changing(
    ctx: RankContext,
    calls: Sequence[tuple[int, int]],
    dynamic: bool | None = False,
    logged: str = "",
    logs_from: int = 0,
) -> dict[str, int]:
    """How often each strategy runs a site, where all results were right. logged: what rank 0 logs."""
    torch._dynamo.reset()
    counters.clear()
    decisions._last.clear()
    replicas = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    replica, part = divmod(ctx.rank, 2)
    names = replicas[replica].group_name, across[part].group_name
    program = Step(*names, logged if ctx.rank == 0 else "", logs_from)
    options = {"ditron.strategy": "tile", "ditron.meeting_s": 10.0, "ditron.timeout_s": 20.0}
    compiled = torch.compile(program.__call__, backend="ditron", dynamic=dynamic, options=options)
    generator = torch.Generator().manual_seed(ctx.rank)
    for call, tokens in enumerate(calls):
        x, w = (torch.randn(*shape, generator=generator) for shape in ((tokens[replica], 16), (16, 24)))
        torch.testing.assert_close(compiled(x, w, call), program(x, w, call), atol=1e-4, rtol=1e-4)
    strategies: dict[str, int] = {}
    for _, choice in decisions._last.values():
        strategies[choice.strategy] = strategies.get(choice.strategy, 0) + 1
    return strategies


@pytest.mark.parametrize("dynamic", [False, *rare(None, True)])
@pytest.mark.parametrize("name", TOKENS)
def test_replicas_have_tokens_of_their_own(rank_pools: RankPools, name: str, dynamic: bool | None) -> None:
    for strategies in rank_pools.get("cpu", 4).run(changing, TOKENS[name], dynamic, timeout=150.0):
        assert set(strategies) == {"tile"}, "no site was given up"


@pytest.mark.parametrize("logs_from", [1, *rare(2)])
@pytest.mark.parametrize("logged", ["part", "product"])
@pytest.mark.parametrize("name", ["one replica changes", *rare("both change at once", "both change apart")])
def test_one_rank_logs_a_product_from_a_call_on(rank_pools: RankPools, name: str, logged: str, logs_from: int) -> None:
    """It changes its form in the call in which its replica changes its tokens, or in a later one."""
    rank_pools.get("cpu", 4).run(changing, TOKENS[name], False, logged, logs_from, timeout=150.0)
