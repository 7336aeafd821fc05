"""all_gather(shard) @ weight: [M/W, K] gathered to [M, K], times [K, N]."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from benchmarks.ops.contest import Contest, Setting, dtype_of, operands
from benchmarks.ops.shapes import Cell
from ditron_inductor.task import reference


def contest(setting: Setting, cell: Cell, strategies: Mapping[str, str]) -> Contest:
    """All contestants keep the gathered tensor, as a training graph does, except ours, which are not asked for it."""
    world_size = setting.world_size
    shards, weights = operands(setting, cell, cell.M // world_size)
    dtype = dtype_of(cell)
    gathered = torch.empty(cell.M, cell.K, dtype=dtype, device=setting.device).normal_()
    out = torch.empty(cell.M, cell.N, dtype=dtype, device=setting.device)
    num = len(shards)

    def library(i: int) -> torch.Tensor:
        dist.all_gather_into_tensor(gathered, shards[i % num])
        return torch.mm(gathered, weights[i % num], out=out)

    def gemm(i: int) -> torch.Tensor:
        return torch.mm(gathered, weights[i % num], out=out)

    def async_tp(i: int) -> torch.Tensor:
        # return_A keeps it away from multicast, which must not be used here.
        _, outs = torch.ops.symm_mem.fused_all_gather_matmul(
            shards[i % num], [weights[i % num]], 0, setting.group_name, return_A=True
        )
        return outs[0]

    def ours(i: int, strategy: str) -> torch.Tensor:
        args = setting.site_args(cell.op, strategy)
        return torch.ops.ditron.all_gather_matmul(shards[i % num], [weights[i % num]], None, 0, False, *args)[0]

    def expected() -> torch.Tensor:
        return reference.all_gather_matmul(
            shards[0].float(),
            [weights[0].float()],
            gather_dim=0,
            world_size=world_size,
            group_name=setting.group_name,
            return_gathered=False,
        )[0]

    result = Contest(reference=expected, link_bytes=(world_size - 1) * shards[0].nbytes)
    result.contestants = {"gemm": gemm, setting.library: library}
    if setting.has_symmetric_memory:
        result.contestants["async_tp"] = async_tp
    for name, strategy in strategies.items():
        result.contestants[name] = lambda i, strategy=strategy: ours(i, strategy)  # type: ignore[misc]
    return result
