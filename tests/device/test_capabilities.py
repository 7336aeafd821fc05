"""Joining the facts of ranks: what peer access and the tile kernels need, and the reason when it is missing."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from ditron_inductor.device import layout
from ditron_inductor.device.capabilities import RankFacts, combine, probe


def gpu(index: int, **changes: Any) -> RankFacts:
    facts = RankFacts(
        host="node-a/boot",
        device_type="cuda",
        device_name="GPU",
        device_id=f"uuid-{index}",
        arch="sm_90",
        num_sms=132,
        peers={f"uuid-{other}": True for other in range(4) if other != index},
        tile_problem="",
    )
    return dataclasses.replace(facts, **changes)


def test_equal_gpus_of_one_host() -> None:
    capabilities = combine([gpu(rank) for rank in range(4)])
    assert capabilities.peer_access and capabilities.tile_available
    assert (capabilities.peer_reason, capabilities.tile_reason) == ("", "")
    assert (capabilities.arch, capabilities.device_name, capabilities.num_sms) == ("sm_90", "GPU", 132)


def test_ranks_may_share_a_gpu() -> None:
    assert combine([gpu(0), gpu(0)]).peer_access


def test_a_gpu_that_is_not_visible_is_left_to_the_mapping() -> None:
    assert combine([gpu(0, peers={}), gpu(1, peers={})]).peer_access


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        (gpu(1, host="node-b/boot"), "rank 1 runs on node-b/boot and rank 0 on node-a/boot: not one host"),
        (gpu(1, peers={"uuid-0": False}), "the GPU of rank 1 cannot access the memory of the GPU of rank 0"),
        (gpu(1, device_type="cpu"), "rank 1 uses cpu and rank 0 cuda"),
    ],
)
def test_without_peer_access_there_are_no_tiles(second: RankFacts, reason: str) -> None:
    capabilities = combine([gpu(0), second])
    assert not capabilities.peer_access and not capabilities.tile_available
    assert capabilities.peer_reason == capabilities.tile_reason == reason


@pytest.mark.parametrize(
    ("ranks", "reason"),
    [
        ([gpu(0), gpu(1, tile_problem="old")], "on rank 1: old"),
        ([gpu(0, tile_problem="old"), gpu(1, tile_problem="old")], "old"),
        ([gpu(0), gpu(1, arch="sm_80")], "the ranks have different devices: sm_80, sm_90"),
        (
            [gpu(0)] * (layout.MAX_WORLD + 1),
            f"groups of more than {layout.MAX_WORLD} ranks are not supported by the tile kernels",
        ),
    ],
)
def test_peer_access_alone_is_not_enough(ranks: list[RankFacts], reason: str) -> None:
    capabilities = combine(ranks)
    assert capabilities.peer_access and not capabilities.tile_available
    assert capabilities.tile_reason == reason


def test_facts_survive_json() -> None:
    facts = probe(torch.device("cpu"))
    assert RankFacts(**facts.to_json()) == facts


def test_a_failed_mapping_takes_peer_access_away() -> None:
    capabilities = combine([gpu(0), gpu(1)]).without_peer_access("no")
    assert (capabilities.peer_access, capabilities.tile_available, capabilities.tile_reason) == (False, False, "no")
