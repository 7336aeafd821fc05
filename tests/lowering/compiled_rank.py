"""A rank on the CPU that launches as GPUs do.

Whether kernels are interpreted is read when they are decorated, so nothing that this module imports may have one.
"""

from __future__ import annotations

import os

from ditron_inductor.tools.processes import Rank


def check_on_rank(rank: Rank, folder: str) -> bool:
    """`site_call_checks.check_all`, for `ditron_inductor.tools.processes.run_ranks`."""
    os.environ.pop("TRITON_INTERPRET", None)
    device = rank.join()
    from tests.lowering import site_call_checks

    site_call_checks.check_all(rank, device, folder)
    return True
