"""flash_decode, strategy `library`: a kernel for the local tokens, NCCL's all-gather of the parts, and a kernel that
merges them.

On the CPU device, and for operands that the kernels do not take, torch's own operations are used instead.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ditron_inductor.lowering.flash_decode.local_decode import DecodeOperands, Shape, make_local
from ditron_inductor.task import flash_decode as reference
from ditron_inductor.task.nodes import FlashDecode
from ditron_inductor.task.watch import communicate


def make(node: FlashDecode, shape: Shape, device: torch.device, arch: str) -> Callable[[DecodeOperands], torch.Tensor]:
    """Returns a function from operands of this shape to the attention [B, Hq, D]."""
    if device.type == "cpu" or shape.problem:

        def by_torch(given: DecodeOperands) -> torch.Tensor:
            return reference.flash_decode(
                given.q,
                given.k,
                given.v,
                given.lengths,
                given.block_table,
                scale=node.scale,
                softcap=node.softcap,
                world_size=node.world_size,
                group_name=node.group_name,
            )

        return by_torch
    local = make_local(shape, device, arch)

    def by_kernels(given: DecodeOperands) -> torch.Tensor:
        part = local.part(given)
        parts = part.new_empty(node.world_size * local.area)
        group = distributed_c10d._resolve_process_group(node.group_name)  # type: ignore[arg-type]
        communicate(dist.all_gather_into_tensor, parts, part, group=group)
        return local.merged(parts, node.world_size, given.q)

    return by_kernels
