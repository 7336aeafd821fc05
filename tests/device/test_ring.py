"""Sizes of slots, and what a ring of slots starts from."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from ditron_inductor.core import layout as words
from ditron_inductor.device import ring as ring_module
from ditron_inductor.device import slot_layout
from ditron_inductor.device.ring import PAGE, make_generation, ring_bytes, slot_size
from ditron_inductor.device.session import meet
from tests.device.threads import make_group

CPU = torch.device("cpu")


@given(nbytes=st.integers(0, 1 << 40), limit=st.integers(0, 1 << 42))
def test_slots_are_large_enough_and_within_the_limit(nbytes: int, limit: int) -> None:
    size = slot_size(nbytes, limit)
    assert (size is None) == (ring_bytes(nbytes) > limit)
    if size is None:
        assert slot_layout.heap_bytes(max(PAGE, -(-nbytes // PAGE) * PAGE)) > limit
        return
    assert size >= nbytes and size % PAGE == 0
    assert slot_layout.heap_bytes(size) <= limit
    assert size <= max(1.25 * nbytes, nbytes + 2 * PAGE)


@pytest.mark.parametrize("pages", [1, 8, 9, 13, 1000, 1023])
def test_the_step_of_sizes_ends_at_the_limit(pages: int) -> None:
    nbytes = pages * PAGE
    assert slot_size(nbytes, slot_layout.heap_bytes(nbytes)) == nbytes
    assert slot_size(nbytes, slot_layout.heap_bytes(nbytes) - 1) is None


def test_slowly_growing_calls_need_few_rings() -> None:
    sizes = {slot_size(nbytes, 1 << 40) for nbytes in range(1 << 20, 1 << 24, 1 << 14)}
    assert len(sizes) <= 4 * 4 + 1


def test_a_new_ring_is_zero_but_for_where_things_are() -> None:
    session = meet(make_group(dist.HashStore(), 0, 1), "open", "begin", 5.0)
    ring = make_generation(session, CPU, PAGE, 5.0, "a test")
    record = torch.zeros(slot_layout.RECORD_WORDS, dtype=torch.int64)
    ring.heap.local.fill_(0xAB)
    ring.ctl.fill_(7)
    ring.counters.fill_(7)
    ring.zero(record)
    assert not ring.heap.local[: slot_layout.HEADER_BYTES].any()
    assert not ring.counters.any() and ring.counters.shape == (slot_layout.COUNTERS,)
    expected = torch.zeros(slot_layout.CTL_WORDS, dtype=torch.int64)
    expected[words.RECORD.value] = record.data_ptr()
    for slot in range(slot_layout.NUM_SLOTS):
        offset = slot_layout.HEADER_BYTES + slot * PAGE
        expected[slot_layout.slot_word(slot, words.DATA_OFFSET.value)] = offset
    assert torch.equal(ring.ctl, expected)
    assert ring.table.tolist() == [ring.heap.local.data_ptr()]
    assert ring.heap.local.numel() == slot_layout.heap_bytes(PAGE)


def test_what_callers_keep_with_a_ring_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_module, "MOST_KEPT", 3)
    session = meet(make_group(dist.HashStore(), 0, 1), "open", "begin", 5.0)
    ring = make_generation(session, CPU, PAGE, 5.0, "a test")
    assert [ring.keep(i, str(i)) for i in range(4)] == ["0", "1", "2", "3"]
    assert ring.kept == {3: "3"}


@pytest.mark.parametrize("limit", [0, slot_layout.HEADER_BYTES, slot_layout.heap_bytes(PAGE) - 1])
def test_a_limit_below_the_smallest_ring(limit: int) -> None:
    assert slot_size(1, limit) is None
    assert slot_size(1, slot_layout.heap_bytes(PAGE)) == PAGE
