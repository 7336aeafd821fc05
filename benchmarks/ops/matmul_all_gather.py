"""all_gather(a @ b, dim 1): [M, K] x [K, N], the columns of all ranks on every rank: [M, W*N]."""

from __future__ import annotations

import torch
import torch.distributed as dist

from benchmarks.ops.contest import Contest, Setting, dtype_of, operands, sampled_rows
from benchmarks.ops.shapes import Cell
from ditron_inductor.task import reference
from ditron_inductor.task.nodes import MatmulAllGather


def contest(setting: Setting, cell: Cell) -> Contest:
    """See the module. The library puts what it gathered into columns by one copy, as a compiled graph does; a single
    row needs none. torch has no op that gathers a product.
    """
    world_size = setting.world_size
    rows, weights = operands(setting, cell, cell.M)
    dtype = dtype_of(cell)
    product = torch.empty(cell.M, cell.N, dtype=dtype, device=setting.device)
    gathered = torch.empty(world_size * cell.M, cell.N, dtype=dtype, device=setting.device)
    parts = gathered.chunk(world_size)
    single = cell.M == 1
    out = gathered.view(1, -1) if single else gathered.new_empty(cell.M, world_size * cell.N)
    num = len(rows)

    def library(i: int) -> torch.Tensor:
        torch.mm(rows[i % num], weights[i % num], out=product)
        dist.all_gather_into_tensor(gathered, product)
        return out if single else torch.cat(parts, 1, out=out)

    def gemm(i: int) -> torch.Tensor:
        return torch.mm(rows[i % num], weights[i % num], out=product)

    def sample() -> tuple[torch.Tensor, torch.Tensor]:
        mine = sampled_rows(cell.M, setting.device)
        expected = reference.matmul_all_gather(
            [rows[0][mine].float()],
            [weights[0].float()],
            gather_dim=1,
            world_size=world_size,
            group_name=setting.group_name,
        )
        return mine, expected

    result = Contest(
        contestants={"gemm": gemm, setting.library: library},
        library=library,
        sample=sample,
        link_bytes=(world_size - 1) * product.nbytes,
    )
    given = [{"a": [left], "b": [right]} for left, right in zip(rows, weights, strict=True)]
    result.contestants |= setting.ours(MatmulAllGather, {"gather_dim": 1}, given)
    return result
