"""matmul_all_reduce, strategy `tile`: the sum of products in one launch, one-shot for a few rows, else two-shot."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ditron_inductor.lowering.host.launch import Launch
from ditron_inductor.lowering.matmul_all_reduce import one_shot, two_shot
from ditron_inductor.lowering.sums import Geometry
from ditron_inductor.task.nodes import MatmulAllReduce


def geometry(node: MatmulAllReduce, launch: Launch, a: torch.Tensor, columns: int) -> Geometry:
    """a [.., K]; columns: N. Equal on all ranks."""
    rows = math.prod(a.shape[:-1])
    if one_shot.fits(rows, columns):
        return one_shot.geometry(node, launch, a, columns)
    return two_shot.geometry(node, launch, a, columns)


def matmul_all_reduce(
    node: MatmulAllReduce,
    launch: Launch,
    sizes: Geometry,
    a: Sequence[torch.Tensor],
    b: Sequence[torch.Tensor],
    bias: torch.Tensor | None = None,
    extras: Sequence[torch.Tensor] = (),
) -> list[torch.Tensor]:
    """a_i [.., K_i], b_i [K_i, N], bias [N], extras as the node's epilogue reads them; returns the outputs [.., N], the
    same bits on every rank that has the same extras.
    """
    if one_shot.fits(sizes.M, sizes.N):
        return one_shot.matmul_all_reduce(node, launch, sizes, a, b, bias, extras)
    return two_shot.matmul_all_reduce(node, launch, sizes, a, b, bias, extras)
