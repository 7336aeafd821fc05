"""Whether a GPU has nothing left to do, found out without waiting for it forever."""

from __future__ import annotations

import threading

import torch

LONGEST_WAIT_S = 1.0
"""Longer than a GPU works on what is in front of a graph that was just compiled. It stands still for longer only if it
waits for a peer.
"""


def is_idle(device_type: str, wait_s: float = LONGEST_WAIT_S) -> bool:
    """Returns whether this process's current GPU ends all its work, that of other streams too, within `wait_s` seconds.
    If so, every collective that was launched here has been launched by all ranks of its group. Returns False for other
    devices, and while a stream is captured.
    """
    if device_type != "cuda" or torch.cuda.is_current_stream_capturing():
        return False
    device, ended = torch.cuda.current_device(), threading.Event()

    def wait() -> None:
        # An error of the device will be raised where it is looked for.
        try:
            torch.cuda.synchronize(device)
            ended.set()
        except RuntimeError:
            return

    # A collective for which no peer comes never ends, and neither does a wait for it.
    threading.Thread(target=wait, name="ditron-idle", daemon=True).start()
    return ended.wait(wait_s)
