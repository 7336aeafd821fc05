"""Workspaces on the CPU device: real rank processes, shared memory, and the interpreter running the signals."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ditron_inductor.device import slot_layout
from tests.device import jobs
from tests.ranks import RankPool, RankPools

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def nothing_left_in_shared_memory() -> Iterator[None]:
    before = set(os.listdir("/dev/shm"))
    yield
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "ditron" in name]


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.all_cases)])
def test_values_cross_in_order(rank_pools: RankPools, world_size: int) -> None:
    rank_pools.get("cpu", world_size).run(jobs.values_cross, 12)


def test_slots_grow_and_the_old_ring_goes(rank_pools: RankPools) -> None:
    held = rank_pools.get("cpu", 2).run(jobs.grows)
    assert held[0] == held[1]
    first, second, third, fourth = held[0]
    assert first < second < third == fourth < slot_layout.HEADER_BYTES + 2.6 * 3_000_000


def test_the_limit_is_an_error_on_all_ranks(rank_pools: RankPools) -> None:
    for name, text in rank_pools.get("cpu", 2).run(jobs.grows_beyond_the_limit):
        assert name == "WorkspaceError"
        assert "at site 'test/0:ping', 67108864 are allowed" in text and "ditron.workspace_limit" in text


def test_all_that_a_group_holds_counts_against_the_limit(rank_pools: RankPools) -> None:
    """The old ring while a new one is made, and the rings of captured graphs, even of one rank's."""
    outcomes = rank_pools.get("cpu", 2).run(jobs.keeps_within_the_limit)
    assert outcomes[0] == outcomes[1]
    most, held, (name, text) = outcomes[0]
    assert len(most) == 3 and held[2] == most[2] and held[0] < held[1] < most[1]
    assert name == "WorkspaceError" and "are allowed" in text


def test_ranks_that_ask_for_different_sizes_hear_of_it(rank_pools: RankPools) -> None:
    for name, text in rank_pools.get("cpu", 2).run(jobs.grows_apart):
        assert name == "WorkspaceError"
        assert "slots of different sizes at site 'test/0:ping': [1048576, 2097152] bytes, by rank" in text


def test_different_options_are_named(rank_pools: RankPools) -> None:
    for name, text in rank_pools.get("cpu", 2).run(jobs.differs_in_options):
        assert name == "DitronOptionsMismatch"
        assert "ditron.workspace_limit is 1048576 on rank 0, 2097152 on rank 1" in text


def test_options_that_come_later_are_compared_too(rank_pools: RankPools) -> None:
    for name, text in rank_pools.get("cpu", 2).run(jobs.differs_in_later_options):
        assert name == "DitronOptionsMismatch"
        assert "ditron.timeout_s is 20.0 on rank 0, 21.0 on rank 1" in text


def test_each_call_waits_as_long_as_its_own_options_say(rank_pools: RankPools) -> None:
    _, (name, text) = rank_pools.get("cpu", 2).run(jobs.several_limits)
    assert name == "DitronTimeout"
    # On the CPU device a limit counts looks; the text says how long they took.
    waited = float(text.partition("waited ")[2].split()[0])
    assert jobs.SHORT_S <= waited < jobs.OPTIONS.timeout_s


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_rank_that_does_not_come_is_named(rank_pools: RankPools, world_size: int) -> None:
    for name, text in rank_pools.get("cpu", world_size).run(jobs.one_rank_stays_away)[:-1]:
        assert name == "DitronHandshakeError"
        assert f"did not hear from: rank {world_size - 1}" in text


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_silent_rank_is_a_timeout_and_a_reset_helps(rank_pools: RankPools, world_size: int) -> None:
    for timeout, poisoned in rank_pools.get("cpu", world_size).run(jobs.one_rank_stays_silent)[:-1]:
        assert timeout[0] == "DitronTimeout"
        assert "at site 'test/0:ping'" in timeout[1] and f"for rank {world_size - 1}" in timeout[1]
        assert poisoned[0] == "DitronPoisoned" and "reset" in poisoned[1]


def test_divergence_names_both_sites(rank_pools: RankPools) -> None:
    errors = rank_pools.get("cpu", 2).run(jobs.ranks_diverge)
    # The rank that is first to look may run into its limit before the other has come; at least one sees the flag.
    assert "DitronDiverged" in [name for name, _ in errors]
    for name, text in errors:
        assert name in ("DitronDiverged", "DitronTimeout")
        if name == "DitronDiverged":
            assert "'test/0:site'" in text and "'test/1:site'" in text


def test_reset_after_an_exception_half_way(rank_pools: RankPools) -> None:
    rank_pools.get("cpu", 4).run(jobs.fails_half_way)


def test_reset_after_half_of_a_growth(rank_pools: RankPools) -> None:
    name, text = rank_pools.get("cpu", 2).run(jobs.half_of_a_growth)[0]
    assert name == "DitronHandshakeError"
    assert "to make room for site 'test/0:ping', and did not hear from: rank 1" in text


def test_reset_names_a_missing_rank(rank_pools: RankPools) -> None:
    for name, text in rank_pools.get("cpu", 4).run(jobs.reset_without_the_last)[:-1]:
        assert name == "DitronHandshakeError"
        assert "to reset the group, and did not hear from: rank 3" in text


def test_reset_where_one_rank_has_no_workspace(rank_pools: RankPools) -> None:
    rank_pools.get("cpu", 2).run(jobs.reset_where_one_rank_has_nothing)


def test_a_group_made_again_gets_a_new_workspace(tmp_path: Path) -> None:
    pool = RankPool(2)  # one of its own: these jobs replace the default group
    try:
        for names in pool.run(jobs.groups_of_one_name, str(tmp_path)):
            assert len(set(names)) == 1, "the test wants groups of one name"
        pool.run(jobs.a_group_ends_while_another_of_its_name_begins, str(tmp_path))
    finally:
        pool.close()


def test_subgroups_side_by_side(rank_pools: RankPools) -> None:
    rank_pools.get("cpu", 4).run(jobs.subgroups_side_by_side)


def test_inference_mode_does_not_matter(rank_pools: RankPools) -> None:
    rank_pools.get("cpu", 2).run(jobs.inference_mode_does_not_matter)


def test_a_released_workspace_leaves_nothing(rank_pools: RankPools) -> None:
    for during, after in rank_pools.get("cpu", 2).run(jobs.releases_everything):
        assert during > after == 0


def test_a_killed_rank_is_named_and_leaves_nothing() -> None:
    pool = RankPool(2)
    try:
        survivor, killed = pool.outcomes(jobs.a_rank_is_killed, stop=1, grace=5.0)
    finally:
        pool.close()
    assert killed.lost
    name, text = survivor.value
    assert name == "DitronTimeout" and "for rank 1" in text
