"""The handshake: what differs is named with its ranks, the weakest capability counts, rank 0's table wins."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest

from ditron_inductor.device.capabilities import RankFacts
from ditron_inductor.device.groups import Group
from ditron_inductor.device.handshake import AgreedOptions, HandshakeResult, agree_options, shake_hands, versions
from ditron_inductor.device.session import meet
from ditron_inductor.errors import DitronHandshakeError, DitronOptionsMismatch
from tests.device.threads import on_ranks

LIMIT_S = 10.0
OPTIONS = AgreedOptions(strategy="auto", workspace_limit=1 << 20, timeout_s=0.0)
FACTS = RankFacts(
    host="here",
    device_type="cpu",
    device_name="cpu",
    device_id="cpu",
    arch="interpreter",
    num_sms=1,
    peers={},
    tile_problem="",
)


def shake(group: Group, options: AgreedOptions = OPTIONS, facts: RankFacts = FACTS, table: str = "") -> HandshakeResult:
    return shake_hands(meet(group, "open", "begin", LIMIT_S), options, facts, table, LIMIT_S)


def test_equal_ranks_agree() -> None:
    agreements = on_ranks(4, shake)
    assert all(agreement == agreements[0] for agreement in agreements)
    assert agreements[0].capabilities.tile_available
    assert agreements[0].capabilities.world_size == 4


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"strategy": "tile"}, "ditron.strategy is 'auto' on ranks 0, 2; 'tile' on rank 1"),
        ({"workspace_limit": 5}, "ditron.workspace_limit is 1048576 on ranks 0, 2; 5 on rank 1"),
        ({"timeout_s": 1.5}, "ditron.timeout_s is 0.0 on ranks 0, 2; 1.5 on rank 1"),
    ],
)
def test_different_options_are_named(change: dict[str, Any], text: str) -> None:
    def run(group: Group) -> HandshakeResult:
        return shake(group, dataclasses.replace(OPTIONS, **change) if group.rank == 1 else OPTIONS)

    for result in on_ranks(3, run):
        assert isinstance(result, DitronOptionsMismatch)
        assert text.replace("; ", ", ") in str(result)


def test_different_versions_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter([versions(), {**versions(), "torch": "9.9"}])
    monkeypatch.setattr("ditron_inductor.device.handshake.versions", lambda: next(calls))
    for result in on_ranks(2, shake):
        assert isinstance(result, DitronOptionsMismatch)
        assert "torch version" in str(result) and "'9.9'" in str(result)


def test_the_weakest_rank_counts() -> None:
    def run(group: Group) -> HandshakeResult:
        return shake(group, facts=dataclasses.replace(FACTS, tile_problem="it is old") if group.rank == 1 else FACTS)

    for agreement in on_ranks(2, run):
        assert not agreement.capabilities.tile_available
        assert agreement.capabilities.tile_reason == "on rank 1: it is old"


def test_the_table_of_rank_0_wins_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        agreements = on_ranks(2, lambda group: shake(group, table=f"table of rank {group.rank}"))
    assert [agreement.table for agreement in agreements] == ["table of rank 0"] * 2
    assert "the tables of measured choices on ranks [1] differ" in caplog.text


def test_new_options_are_compared_too() -> None:
    def run(group: Group) -> None:
        session = meet(group, "open", "begin", LIMIT_S)
        agree_options(session, dataclasses.replace(OPTIONS, strategy="tile"), LIMIT_S)
        agree_options(session, dataclasses.replace(OPTIONS, timeout_s=float(group.rank)), LIMIT_S)

    for result in on_ranks(2, run):
        assert isinstance(result, DitronOptionsMismatch)
        assert "ditron.timeout_s is 0.0 on rank 0, 1.0 on rank 1" in str(result)


def test_options_that_one_rank_alone_begins_to_use_do_not_hang() -> None:
    def run(group: Group) -> None:
        session = meet(group, "open", "begin", LIMIT_S)
        if group.rank == 0:
            agree_options(session, OPTIONS, 0.3)

    result = on_ranks(2, run)[0]
    assert isinstance(result, DitronHandshakeError)
    assert "to agree on a site and its options, and did not hear from: rank 1" in str(result)
