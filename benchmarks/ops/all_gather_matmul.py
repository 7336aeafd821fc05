"""all_gather(shard) @ weight: [M/W, K] gathered to [M, K], times [K, N]."""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist

from benchmarks.ops.contest import (
    Call,
    Contest,
    Make,
    Product,
    Setting,
    dtype_of,
    of_every_shard,
    operands,
    product_into,
    sampled_rows,
)
from benchmarks.ops.shapes import Cell
from ditron_inductor.task import reference
from ditron_inductor.task.nodes import AllGatherMatmul


def contest(setting: Setting, cell: Cell) -> Contest:
    """All contestants keep the gathered tensor, as a training graph does, except ours, which are not asked for it."""
    world_size = setting.world_size
    shard_rows = cell.M // world_size
    shards, weights = operands(setting, cell, shard_rows)
    dtype = dtype_of(cell)
    gathered = torch.empty(cell.M, cell.K, dtype=dtype, device=setting.device).normal_()
    out = torch.empty(cell.M, cell.N, dtype=dtype, device=setting.device)
    num = len(shards)

    def baseline(make: Make, multiply: Product) -> Call:
        whole, result = make(cell.M, cell.K, dtype=dtype), make(cell.M, cell.N, dtype=dtype)

        def call(i: int) -> torch.Tensor:
            dist.all_gather_into_tensor(whole, shards[i % num])
            return multiply(whole, weights[i % num], result)

        return call

    library = baseline(functools.partial(torch.empty, device=setting.device), product_into)

    def gemm(i: int) -> torch.Tensor:
        return torch.mm(gathered, weights[i % num], out=out)

    def sample() -> tuple[torch.Tensor, torch.Tensor]:
        rows = sampled_rows(shard_rows, setting.device)
        expected = reference.all_gather_matmul(
            shards[0][rows].float(),
            [weights[0].float()],
            gather_dim=0,
            world_size=world_size,
            group_name=setting.group_name,
            return_gathered=False,
        )[0]
        return of_every_shard(rows, shard_rows, world_size), expected

    result = Contest(
        contestants={"gemm": gemm, setting.library: library},
        library=library,
        sample=sample,
        link_bytes=(world_size - 1) * shards[0].nbytes,
    )
    setting.expert(result, baseline)
    if setting.has_symmetric_memory:
        fused = torch.ops.symm_mem.fused_all_gather_matmul.default

        def async_tp(i: int) -> torch.Tensor:
            # return_A keeps it away from multicast, which must not be used here.
            return fused(shards[i % num], [weights[i % num]], 0, setting.group_name, return_A=True)[1][0]

        result.contestants["async_tp"] = async_tp
    fields = {"gather_dim": 0, "return_gathered": False, "num_weights": 1}
    given = [{"shard": shard, "weights": [weight]} for shard, weight in zip(shards, weights, strict=True)]
    result.contestants |= setting.ours(AllGatherMatmul, fields, given)
    return result
