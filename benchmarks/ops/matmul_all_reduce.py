"""all_reduce(a @ b): [M, K] x [K, N], the sum on every rank."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from benchmarks.ops.contest import Contest, Setting, dtype_of, operands
from benchmarks.ops.shapes import Cell
from ditron_inductor.task import reference

# torch's one-shot all-reduce reads every peer's whole tensor: for small ones only.
ONE_SHOT_MAX_BYTES = 8 << 20


def contest(setting: Setting, cell: Cell, strategies: Mapping[str, str]) -> Contest:
    """See the module. torch's own symmetric-memory all-reduces take the product from a symmetric tensor."""
    world_size = setting.world_size
    rows, weights = operands(setting, cell, cell.M)
    dtype = dtype_of(cell)
    product = torch.empty(cell.M, cell.N, dtype=dtype, device=setting.device)
    num = len(rows)

    def library(i: int) -> torch.Tensor:
        torch.mm(rows[i % num], weights[i % num], out=product)
        dist.all_reduce(product)
        return product

    def gemm(i: int) -> torch.Tensor:
        return torch.mm(rows[i % num], weights[i % num], out=product)

    def ours(i: int, strategy: str) -> torch.Tensor:
        args = setting.site_args(cell.op, strategy)
        return torch.ops.ditron.matmul_all_reduce(rows[i % num], weights[i % num], None, "sum", *args)[0]

    def expected() -> torch.Tensor:
        return reference.matmul_all_reduce(
            rows[0].float(),
            weights[0].float(),
            reduce_op="sum",
            world_size=world_size,
            group_name=setting.group_name,
        )

    # A rank sends its part of the sum's other owners, and its own part to all of them.
    link_bytes = 2 * (world_size - 1) * product.nbytes // world_size
    result = Contest(reference=expected, num_partials=world_size, link_bytes=link_bytes, replicated=True)
    result.contestants = {"gemm": gemm, setting.library: library}
    if setting.has_symmetric_memory:
        _add_symmetric_memory(result, setting, rows, weights, product)
    for name, strategy in strategies.items():
        result.contestants[name] = lambda i, strategy=strategy: ours(i, strategy)  # type: ignore[misc]
    return result


def _add_symmetric_memory(
    result: Contest,
    setting: Setting,
    rows: list[torch.Tensor],
    weights: list[torch.Tensor],
    product: torch.Tensor,
) -> None:
    import torch.distributed._symmetric_memory as symm_mem

    num = len(rows)
    shared = symm_mem.empty(product.shape, dtype=product.dtype, device=product.device)
    symm_mem.rendezvous(shared, setting.group_name)

    def one_shot(i: int) -> torch.Tensor:
        torch.mm(rows[i % num], weights[i % num], out=shared)
        return torch.ops.symm_mem.one_shot_all_reduce(shared, "sum", setting.group_name)

    def two_shot(i: int) -> torch.Tensor:
        torch.mm(rows[i % num], weights[i % num], out=shared)
        return torch.ops.symm_mem.two_shot_all_reduce_(shared, "sum", setting.group_name)

    if product.nbytes <= ONE_SHOT_MAX_BYTES:
        result.contestants["symm_mem:one_shot"] = one_shot
    result.contestants["symm_mem:two_shot"] = two_shot
