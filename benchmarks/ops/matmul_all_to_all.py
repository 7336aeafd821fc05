"""all_to_all(a @ b): [M/W, K] x [K, N] on every rank, whose W runs of columns go to the W ranks: [M, N/W] on each."""

from __future__ import annotations

import torch
import torch.distributed as dist

from benchmarks.ops.contest import Contest, Setting, dtype_of, of_every_shard, operands, sampled_rows
from benchmarks.ops.shapes import Cell
from ditron_inductor.task import reference
from ditron_inductor.task.nodes import MatmulAllToAll


def contest(setting: Setting, cell: Cell) -> Contest:
    """See the module. The library puts each rank's columns together by one copy before it sends them, as a compiled
    graph does; what comes needs none.
    """
    world_size = setting.world_size
    rows = cell.M // world_size
    lefts, weights = operands(setting, cell, rows)
    dtype = dtype_of(cell)
    product = torch.empty(rows, cell.N, dtype=dtype, device=setting.device)
    by_rank = product.view(rows, world_size, -1).transpose(0, 1)
    packed = torch.empty(by_rank.shape, dtype=dtype, device=setting.device)
    out = torch.empty(cell.M, cell.N // world_size, dtype=dtype, device=setting.device)
    num = len(lefts)

    def library(i: int) -> torch.Tensor:
        torch.mm(lefts[i % num], weights[i % num], out=product)
        packed.copy_(by_rank)
        dist.all_to_all_single(out, packed.view(out.shape))
        return out

    def gemm(i: int) -> torch.Tensor:
        return torch.mm(lefts[i % num], weights[i % num], out=product)

    def sample() -> tuple[torch.Tensor, torch.Tensor]:
        mine = sampled_rows(rows, setting.device)
        expected = reference.matmul_all_to_all(
            [lefts[0][mine].float()],
            [weights[0].float()],
            gather_dim=0,
            parts=1,
            world_size=world_size,
            group_name=setting.group_name,
        )
        return of_every_shard(mine, rows, world_size), expected

    result = Contest(
        contestants={"gemm": gemm, setting.library: library},
        library=library,
        sample=sample,
        link_bytes=(world_size - 1) * product.nbytes // world_size,
    )
    given = [{"a": [left], "b": [right]} for left, right in zip(lefts, weights, strict=True)]
    result.contestants |= setting.ours(MatmulAllToAll, {"gather_dim": 0, "parts": 1}, given)
    return result
