"""Reductions behind the experts of a mixture by the library: torch's grouped matmul, and one kernel for the sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ditron_inductor.lowering.expert_sums.combine_kernel import sums_of_slots
from ditron_inductor.task.nodes import ReducedExperts


def by_library(node: ReducedExperts, reduce: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    """Returns a function of node.split(operands). reduce: reduces the sums [T, N] by the library."""
    sums = node.sums

    def call(
        x: torch.Tensor,
        weight: torch.Tensor,
        ends: torch.Tensor,
        second: tuple[torch.Tensor, torch.Tensor] | None,
        bias: torch.Tensor | None,
        *slots: torch.Tensor | None,
    ) -> Any:
        products = torch._grouped_mm(x, weight, offs=ends)
        if second is not None:
            products += torch._grouped_mm(*second, offs=ends)
        operands = [products, *(one for one in slots if one is not None)]
        if bias is not None:
            experts = experts_of_rows(ends, len(x))
            if sums.has_bias:
                operands += [bias, experts]
            else:
                products += bias[experts]
        (total,) = sums_of_slots(sums, operands)
        return [reduce(total), *[products] * node.returns_products]

    return call


def experts_of_rows(ends: torch.Tensor, rows: int) -> torch.Tensor:
    """Returns the expert of each row of a grouped matmul, int64 [rows]; the last one for rows behind the last end."""
    numbers = torch.arange(rows, device=ends.device, dtype=ends.dtype)
    return torch.searchsorted(ends, numbers, right=True).clamp_(max=len(ends) - 1)
