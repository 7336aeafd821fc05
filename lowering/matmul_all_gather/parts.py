"""The places in a slot and the output of the two `tile` kernels of `matmul_all_gather`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ditron_inductor.task.nodes import MatmulAllGather


@triton.jit
def place_of(source, target, WORLD: tl.constexpr):
    """Returns which of the WORLD - 1 places in the slot of rank `target` is for `source`, another rank."""
    return (source + WORLD - target - 1) % WORLD


def gathered_like(node: MatmulAllGather, a: torch.Tensor, columns: int) -> torch.Tensor:
    """Allocates the output for a [.., K] and `columns` columns on each rank."""
    shape = [*a.shape[:-1], columns]
    shape[node.gather_dim] *= node.world_size
    return a.new_empty(shape)
