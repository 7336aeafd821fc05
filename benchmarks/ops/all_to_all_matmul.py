"""all_to_all(x) @ b: [M, K/W] on every rank, whose W runs of rows go to the W ranks: [M/W, K] x [K, N] on each."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.distributed as dist

from benchmarks.ops.contest import Contest, Setting, dtype_of, operands, sampled_rows
from benchmarks.ops.shapes import Cell
from ditron_inductor.task import reference
from ditron_inductor.task.nodes import AllToAllMatmul


def contest(setting: Setting, cell: Cell) -> Contest:
    """See the module. The library puts what has come side by side by one copy, as a compiled graph does; what it sends
    needs none.
    """
    world_size = setting.world_size
    rows, width = cell.M // world_size, cell.K // world_size
    xs, _ = operands(setting, replace(cell, K=width, N=1), cell.M)
    lefts, weights = operands(setting, cell, rows)
    dtype = dtype_of(cell)
    received = torch.empty(cell.M, width, dtype=dtype, device=setting.device)
    whole = torch.empty(rows, cell.K, dtype=dtype, device=setting.device)
    by_rank = whole.view(rows, world_size, width).transpose(0, 1)
    out = torch.empty(rows, cell.N, dtype=dtype, device=setting.device)

    def library(i: int) -> torch.Tensor:
        dist.all_to_all_single(received, xs[i % len(xs)])
        by_rank.copy_(received.view(by_rank.shape))
        return torch.mm(whole, weights[i % len(weights)], out=out)

    def gemm(i: int) -> torch.Tensor:
        return torch.mm(lefts[i % len(lefts)], weights[i % len(weights)], out=out)

    def sample() -> tuple[torch.Tensor, torch.Tensor]:
        mine = sampled_rows(rows, setting.device)
        chosen = xs[0].view(world_size, rows, width)[:, mine].reshape(-1, width)
        (expected,) = reference.all_to_all_matmul(
            chosen.float(),
            weights[0].float(),
            scatter_dim=0,
            parts=1,
            world_size=world_size,
            group_name=setting.group_name,
            return_received=False,
        )
        return mine, expected

    result = Contest(
        contestants={"gemm": gemm, setting.library: library},
        library=library,
        sample=sample,
        num_partials=world_size,
        link_bytes=(world_size - 1) * received.nbytes // world_size,
    )
    fields = {"scatter_dim": 0, "parts": 1, "return_received": False}
    # There may be more of x than of weights: so many calls have operands of their own.
    turns = range(math.lcm(len(xs), len(weights)))
    given = [{"x": xs[i % len(xs)], "weight": weights[i % len(weights)]} for i in turns]
    result.contestants |= setting.ours(AllToAllMatmul, fields, given)
    return result
