"""reduce_scatter(a @ b): [M, K] x [K, N], rank r keeps the r-th [M/W, N] of the sum."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from benchmarks.ops.contest import Contest, Setting, dtype_of, operands
from benchmarks.ops.shapes import Cell
from ditron_inductor.task import reference


def contest(setting: Setting, cell: Cell, strategies: Mapping[str, str]) -> Contest:
    """See the module."""
    world_size = setting.world_size
    rows, weights = operands(setting, cell, cell.M)
    dtype = dtype_of(cell)
    product = torch.empty(cell.M, cell.N, dtype=dtype, device=setting.device)
    out = torch.empty(cell.M // world_size, cell.N, dtype=dtype, device=setting.device)
    num = len(rows)

    def library(i: int) -> torch.Tensor:
        torch.mm(rows[i % num], weights[i % num], out=product)
        dist.reduce_scatter_tensor(out, product)
        return out

    def gemm(i: int) -> torch.Tensor:
        return torch.mm(rows[i % num], weights[i % num], out=product)

    def async_tp(i: int) -> torch.Tensor:
        return torch.ops.symm_mem.fused_matmul_reduce_scatter(
            rows[i % num], weights[i % num], "sum", 0, setting.group_name
        )

    def ours(i: int, strategy: str) -> torch.Tensor:
        args = setting.site_args(cell.op, strategy)
        return torch.ops.ditron.matmul_reduce_scatter(rows[i % num], weights[i % num], None, 0, "sum", *args)[0]

    def expected() -> torch.Tensor:
        return reference.matmul_reduce_scatter(
            rows[0].float(),
            weights[0].float(),
            scatter_dim=0,
            reduce_op="sum",
            world_size=world_size,
            group_name=setting.group_name,
        )

    result = Contest(reference=expected, num_partials=world_size, link_bytes=(world_size - 1) * out.nbytes)
    result.contestants = {"gemm": gemm, setting.library: library}
    if setting.has_symmetric_memory:
        result.contestants["async_tp"] = async_tp
    for name, strategy in strategies.items():
        result.contestants[name] = lambda i, strategy=strategy: ours(i, strategy)  # type: ignore[misc]
    return result
