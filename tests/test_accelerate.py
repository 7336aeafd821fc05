"""Accelerate compiles what it prepares by Inductor with our passes, as the guide says it, and trains as eager does."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ditron_inductor
from benchmarks.tolerances import assert_near
from tests.models.interpreted import without_generated_code
from tests.ranks import RankContext, RankPools

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None, reason="needs accelerate: pip install 'ditron-inductor[models]'"
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(64, eps=1e-5)
        self.up, self.down = nn.Linear(64, 128, bias=False), nn.Linear(128, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


def made(ctx: RankContext) -> nn.Module:
    """Two blocks, cut over all ranks, the same in every call."""
    torch.manual_seed(1)
    model = nn.Sequential(Block(), Block()).to(ctx.device)
    mesh = init_device_mesh(ctx.device.type, (ctx.world_size,))
    for block in model:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    model.tp_size = ctx.world_size  # what Accelerate asks a model that is cut for
    return model


def step_of(model: nn.Module) -> torch.optim.Optimizer:
    """One tensor after the other: torch updates no list in which some are DTensors and some are not."""
    return torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)


def trained(model: nn.Module, optimizer: Any, backward: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """The weights after a step."""
    backward(model(x).square().mean())
    optimizer.step()
    values = [value.detach() for value in model.parameters()]
    return [value.to_local() if isinstance(value, DTensor) else value for value in values]


def train_both(ctx: RankContext) -> Counter[str]:
    """What the passes counted while a prepared model took a step as an eager one does."""
    from accelerate import Accelerator, ParallelismConfig
    from accelerate.state import AcceleratorState
    from accelerate.utils import TorchDynamoPlugin

    torch._dynamo.reset()
    counters.clear()
    x = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(2)).to(ctx.device)
    rank = str(ctx.rank)
    with contextlib.ExitStack() as stack:
        environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(ctx.world_size)}
        stack.enter_context(mock.patch.dict(os.environ, environment))
        AcceleratorState._reset_state(reset_partial_state=True)
        stack.callback(AcceleratorState._reset_state, reset_partial_state=True)
        matmul = torch.backends.cuda.matmul
        stack.callback(setattr, matmul, "allow_tf32", matmul.allow_tf32)
        if ctx.device.type == "cpu":
            stack.enter_context(without_generated_code())
            # Accelerate has tensor parallelism for accelerators only.
            stack.enter_context(mock.patch.object(ParallelismConfig, "_validate_accelerator"))
        plugin = TorchDynamoPlugin(backend="inductor", options=ditron_inductor.passes_for_inductor())
        parallel = ParallelismConfig(tp_size=ctx.world_size)
        accelerator = Accelerator(dynamo_plugin=plugin, parallelism_config=parallel)
        matmul.allow_tf32 = False
        model = made(ctx)
        prepared, optimizer = accelerator.prepare(model, step_of(model))
        got = trained(prepared, optimizer, accelerator.backward, x)
        eager = made(ctx)
        wanted = trained(eager, step_of(eager), torch.Tensor.backward, x)
    for one, other in zip(got, wanted, strict=True):
        assert_near(one, other, num_partials=ctx.world_size)
    return Counter(counters["ditron"])


def check(pool: Any) -> None:
    for counted in pool.run(train_both, timeout=200.0):
        assert counted["matmul_all_reduce"] == 4 and counted["all_reduce_rms_norm"] == 1


def test_training(rank_pools: RankPools) -> None:
    check(rank_pools.get("cpu", 2, label="accelerate"))


@pytest.mark.gpu
def test_training_on_gpus(rank_pools: RankPools) -> None:
    check(rank_pools.get("cuda", 2, label="accelerate"))


def test_the_name_is_refused() -> None:
    from accelerate.utils import TorchDynamoPlugin

    with pytest.raises(ValueError, match="DITRON"):
        TorchDynamoPlugin(backend="ditron")
