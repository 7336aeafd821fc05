"""reduce_scatter(a @ b): [M, K] x [K, N], rank r keeps the r-th [M/W, N] of the sum; or of a sum of such products."""

from __future__ import annotations

import functools
from dataclasses import replace

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
from ditron_inductor.task.nodes import MatmulReduceScatter


def contest(setting: Setting, cell: Cell) -> Contest:
    """See the module."""
    world_size = setting.world_size
    shard_rows = cell.M // world_size
    products = [
        operands(setting, replace(cell, K=depth), cell.M, seed) for seed, depth in enumerate(cell.depths or (cell.K,))
    ]
    num = min(len(rows) for rows, _ in products)
    # By call, and then by product.
    lefts = [[rows[i] for rows, _ in products] for i in range(num)]
    rights = [[weights[i] for _, weights in products] for i in range(num)]
    dtype = dtype_of(cell)
    product = torch.empty(cell.M, cell.N, dtype=dtype, device=setting.device)

    def summed(i: int, total: torch.Tensor, multiply: Product) -> torch.Tensor:
        first, *others = zip(lefts[i % num], rights[i % num], strict=True)
        found = multiply(*first, total)
        for left, right in others:
            found.addmm_(left, right)
        return found

    def gemm(i: int) -> torch.Tensor:
        return summed(i, product, product_into)

    def baseline(make: Make, multiply: Product) -> Call:
        total, out = make(cell.M, cell.N, dtype=dtype), make(shard_rows, cell.N, dtype=dtype)

        def call(i: int) -> torch.Tensor:
            dist.reduce_scatter_tensor(out, summed(i, total, multiply))
            return out

        return call

    library = baseline(functools.partial(torch.empty, device=setting.device), product_into)

    def sample() -> tuple[torch.Tensor, torch.Tensor]:
        mine = sampled_rows(shard_rows, setting.device)
        expected = reference.matmul_reduce_scatter(
            [left[of_every_shard(mine, shard_rows, world_size)].float() for left in lefts[0]],
            [right.float() for right in rights[0]],
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
        link_bytes=(world_size - 1) * product.nbytes // world_size,
        # The library rounds after each product.
        num_partials=world_size * len(products),
    )
    setting.expert(result, baseline)
    if setting.has_symmetric_memory and cell.depths:
        result.unable["async_tp"] = "takes one product"
    elif setting.has_symmetric_memory:
        fused = torch.ops.symm_mem.fused_matmul_reduce_scatter.default

        def async_tp(i: int) -> torch.Tensor:
            return fused(lefts[i % num][0], rights[i % num][0], "sum", 0, setting.group_name)

        result.contestants["async_tp"] = async_tp
    fields = {"scatter_dim": 0, "reduce_op": "sum", "num_products": len(products)}
    given = [{"a": left, "b": right} for left, right in zip(lefts, rights, strict=True)]
    result.contestants |= setting.ours(MatmulReduceScatter, fields, given)
    return result
