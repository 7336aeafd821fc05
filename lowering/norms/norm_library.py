"""The strategy `library` for rows that are reduced and normalised: the library's all-reduce, then one kernel.

On the CPU device, and for rows that are too long for the kernel, torch's operations replace the kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from ditron_inductor.lowering.norms.add_norm import Outputs, make_add_norm
from ditron_inductor.task import reference
from ditron_inductor.task.nodes import MOST_NORM_COLUMNS, ReductionWithNorm


def reduced(node: ReductionWithNorm, x: torch.Tensor) -> torch.Tensor:
    """Reduces the contiguous x over the ranks, in place, and returns it."""
    return reference.all_reduce_(x, reduce_op=node.reduce_op, world_size=node.world_size, group_name=node.group_name)


def normaliser(node: ReductionWithNorm, shape: list[int], device: torch.device) -> Callable[..., Outputs]:
    """Returns a function (reduced rows of this shape [.., N], `nodes.EXTRAS`) -> Outputs."""
    if device.type == "cuda" and shape[-1] <= MOST_NORM_COLUMNS:
        return make_add_norm(node, shape, device)
    return functools.partial(reference.add_norm, norm=node.norm, post=node.post, saved=node.saved, factor=node.factor)
