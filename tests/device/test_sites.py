"""Site numbers: equal on all ranks, in range, and found again by name, even when hashes collide."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from ditron_inductor.device import slot_layout
from ditron_inductor.device.sites import SiteNames
from tests.device.threads import make_group


def names(store: dist.Store, rank: int = 0, session: str = "s") -> SiteNames:
    return SiteNames(make_group(store, rank, 2), session)


def test_ranks_get_the_same_number_and_its_text() -> None:
    store = dist.HashStore()
    first, second = names(store, 0), names(store, 1)
    number = first.number("r/0:all_gather_matmul")
    assert second.text(number) == "r/0:all_gather_matmul"
    assert second.number("r/0:all_gather_matmul") == number == first.number("r/0:all_gather_matmul")
    assert 1 < number <= slot_layout.SITE_MASK and number % 2 == 1


def test_colliding_sites_get_the_same_numbers_whoever_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_layout, "SITE_MASK", 63)
    store = dist.HashStore()
    first, second = names(store, 0), names(store, 1)
    texts = [f"site {i}" for i in range(16)]
    forwards = {}
    backwards = {}
    for text, other in zip(texts, reversed(texts), strict=True):
        forwards[text] = first.number(text)
        backwards[other] = second.number(other)
    assert forwards == backwards
    assert len(set(forwards.values())) == len(texts)
    assert all(second.text(number) == text for text, number in forwards.items())


def test_a_number_that_no_rank_posted_stays_a_number() -> None:
    assert names(dist.HashStore()).text(0xABC, timeout_s=0.05) == "#000abc (posted by no rank)"


def test_sessions_do_not_see_each_other() -> None:
    store = dist.HashStore()
    number = names(store, session="old").number("a")
    assert "posted by no rank" in names(store, session="new").text(number, timeout_s=0.05)
