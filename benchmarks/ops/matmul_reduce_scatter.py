"""reduce_scatter(a @ b): [M, K] x [K, N], rank r keeps the r-th [M/W, N] of the sum."""

from __future__ import annotations

import torch
import torch.distributed as dist

from benchmarks.ops.contest import Call, Contest, Setting, dtype_of, of_every_shard, operands, sampled_rows
from benchmarks.ops.shapes import Cell
from ditron_inductor.task import reference


def contest(setting: Setting, cell: Cell) -> Contest:
    """See the module."""
    world_size = setting.world_size
    shard_rows = cell.M // world_size
    rows, weights = operands(setting, cell, cell.M)
    dtype = dtype_of(cell)
    product = torch.empty(cell.M, cell.N, dtype=dtype, device=setting.device)
    out = torch.empty(shard_rows, cell.N, dtype=dtype, device=setting.device)
    num = len(rows)

    def library(i: int) -> torch.Tensor:
        torch.mm(rows[i % num], weights[i % num], out=product)
        dist.reduce_scatter_tensor(out, product)
        return out

    def gemm(i: int) -> torch.Tensor:
        return torch.mm(rows[i % num], weights[i % num], out=product)

    def ours(op: torch._ops.OpOverload, site: tuple[object, ...]) -> Call:
        return lambda i: op([rows[i % num]], [weights[i % num]], None, None, 0, "sum", *site)[0]

    def sample() -> tuple[torch.Tensor, torch.Tensor]:
        mine = sampled_rows(shard_rows, setting.device)
        expected = reference.matmul_reduce_scatter(
            [rows[0][of_every_shard(mine, shard_rows, world_size)].float()],
            [weights[0].float()],
            scatter_dim=0,
            reduce_op="sum",
            world_size=world_size,
            group_name=setting.group_name,
        )
        return mine, expected

    result = Contest(
        contestants={"gemm": gemm, setting.library: library},
        library=library,
        sample=sample,
        link_bytes=(world_size - 1) * out.nbytes,
        num_partials=world_size,
    )
    if setting.has_symmetric_memory:
        fused = torch.ops.symm_mem.fused_matmul_reduce_scatter.default

        def async_tp(i: int) -> torch.Tensor:
            return fused(rows[i % num], weights[i % num], "sum", 0, setting.group_name)

        result.contestants["async_tp"] = async_tp
    result.contestants |= setting.ours(cell.op, ours)
    return result
