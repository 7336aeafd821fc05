"""Copies by address, and what happens when the driver refuses them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ditron_inductor.device import driver
from ditron_inductor.device.lanes import HostLane


class Function:
    """A function of the driver that returns `error`, with the attributes that ctypes looks at."""

    def __init__(self, error: int) -> None:
        self.error = error
        self.calls: list[tuple[int, ...]] = []
        self.argtypes: Any = None
        self.restype: Any = None

    def __call__(self, *args: int) -> int:
        assert len(args) == len(self.argtypes)
        self.calls.append(args)
        return self.error


@pytest.mark.parametrize("hip", [None, "6.4"], ids=["cuda", "hip"])
def test_a_copy_is_one_call_of_the_driver(monkeypatch: pytest.MonkeyPatch, hip: str | None) -> None:
    function = Function(0)
    name = "cuMemcpyDtoDAsync_v2" if hip is None else "hipMemcpyDtoDAsync"
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(driver, "library", lambda: SimpleNamespace(**{name: function}))
    copy = driver.device_copy.__wrapped__()
    copy(1 << 47, 3, 4096, 7)
    assert function.calls == [(1 << 47, 3, 4096, 7)]
    function.error = 700
    with pytest.raises(RuntimeError, match="copy of 4096 bytes: error 700"):
        copy(1 << 47, 3, 4096, 7)


def test_copies_of_the_cpu_go_where_they_should() -> None:
    source, target = torch.arange(8, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    with HostLane() as lane:
        lane.copy([(8, source.data_ptr(), 8), (24, source.data_ptr() + 16, 4)], target.data_ptr())
    assert target.tolist() == [0, 0, 0, 1, 0, 0, 4, 0]


@pytest.mark.gpu
def test_a_copy_on_a_gpu_is_on_its_stream_and_in_its_graph() -> None:
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    source, target = torch.arange(1 << 20, device=device), torch.zeros(1 << 20, dtype=torch.int64, device=device)
    copy, stream, n = driver.device_copy(), torch.cuda.Stream(device), 8 << 20
    stream.wait_stream(torch.cuda.current_stream())
    copy(target.data_ptr(), source.data_ptr(), n, stream.cuda_stream)
    stream.synchronize()
    assert torch.equal(target, source)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        copy(target.data_ptr(), source.data_ptr(), n, torch.cuda.current_stream().cuda_stream)
    for _ in range(3):
        source.random_()
        graph.replay()
        assert torch.equal(target, source)
