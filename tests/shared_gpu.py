"""Collectives of ranks that share a GPU, where NCCL refuses to run: gloo, over copies of the tensors on the host.

Gloo itself takes CUDA tensors in some collectives alone, and an all-gather of them ends the process. Here the ops that
c10d dispatches by device, for `torch.distributed` and the functional collectives alike, copy CUDA tensors to the host,
run there, and copy the outputs back on the current stream. The host waits for each of them, so none can be captured.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch.utils import _pytree as pytree

# The first argument of each is what it writes.
COLLECTIVES = (
    "_allgather_base_",
    "_reduce_scatter_base_",
    "allgather_",
    "allgather_into_tensor_coalesced_",
    "allreduce_",
    "allreduce_coalesced_",
    "alltoall_",
    "alltoall_base_",
    "broadcast_",
    "reduce_scatter_",
    "reduce_scatter_tensor_coalesced_",
)


def stage_collectives() -> None:
    """From now on, collectives of CUDA tensors run by way of the host in this process. For groups of gloo only."""
    with warnings.catch_warnings():
        # It says of each that an implementation is replaced.
        warnings.simplefilter("ignore")
        for name in COLLECTIVES:
            _LIBRARY.impl(name, functools.partial(_staged, getattr(torch.ops.c10d, name).default), "CUDA")


_LIBRARY = torch.library.Library("c10d", "IMPL")


@torch.no_grad()
def _staged(op: Any, *args: Any, **kwargs: Any) -> Any:
    staged: dict[int, torch.Tensor] = {}

    def to_host(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_cuda:
            # A tensor that is given twice, as the output and in part the input, has one copy.
            return staged.setdefault(id(value), value.detach().cpu())
        return value

    result = op(*pytree.tree_map(to_host, args), **kwargs)
    *_, work = result if isinstance(result, tuple) else (result,)
    work.wait()
    for tensor in pytree.tree_leaves(args[0]):
        tensor.detach().copy_(staged[id(tensor)])
    return (args[0], work) if isinstance(result, tuple) else result
