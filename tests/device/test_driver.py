"""Copies by address, and what happens when the driver refuses them."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ditron_inductor.device import driver
from ditron_inductor.device.lanes import Lane, Transfer


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


@pytest.mark.parametrize(("error", "version"), [(0, 12080), (35, 0)])
def test_the_version_of_the_driver(monkeypatch: pytest.MonkeyPatch, error: int, version: int) -> None:
    def answer(found: Any) -> int:
        found[0] = 12080
        return error

    function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int))(answer)
    monkeypatch.setattr(driver, "library", lambda: SimpleNamespace(cuDriverGetVersion=function))
    assert driver.version.__wrapped__() == version


@pytest.mark.parametrize("hip", [None, "6.4"], ids=["cuda", "hip"])
def test_a_copy_is_one_call_of_the_driver(monkeypatch: pytest.MonkeyPatch, hip: str | None) -> None:
    function, in_runs, copy = _functions(monkeypatch, hip)
    copy(1 << 47, 3, 4096, 7)
    assert function.calls == [(1 << 47, 3, 4096, 7)] and not in_runs.calls
    function.error = 700
    with pytest.raises(RuntimeError, match="copy of 1 x 4096 bytes: error 700"):
        copy(1 << 47, 3, 4096, 7)


def _functions(monkeypatch: pytest.MonkeyPatch, hip: str | None) -> tuple[Function, Function, driver.Copy]:
    """The driver's copies of bytes that lie together, and of runs, both recorded, and the function that calls them."""
    function, in_runs = Function(0), Function(0)
    flat, runs = (
        ("cuMemcpyDtoDAsync_v2", "cuMemcpy2DAsync_v2") if hip is None else ("hipMemcpyDtoDAsync", "hipMemcpy2DAsync")
    )
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(driver, "library", lambda: SimpleNamespace(**{flat: function, runs: in_runs}))
    return function, in_runs, driver.device_copy.__wrapped__()


@pytest.mark.parametrize("hip", [None, "6.4"], ids=["cuda", "hip"])
def test_runs_are_one_copy(monkeypatch: pytest.MonkeyPatch, hip: str | None) -> None:
    function, in_runs, copy = _functions(monkeypatch, hip)
    target, source, nbytes, runs, pitch = 1 << 47, 1 << 46, 4096, 16, 8192
    copy(target, source, nbytes, 7, runs, pitch)
    assert not function.calls and len(in_runs.calls) == 1
    if hip is not None:
        assert in_runs.calls[0] == (target, pitch, source, nbytes, nbytes, runs, 4, 7)
    else:
        # What byref points to.
        described, stream = in_runs.calls[0][0]._obj, in_runs.calls[0][1]
        assert stream == 7 and ctypes.sizeof(described) == 128
        assert (described.srcMemoryType, described.srcDevice, described.srcPitch) == (4, source, nbytes)
        assert (described.dstMemoryType, described.dstDevice, described.dstPitch) == (4, target, pitch)
        assert (described.WidthInBytes, described.Height) == (nbytes, runs)
    in_runs.error = 1
    with pytest.raises(RuntimeError, match="copy of 16 x 4096 bytes: error 1"):
        copy(target, source, nbytes, 7, runs, pitch)


def test_runs_that_lie_too_far_apart_are_copied_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    function, in_runs, copy = _functions(monkeypatch, None)
    copy(0, 1 << 46, 4096, 7, 3, 1 << 31)
    assert not in_runs.calls
    assert function.calls == [(run << 31, (1 << 46) + run * 4096, 4096, 7) for run in range(3)]


def test_copies_of_the_cpu_go_where_they_should() -> None:
    source, target = torch.arange(8, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    with Lane() as lane:
        address = source.data_ptr()
        lane.copy([Transfer(8, address, 8), Transfer(24, address + 16, 4)], target.data_ptr())
    assert target.tolist() == [0, 0, 0, 1, 0, 0, 4, 0]
    with Lane() as lane:
        lane.copy([Transfer(4, address + 20, 4, runs=3, pitch=12)], target.data_ptr())
    assert target.tolist() == [0, 5, 0, 1, 6, 0, 4, 7]


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


@pytest.mark.gpu
def test_runs_on_a_gpu_go_where_they_should() -> None:
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    copy = driver.device_copy()
    # The bytes of a run, of which the last ones are no multiples of anything.
    for runs, nbytes, apart in ((16, 1 << 20, 2 << 20), (7, 509 * 4096, 3 * 509 * 4096), (5, 1003, 2006), (2, 2, 6)):
        source = torch.randint(0, 256, (runs, nbytes), dtype=torch.uint8, device=device)
        target = torch.zeros(runs, apart, dtype=torch.uint8, device=device)
        stream = torch.cuda.current_stream().cuda_stream
        copy(target.data_ptr() + 1, source.data_ptr(), nbytes, stream, runs, apart)
        assert torch.equal(target[:, 1 : 1 + nbytes], source)
        assert not target[:, 0].any() and not target[:, 1 + nbytes :].any()
        target.zero_()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            copy(target.data_ptr(), source.data_ptr(), nbytes, torch.cuda.current_stream().cuda_stream, runs, apart)
        graph.replay()
        assert torch.equal(target[:, :nbytes], source)
