"""The few functions of the GPU driver that torch does not offer, or offers at several times their cost.

They are called by ctypes in the library that torch and Triton use themselves, so the current context is theirs. Streams
are passed by handle.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch

Copy = Callable[[int, int, int, int], None]
"""A function of (target address, source address, bytes, stream) that queues a copy on the stream."""


@functools.cache
def library() -> ctypes.CDLL:
    """Returns the library of the driver. For HIP this is the one that torch has loaded, because its wheels bring their
    own.
    """
    if torch.version.hip is None:
        return ctypes.CDLL("libcuda.so.1")
    with open("/proc/self/maps") as maps:
        loaded = [line.split()[-1] for line in maps if "libamdhip64.so" in line]
    return ctypes.CDLL(loaded[0] if loaded else "libamdhip64.so")


@functools.cache
def capture_info() -> Callable[..., int]:
    """Returns the driver's function of (stream, status*, id*) that reads the capture in which the stream takes part; it
    returns the driver's error.
    """
    # Both signatures are frozen; the second version of CUDA's is followed by outputs that may be null.
    if torch.version.hip is not None:
        return library().hipStreamGetCaptureInfo  # type: ignore[no-any-return]
    function = library().cuStreamGetCaptureInfo_v2
    return lambda stream, status, number: int(function(stream, status, number, None, None, None))


@functools.cache
def device_copy() -> Copy:
    """Returns a function that copies within a device, or from a peer's memory that is mapped here, on any stream of the
    current device. `Tensor.copy_` does the same for contiguous tensors of one dtype; here neither end needs a view. The
    function raises RuntimeError if the driver refuses.
    """
    # Both take (target, source, bytes, stream), and both may be captured.
    function = library().cuMemcpyDtoDAsync_v2 if torch.version.hip is None else library().hipMemcpyDtoDAsync
    function.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
    function.restype = ctypes.c_int

    def copy(target: int, source: int, nbytes: int, stream: int) -> None:
        error = function(target, source, nbytes, stream)
        if error != 0:
            raise RuntimeError(f"the GPU driver did not queue a copy of {nbytes} bytes: error {error}")

    return copy


def host_copy(target: int, source: int, nbytes: int, stream: int) -> None:
    """Copies on the CPU, at once; the arguments are those of a copy on a GPU."""
    ctypes.memmove(target, source, nbytes)
