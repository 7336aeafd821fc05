"""A layer of experts under tensor and sequence parallelism, as TorchTitan writes it, inside a rank."""

from __future__ import annotations

import functools
import importlib
from collections import Counter
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed import _functional_collectives as functional
from torch.nn.functional import silu

from benchmarks.tolerances import narrow_limit, relative_error
from ditron_inductor.task.plan import decisions
from tests.models.interpreted import interpreted
from tests.rank_process import RankContext

fuse = importlib.import_module("ditron_inductor.passes.fuse.grouped_matmul_all_reduce")
WIDTH, INNER, EXPERTS, TAKEN = 32, 32, 6, 2
KINDS = "all_gather_matmul", "grouped_matmul_reduce_scatter"


def _drawn(ctx: RankContext, seed: int, *shape: int) -> torch.Tensor:
    """The same on all ranks, on this rank's device."""
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return (drawn / shape[-1] ** 0.5).to(ctx.device)


class Mixture(nn.Module):
    """A rank has a part of the width of each expert, and a part of the tokens in front of the layer and behind it."""

    def __init__(self, ctx: RankContext, scores: torch.Tensor) -> None:
        super().__init__()
        self.scores = scores
        self.router = nn.Parameter(_drawn(ctx, 0, WIDTH, EXPERTS).bfloat16())
        up, gate, down = (_drawn(ctx, seed, EXPERTS, INNER * ctx.world_size, WIDTH) for seed in (1, 2, 3))
        parts = [whole.chunk(ctx.world_size, 1)[ctx.rank].bfloat16() for whole in (up, gate, down)]
        self.up, self.gate, down = (nn.Parameter(part.contiguous()) for part in parts)
        self.down = nn.Parameter(down.detach().mT.contiguous())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        group = dist.group.WORLD
        whole = functional.all_gather_tensor_autograd(x, 0, group)
        weights = torch.sigmoid((whole @ self.router).float())
        experts = self.scores.topk(TAKEN)[1]
        ids = experts.flatten()
        order = ids.argsort(stable=True)
        tokens = order // TAKEN
        ends = torch.histc(ids.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0, dtype=torch.int32)
        rows = whole[tokens]
        multiply = functools.partial(torch._grouped_mm, offs=ends)
        inside = silu(multiply(rows, self.gate.mT)) * multiply(rows, self.up.mT)
        terms = multiply(inside, self.down.mT).float() * weights.gather(1, experts).flatten()[order].unsqueeze(-1)
        total = torch.zeros_like(whole).scatter_add(0, tokens.unsqueeze(-1).expand(-1, WIDTH), terms.bfloat16())
        return functional.reduce_scatter_tensor_autograd(total, "sum", 0, group)


def exact(layer: Mixture, x: torch.Tensor) -> torch.Tensor:
    """What the layer returns, in the dtype of x and with all experts for all tokens."""
    whole = functional.all_gather_tensor_autograd(x, 0, dist.group.WORLD)
    weights = torch.sigmoid(whole @ layer.router)
    chosen = torch.zeros_like(weights).scatter(1, layer.scores.topk(TAKEN)[1], 1.0)
    inside = silu(torch.einsum("td,efd->etf", whole, layer.gate)) * torch.einsum("td,efd->etf", whole, layer.up)
    total = torch.einsum("etf,edf,te->td", inside, layer.down, weights * chosen)
    return functional.reduce_scatter_tensor_autograd(total, "sum", 0, dist.group.WORLD)


def _step(layer: Mixture, run: Any, x: torch.Tensor, gradient: torch.Tensor) -> dict[str, torch.Tensor]:
    """The result and all gradients."""
    layer.zero_grad(set_to_none=True)
    given = x.detach().requires_grad_()
    out = run(given)
    out.backward(gradient.to(out.dtype))
    found = {name: one.grad for name, one in [("x", given), *layer.named_parameters()]}
    return {"out": out.detach(), **{name: one for name, one in found.items() if one is not None}}


def train(ctx: RankContext, tokens: int, inductor: bool) -> tuple[Counter[str], set[str]]:
    """(The collectives of a training step that became nodes of KINDS, the strategies that ran), after a comparison of
    the result and of all gradients with float32: they are as near as those of eager mode.
    """
    torch._dynamo.reset()
    counters.clear()
    decisions._last.clear()
    scores = _drawn(ctx, 4, tokens, EXPERTS)
    # The last expert is chosen by nobody.
    scores[:, -1] = -100.0
    x, gradient = (_drawn(ctx, seed, tokens, WIDTH).chunk(ctx.world_size)[ctx.rank] for seed in (5, 6))
    layer = Mixture(ctx, scores)
    options = {"ditron.strategy": "tile"}
    if inductor:
        compiled = torch.compile(layer, backend="ditron", options=options, fullgraph=True)
    else:
        compiled = torch.compile(layer, backend=interpreted(options), fullgraph=True)
    with mock.patch.object(fuse, "LEAST_TOKENS", 64):
        found = _step(layer, compiled, x.bfloat16(), gradient)
    eager = _step(layer, layer, x.bfloat16(), gradient)
    layer.float()
    wanted = _step(layer, functools.partial(exact, layer), x.bfloat16().float(), gradient.bfloat16())
    for name, value in wanted.items():
        error, rounded = (relative_error(one[name], value) for one in (found, eager))
        assert error <= narrow_limit(torch.bfloat16, rounded), f"{name}: {error:.1e}, eager {rounded:.1e}"
    assert set(found) == set(wanted) == {"out", "x", "router", "up", "gate", "down"}
    counted = Counter({kind: counters["ditron"][kind] for kind in KINDS})
    return counted, {choice.strategy for _, choice in decisions._last.values()}
