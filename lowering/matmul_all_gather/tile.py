"""matmul_all_gather, strategy `tile`: out = all_gather(a @ b + bias) in one launch, for a few rows or for many."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ditron_inductor.lowering.host.launch import Launch
from ditron_inductor.lowering.matmul_all_gather import few_rows, many_rows
from ditron_inductor.lowering.sums import Geometry
from ditron_inductor.task.nodes import MatmulAllGather


def geometry(node: MatmulAllGather, launch: Launch, a: torch.Tensor, columns: int) -> Geometry:
    """a [.., K]; columns: N. Equal on all ranks."""
    if few_rows.fits(launch, math.prod(a.shape[:-1])):
        return few_rows.geometry(node, launch, a, columns)
    return many_rows.geometry(node, launch, a, columns)


def matmul_all_gather(
    node: MatmulAllGather,
    launch: Launch,
    sizes: Geometry,
    a: Sequence[torch.Tensor],
    b: Sequence[torch.Tensor],
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """a_i [.., K_i], b_i [K_i, N], bias [N]; returns what all ranks compute along the node's dimension."""
    if few_rows.fits(launch, sizes.M):
        return few_rows.matmul_all_gather(node, launch, sizes, a, b, bias)
    return many_rows.matmul_all_gather(node, launch, sizes, a, b, bias)
