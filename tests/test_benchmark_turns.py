"""Benchmarks that share GPUs: one that times is alone, and does not wait for ever."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from benchmarks.turns import Turns

OTHER = """
import sys
from benchmarks.turns import Turns
turns = Turns(sys.argv[1])
for line in sys.stdin:
    turns.take(alone=line.strip() == "alone") if line.strip() != "leave" else turns.leave()
    print("done", flush=True)
"""


class Other:
    """Another process that takes turns."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-c", OTHER, str(folder)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, what: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()

    def done(self) -> None:
        """Waits until it has what was asked for."""
        assert self._process.stdout is not None and self._process.stdout.readline() == "done\n"

    def has_locks(self) -> int:
        """How many locks the process holds or waits for."""
        lines = Path("/proc/locks").read_text().splitlines()
        return sum(str(self._process.pid) in line.split() for line in lines)

    def waits(self) -> bool:
        """Whether the process comes to hold its place in the queue and to wait for the others."""
        deadline = time.monotonic() + 20.0
        while self.has_locks() < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.has_locks() == 2

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def test_whoever_times_is_alone_and_is_not_passed(tmp_path: Path) -> None:
    mine, timing, third = Turns(str(tmp_path)), Other(tmp_path), Other(tmp_path)
    try:
        mine.take(alone=False)
        third.ask("together")
        third.done()
        timing.ask("alone")
        assert timing.waits()
        third.ask("together")
        mine.leave()
        timing.done()
        assert third.waits(), "whoever came later waits behind it"
        timing.end()
        third.done()
        mine.take(alone=False)
        third.ask("leave")
        third.done()
        mine.take(alone=True)
    finally:
        timing.end()
        third.end()
