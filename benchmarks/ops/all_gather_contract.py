"""all_gather(shard).t() @ factor: [K/W, M] gathered to [K, M], its transpose times [K, N]; a weight gradient."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist

from benchmarks.ops.contest import Call, Contest, Setting, dtype_of, operands, sampled_rows
from benchmarks.ops.shapes import Cell
from ditron_inductor.task import reference


def contest(setting: Setting, cell: Cell) -> Contest:
    """Nobody else fuses it: NCCL + cuBLAS and our strategies. No one keeps the gathered tensor."""
    world_size = setting.world_size
    # Rows [K/W, M], and a factor with contiguous columns, as gradients lie.
    shards, drawn = operands(setting, replace(cell, K=cell.M, N=1), cell.K // world_size)
    shape = (cell.K, cell.N)
    generator = torch.Generator(setting.device).manual_seed(1000 + setting.rank)
    dtype = dtype_of(cell)
    scale = cell.K**-0.5
    factors = [(torch.randn(shape, generator=generator, device=setting.device) * scale).to(dtype) for _ in drawn]
    gathered = torch.empty(cell.K, cell.M, dtype=dtype, device=setting.device).normal_()
    out = torch.empty(cell.M, cell.N, dtype=dtype, device=setting.device)
    num = len(shards)

    def library(i: int) -> torch.Tensor:
        dist.all_gather_into_tensor(gathered, shards[i % num])
        return torch.mm(gathered.t(), factors[i % num], out=out)

    def gemm(i: int) -> torch.Tensor:
        return torch.mm(gathered.t(), factors[i % num], out=out)

    def ours(op: torch._ops.OpOverload, site: tuple[object, ...]) -> Call:
        return lambda i: op(shards[i % num], [factors[i % num]], None, 0, True, False, *site)[0]

    def sample() -> tuple[torch.Tensor, torch.Tensor]:
        rows = sampled_rows(cell.M, setting.device)
        expected = reference.all_gather_contract(
            shards[0][:, rows].float(),
            [factors[0].float()],
            gather_dim=0,
            gathered_first=True,
            world_size=world_size,
            group_name=setting.group_name,
            return_gathered=False,
        )[0]
        return rows, expected

    return Contest(
        contestants={"gemm": gemm, setting.library: library} | setting.ours(cell.op, ours),
        library=library,
        sample=sample,
        link_bytes=(world_size - 1) * shards[0].nbytes,
    )
