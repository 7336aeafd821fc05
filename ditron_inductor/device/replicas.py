"""What every rank of a group has alike: taking one's own part of it, and comparing that it is so.

A pass that divides work among the ranks takes some inputs for replicated, which no graph can prove. So the ranks
compare samples of them when a site first runs: a mistake becomes an error with names, and not a wrong result.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ditron_inductor.device import groups
from ditron_inductor.device.exchange import meet
from ditron_inductor.errors import DitronNotReplicated

SAMPLES = 16
ROUNDINGS = 16
"""Values differ if they are further apart than so many roundings of the largest one: ranks may compute them in
different orders.
"""


def own_chunk(x: torch.Tensor, dim: int, world_size: int, group_name: str) -> torch.Tensor:
    """This rank's of the `world_size` equal chunks of x along `dim`, a contiguous copy."""
    length = x.shape[dim] // world_size
    own = x.narrow(dim, groups.find(group_name).rank() * length, length)
    return own.clone(memory_format=torch.contiguous_format)


class Replicas:
    """The comparisons that were made: each site of each group compares once in the life of a group."""

    def __init__(self) -> None:
        self._compared: WeakKeyDictionary[dist.ProcessGroup, set[Hashable]] = WeakKeyDictionary()

    def compared(self, x: torch.Tensor, same: Sequence[torch.Tensor], group_name: str, site: str) -> torch.Tensor:
        """An alias of x. Collective at the first call of a site outside of a CUDA graph's capture.

        Raises DitronNotReplicated on all ranks where a tensor of `same` differs, and DitronHandshakeError where a rank
        does not come.
        """
        known = self._compared.setdefault(groups.find(group_name), set())
        key = (site, *[one.shape for one in same])
        if key not in known and not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            _compare(same, group_name, site)
            known.add(key)
        return x.view_as(x)


def _compare(same: Sequence[torch.Tensor], group_name: str, site: str) -> None:
    group = groups.resolve(group_name)
    purpose = f"compare the inputs of {site}"
    session = meet(group, "replicas", purpose, group.timeout_s)
    answers = session.all_gather(purpose, [samples(one) for one in same], group.timeout_s)
    for rank, answer in enumerate(answers):
        for tensor, own, other in zip(same, answers[0], answer, strict=True):
            if not near(own, other, tensor.dtype):
                raise DitronNotReplicated(
                    rank=rank,
                    peer=0,
                    group_name=group_name,
                    tensor=f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}",
                    site=site,
                )


def samples(x: torch.Tensor) -> list[float]:
    """Values of x at places that follow from its shape."""
    count = x.numel()
    places = torch.arange(min(SAMPLES, count), device=x.device) * max(1, count // SAMPLES)
    values: list[float] = x[torch.unravel_index(places, x.shape)].double().reshape(-1).tolist() if count else []
    return values


def near(own: Sequence[float], other: Sequence[float], dtype: torch.dtype) -> bool:
    """Whether two lists of samples are those of one tensor."""
    if len(own) != len(other):
        return False
    largest = max((abs(one) for one in (*own, *other) if math.isfinite(one)), default=0.0)
    bound = ROUNDINGS * torch.finfo(dtype).eps * largest if dtype.is_floating_point else 0.0
    return all(_equal(one, two, bound) for one, two in zip(own, other, strict=True))


def _equal(one: float, two: float, bound: float) -> bool:
    if not (math.isfinite(one) and math.isfinite(two)):
        return one == two or (math.isnan(one) and math.isnan(two))
    return abs(one - two) <= bound


replicas = Replicas()
"""Those of this process."""
