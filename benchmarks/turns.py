"""Several benchmarks on the same GPUs: they compile beside each other, and each is alone on the machine where it times.

Most of a cell's time is compilation, on one core of the host for each rank. Two locks on files order the runs: `gpus`
is shared by all that compile and check, and taken alone by the one that times. Whoever waits for it holds `queue`, so
that a run that waits to be alone is not passed by others for ever. The locks of a process that ends are free again.
"""

from __future__ import annotations

import fcntl
from pathlib import Path


class Turns:
    """The place of one run among all that name the same folder, which is made if it is missing."""

    def __init__(self, folder: str) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        self._queue, self._gpus = (open(Path(folder) / name, "w") for name in ("queue", "gpus"))  # noqa: SIM115

    def take(self, *, alone: bool) -> None:
        """Gives up what this run has, and waits for its next turn: alone, or together with others that are not."""
        self.leave()
        kind = fcntl.LOCK_EX if alone else fcntl.LOCK_SH
        fcntl.flock(self._queue, kind)
        fcntl.flock(self._gpus, kind)
        fcntl.flock(self._queue, fcntl.LOCK_UN)

    def leave(self) -> None:
        """Lets others be alone."""
        fcntl.flock(self._gpus, fcntl.LOCK_UN)
