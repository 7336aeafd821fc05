"""The number of polls that a bounded wait makes per second on a device, which turns a time limit into a count of polls.

A kernel has no portable clock, so its waits count polls. One wait that can never succeed, on memory of this rank (as
all waits are), is timed once per device and process.
"""

from __future__ import annotations

import time

import torch
import triton

from ditron_inductor.core import layout as words
from ditron_inductor.core import quick_interpreter
from ditron_inductor.core.signals import Use, wait
from ditron_inductor.device import slot_layout
from ditron_inductor.device.interpreter_lock import interpreting

CUDA_POLLS = 10_000
CPU_POLLS = 20
ROUNDS = 5
LONGEST_LIMIT = 1 << 60


@triton.jit(do_not_specialize=["rank", "slot", "row", "source", "site"])
def _wait_in_vain(table, ctl, rank, slot, row, source, site):  # type: ignore[no-untyped-def]
    wait(Use(table, ctl, rank, slot, site, rank + 1), row, source)


class PollRates:
    """The polls per second of each device, measured at first use (this takes tens of milliseconds and one small
    compilation).
    """

    def __init__(self) -> None:
        self._rates: dict[torch.device, float] = {}

    def limit(self, device: torch.device, timeout_s: float) -> int:
        """The number of polls that take `timeout_s` seconds on `device`."""
        if device not in self._rates:
            self._rates[device] = measure(device)
        return max(1, min(LONGEST_LIMIT, int(timeout_s * self._rates[device])))


def measure(device: torch.device) -> float:
    """Measures the polls per second of a waiting program on `device`. It synchronises the device, and must not be
    called inside a capture. Raises DitronInterpreterBusy while another thread runs a kernel on the CPU device.
    """
    if device.type != "cuda":
        return _measure(device)
    with torch.cuda.device(device):
        return _measure(device)


def _measure(device: torch.device) -> float:
    polls = CUDA_POLLS if device.type == "cuda" else CPU_POLLS
    header = torch.zeros(slot_layout.HEADER_BYTES, dtype=torch.uint8, device=device)
    table = torch.full((slot_layout.MAX_WORLD,), header.data_ptr(), dtype=torch.int64, device=device)
    ctl = torch.zeros(slot_layout.CTL_WORDS, dtype=torch.int64, device=device)
    record = torch.zeros(slot_layout.RECORD_WORDS, dtype=torch.int64, device=device)
    _timed_wait(ctl, table, record, 1)  # The first launch compiles.
    # The fastest round counts. A round that was interrupted would make every limit too short, and waits would fail
    # without cause.
    seconds = min(_timed_wait(ctl, table, record, polls) for _ in range(ROUNDS))
    assert int(record[words.STATE.value]) == words.TIMEOUT.value
    return polls / seconds


def _timed_wait(ctl: torch.Tensor, table: torch.Tensor, record: torch.Tensor, polls: int) -> float:
    ctl.zero_()
    ctl[words.POLL_LIMIT.value] = polls
    ctl[words.RECORD.value] = record.data_ptr()
    _synchronize(ctl.device)
    # On a busy machine the interpreter also waits for its turn. This is not polling, but its pauses are.
    clock = time.perf_counter if ctl.device.type == "cuda" else time.thread_time
    start = clock()
    with interpreting(_wait_in_vain):
        _wait_in_vain[(1,)](table, ctl, 0, 0, 0, 0, 1, num_warps=1)
    _synchronize(ctl.device)
    seconds = clock() - start
    return seconds if ctl.device.type == "cuda" else seconds + polls * quick_interpreter.pause_s


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
