"""torch's all-reduces in symmetric memory in the place of Inductor's, by its own selection or by hand.

Inductor's own selection (`_collective.auto_select`) is not in every torch, and takes small one-shot all-reduces alone.
By hand a pass behind Inductor's own puts an op in the place of every all-reduce of a graph, which copies into symmetric
memory and reduces there: in one shot up to `ONE_SHOT_BYTES`, where every rank reads all of its peers' tensors, in two
shots beyond.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

AUTO_SELECT = "_collective.auto_select"
ONE_SHOT_BYTES = 256 << 10
ALIGNMENT = 16


def auto_select_refusal() -> str:
    """Why Inductor cannot select all-reduces itself, empty where it can."""
    known = AUTO_SELECT in config.get_config_copy()
    return "" if known else f"Inductor of torch {torch.__version__} has no {AUTO_SELECT}: see symm_mem"


@functools.cache
def _buffer(group_name: str, nbytes: int, device: torch.device) -> torch.Tensor:
    """Symmetric memory of a group, which all calls of this size use in turn. Collective when it is made."""
    import torch.distributed._symmetric_memory as symm_mem

    buffer = symm_mem.empty(nbytes, dtype=torch.uint8, device=device)
    symm_mem.rendezvous(buffer, group_name)
    return buffer


@torch.library.custom_op("ditron_benchmarks::symmetric_all_reduce", mutates_args=())
def symmetric_all_reduce(x: torch.Tensor, reduce_op: str, group_name: str) -> torch.Tensor:
    """The sum of x over the ranks of a group, by torch's kernels in symmetric memory; on a CPU by the group itself."""
    if x.device.type != "cuda":
        summed = x.clone()
        dist.all_reduce(summed, group=dist.distributed_c10d._resolve_process_group(group_name))
        return summed
    nbytes = math.ceil(x.nbytes / ALIGNMENT) * ALIGNMENT
    shared = _buffer(group_name, nbytes, x.device)[: x.nbytes].view(x.dtype).view(x.shape)
    shared.copy_(x)
    if x.nbytes <= ONE_SHOT_BYTES:
        found: torch.Tensor = torch.ops.symm_mem.one_shot_all_reduce(shared, reduce_op, group_name)
        return found
    # The result would be overwritten by the next call.
    return torch.ops.symm_mem.two_shot_all_reduce_(shared, reduce_op, group_name).clone()


@symmetric_all_reduce.register_fake
def _(x: torch.Tensor, reduce_op: str, group_name: str) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


class ByHand(CustomGraphPass):  # type: ignore[misc]
    """Puts `symmetric_all_reduce` in the place of every sum over ranks in a graph."""

    def __call__(self, graph: fx.Graph) -> None:
        functional = torch.ops._c10d_functional
        for node in list(graph.nodes):
            if node.target is not functional.all_reduce.default or node.args[1] != "sum":
                continue
            with graph.inserting_before(node):
                op: Any = torch.ops.ditron_benchmarks.symmetric_all_reduce.default
                new = graph.call_function(op, node.args)
                new.meta = dict(node.meta)
            for user in list(node.users):
                if user.target is functional.wait_tensor.default:
                    user.replace_all_uses_with(new)
                    graph.erase_node(user)
            node.replace_all_uses_with(new)
            graph.erase_node(node)

    def uuid(self) -> Any:
        return get_hash_for_files((__file__,))
