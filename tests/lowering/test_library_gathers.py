"""The gather of keys and values by the library: in one launch where the backend can, one by one where it cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ditron_inductor.lowering.all_gather_attention import library
from tests.ranks import RankContext, RankPools


class Group:
    """A process group with one backend for the device of what it is asked for."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.launches: list[int] = []

    def _get_backend(self, device: torch.device) -> Any:
        assert device.type == "cuda"
        return self

    def name(self) -> str:
        return self.backend

    def allgather_into_tensor_coalesced(self, gathered: list[Any], own: list[Any], options: Any) -> None:
        assert not options.asyncOp
        self.launches.append(len(own))


@pytest.mark.parametrize(("backend", "launches"), [("nccl", [2]), ("gloo", [1, 1]), ("wrapper", [1, 1])])
def test_tensors_of_gpus_are_gathered_together_by_nccl_only(
    monkeypatch: pytest.MonkeyPatch, backend: str, launches: list[int]
) -> None:
    """Ranks that share a GPU have gloo, which takes CUDA tensors one by one."""
    group: Any = Group(backend)
    monkeypatch.setattr("torch.distributed.all_gather_into_tensor", lambda out, one, group: group.launches.append(1))
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        own = [torch.empty(2, 3, device="cuda") for _ in range(2)]
        library._gather_both([torch.empty(4, 3, device="cuda") for _ in own], own, group)
    assert group.launches == launches


def _gathered(ctx: RankContext) -> list[list[float]]:
    import torch.distributed as dist

    k, v = torch.full((1, 1, 2, 1), float(ctx.rank)), torch.full((1, 1, 2, 1), 10.0 + ctx.rank)
    group = dist.group.WORLD
    assert group is not None
    return [one.flatten().tolist() for one in library.gather(k, v, group)]


def test_both_are_gathered_in_rank_order(rank_pools: RankPools) -> None:
    for keys, values in rank_pools.get("cpu", 2).run(_gathered):
        assert keys == [0.0, 0.0, 1.0, 1.0] and values == [10.0, 10.0, 11.0, 11.0]
