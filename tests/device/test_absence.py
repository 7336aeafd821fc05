"""Which ranks have not begun a call: what credits say of them, whatever the calls were, and where they are read."""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import pytest
import torch

from ditron_inductor.core.layout import CREDIT_ROW, EPOCH_BITS, MAX_WORLD, POISON, SLOT_WORDS
from ditron_inductor.device import slot_layout
from ditron_inductor.device.absence import Look, not_begun
from ditron_inductor.device.slot_layout import EPOCH_MASK, NUM_SLOTS, is_behind
from tests.device.one_rank import make_shared

RANK = 1
WORLD_SIZE = 4


def credits_after(slots: list[int], begun: dict[int, int], first_epoch: int = 0) -> list[list[int]]:
    """The epochs of the credits by slot and peer, when launch i used slots[i] and `begun` launches have begun on each
    peer: each of them first gives the credit of the use before it.
    """
    found = [[first_epoch] * WORLD_SIZE for _ in range(NUM_SLOTS)]
    for peer, launches in begun.items():
        for used in slots[: max(0, launches - 1)]:
            found[used][peer] = (found[used][peer] + 1) & EPOCH_MASK
    return found


def test_the_one_that_stopped_between_two_calls_is_found() -> None:
    credits = credits_after([0, 1, 0, 1, 0], {0: 5, 2: 5, 3: 4})
    assert not_begun(credits, RANK, 0, 3) == [3]


def test_who_has_gone_on_says_nothing_about_the_others() -> None:
    """Rank 0 needs nothing of the rank that stopped, and has begun the next call: rank 2 and 3 may be in this one."""
    credits = credits_after([0, 1, 0], {0: 4, 2: 3, 3: 3})
    assert not_begun(credits, RANK, 0, 2) == []


def test_a_missing_credit_is_enough() -> None:
    """All of them stopped before they could give the credit of the use before, in the same slot."""
    credits = credits_after([0, 1, 1, 1], {0: 3, 2: 3, 3: 3})
    assert not_begun(credits, RANK, 1, 3) == [0, 2, 3]


@pytest.mark.parametrize("first_epoch", [0, EPOCH_MASK - 2, 1 << 39], ids=["first", "at the end", "half way"])
def test_nobody_is_accused_and_who_is_behind_others_is_found(first_epoch: int) -> None:
    draw = random.Random(first_epoch)
    found = 0
    for _ in range(2000):
        slots = [draw.randrange(NUM_SLOTS) for _ in range(6)]
        here = draw.randrange(2, len(slots))
        begun = {peer: here + draw.choice([-1, 0, 1, 1, 1, 2]) for peer in range(WORLD_SIZE) if peer != RANK}
        used = slots[here]
        epoch = (first_epoch + slots[: here + 1].count(used)) & EPOCH_MASK
        named = not_begun(credits_after(slots, begun, first_epoch), RANK, used, epoch)
        behind = [peer for peer, launches in begun.items() if launches < here + 1]
        assert set(named) <= set(behind), (slots, here, begun)
        if here + 1 in begun.values():
            assert named == behind, (slots, here, begun)
            found += bool(named)
    assert found > 200


def test_epochs_are_compared_as_kernels_do() -> None:
    assert is_behind(1, 2) and not is_behind(2, 2) and not is_behind(3, 2)
    assert is_behind(EPOCH_MASK, 0) and not is_behind(0, EPOCH_MASK) and is_behind(-1, 0)


# Where the credits are read.


def shared_after_a_failure() -> Any:
    """The workspace of rank 0, alone in its process, to which rank 1 has given the credit of a use, and 2 has not."""
    shared = make_shared()
    ring = shared.generations[-1]
    header = ring.heap.local[: slot_layout.HEADER_BYTES].view(torch.int64)
    header[SLOT_WORDS.value + CREDIT_ROW.value * MAX_WORLD.value + 1] = (77 << EPOCH_BITS.value) | 5
    header[SLOT_WORDS.value + CREDIT_ROW.value * MAX_WORLD.value + 2] = (77 << EPOCH_BITS.value) | 4
    ring.ctl[POISON.value] = 1
    return shared


def looked(shared: Any) -> list[int]:
    group = mock.Mock(rank=0, world_size=3)
    return Look(torch.device("cpu")).not_begun(shared.generations, group, 0, 1)


def test_the_credits_of_the_ring_that_failed_are_read() -> None:
    shared = shared_after_a_failure()
    assert looked(shared) == [2]
    shared.generations[-1].ctl[POISON.value] = 0
    assert looked(shared) == []


def test_a_device_that_cannot_be_read_hides_no_error() -> None:
    shared = shared_after_a_failure()
    with mock.patch.object(type(shared.generations[-1]), "credits", side_effect=RuntimeError("CUDA error")):
        assert looked(shared) == []
