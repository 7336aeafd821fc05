"""An attention block whose heads and sequence change places between ranks (Ulysses), through `backend="ditron"`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import _functional_collectives as functional

from benchmarks.tolerances import MODEL_TOLERANCES, relative_error
from ditron_inductor.backend import ditron
from ditron_inductor.report.explain import without_caches
from ditron_inductor.task.site_records import collect_sites
from tests.cases import rare
from tests.models.interpreted import interpreted
from tests.rank_process import RankContext
from tests.ranks import RankPool, RankPools


def exchange(x: torch.Tensor) -> torch.Tensor:
    """Chunk i of dimension 0 goes to rank i."""
    splits = [x.shape[0] // dist.get_world_size()] * dist.get_world_size()
    return functional.all_to_all_single_autograd(x.contiguous(), splits, splits, dist.group.WORLD)


def to_heads(x: torch.Tensor) -> torch.Tensor:
    """[B, S, .., W*h, D] of every rank to [B, W*S, .., h, D]."""
    world = dist.get_world_size()
    sent = x.unflatten(-2, (world, -1)).movedim(-3, 0)
    return exchange(sent).movedim(0, 1).flatten(1, 2)


def to_rows(x: torch.Tensor) -> torch.Tensor:
    """[B, W*S, h, D] to [B, S, W*h, D]."""
    world = dist.get_world_size()
    sent = x.unflatten(1, (world, -1)).transpose(0, 1)
    return exchange(sent).movedim(0, 2).flatten(2, 3)


class Block(nn.Module):
    """Rows [B, S/W, dim] to as many; packed: one projection and one all-to-all for queries, keys and values."""

    def __init__(self, dim: int, heads: int, packed: bool) -> None:
        super().__init__()
        self.heads = heads
        self.ins = nn.ModuleList([nn.Linear(dim, 3 * dim)] if packed else [nn.Linear(dim, dim) for _ in range(3)])
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(self.ins) == 1:
            q, k, v = to_heads(self.ins[0](x).unflatten(-1, (3, self.heads, -1))).unbind(2)
        else:
            q, k, v = (to_heads(one(x).unflatten(-1, (self.heads, -1))) for one in self.ins)
        seen = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        return self.out(to_rows(seen.transpose(1, 2)).flatten(-2))


@dataclass(frozen=True)
class Setup:
    """dim and heads of a block, and the whole batch that it runs on."""

    packed: bool
    batch: int = 2
    seq_len: int = 16
    dim: int = 32
    heads: int = 4
    dtype: torch.dtype = torch.float32


def step(block: nn.Module, call: Callable[..., torch.Tensor], x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The output and all gradients of one step."""
    block.zero_grad(set_to_none=True)
    x = x.detach().clone().requires_grad_()
    out = call(x)
    out.backward(torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape).to(out.dtype))
    gradients = {name: one.grad for name, one in block.named_parameters() if one.grad is not None}
    assert x.grad is not None and len(gradients) == len(list(block.parameters()))
    return {"output": out.detach().clone(), "input's gradient": x.grad, **gradients}


def assert_matches(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    errors = {name: relative_error(got[name], wanted[name]) for name in wanted}
    wrong = {name: f"{error:.1e}" for name, error in errors.items() if error > MODEL_TOLERANCES[dtype]}
    assert not wrong, f"relative errors above {MODEL_TOLERANCES[dtype]:.0e}: {wrong}"


def check_block(ctx: RankContext, setup: Setup, backend: Any, options: dict[str, Any], inference: bool = True) -> None:
    """Outputs and gradients as in eager mode, of inference too; every all-to-all of them is fused."""
    torch._dynamo.reset()
    torch.manual_seed(1)
    with ctx.device:
        block = Block(setup.dim, setup.heads, setup.packed).to(setup.dtype)
    torch.manual_seed(2 + ctx.rank)
    x = torch.randn(setup.batch, setup.seq_len // ctx.world_size, setup.dim).to(ctx.device, setup.dtype)
    with collect_sites() as sink, without_caches():
        kwargs = {"backend": ditron, "options": options} if backend is None else {"backend": backend(options)}
        call: Any = torch.compile(block, fullgraph=True, **kwargs)
        if inference:
            with torch.no_grad():
                assert_matches({"output": call(x)}, {"output": block(x)}, setup.dtype)
        wanted = step(block, block, x)
        assert_matches(step(block, call, x), wanted, setup.dtype)
    records = [record for graph in sink.graphs for record in graph.sites]
    assert all(record.matched for record in records), [record.reason for record in records if not record.matched]
    ins = len(block.ins)
    forwards = 1 + inference
    # Forward, and backward, where the two kinds change places.
    wanted_kinds = Counter(matmul_all_to_all=forwards * ins + 1, all_to_all_matmul=forwards + ins)
    assert Counter(record.kind for record in records) == wanted_kinds


@pytest.mark.timeout(300)
@pytest.mark.parametrize("packed", [True, *rare(False)])
def test_block_trains_as_eager(rank_pools: RankPools, packed: bool) -> None:
    # Code for the CPU takes long to compile: only that of one forward and one backward graph.
    backend = None if packed else interpreted
    options = {"ditron.strategy": "tile"}
    rank_pools.get("cpu", 2).run(check_block, Setup(packed), backend, options, not packed, timeout=280)


LARGE = Setup(packed=True, batch=1, seq_len=4096, dim=2048, heads=16, dtype=torch.bfloat16)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("strategy", ["tile", "chunked"])
def test_large_block_trains_as_eager(gpu_pool: RankPool, strategy: str) -> None:
    gpu_pool.run(check_block, LARGE, None, {"ditron.strategy": strategy}, timeout=280)
