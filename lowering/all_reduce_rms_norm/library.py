"""all_reduce_rms_norm and matmul_all_reduce_rms_norm, strategy `library`: the library's all-reduce, then one kernel.

On the CPU device, and for rows that are too long for the kernel, torch's own operations take its place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from ditron_inductor.lowering.all_reduce_rms_norm.add_norm import Outputs, make_add_norm
from ditron_inductor.lowering.epilogues import preparer_of
from ditron_inductor.lowering.host.kind import bound
from ditron_inductor.task import reference
from ditron_inductor.task.nodes import MOST_NORM_COLUMNS, AllReduceRmsNorm, MatmulAllReduceRmsNorm, NormNode


def make(node: NormNode, shape: list[int], device: torch.device) -> Callable[..., Outputs]:
    """(x, extras) or (a, b, bias, extras) -> (normed, total) of this shape [.., N], and what is saved."""
    normalise: Callable[..., Outputs] = functools.partial(
        reference.add_norm, norm=node.norm, post=node.post, saved=node.saved
    )
    if device.type == "cuda" and shape[-1] <= MOST_NORM_COLUMNS:
        normalise = make_add_norm(node, shape, device)
    all_reduce, matmul_all_reduce = bound(reference.all_reduce_, node), bound(reference.matmul_all_reduce, node)

    def all_reduce_rms_norm(x: torch.Tensor, given: tuple[torch.Tensor | None, ...]) -> Outputs:
        return normalise(all_reduce(x.clone(memory_format=torch.contiguous_format)), given)

    preparer = preparer_of(node.reduction, device) if isinstance(node, MatmulAllReduceRmsNorm) else None

    def matmul_all_reduce_rms_norm(
        a: Sequence[torch.Tensor],
        b: Sequence[torch.Tensor],
        bias: torch.Tensor | None,
        given: tuple[torch.Tensor | None, ...],
        extras: Sequence[torch.Tensor] = (),
    ) -> Outputs:
        prepare = None if preparer is None else functools.partial(preparer.prepare, extras=extras)
        return normalise(matmul_all_reduce(a, b, bias, prepare=prepare), given)

    return all_reduce_rms_norm if isinstance(node, AllReduceRmsNorm) else matmul_all_reduce_rms_norm
