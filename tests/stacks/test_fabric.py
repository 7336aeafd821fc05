"""Lightning Fabric with a model that is compiled where Fabric cuts it: it trains as in eager mode, and is fused."""

from __future__ import annotations

import importlib.util
import os
from collections import Counter
from unittest import mock

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.ranks import RankContext, RankPools

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lightning_fabric") is None, reason="needs Fabric: make test-stacks"
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(64, eps=1e-5)
        self.up, self.down = nn.Linear(64, 128, bias=False), nn.Linear(128, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


def losses(ctx: RankContext, backend: str) -> list[float]:
    """Those of three steps of a model that `backend` compiles."""
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.environments import TorchElasticEnvironment
    from lightning_fabric.strategies import ModelParallelStrategy

    def cut(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        for block in model.children():
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh["tensor_parallel"], plan)
        return torch.compile(model, backend=backend)

    torch._dynamo.reset()
    counters.clear()
    strategy = ModelParallelStrategy(cut, data_parallel_size=1, tensor_parallel_size=ctx.world_size)
    strategy.cluster_environment = TorchElasticEnvironment()
    fabric = Fabric(accelerator="cpu", devices=ctx.world_size, strategy=strategy)
    fabric.launch()
    torch.manual_seed(1)
    model = fabric.setup_module(nn.Sequential(Block(), Block()))
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1, foreach=False))
    x = torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(2))
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        fabric.backward(loss)
        optimizer.step()
        found.append(loss.item())
    return found


def train(ctx: RankContext) -> tuple[list[float], list[float], Counter[str]]:
    """The losses of eager mode and of Ditron, and what was fused."""
    rank = str(ctx.rank)
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(ctx.world_size), "TORCHELASTIC_RUN_ID": "fabric"}
    with mock.patch.dict(os.environ, environment):
        wanted = losses(ctx, "eager")
        got = losses(ctx, "ditron")
        return wanted, got, Counter(counters["ditron"])


def test_training(rank_pools: RankPools) -> None:
    for wanted, got, fused in rank_pools.get("cpu", 2, label="fabric").run(train, timeout=200.0):
        assert got == pytest.approx(wanted, rel=1e-5)
        assert wanted[0] > wanted[2]
        # Two in the forward, of which one takes a norm, and two in the backward.
        assert fused["matmul_all_reduce"] == 4 and fused["all_reduce_rms_norm"] == 1
