"""From a failure record to an error with names: at the next call, in the log, and never for nothing."""

from __future__ import annotations

import logging
import re
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ditron_inductor.core import layout as words
from ditron_inductor.device.sites import SiteNames
from ditron_inductor.device.watchdog import Health, Watchdog
from ditron_inductor.errors import DitronDiverged, DitronPoisoned, DitronTimeout
from tests.device.threads import make_group

CREDIT = words.CREDIT_ROW.value


def make_health(world_size: int = 2) -> tuple[Health, SiteNames]:
    """The health of rank 0's workspace, and the sites of rank 1."""
    store = dist.HashStore()
    ours = SiteNames(make_group(store, 0, world_size), "s")
    health = Health(make_group(store, 0, world_size), ours, torch.device("cpu"))
    health.timeout_s = 1.5
    ours.number("r/0:ours")
    return health, SiteNames(make_group(store, 1, world_size), "s")


def word(sites: SiteNames, site: str, epoch: int) -> int:
    return (sites.number(site) if site else 0) << words.EPOCH_BITS.value | epoch


def write(health: Health, state: int, chunk: int, expected: int, seen: int) -> None:
    """What `core.signals.fail` writes, in its order."""
    for index, value in ((1, 0), (2, 1), (3, chunk), (4, 1), (5, expected), (6, seen), (0, state)):
        health.record[index] = value


def test_a_healthy_workspace_raises_nothing_and_costs_little() -> None:
    health, _ = make_health()
    start = time.perf_counter()
    for _ in range(10_000):
        health.failed()
    per_call = (time.perf_counter() - start) / 10_000
    assert per_call < 5e-6
    health.check()


def test_a_timeout_names_site_ranks_chunk_and_flag() -> None:
    health, peer = make_health()
    write(health, words.TIMEOUT.value, 7, word(peer, "r/0:ours", 12), word(peer, "r/1:theirs", 11))
    with pytest.raises(DitronTimeout) as info:
        health.check()
    text = str(info.value)
    assert "rank 0 waited 1.5 s at site 'r/0:ours' for rank 1 (chunk 7)" in text
    assert "use 12 of slot 1" in text and "use 11, by 'r/1:theirs'" in text


def test_a_peer_that_never_wrote_and_a_missing_credit() -> None:
    health, peer = make_health()
    write(health, words.TIMEOUT.value, CREDIT, word(peer, "r/0:ours", 3), 0)
    with pytest.raises(DitronTimeout, match=r"\(chunk credit of slot 1\).*saw nothing from it yet"):
        health.check()


def test_a_credit_is_of_the_use_before_the_call_that_gave_it() -> None:
    health, peer = make_health()
    write(health, words.TIMEOUT.value, CREDIT, word(peer, "r/0:ours", 3), word(peer, "r/1:theirs", 2))
    with pytest.raises(DitronTimeout) as info:
        health.check()
    text = str(info.value)
    assert "expected its next call after use 3 of the slot, saw the one after use 2, 'r/1:theirs'" in text
    assert "by 'r/1:theirs'" not in text


@pytest.mark.parametrize(
    ("absent", "sentence"),
    [
        ([3], " waits for such a rank itself. Rank 3 has not begun this call, or failed before it. Call "),
        ([1, 3], " waits for such a rank itself. Ranks 1, 3 have not begun this call, or failed before it. Call "),
        ([1], " waits for such a rank itself. Call "),
        ([], " waits for such a rank itself. Call "),
    ],
)
def test_a_timeout_names_other_ranks_that_have_not_begun(absent: list[int], sentence: str) -> None:
    health, peer = make_health(4)
    write(health, words.TIMEOUT.value, 512, word(peer, "r/0:ours", 12), 0)
    with pytest.raises(DitronTimeout, match="for rank 1 .*" + re.escape(sentence)):
        health.check(lambda slot, epoch: absent if (slot, epoch) == (1, 12) else [2])
    with pytest.raises(DitronPoisoned, match=re.escape(sentence)):
        health.check()


def test_the_credit_that_a_call_waits_for_is_of_the_use_before_it() -> None:
    health, peer = make_health(4)
    write(health, words.TIMEOUT.value, CREDIT, word(peer, "r/0:ours", 11), 0)
    with pytest.raises(DitronTimeout, match="Rank 3 has not begun this call"):
        health.check(lambda slot, epoch: [3] if (slot, epoch) == (1, 12) else [2])


@pytest.mark.parametrize(("world_size", "state"), [(2, words.TIMEOUT.value), (4, words.DIVERGED.value)])
def test_nobody_looks_where_nobody_else_can_be_at_fault(world_size: int, state: int) -> None:
    health, peer = make_health(world_size)
    write(health, state, 0, word(peer, "r/0:ours", 12), word(peer, "r/1:theirs", 12))
    look = mock.Mock(return_value=[1])
    with pytest.raises(DitronTimeout if state == words.TIMEOUT.value else DitronDiverged):
        health.check(look)
    look.assert_not_called()


def test_divergence_names_both_sites() -> None:
    health, peer = make_health()
    write(health, words.DIVERGED.value, 0, word(peer, "r/0:ours", 5), word(peer, "r/1:theirs", 5))
    with pytest.raises(DitronDiverged, match="rank 0 was at site 'r/0:ours' while rank 1 was at site 'r/1:theirs'"):
        health.check()


def test_later_calls_are_told_to_reset_until_the_failure_is_cleared() -> None:
    health, peer = make_health()
    write(health, words.TIMEOUT.value, 0, word(peer, "r/0:ours", 1), 0)
    with pytest.raises(DitronTimeout):
        health.check()
    for _ in range(2):
        with pytest.raises(DitronPoisoned, match="group 'test' failed earlier .rank 0 waited"):
            health.check()
    health.clear()
    assert not health.failed()
    health.check()


def test_an_exception_in_a_call_asks_for_a_reset() -> None:
    health, _ = make_health()
    health.fail(ValueError("no such shape"))
    with pytest.raises(DitronPoisoned, match="ValueError: no such shape"):
        health.check()


def test_the_thread_logs_a_failure_once_and_again_after_a_reset(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ditron_inductor.device.watchdog.PERIOD_S", 0.1)
    health, peer = make_health()
    watchdog = Watchdog()
    watchdog.watch(health)
    try:
        with caplog.at_level(logging.ERROR):
            for failures in (1, 2):
                write(health, words.TIMEOUT.value, 0, word(peer, "r/0:ours", 1), 0)
                deadline = time.monotonic() + 5
                while len(caplog.records) < failures and time.monotonic() < deadline:
                    time.sleep(0.02)
                time.sleep(0.3)
                assert [record.getMessage()[:14] for record in caplog.records] == ["DitronTimeout:"] * failures
                health.clear()
    finally:
        watchdog.close()


def test_a_thread_that_did_not_start_is_started_by_the_next_call() -> None:
    health, _ = make_health()
    watchdog = Watchdog()
    with (
        mock.patch("threading.Thread.start", side_effect=RuntimeError("can't start new thread")),
        pytest.raises(RuntimeError, match="new thread"),
    ):
        watchdog.watch(health)
    watchdog.watch(health)
    try:
        assert watchdog._thread is not None and watchdog._thread.is_alive()
    finally:
        watchdog.close()
