"""Which launches overlap with others on which device, see core/overlap.py."""

from __future__ import annotations

from typing import Any

import torch

from ditron_inductor.core.overlap import APART, FOLLOWS
from ditron_inductor.device import driver
from ditron_inductor.task.policy import OVERLAPS

LEAST_DRIVER = 12030
"""The CUDA version of the oldest driver that captures such launches in a CUDA graph."""


def overlap_for(arch: str, rows: int, wanted: str) -> int:
    """Returns how a launch for so many rows overlaps with others on `arch` ("sm_90", "gfx942", "interpreter"), where a
    call is to overlap as `wanted`, one of OVERLAPS. Launches of several rows are apart: they have a program or two for
    each SM, and those that begin early share the SMs that are free first, while others stay empty. On an H200 the down
    projection of 70B with 32 rows takes 22 us more so.
    """
    major = arch.removeprefix("sm_")[:-1] if arch.startswith("sm_") else ""
    able = bool(wanted) and rows == 1 and major.isdigit() and int(major) >= 9 and is_captured()
    return OVERLAPS.index(wanted) if able else int(APART.value)


def is_captured() -> bool:
    """Returns whether the driver can capture launches that follow. Without a GPU kernels are only compiled."""
    return not torch.cuda.is_available() or driver.version() >= LEAST_DRIVER


def launch_options(overlap: int) -> dict[str, Any]:
    """Returns the options of such a launch."""
    return {"launch_pdl": True} if overlap == FOLLOWS.value else {}
