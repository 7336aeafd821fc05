"""Layers that torchao quantises, beside a collective: what becomes of each form, and that it computes the same."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as collectives

import ditron_inductor
from tests.ranks import RankContext, RankPools

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="needs torchao: make test-stacks"
)


class Reduced(nn.Module):
    """A row-parallel layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(128, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return collectives.all_reduce(self.linear(x), "sum", dist.group.WORLD)


class Gathered(nn.Module):
    """A column-parallel layer behind a gather."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(128, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(collectives.all_gather_tensor(x, 0, dist.group.WORLD))


def configs() -> dict[str, Any]:
    """torchao's configurations that run on a CPU."""
    from torchao import quantization as ao

    return {
        "int8 weights": ao.Int8WeightOnlyConfig(),
        "float8 weights": ao.Float8WeightOnlyConfig(),
        "int8": ao.Int8DynamicActivationInt8WeightConfig(),
    }


def compiled(ctx: RankContext) -> dict[tuple[str, str], tuple[str, str, float]]:
    """By layer and configuration: the collective's node, why it was left alone, the error relative to eager mode."""
    from torchao.quantization import quantize_

    found = {}
    for name, config in configs().items():
        for layer in (Reduced, Gathered):
            torch._dynamo.reset()
            torch.manual_seed(ctx.rank)
            model = layer().to(torch.bfloat16)
            quantize_(model, config)
            x = torch.randn(16, 128, dtype=torch.bfloat16)
            with torch.no_grad():
                wanted = model(x).float()
                report = ditron_inductor.explain(model)(x)
                got = torch.compile(model, backend="ditron")(x).float()
            (site,) = report.sites
            error = float((got - wanted).abs().max() / wanted.abs().max())
            found[layer.__name__, name] = site.record.kind, site.record.reason_code, error
    return found


def test_what_becomes_of_each_form(rank_pools: RankPools) -> None:
    first, second = rank_pools.get("cpu", 2, label="torchao").run(compiled, timeout=200.0)
    for found in (first, second):
        kinds = {key: value[:2] for key, value in found.items()}
        # A weight that is dequantised is an operand like any other; a product of int8 by int8 is left alone.
        for name in ("int8 weights", "float8 weights"):
            assert kinds["Reduced", name] == ("matmul_all_reduce", "")
            assert kinds["Gathered", name] == ("all_gather_matmul", "")
        assert kinds["Reduced", "int8"] == ("all_reduce", "no_matmul")
        assert kinds["Gathered", "int8"] == ("all_gather_into_tensor", "quantized_matmul")
        # Eager mode rounds the product before it scales it.
        assert max(error for *_, error in found.values()) < 0.02
