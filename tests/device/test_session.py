"""Meetings through the store: they end, they agree, they trust no leftovers, they name who is missing."""

from __future__ import annotations

import dataclasses
import time
from datetime import timedelta
from unittest import mock

import pytest
import torch.distributed as dist

from ditron_inductor.device import meetings
from ditron_inductor.device.facts import GraphFacts, GroupFacts
from ditron_inductor.device.groups import Group
from ditron_inductor.device.meetings import Meetings
from ditron_inductor.device.session import Session, _Waiting, meet
from ditron_inductor.errors import DitronDiverged, DitronHandshakeError
from tests.device.threads import Anchor, make_group, on_ranks

LIMIT_S = 20.0
SHORT_S = 0.3


def tcp_stores(num: int) -> list[dist.TCPStore]:
    """One store per rank, as torchrun makes them; the first hosts it."""
    limit = timedelta(seconds=LIMIT_S)
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)
    return [host, *(dist.TCPStore("127.0.0.1", host.port, is_master=False, timeout=limit) for _ in range(num - 1))]


def open_session(group: Group) -> Session:
    return meet(group, "topic", "begin", LIMIT_S)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_meet_and_gather_by_rank(world_size: int) -> None:
    def run(group: Group) -> tuple[str, list[int]]:
        session = open_session(group)
        return session.name, session.all_gather("count", group.rank * 10, LIMIT_S)

    results = on_ranks(world_size, run)
    assert len({name for name, _ in results}) == 1
    assert all(values == [rank * 10 for rank in range(world_size)] for _, values in results)


@pytest.mark.parametrize("world_size", [2, 3])
def test_meetings_on_one_topic_follow_each_other(world_size: int) -> None:
    def run(group: Group) -> list[str]:
        return [open_session(group).name for _ in range(20)]

    names = on_ranks(world_size, run)
    assert all(rank_names == names[0] for rank_names in names)
    assert len(set(names[0])) == 20


def test_a_late_rank_is_waited_for() -> None:
    def run(group: Group) -> str:
        time.sleep(0.5 * group.rank)
        return open_session(group).name

    assert len(set(on_ranks(3, run))) == 1


def test_leftovers_of_an_earlier_group_are_not_met() -> None:
    store = dist.HashStore()
    first = on_ranks(2, lambda group: open_session(group).name, store)
    # The name and store are the same, and only rank 0 comes: what rank 1 left behind must not pass for rank 1.
    with pytest.raises(DitronHandshakeError, match="did not hear from: rank 1"):
        meet(make_group(store, 0, 2), "topic", "begin", SHORT_S)
    second = on_ranks(2, lambda group: open_session(group).name, store)
    assert second[0] == second[1] != first[0]


def test_a_missing_rank_is_named_with_its_global_rank() -> None:
    store = dist.HashStore()

    def run(group: Group) -> None:
        if group.rank != 1:
            meet(group, "topic", "begin", SHORT_S)

    results = on_ranks(3, run, store, first_global_rank=4)
    for rank in (0, 2):
        assert isinstance(results[rank], DitronHandshakeError)
        assert results[rank].fields["missing"] == "rank 1 (global rank 5)"
        assert "s to begin, and did not hear from" in str(results[rank])
        assert results[rank].fields["seconds"] >= SHORT_S


def test_an_error_tells_the_time_that_has_passed_and_not_the_limit() -> None:
    """A pause may last longer than the limit, and a store may be lost long before it."""
    waiting = _Waiting(make_group(dist.HashStore(), 0, 2), "begin", 60.0)
    waiting.deadline, waiting.pause_s = waiting.began, SHORT_S
    time.sleep(SHORT_S)
    with pytest.raises(DitronHandshakeError, match="waited 0\\.[3-9] s to begin") as late:
        waiting.pause([1])
    assert SHORT_S <= late.value.fields["seconds"] < 60.0
    lost = _Waiting(make_group(dist.HashStore(), 0, 2), "begin", 60.0).error("the store")
    assert "waited 0.0 s to begin" in str(lost)


def test_a_lost_store_tells_how_long_graphs_were_being_compared() -> None:
    def lose(self: Meetings, group_name: str) -> None:
        time.sleep(SHORT_S)
        raise dist.DistError("the connection was closed")

    with (
        mock.patch.object(meetings, "check_world_sizes"),
        mock.patch.object(meetings.groups, "find", lambda name: Anchor()),
        mock.patch.object(meetings.groups, "resolve", lambda name: make_group(dist.HashStore(), 0, 2)),
        mock.patch.object(Meetings, "_log", lose),
        pytest.raises(DitronHandshakeError, match="waited 0\\.[3-9] s to compare a graph .*the connection was closed"),
    ):
        Meetings().meet(GraphFacts((GroupFacts("test", 2, (), ()),)), 60.0)


def test_a_rank_that_gave_up_is_met_when_it_comes_back() -> None:
    def run(group: Group) -> str:
        if group.rank == 0:
            with pytest.raises(DitronHandshakeError):
                meet(group, "topic", "begin", SHORT_S)
        else:
            time.sleep(2 * SHORT_S)
        return open_session(group).name

    names = on_ranks(3, run)
    assert len(set(names)) == 1


def test_gather_names_the_ranks_that_do_not_come() -> None:
    def run(group: Group) -> None:
        session = open_session(group)
        if group.rank == 0:
            session.all_gather("make room", None, SHORT_S)

    result = on_ranks(3, run)[0]
    assert isinstance(result, DitronHandshakeError)
    assert result.fields["missing"] == "rank 1, rank 2"


def test_ranks_that_come_for_different_purposes_diverge() -> None:
    def run(group: Group) -> None:
        open_session(group).all_gather("make room" if group.rank == 0 else "agree on new options", None, LIMIT_S)

    for rank, result in enumerate(on_ranks(2, run)):
        assert isinstance(result, DitronDiverged)
        assert result.fields["peer"] == 1 - rank
        assert "make room" in str(result) and "agree on new options" in str(result)


def test_over_tcp_and_when_the_host_of_the_store_ends() -> None:
    stores = tcp_stores(2)

    def run(group: Group) -> list[int]:
        prefixed = dataclasses.replace(group, store=dist.PrefixStore("ditron/x", stores[group.rank]))
        return open_session(prefixed).all_gather("count", group.rank, LIMIT_S)

    assert on_ranks(2, run) == [[0, 1], [0, 1]]
    survivor = stores[1]
    stores.clear()
    with pytest.raises(DitronHandshakeError, match="did not hear from: the store of the group, .* in another rank's"):
        meet(make_group(survivor, 1, 2), "topic", "begin", LIMIT_S)
