"""The few functions of the GPU driver that torch does not offer, or offers at several times their cost.

They are called by ctypes in the library that torch and Triton use themselves, so the current context is theirs. Streams
are passed by handle.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch

Copy = Callable[..., None]
"""A function of (target address, source address, bytes of a run, stream, number of runs, pitch in bytes) that queues a
copy. The runs follow each other at the source, and begin a pitch apart in the target. The last two may be left out.
"""


@functools.cache
def library() -> ctypes.CDLL:
    """Returns the library of the driver; for HIP the one that torch has loaded, as its wheels bring their own."""
    if torch.version.hip is None:
        return ctypes.CDLL("libcuda.so.1")
    with open("/proc/self/maps") as maps:
        loaded = [line.split()[-1] for line in maps if "libamdhip64.so" in line]
    return ctypes.CDLL(loaded[0] if loaded else "libamdhip64.so")


@functools.cache
def capture_info() -> Callable[..., int]:
    """Returns the driver's function of (stream, status*, id*) that reads the stream's capture; it returns an error."""
    # Both signatures are frozen; the second version of CUDA's is followed by outputs that may be null.
    if torch.version.hip is not None:
        return library().hipStreamGetCaptureInfo  # type: ignore[no-any-return]
    function = library().cuStreamGetCaptureInfo_v2
    return lambda stream, status, number: int(function(stream, status, number, None, None, None))


@functools.cache
def version() -> int:
    """Returns the CUDA version of the driver, as 1000 times its major and 10 times its minor number."""
    found = ctypes.c_int(0)
    error = library().cuDriverGetVersion(ctypes.byref(found))
    return 0 if error else found.value


class _Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D of cuda.h."""

    _fields_ = [
        ("srcXInBytes", ctypes.c_size_t),
        ("srcY", ctypes.c_size_t),
        ("srcMemoryType", ctypes.c_uint),
        ("srcHost", ctypes.c_void_p),
        ("srcDevice", ctypes.c_uint64),
        ("srcArray", ctypes.c_void_p),
        ("srcPitch", ctypes.c_size_t),
        ("dstXInBytes", ctypes.c_size_t),
        ("dstY", ctypes.c_size_t),
        ("dstMemoryType", ctypes.c_uint),
        ("dstHost", ctypes.c_void_p),
        ("dstDevice", ctypes.c_uint64),
        ("dstArray", ctypes.c_void_p),
        ("dstPitch", ctypes.c_size_t),
        ("WidthInBytes", ctypes.c_size_t),
        ("Height", ctypes.c_size_t),
    ]


CUDA_UNIFIED = 4
"""CU_MEMORYTYPE_UNIFIED: the driver finds out from an address where its memory is."""
HIP_DEFAULT = 4
"""hipMemcpyDefault: HIP's name of CU_MEMORYTYPE_UNIFIED."""
MOST_PITCH = (1 << 31) - 1
"""The largest pitch of a copy of runs on any GPU, in bytes."""


@functools.cache
def device_copy() -> Copy:
    """Returns a function that copies within a device, or from a peer's memory that is mapped here, on any stream of the
    current device. `Tensor.copy_` does the same for contiguous tensors of one dtype; here neither end needs a view, and
    several runs are one copy for the copy engine, where `copy_` launches a kernel. The function raises RuntimeError if
    the driver refuses.
    """
    # All of these may be captured.
    if torch.version.hip is None:
        flat, in_runs = library().cuMemcpyDtoDAsync_v2, library().cuMemcpy2DAsync_v2
        in_runs.argtypes = [ctypes.POINTER(_Copy2D), ctypes.c_void_p]
    else:
        flat, in_runs = library().hipMemcpyDtoDAsync, library().hipMemcpy2DAsync
        address, size = ctypes.c_uint64, ctypes.c_size_t
        in_runs.argtypes = [address, size, address, size, size, size, ctypes.c_int, ctypes.c_void_p]
    flat.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
    flat.restype = in_runs.restype = ctypes.c_int

    def queue_runs(target: int, source: int, nbytes: int, stream: int, runs: int, pitch: int) -> int:
        if torch.version.hip is not None:
            return int(in_runs(target, pitch, source, nbytes, nbytes, runs, HIP_DEFAULT, stream))
        copy = _Copy2D(
            srcMemoryType=CUDA_UNIFIED,
            srcDevice=source,
            srcPitch=nbytes,
            dstMemoryType=CUDA_UNIFIED,
            dstDevice=target,
            dstPitch=pitch,
            WidthInBytes=nbytes,
            Height=runs,
        )
        return int(in_runs(ctypes.byref(copy), stream))

    def copy(target: int, source: int, nbytes: int, stream: int, runs: int = 1, pitch: int = 0) -> None:
        error = 0
        if runs == 1:
            error = flat(target, source, nbytes, stream)
        elif pitch <= MOST_PITCH:
            error = queue_runs(target, source, nbytes, stream, runs, pitch)
        else:
            for run in range(runs):
                error = error or flat(target + run * pitch, source + run * nbytes, nbytes, stream)
        if error != 0:
            raise RuntimeError(f"the GPU driver did not queue a copy of {runs} x {nbytes} bytes: error {error}")

    return copy


def host_copy(target: int, source: int, nbytes: int, stream: int, runs: int = 1, pitch: int = 0) -> None:
    """Copies on the CPU, at once; the arguments are those of a copy on a GPU."""
    for run in range(runs):
        ctypes.memmove(target + run * pitch, source + run * nbytes, nbytes)
