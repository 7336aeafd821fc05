"""The lock of Triton's interpreter, which runs kernels on the CPU device and has global state."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from triton.runtime.jit import JITFunction

from ditron_inductor.errors import DitronInterpreterBusy

_interpreter = threading.Lock()


@contextlib.contextmanager
def interpreting(kernel: Any) -> Iterator[None]:
    """Holds Triton's interpreter for one launch of `kernel`, so that one thread alone uses it. A compiled kernel needs
    no interpreter, and nothing is held for it. Raises DitronInterpreterBusy if another thread holds it. To wait would
    risk a deadlock: the launch of the other thread may be waiting for a peer, and that peer for this launch.
    """
    if isinstance(kernel, JITFunction):
        yield
        return
    if not _interpreter.acquire(blocking=False):
        raise DitronInterpreterBusy(kernel=getattr(kernel, "__name__", str(kernel)))
    try:
        yield
    finally:
        _interpreter.release()
