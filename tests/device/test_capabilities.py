"""Joining the facts of ranks: what peer access and the tile kernels need, and the reason when it is missing."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch

from ditron_inductor.device import capabilities, slot_layout
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
    joined = combine([gpu(rank) for rank in range(4)])
    assert joined.peer_access and joined.tile_available
    assert (joined.peer_reason, joined.tile_reason) == ("", "")
    assert (joined.arch, joined.device_name, joined.num_sms) == ("sm_90", "GPU", 132)


def test_all_ranks_send_in_band_or_none() -> None:
    assert combine([gpu(0, in_band=True), gpu(1, in_band=True)]).in_band
    assert not combine([gpu(0, in_band=True), gpu(1)]).in_band


def test_the_smallest_device_counts() -> None:
    assert combine([gpu(0, num_sms=132), gpu(1, num_sms=114), gpu(2, num_sms=148)]).num_sms == 114


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
    joined = combine([gpu(0), second])
    assert not joined.peer_access and not joined.tile_available
    assert joined.peer_reason == joined.tile_reason == reason


@pytest.mark.parametrize(
    ("ranks", "reason"),
    [
        ([gpu(0), gpu(1, tile_problem="old")], "on rank 1: old"),
        ([gpu(0, tile_problem="old"), gpu(1, tile_problem="old")], "old"),
        ([gpu(0), gpu(1, arch="sm_80")], "the ranks have different devices: sm_80, sm_90"),
        (
            [gpu(0)] * (slot_layout.MAX_WORLD + 1),
            f"groups of more than {slot_layout.MAX_WORLD} ranks are not supported by the tile kernels",
        ),
    ],
)
def test_peer_access_alone_is_not_enough(ranks: list[RankFacts], reason: str) -> None:
    joined = combine(ranks)
    assert joined.peer_access and not joined.tile_available
    assert joined.tile_reason == reason


def test_facts_survive_json() -> None:
    facts = probe(torch.device("cpu"))
    assert RankFacts(**json.loads(json.dumps(dataclasses.asdict(facts)))) == facts


def test_a_failed_mapping_takes_peer_access_away() -> None:
    joined = combine([gpu(0), gpu(1)]).without_peer_access("no")
    assert (joined.peer_access, joined.tile_available, joined.tile_reason) == (False, False, "no")


@pytest.mark.parametrize(
    ("interpreted", "triton", "numpy", "reason"),
    [
        (False, (3, 8), (2, 4), "TRITON_INTERPRET=1 was not set before Triton was imported"),
        (True, (3, 6), (2, 4), "the interpreter of Triton 3.6 needs numpy < 2.4 (or take Triton 3.8)"),
        (True, (3, 6), (2, 3), ""),
        (True, (3, 8), (2, 4), ""),
    ],
)
def test_the_cpu_needs_the_interpreter(
    monkeypatch: pytest.MonkeyPatch, interpreted: bool, triton: tuple[int, int], numpy: tuple[int, int], reason: str
) -> None:
    monkeypatch.setattr(capabilities, "_interpreted", lambda: interpreted)
    monkeypatch.setattr(capabilities, "_version", {"triton": triton, "numpy": numpy}.__getitem__)
    facts = probe(torch.device("cpu"))
    assert facts.tile_problem == reason
    assert facts.arch == ("cpu" if reason else "interpreter")
