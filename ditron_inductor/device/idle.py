"""Whether a GPU has nothing left to do, found out without waiting for it forever."""

from __future__ import annotations

import threading

import torch

from ditron_inductor.device import groups

LONGEST_WAIT_S = 1.0
"""Longer than a GPU works on what is in front of a graph that was just compiled. It stands still for longer only if it
waits for a peer.
"""


def counts_on_gpu(group: groups.Group) -> bool:
    """Returns whether a group's library is NCCL, whose collectives end on the GPU of a rank when all have launched
    them. (The root of a broadcast may end before the others have begun.)
    """
    process_group = group.process_group()
    if process_group is None or not torch.cuda.is_available():
        return False
    try:
        return str(process_group._get_backend(torch.device("cuda")).name()) == "nccl"
    except (RuntimeError, AttributeError):
        return False


def is_idle(wait_s: float) -> bool:
    """Returns whether this process's current GPU ends all its work, that of other streams too, within `wait_s` seconds,
    at most LONGEST_WAIT_S. False while the current stream is captured.
    """
    if torch.cuda.is_current_stream_capturing():
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
    return ended.wait(min(wait_s, LONGEST_WAIT_S))
