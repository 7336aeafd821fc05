"""Decode attention over sharded caches: operands, the call, and the fp64 result, as `problems.Problem` has them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist

from benchmarks.tolerances import assert_near
from ditron_inductor.ops import flash_decode
from ditron_inductor.options import Options
from ditron_inductor.task import flash_decode as reference
from tests.lowering import calls
from tests.lowering.calls import Site
from tests.lowering.problems import Problem
from tests.rank_process import RankContext

SHARPNESS = 3.0
"""Of the scores: so that few tokens count, and a wrong one is seen."""


@dataclass(frozen=True)
class Decode:
    """Caches of `capacity` tokens on every rank; as [B, Hkv, S, D] if heads_first, in blocks of `page` if there are."""

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    capacity: int
    dtype: torch.dtype = torch.float16
    page: int = 0
    heads_first: bool = False
    softcap: float = 0.0

    def __str__(self) -> str:
        layout = f"-paged{self.page}" if self.page else "-heads_first" * self.heads_first
        sizes = f"{self.batch}x{self.heads}:{self.kv_heads}x{self.head_dim}x{self.capacity}"
        return f"{sizes}{layout}-{str(self.dtype)[6:]}{'-capped' * (self.softcap > 0)}"


class DecodeProblem(Problem):
    """One call; every rank holds some tokens of each sequence, the first rank none of the first."""

    def __init__(self, ctx: RankContext, case: Decode, *, site: Site) -> None:
        self.ctx, self.case, self.site, self.kind = ctx, case, site, "flash_decode"
        self.q = calls.operand(ctx, [case.batch, case.heads, case.head_dim], case.dtype)
        self.block_table: torch.Tensor | None = None
        shape = [case.batch, case.capacity, case.kv_heads, case.head_dim]
        if case.page:
            blocks = math.ceil(case.capacity / case.page)
            shape = [case.batch * blocks + 2, case.page, *shape[2:]]
            chosen = torch.randperm(shape[0], device=ctx.device)[: case.batch * blocks]
            self.block_table = chosen.view(case.batch, blocks).int()
        if case.heads_first:
            shape[1:3] = shape[2], shape[1]
        caches = [calls.operand(ctx, shape, case.dtype) for _ in range(2)]
        self.k, self.v = (cache.transpose(1, 2) if case.heads_first else cache for cache in caches)
        self.lengths = torch.zeros(case.batch, dtype=torch.int32, device=ctx.device)
        self.refill()

    def __call__(self) -> list[torch.Tensor]:
        site = self.site
        options = Options(site.strategy, site.workspace_limit, site.timeout_s)
        out = flash_decode(
            self.q,
            self.k,
            self.v,
            self.lengths,
            group=site.group_name or None,
            block_table=self.block_table,
            softcap=self.case.softcap,
            options=options,
            site=site.name,
        )
        return [out]

    def refill(self) -> None:
        """Other lengths too. Behind a sequence's end is NaN, which must not be read."""
        case = self.case
        self.q.copy_(calls.operand(self.ctx, self.q.shape, torch.float32) * SHARPNESS)
        # The same on all ranks.
        dist.broadcast(self.q, 0)
        lengths = torch.randint(0, case.capacity + 1, [case.batch])
        lengths[-1] = case.capacity
        if self.ctx.rank == 0:
            lengths[0] = 0
        self.lengths.copy_(lengths)
        for cache in (self.k, self.v):
            cache.copy_(calls.operand(self.ctx, cache.shape, torch.float32))
            if self.block_table is None:
                tokens = torch.arange(cache.shape[1], device=cache.device)
                cache.masked_fill_((tokens >= self.lengths[:, None])[:, :, None, None], math.nan)

    def check(self, outputs: list[torch.Tensor], what: str = "") -> None:
        """AssertionError unless the output is right, and the same on all ranks. Collective."""
        (out,) = outputs
        assert out.shape == self.q.shape and out.dtype == self.q.dtype and out.is_contiguous()
        wanted = reference.flash_decode(
            self.q.double(),
            self.k.double(),
            self.v.double(),
            self.lengths,
            self.block_table,
            scale=self.case.head_dim**-0.5,
            softcap=self.case.softcap,
            **self.site.group(self.ctx),
        )
        assert_near(out, wanted, num_partials=2, what=f"{what} {self.case}")
        calls.assert_replicated(self.ctx, out, self.site)
