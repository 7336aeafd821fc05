"""Heaps of the CPU device: only what a rank offered as its heap is mapped, whatever the store says."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ditron_inductor.device.heap import CpuHeap

NBYTES = 1 << 16


@pytest.fixture
def heaps() -> Iterator[tuple[CpuHeap, CpuHeap]]:
    """The heaps of two ranks, both of them in this process."""
    own, peer = CpuHeap(NBYTES), CpuHeap(NBYTES)
    yield own, peer
    own.joined()
    peer.joined()


def join(own: CpuHeap, offer: Any) -> None:
    group: Any = SimpleNamespace(rank=0)
    own.join(group, [own.offer(), offer])


def offer_of(fd: int, **changes: Any) -> dict[str, Any]:
    """A file of this process, offered as if it were a heap."""
    status = os.fstat(fd)
    return {"pid": os.getpid(), "fd": fd, "device": status.st_dev, "inode": status.st_ino, **changes}


def test_what_a_rank_writes_its_peer_reads(heaps: tuple[CpuHeap, CpuHeap]) -> None:
    own, peer = heaps
    join(own, peer.offer())
    peer.local[5] = 7
    assert own.view(1)[5] == 7 and own.view(1).numel() == NBYTES


@pytest.mark.parametrize("name", ["pid", "fd", "device", "inode"])
@pytest.mark.parametrize("value", ["1", "self", "../../../file", 1.0, True, None, -1, [1], 1 << 64])
def test_numbers_only(heaps: tuple[CpuHeap, CpuHeap], name: str, value: Any) -> None:
    own, peer = heaps
    with pytest.raises(OSError, match=f"{name} .*not a whole number"):
        join(own, {**peer.offer(), name: value})


def test_no_offer_at_all(heaps: tuple[CpuHeap, CpuHeap]) -> None:
    with pytest.raises(OSError, match="pid None"):
        join(heaps[0], "heap")


def test_an_offer_without_a_field(heaps: tuple[CpuHeap, CpuHeap]) -> None:
    own, peer = heaps
    with pytest.raises(OSError, match="fd None"):
        join(own, {key: value for key, value in peer.offer().items() if key != "fd"})


def test_a_path_out_of_proc_maps_no_file(heaps: tuple[CpuHeap, CpuHeap], tmp_path: Path) -> None:
    own, _ = heaps
    file = tmp_path / "file"
    file.write_bytes(bytes(NBYTES))
    status = file.stat()
    up = "../" * 16 + str(file).lstrip("/")
    with pytest.raises(OSError, match="not a whole number"):
        join(own, {"pid": os.getpid(), "fd": up, "device": status.st_dev, "inode": status.st_ino})
    assert file.read_bytes() == bytes(NBYTES)


def test_an_open_file_is_no_heap(heaps: tuple[CpuHeap, CpuHeap], tmp_path: Path) -> None:
    own, peer = heaps
    file = tmp_path / "file"
    file.write_bytes(bytes(NBYTES))
    with file.open("r+b") as opened:
        # Its own numbers are true, but its device is that of a file system.
        for offer in (offer_of(opened.fileno()), offer_of(opened.fileno(), device=peer.offer()["device"])):
            with pytest.raises(OSError, match="is not the heap"):
                join(own, offer)


def test_another_heap_than_the_one_offered(heaps: tuple[CpuHeap, CpuHeap]) -> None:
    own, peer = heaps
    with pytest.raises(OSError, match="is not the heap"):
        join(own, {**peer.offer(), "inode": own.offer()["inode"]})
    with pytest.raises(OSError, match="is not the heap"):
        join(own, {**peer.offer(), "device": peer.offer()["device"] + 1})


def test_a_pipe_is_refused_at_once(heaps: tuple[CpuHeap, CpuHeap]) -> None:
    own, _ = heaps
    ends = os.pipe()
    try:
        for end in ends:
            with pytest.raises(OSError, match="is not the heap"):
                join(own, offer_of(end))
    finally:
        for end in ends:
            os.close(end)


def test_a_heap_of_another_size(heaps: tuple[CpuHeap, CpuHeap]) -> None:
    own, _ = heaps
    small = CpuHeap(NBYTES // 2)
    try:
        with pytest.raises(OSError, match="is not the heap"):
            join(own, small.offer())
    finally:
        small.joined()


def test_a_process_that_is_not_there(heaps: tuple[CpuHeap, CpuHeap]) -> None:
    own, peer = heaps
    with pytest.raises(FileNotFoundError):
        join(own, {**peer.offer(), "pid": 1 << 30})
