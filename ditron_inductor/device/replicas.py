"""Tensors that are replicated on all ranks of a group: a rank takes its part, and the ranks compare samples.

A pass that divides work among the ranks assumes that some inputs are replicated, which no graph can prove. So the ranks
compare samples of them when a site first runs. A mistake becomes an error with names, and not a wrong result.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Sequence
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ditron_inductor.device import groups
from ditron_inductor.device.registry import workspaces
from ditron_inductor.device.session import meet
from ditron_inductor.errors import DitronNotReplicated

SAMPLES = 16
ROUNDINGS = 16
"""Values count as different if they are further apart than this many roundings of the largest value. Ranks may compute
them in different orders.
"""


def own_chunk(x: torch.Tensor, dim: int, world_size: int, group_name: str) -> torch.Tensor:
    """Returns this rank's chunk of the `world_size` equal chunks of x along `dim`, as a contiguous copy."""
    length = x.shape[dim] // world_size
    own = x.narrow(dim, groups.find(group_name).rank() * length, length)
    return own.clone(memory_format=torch.contiguous_format)


class Replicas:
    """The comparisons of replicated tensors. A site of a group is compared at its first call, and whenever the number
    of its calls has doubled, because another program may have a site of the same name. If torch captures the graph, a
    rank may make later calls alone, so these are not compared.
    """

    def __init__(self) -> None:
        self._calls: WeakKeyDictionary[dist.ProcessGroup, dict[Hashable, int]] = WeakKeyDictionary()

    def compared(
        self,
        x: torch.Tensor,
        same: Sequence[torch.Tensor],
        group_name: str,
        site: str,
        names: str = "",
        constants: str = "",
        again: bool = True,
    ) -> torch.Tensor:
        """Returns an alias of x. Collective at calls 1, 2, 4, 8, .. of a site, or at call 1 alone if not `again`; calls
        in the capture of a CUDA graph do not count.

        Raises DitronNotReplicated on all ranks if a tensor of `same` or a line of `constants` differs, and
        DitronHandshakeError if a rank does not come. names: a line for each tensor.
        """
        if not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            calls = self._calls.setdefault(groups.find(group_name), {})
            key = (site, *[tensor.shape for tensor in same])
            count = calls.get(key, 0) + 1
            if count == 1 or (again and count & (count - 1) == 0):
                places = names.split("\n") if names else [""] * len(same)
                _compare(same, places, constants.split("\n"), group_name, site)
            calls[key] = count
        return x.view_as(x)

    def forget(self, process_group: dist.ProcessGroup) -> None:
        """Makes the ranks compare everything of a group anew. After a failure they may have made different numbers of
        calls.
        """
        self._calls.pop(process_group, None)


def _limit_s(group: groups.Group) -> float:
    """Returns how long a rank waits for the others: as long as the calls of the group's workspaces, if it has any."""
    process_group = group.process_group()
    found = [] if process_group is None else workspaces.of_group(process_group)
    limits = [max(limit, workspaces.first_timeout_s) for shared in found for limit in shared.timeouts]
    return max(limits, default=group.timeout_s)


def _compare(
    same: Sequence[torch.Tensor], names: Sequence[str], constants: Sequence[str], group_name: str, site: str
) -> None:
    group = groups.resolve(group_name)
    purpose, limit_s = f"compare the inputs of {site}", _limit_s(group)
    session = meet(group, "replicas", purpose, limit_s)
    mine = [[samples(tensor), extremes(tensor)] for tensor in same]
    answers = session.all_gather(purpose, [list(constants), mine], limit_s)
    first_constants, first = answers[0]
    for rank, (its_constants, its) in enumerate(answers):
        differing = [
            _described(tensor, name)
            for tensor, name, own, other in zip(same, names, first, its, strict=True)
            if not all(near(left, right, tensor.dtype) for left, right in zip(own, other, strict=True))
        ]
        if its_constants != first_constants:
            pairs = itertools.zip_longest(its_constants[1:], first_constants[1:], fillvalue="nothing")
            differing += [f"constant, {own} and not {other}," for own, other in pairs if own != other]
            differing += ["order of constants"]
        if differing:
            raise DitronNotReplicated(rank=rank, peer=0, group_name=group_name, tensor=differing[0], site=site)


def _described(tensor: torch.Tensor, name: str) -> str:
    text = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
    return f"{text}, read at {name}," if name else text


def extremes(x: torch.Tensor) -> list[float]:
    """Returns values that a few samples may miss: the smallest and the largest value; for integers, the sum."""
    if not x.numel() or x.is_complex() or (x.is_floating_point() and x.dtype.itemsize < 2):
        return []
    return [float(value) for value in (torch.aminmax(x) if x.is_floating_point() else (x.sum(),))]


def samples(x: torch.Tensor) -> list[float]:
    """Returns values of x at places that follow from its shape."""
    count = x.numel()
    places = torch.arange(min(SAMPLES, count), device=x.device) * max(1, count // SAMPLES)
    values: list[float] = x[torch.unravel_index(places, x.shape)].double().reshape(-1).tolist() if count else []
    return values


def near(own: Sequence[float], other: Sequence[float], dtype: torch.dtype) -> bool:
    """Returns whether two lists of samples are those of one tensor."""
    if len(own) != len(other):
        return False
    largest = max((abs(value) for value in (*own, *other) if math.isfinite(value)), default=0.0)
    bound = ROUNDINGS * torch.finfo(dtype).eps * largest if dtype.is_floating_point else 0.0
    return all(_equal(first, second, bound) for first, second in zip(own, other, strict=True))


def _equal(first: float, second: float, bound: float) -> bool:
    if not (math.isfinite(first) and math.isfinite(second)):
        return first == second or (math.isnan(first) and math.isnan(second))
    return abs(first - second) <= bound


replicas = Replicas()
"""The comparisons of this process."""
