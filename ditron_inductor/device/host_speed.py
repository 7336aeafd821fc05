"""The time that this host takes to launch a kernel, from which the plan knows what an eager call of many launches
costs.

The times of hosts with the same GPU differ several times, because their cores are older, shared, or busy.
"""

from __future__ import annotations

import functools
import statistics
import time

import torch

CALLS = 64
ROUNDS = 5
SIZE = 64


@functools.cache
def launch_us(device: torch.device) -> float:
    """Returns the microseconds of the host for one eager `torch.mm` of a small size, back to back; 0 if the device is
    not a GPU.

    It is the median of a few rounds, and is measured once for each device and process, in a few milliseconds. It
    synchronises the device, and must not be called inside a capture.
    """
    if device.type != "cuda":
        return 0.0
    x = torch.zeros(SIZE, SIZE, dtype=torch.bfloat16, device=device)
    rounds = []
    # The first call loads libraries.
    with torch.autocast(device.type, enabled=False):
        for _ in range(ROUNDS + 1):
            torch.cuda.synchronize(device)
            begin = time.perf_counter()
            for _ in range(CALLS):
                torch.mm(x, x)
            rounds.append(1e6 * (time.perf_counter() - begin) / CALLS)
    torch.cuda.synchronize(device)
    return round(statistics.median(rounds[1:]), 1)
