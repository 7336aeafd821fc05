"""The norm in front of a gather, as a launch of its own, with which `tile` and `library` begin.

On the CPU device, and for rows that are too long for the kernel, `library` uses torch's operations instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ditron_inductor.lowering.norms.add_norm import make_add_norm
from ditron_inductor.lowering.norms.rows import shard_extras
from ditron_inductor.task import reference
from ditron_inductor.task.nodes import MOST_NORM_COLUMNS, AllGatherMatmul

MakeShard = Callable[[torch.Tensor, tuple[torch.Tensor | None, ...]], tuple[torch.Tensor, tuple[torch.Tensor, ...]]]
"""A function of (x, contiguous; the tensors `SHARD_EXTRAS`). It returns (the shard; what the prologue returns)."""


def make_shard(node: AllGatherMatmul, shape: torch.Size, device: torch.device) -> MakeShard | None:
    """Returns what computes the norm of a node for x [.., K] of this shape by one kernel; None if it has no norm."""
    prologue = node.prologue
    if prologue is None:
        return None
    add_norm = make_add_norm(prologue, shape, device)
    # Without a residual the second output, the sum, is x itself, which no node returns.
    first = 1 if "residual" in prologue.extras else 2

    def make(x: torch.Tensor, given: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        outputs = add_norm(x, shard_extras(given))
        return outputs[0], outputs[first:]

    return make


def gather_library(
    make: MakeShard | None,
    shard: torch.Tensor,
    weights: Sequence[torch.Tensor],
    extras: Sequence[torch.Tensor] = (),
    given: tuple[torch.Tensor | None, ...] = (),
    *,
    node: AllGatherMatmul,
    **arguments: Any,
) -> list[torch.Tensor]:
    """The strategy `library`: the norm, if there is one, and `reference.all_gather_matmul`. make: of `make_shard`."""
    if make is None or node.prologue is None:
        return reference.all_gather_matmul(shard, weights, extras, **arguments)
    if shard.is_cuda and shard.shape[-1] <= MOST_NORM_COLUMNS:
        shard, returned = make(shard.contiguous(), given)
    else:
        shard, returned = reference.norm_shard(shard, given, node.prologue)
    return [*reference.all_gather_matmul(shard, weights, extras, **arguments), *returned]
