"""all_reduce(a @ b): [M, K] x [K, N], the sum on every rank."""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist

from benchmarks.ops.contest import Call, Contest, Make, Product, Setting, dtype_of, operands, product_into, sampled_rows
from benchmarks.ops.shapes import Cell
from ditron_inductor.task import reference
from ditron_inductor.task.nodes import MatmulAllReduce

ONE_SHOT_MAX_BYTES = 8 << 20


def contest(setting: Setting, cell: Cell) -> Contest:
    """See the module. torch's own symmetric-memory all-reduces take the product from a symmetric tensor."""
    world_size = setting.world_size
    rows, weights = operands(setting, cell, cell.M)
    product = torch.empty(cell.M, cell.N, dtype=dtype_of(cell), device=setting.device)
    num = len(rows)

    def baseline(make: Make, multiply: Product) -> Call:
        out = make(cell.M, cell.N, dtype=dtype_of(cell))

        def call(i: int) -> torch.Tensor:
            total = multiply(rows[i % num], weights[i % num], out)
            dist.all_reduce(total)
            return total

        return call

    library = baseline(functools.partial(torch.empty, device=setting.device), product_into)

    def gemm(i: int) -> torch.Tensor:
        return torch.mm(rows[i % num], weights[i % num], out=product)

    def sample() -> tuple[torch.Tensor, torch.Tensor]:
        mine = sampled_rows(cell.M, setting.device)
        expected = reference.matmul_all_reduce(
            [rows[0][mine].float()],
            [weights[0].float()],
            reduce_op="sum",
            world_size=world_size,
            group_name=setting.group_name,
        )
        return mine, expected

    result = Contest(
        contestants={"gemm": gemm, setting.library: library},
        library=library,
        sample=sample,
        # A rank sends its part of the sum's other owners, and its own part to all of them.
        link_bytes=2 * (world_size - 1) * product.nbytes // world_size,
        num_partials=world_size,
    )
    setting.expert(result, baseline)
    if setting.has_symmetric_memory:
        _add_symmetric_memory(result, setting, rows, weights, product)
    given = [{"a": [left], "b": [right]} for left, right in zip(rows, weights, strict=True)]
    result.contestants |= setting.ours(MatmulAllReduce, {"reduce_op": "sum"}, given)
    return result


def _add_symmetric_memory(
    result: Contest,
    setting: Setting,
    rows: list[torch.Tensor],
    weights: list[torch.Tensor],
    product: torch.Tensor,
) -> None:
    num = len(rows)
    shared = setting.shared.get(tuple(product.shape), product.dtype, product.device)
    reduce_one_shot = torch.ops.symm_mem.one_shot_all_reduce.default
    reduce_two_shot = torch.ops.symm_mem.two_shot_all_reduce_.default

    def one_shot(i: int) -> torch.Tensor:
        torch.mm(rows[i % num], weights[i % num], out=shared)
        return reduce_one_shot(shared, "sum", setting.group_name)

    def two_shot(i: int) -> torch.Tensor:
        torch.mm(rows[i % num], weights[i % num], out=shared)
        return reduce_two_shot(shared, "sum", setting.group_name)

    if product.nbytes <= ONE_SHOT_MAX_BYTES:
        result.contestants["symm_mem:one_shot"] = one_shot
    else:
        result.unable["symm_mem:one_shot"] = "reads every peer's whole tensor: not for more than 8 MiB"
    result.contestants["symm_mem:two_shot"] = two_shot
